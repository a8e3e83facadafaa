"""Workspaces that ranks build together, and replicas that each have a round of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from residency.journal.events import payload
from residency.journal.reader import JournalReader

Live = Callable[[list[list[dict[str, Any]]]], list[Any]]

PROBE = 2  # the second request of a round


def told(folder: str, stream: str) -> list[str]:
    """What a rank's events say of other ranks."""
    with JournalReader.open(Path(folder) / "host 0.db") as reader:
        return [str(payload(event)["what"]) for event in reader.events(stream) if event.type == "ranks"]


def test_what_a_probe_drops_is_dropped_and_built_by_all_ranks_in_one_order(live: Live) -> None:
    memory = {"rank": 3, "what": "oom", "at": "met", "number": PROBE}
    (case,) = live([[{"staging": "ours", "faults": [memory]}]])
    assert {rank["decision"] for rank in case[0]} <= {"committed", "kept"}, case[0]
    folder = case[0][0]["folder"]
    for rank in range(4):
        assert told(folder, f"tiny.rank{rank}") == ["workspaces dropped", "workspaces built", "prepared"]


def test_a_rank_that_drops_them_by_itself_breaks_the_next_request_of_all(live: Live) -> None:
    """What the promise above is for: without it the same probe ends the round."""
    memory = {"rank": 3, "what": "oom", "at": "met", "number": PROBE}
    (case,) = live([[{"staging": "its own", "faults": [memory]}]])
    assert all(rank.get("decision") not in ("committed", "kept") for rank in case[0])
    assert any("variant access" in str(rank.get("reason")) for rank in case[0])


def test_replicas_have_a_round_each_and_do_not_wait_for_each_other(live: Live) -> None:
    killed = {"rank": 3, "what": "kill", "at": "before", "name": "applied"}
    (case,) = live([[{"replicas": 2, "faults": [killed]}, {"replicas": 2}]])
    first, second = case
    assert [rank.get("decision") for rank in first] == ["committed", "committed", "rolled-back", None]
    assert [rank["decision"] for rank in second] == ["restored", "restored", "committed", "committed"]
    assert len({rank["epoch"] for rank in second}) == 2
    assert second[0]["epoch"] == second[1]["epoch"]


def test_a_control_request_to_all_ranks_is_one_round_of_all(live: Live) -> None:
    (case,) = live([[{"asks": [{"verb": "validate"}, {"verb": "calibrate"}, {"verb": "roll_back"}]}]])
    (life,) = case
    for number in range(3):
        answers = [rank["asked"][number] for rank in life]
        assert len({(one["outcome"], one["round"], one["epoch"]) for one in answers}) == 1, answers
    validated, calibrated, gone_back = (one["outcome"] for one in life[0]["asked"])
    assert validated == "committed" and calibrated in ("committed", "kept") and gone_back == "rolled-back"


def test_one_that_reaches_a_single_rank_is_refused_in_time_and_leaves_all_able_to_run_the_next(live: Live) -> None:
    asks = [{"verb": "validate", "ranks": [2]}, {"verb": "validate", "attempt": 1}]
    (case,) = live([[{"asks": asks, "limits": {"step_s": 4.0, "grace_s": 1.0}}]])
    (life,) = case
    assert [None if rank["asked"][0] is None else rank["asked"][0]["outcome"] for rank in life] == [
        None,
        None,
        "refused",
        None,
    ]
    assert {rank["asked"][1]["outcome"] for rank in life} == {"committed"}


def test_a_rank_that_cannot_be_attached_is_not_waited_for(live: Live) -> None:
    (case,) = live([[{"misled": 1}]])
    (life,) = case
    assert (life[1]["status"], life[1]["error"]) == (2, "UnknownComponent")
    for rank in (0, 2, 3):
        assert life[rank]["decision"] == "gated"
        assert "rank-failed: rank 1" in life[rank]["reason"] and "nobody" in life[rank]["reason"]
