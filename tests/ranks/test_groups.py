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
