"""What else can happen to a rank: lies, signals, memory, switches, and a crash between the decision and its commits."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from residency.journal.fold import fold_stream
from residency.journal.reader import JournalReader
from residency.journal.verify import verify

Live = Callable[[list[list[dict[str, Any]]]], list[Any]]


def _load(name: str) -> Any:
    spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


outcomes = _load("outcomes")


def one(live: Live, *faults: dict[str, Any], **life: Any) -> list[Any]:
    """Live one case with faults, and the start after it, and find nothing wrong with them."""
    (case,) = live([[{"faults": list(faults), **life}, life]])
    assert outcomes.problems(case, {fault["rank"] for fault in faults}) == []
    return list(case)


def decisions(life: list[dict[str, Any]]) -> list[str | None]:
    return [rank.get("decision") for rank in life]


def rounds(case: list[Any], rank: int, host: str = "host 0") -> list[Any]:
    """The rounds of one rank, as its journal tells them; the journal is sound."""
    reader = JournalReader.open(Path(case[0][0]["folder"]) / f"{host}.db")
    try:
        assert [found for found in verify(reader) if not found.is_note] == []
        name = f"tiny.rank{rank}"
        return list(fold_stream(reader.events(name), name).rounds)
    finally:
        reader.close()


def test_a_rank_that_lies_about_its_digest_makes_all_roll_back(live: Live) -> None:
    first, _ = one(live, {"rank": 3, "what": "lie", "at": "digest"})
    assert decisions(first) == ["rolled-back"] * 4
    assert all("digest" in rank["reason"] for rank in first)
    # Going back takes the same steps on all, wherever each was.
    back = {tuple(step for step in rank["steps"] if step > "900") for rank in first}
    assert len(back) == 1 and next(iter(back))[0] == "901.rolled back"


def test_one_that_is_slow_within_the_limit_is_waited_for(live: Live) -> None:
    first, _ = one(live, {"rank": 1, "what": "late", "at": "before", "name": "applied"})
    assert decisions(first) == ["committed"] * 4


@pytest.mark.parametrize(
    ("at", "name"), [("append", "commit"), ("appended", "commit"), ("decide", ""), ("decided", "")]
)
def test_a_crash_between_the_commits_of_two_ranks_never_leaves_two_placements(live: Live, at: str, name: str) -> None:
    cases = live(
        [
            [
                {
                    "faults": [
                        {"rank": rank, "what": "kill", "at": at, **({"name": name} if name else {})} for rank in killed
                    ]
                },
                {},
            ]
            for killed in ([0], [2], [1, 2, 3], [0, 1, 2, 3])
        ]
    )
    for case, killed in zip(cases, ([0], [2], [1, 2, 3], [0, 1, 2, 3]), strict=True):
        assert outcomes.problems(case, set(killed)) == []
        written = {rank for rank in range(4) if rounds(case, rank)[0].state == "committed"}
        # Who wrote its commit may have served it: then it is what all come back to, also those that did not.
        expected = "restored" if written else "committed"
        assert decisions(case[1]) == [expected] * 4, (killed, written)


def test_a_rank_that_dies_prepared_and_unvoted_is_a_round_that_never_was(live: Live) -> None:
    first, _ = case = one(live, {"rank": 2, "what": "kill", "at": "appended", "name": "prepared"})
    assert [rank.get("decision") for rank in first] == ["rolled-back", "rolled-back", None, "rolled-back"]
    assert rounds(case, 0)[0].state == "rolled-back"


def test_a_stopped_rank_is_gone_for_the_others_and_finds_the_round_ended(live: Live) -> None:
    first, _ = one(live, {"rank": 1, "what": "stop", "at": "before", "name": "verdict"})
    assert decisions(first) == ["rolled-back", None, "rolled-back", "rolled-back"]
    assert all("rank 1" in first[rank]["reason"] for rank in (0, 2, 3))


def test_a_signal_to_one_rank_rolls_all_back_and_blames_nobody(live: Live) -> None:
    first, _ = case = one(live, {"rank": 2, "what": "interrupt", "at": "before", "name": "applied"})
    assert first[2]["status"] == -signal.SIGTERM
    assert [first[rank]["decision"] for rank in (0, 1, 3)] == ["rolled-back"] * 3
    assert {rounds(case, rank)[0].state for rank in range(4)} == {"rolled-back"}


def test_a_kill_switch_of_one_rank_pins_all(live: Live) -> None:
    (case,) = live([[{"faults": [{"rank": 1, "what": "switch", "at": "before", "name": "applied"}]}]])
    assert decisions(case[0]) == ["pinned"] * 4
    assert {rank["state"] for rank in case[0]} == {"measuring"}


@pytest.mark.parametrize("number", [2, 5])
def test_memory_that_runs_out_on_one_rank_is_survived(live: Live, number: int) -> None:
    """In the probe and in a validation: the others wait for it in a request, and end, or are told."""
    first, _ = one(live, {"rank": 3, "what": "oom", "at": "request", "number": number})
    assert first[3].get("decision") in ("committed", "rolled-back", "gated")
    assert all(rank["status"] in (0, 73) for rank in first)


KINDS = ("kill", "hang", "raise")


def test_a_rank_struck_inside_a_request_does_not_keep_the_others_in_it(live: Live) -> None:
    faults = [
        {"rank": number % 4, "what": what, "at": "request", "number": number}
        for number in range(1, 7)
        for kind, what in enumerate(KINDS)
        if (number + kind) % 2
    ]
    cases = live([[{"faults": [fault]}, {}] for fault in faults])
    assert [outcomes.problems(case, {fault["rank"]}) for case, fault in zip(cases, faults, strict=True)] == [[]] * 9


def test_a_rank_struck_before_an_effect_leaves_one_placement(live: Live) -> None:
    cases = live([[{"faults": [{"rank": n, "what": KINDS[n % 3], "at": "effect", "number": 1}]}, {}] for n in range(4)])
    assert [outcomes.problems(case, {n}) for n, case in enumerate(cases)] == [[]] * 4


def test_ranks_of_two_hosts_keep_a_journal_each_and_come_back_to_one_placement(live: Live) -> None:
    case = one(live, {"rank": 3, "what": "kill", "at": "append", "name": "commit"}, per_host=2)
    assert decisions(case[1]) == ["restored"] * 4
    states = [rounds(case, rank, f"host {rank // 2}")[0].state for rank in range(4)]
    assert states == ["committed", "committed", "committed", "validating"]


def test_a_host_that_lost_its_journal_makes_all_calibrate(live: Live) -> None:
    (case,) = live([[{"per_host": 2}, {"per_host": 2, "forget": "host 1"}]])
    assert decisions(case[0]) == ["committed"] * 4
    assert decisions(case[1]) == ["committed"] * 4
    assert rounds(case, 0)[-1].source == "calibration"
    assert [rank["round"] for rank in case[1]] == [2] * 4, "one more than the highest that any rank knows"


def test_a_store_that_dies_with_rank_0_after_the_votes_ends_who_cannot_learn_what_was_decided(live: Live) -> None:
    (case,) = live(
        [[{"store": "rank 0", "faults": [{"rank": 0, "what": "kill", "at": "append", "name": "prepared"}]}, {}]]
    )
    assert outcomes.problems(case, {0}) == []
    # Each was about to vote, or had: those that had not go back, the others cannot know.
    assert {(rank["status"], rank.get("decision")) for rank in case[0][1:]} <= {(73, None), (0, "rolled-back")}


def test_over_the_store_of_a_launcher_it_is_the_same(live: Live) -> None:
    (case,) = live([[{"store": "tcp", "faults": [{"rank": 2, "what": "kill", "at": "before", "name": "vote"}]}, {}]])
    assert outcomes.problems(case, {2}) == []


def test_what_an_earlier_start_left_in_the_store_is_not_taken_for_this_one(live: Live) -> None:
    (case,) = live([[{"store": "kept"}, {"store": "kept"}]])
    assert decisions(case[0]) == ["committed"] * 4
    assert decisions(case[1]) == ["restored"] * 4
