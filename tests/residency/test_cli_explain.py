from collections.abc import Callable
from typing import Any

import pytest

from residency.journal.events import Draft, EventType


@pytest.mark.parametrize(
    "expected",
    [
        "round 1 is committed: placement",
        "probe     128x96, 6 steps",
        "device memory: cap 400.00 MiB, reserves times 2 after a death",
        "vae stays as configured: configured by the user",
        "planned for 128x96, 6 steps",
        "predicted: 1.90 s a request of 6 steps (1.70 s of compute and 200.0 ms of transfers)",
        "a faster placement would not fit in phase 'use:transformer'",
        "next cheapest change: 30.00 MiB more would allow text_encoder resident: -170.0 ms a request (estimated;",
        "runner-up",
        "verdict: faster: 2.50 s to 1.90 s",
    ],
)
def test_explain_says_what_led_to_a_placement(expected: str, committed: Any, run: Callable[..., Any]) -> None:
    done = run("explain", "--journal", "journal.db")

    assert expected in done.out


def test_explain_says_what_differed_in_the_fingerprint(crashed: Any, run: Callable[..., Any]) -> None:
    done = run("explain", "2", "--journal", "journal.db")
    (plain,) = run("explain", "2", "--json", "--journal", "journal.db").json()

    assert "the worker had changed since the epoch before: cap_bytes was 400.00 MiB, is 500.00 MiB" in done.out
    assert plain["fingerprint_differences"] == [{"part": "cap_bytes", "before": 419430400, "now": 524288000}]
    assert plain["plan"]["inputs"]["cap_bytes"] == 419430400


def test_explain_without_a_plan_names_the_gate(story: Any, run: Callable[..., Any], gate: Callable[..., None]) -> None:
    story.start()
    gate(story, reason="warmup-failed", detail="the warmup raised ValueError")

    done = run("explain", "--journal", "journal.db")

    assert (done.code, done.err) == (1, "no plan was made: warmup-failed the warmup raised ValueError\n")


def test_explain_without_a_plan_says_how_the_round_ended(story: Any, run: Callable[..., Any]) -> None:
    story.start()
    story.write(Draft(type=EventType.TRANSITION, round=1, payload={}, to_state="measuring", trigger="measure"))
    verdict = {"ok": False, "blames": "request", "reason": "infeasible", "detail": "no placement fits"}
    story.write(
        Draft(
            type=EventType.TRANSITION,
            round=1,
            payload={"verdict": verdict},
            from_state="measuring",
            to_state="rolled-back",
            trigger="roll_back",
        )
    )

    done = run("explain", "--journal", "journal.db")

    assert done.code == 1
    assert done.err.startswith("no plan was made: round 1 was rolled back: ")
    assert "no placement fits" in done.err


def test_explain_lists_the_requests_that_validated(
    crashed: Any, measured: Callable[..., None], run: Callable[..., Any]
) -> None:
    measured(crashed, round_number=2, epoch="epoch-2")

    done = run("explain", "2", "--journal", "journal.db")
    (plain,) = run("explain", "2", "--json", "--journal", "journal.db").json()

    assert [line.split()[0] for line in done.out.splitlines() if " 128x96, 6 steps  " in line] == [
        "probe",
        "validation",
    ]
    assert [record["kind"] for record in plain["other_records"]] == ["validation"]


def test_explain_puts_the_gate_of_the_latest_start_before_the_newest_plan(
    committed: Any, run: Callable[..., Any], gate: Callable[..., None]
) -> None:
    committed.start(epoch="epoch-2")
    gate(committed, epoch="epoch-2", reason="warmup-failed", detail="the warmup raised ValueError")

    lines = run("explain", "--journal", "journal.db").out.splitlines()
    (plain,) = run("explain", "--json", "--journal", "journal.db").json()

    assert lines[0] == "the latest start made no plan: warmup-failed the warmup raised ValueError"
    assert lines[2].startswith("round 1 is committed")
    assert plain["latest_start"] == lines[:1]


def test_explain_says_that_the_next_start_decides_about_a_round_in_flight(
    crashed: Any, run: Callable[..., Any]
) -> None:
    done = run("explain", "--journal", "journal.db")

    assert "it is in flight, or its worker died in it: then the next start decides" in done.out
    assert "residency replay --dry-run" in done.out


def test_explain_says_whom_the_recovery_blames_for_a_death(
    crashed: Any, died: Callable[[], None], run: Callable[..., Any]
) -> None:
    died()
    crashed.start(epoch="epoch-3")

    lines = run("explain", "--journal", "journal.db").out.splitlines()

    why = "it died between the first effect and the commit, in round 2, planned"
    assert lines[0] == f"the latest start found epoch epoch-2 dead: blames plan: {why}"
    assert lines[1].startswith("the latest start made no plan: it is measuring, or it died")
    assert f"its worker died in it: the recovery blames plan: {why}" in lines
    assert f"verdict: died: blames plan: {why}" in lines


def test_explain_says_that_a_restored_placement_was_not_measured_and_that_nothing_had_changed(
    crashed: Any, run: Callable[..., Any]
) -> None:
    # Back under the fingerprint of round 1, after a life under another one.
    crashed.start(epoch="epoch-3")
    crashed.restore(3, from_round=1, epoch="epoch-3")

    shown = run("explain", "3", "--journal", "journal.db").out

    assert "restored: the last committed placement of round 1, under the same fingerprint" in shown
    assert "the worker had changed" not in shown


LOST = "AcceleratorError: CUDA error: misaligned address"


def test_a_lost_device_is_told_in_words_by_every_verb(
    crashed: Any, poison: Callable[..., None], run: Callable[..., Any]
) -> None:
    poison(crashed, round_number=2, epoch="epoch-2", state="planned")

    explained = run("explain", "--journal", "journal.db").out.splitlines()
    logged = run("log", "-n", "2", "--journal", "journal.db").out.splitlines()
    listed = run("rounds", "--journal", "journal.db").out.splitlines()
    replayed = run("replay", "--journal", "journal.db").out.splitlines()
    (epochs,) = run("replay", "--json", "--journal", "journal.db").json()

    assert any(line.startswith("its worker lost the device in it and had to end: the next start") for line in explained)
    assert f"verdict: the device was lost in it, and nothing moved back: {LOST}" in explained
    assert logged[1].endswith(f"the device is lost while planned; nothing is moved back: {LOST}")
    assert listed[1].endswith(f"the device was lost in it, and nothing moved back: {LOST}")
    assert replayed[-1].endswith("device lost")
    assert epochs["epochs"][1]["poisoned"] == {"problem": LOST, "state": "planned"}
    assert run("verify", "--journal", "journal.db").code == 0


def test_a_rehearsal_says_whom_the_next_start_would_blame_for_a_lost_device(
    crashed: Any, poison: Callable[..., None], run: Callable[..., Any]
) -> None:
    poison(crashed, round_number=2, epoch="epoch-2", state="planned")

    rehearsed = run("replay", "--dry-run", "--journal", "journal.db").out

    assert "the next start closes epoch epoch-2 with effect.outcome, recovered" in rehearsed
    assert "round 2 died with a plan that was never committed" in rehearsed


def test_a_device_that_is_lost_before_any_plan_is_why_there_is_none(
    story: Any, poison: Callable[..., None], run: Callable[..., Any]
) -> None:
    story.start()
    poison(story, round_number=0, epoch="epoch-1", state="measuring")

    done = run("explain", "--journal", "journal.db")

    assert (done.code, done.err) == (1, f"no plan was made: the device was lost to it: {LOST}\n")
