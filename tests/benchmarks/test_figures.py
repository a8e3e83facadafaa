"""What follows from rows: ratios, the best peer, host memory, noise, and several files as one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.request_time_figures import figures, group_of, merge, noise_of, read_document, worst
from benchmarks.request_time_report import compare, tables

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GIB = 2**30


def named(document: Any, name: str) -> Any:
    return next(one for one in figures(document) if one.name == name)


def test_ratios_to_bound_resident_and_the_best_peer_are_of_the_same_run(document: Any) -> None:
    ours = named(document, "ours@24GiB")

    assert ours.over(ours.bound_s) == pytest.approx(1.1)
    assert ours.over(ours.busy_bound_s) == pytest.approx(1.1 / 1.05)
    assert ours.bound_s / ours.best_bound_s == pytest.approx(1.25)
    assert ours.over(ours.resident_s) == pytest.approx(1.1)
    assert (ours.peer, ours.peer_s) == ("group-leaf", 2.2)


def test_a_peer_that_failed_is_no_best_peer(document: Any) -> None:
    assert named(document, "ours@8GiB").peer is None


def test_a_peer_of_another_run_counts_where_the_same_run_has_none(document: Any, make: Any, row: Any) -> None:
    other = make(row("group-leaf", 8, [3.0]), started_at="2026-01-02T00:00:00+00:00")

    assert named(merge([document, other]), "ours@8GiB").peer_s == 3.0


def test_output_is_compared_with_that_of_all_resident(document: Any) -> None:
    assert named(document, "group-leaf@24GiB").is_equal is True
    assert named(document, "group-block@24GiB").is_equal is False


def test_host_memory_is_told_beyond_a_resident_run_and_beyond_the_weights_kept_there(document: Any) -> None:
    ours, leaf = named(document, "ours@24GiB"), named(document, "group-leaf@24GiB")

    assert (ours.host_bytes, ours.host_beyond_bytes) == (21 * GIB, 1 * GIB)  # the transformer's 20 are away
    assert (leaf.host_bytes, leaf.host_beyond_bytes) == (28 * GIB, 7 * GIB)  # all 21 are


def test_merging_keeps_each_run_once_oldest_first(make: Any, row: Any) -> None:
    older = make(row("ours", 24, [1.0]), started_at="2026-01-01T00:00:00+00:00")
    newer = make(row("ours", 24, [2.0]), started_at="2026-01-02T00:00:00+00:00")

    merged = merge([newer, older, newer])

    assert [run["started_at"][:10] for run in merged["runs"]] == ["2026-01-01", "2026-01-02"]


def test_a_merged_file_keeps_the_timeline_of_the_worst_request_alone(document: Any) -> None:
    merged = merge([document])
    kept = {one.name: "copies" in one.row["timeline"] for one in figures(merged) if "timeline" in one.row}

    assert kept == {"ours@24GiB": False, "ours@8GiB": True}  # 2.0 / 1.6 is farther above its bound than 1.1 / 1.0
    assert next(iter(worst(figures(merged)).values())).name == "ours@8GiB"
    assert named(merged, "ours@24GiB").row["timeline"]["busy_ms"]["both"] == 45.0


def test_noise_is_how_far_apart_equal_things_are(make: Any, row: Any) -> None:
    first = make(row("resident", None, [1.0, 1.01, 1.02]))
    second = make(row("resident", None, [1.1, 1.1, 1.1]), started_at="2026-01-02T00:00:00+00:00")
    within, between = noise_of(first), noise_of(merge([first, second]))

    assert list(within.values()) == [pytest.approx(0.01 / 1.01)]
    assert list(between.values()) == [pytest.approx((1.1 - 1.01) / 1.055)]


@pytest.mark.parametrize(
    ("now", "verdict"), [([1.1, 1.12, 1.08], "equal within noise"), ([0.9] * 3, "faster"), ([1.4] * 3, "slower")]
)
def test_a_comparison_tells_a_change_from_noise(
    document: Any, make: Any, row: Any, plan: Any, now: list[float], verdict: str
) -> None:
    new = make(row("ours", 24, now, plan=plan(bound_s=1.0, best_s=0.8)), started_at="2026-01-02T00:00:00+00:00")

    lines = compare(document, new)

    assert len(lines) == 3
    assert lines[2].startswith("| flux: ours@24GiB | 1.100 |") and lines[2].endswith(f"| {verdict} |")


def test_compiled_runs_and_other_steps_are_not_compared(document: Any, make: Any, row: Any) -> None:
    other = make(row("ours", 24, [0.1]), compiled=True), make(row("ours", 24, [0.1]), steps=28)

    for one in other:
        assert compare(document, one)[-1].startswith("| nothing is in both")
        assert group_of(one["runs"][0]) != group_of(document["runs"][0])


def test_the_tables_have_a_row_for_every_mode_and_the_error_of_one_that_failed(document: Any) -> None:
    text = "\n".join(tables(document))

    assert "| ours@24GiB | 1.100 | 1.080 | 3 | 2.24 | 4.0 | 1.000 | 1.100 | 1.048 | 1.250 | 1.100 |" in text
    assert "2.00 (group-leaf)" in text
    assert "| group-leaf@8GiB | OutOfMemoryError: no room |" in text
    assert "link in GiB/s: to device pinned 50.0" in text


@pytest.mark.parametrize("text", ["{}", '{"format": 2, "runs": []}', '{"format": 1}'])
def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ValueError, match="no results of this benchmark"):
        read_document(path)


def test_a_row_as_the_process_wrote_it_before_it_was_killed_is_told(make: Callable[..., Any], row: Any) -> None:
    part = row("ours", 12, [1.5], error="killed at its bound of 120 s", failed_in="requests")
    del part["peaks"], part["digest"]
    document = json.loads(json.dumps(make({**part, "plan": None})))
    document["runs"][0]["rows"][0].pop("plan")

    assert named(document, "ours@12GiB").median_s == 1.5
    assert named(document, "ours@12GiB").is_equal is None
