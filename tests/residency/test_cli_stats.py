from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from residency.cli.tally import tally
from residency.journal.events import Draft, EventType
from residency.journal.fold import fold_stream
from residency.journal.prune import prune
from residency.journal.reader import JournalReader


def write(story: Any, kind: EventType, *, epoch: str, number: int = 0, **payload: Any) -> None:
    story.write(Draft(type=kind, round=number, payload=payload), epoch=epoch)


@pytest.fixture
def eventful(crashed: Any, died: Callable[[], None], measured: Callable[..., None]) -> Any:
    """Five lives: committed and killed, died moving, restored and rolled back, gated and lost its device, and one."""
    died()
    crashed.start(epoch="epoch-3")
    crashed.restore(3, from_round=1, epoch="epoch-3")
    measured(crashed, round_number=3, epoch="epoch-3")
    verdict = {"ok": False, "blames": "plan", "reason": "memory", "detail": "too much"}
    crashed.write(
        Draft(
            type=EventType.TRANSITION,
            round=3,
            payload={"verdict": verdict},
            from_state="planned",
            to_state="rolled-back",
            trigger="roll_back",
        ),
        epoch="epoch-3",
    )
    write(crashed, EventType.SERVING, epoch="epoch-3", number=3, decision="rolled-back")
    write(
        crashed, EventType.STOPPED, epoch="epoch-3", number=3, reason="signal", signal="SIGTERM", outside={"allowed": 3}
    )
    crashed.start(epoch="epoch-4")
    write(crashed, EventType.GATED, epoch="epoch-4", reason="no-warmup", detail="-")
    write(crashed, EventType.POISONED, epoch="epoch-4", problem="CUDA error")
    outside = {"allowed": 1, "refused": 2, "recalibrated": 0}
    write(crashed, EventType.STOPPED, epoch="epoch-4", reason="error", signal=None, outside=outside)
    crashed.start(epoch="epoch-5")
    return crashed


def test_stats_count_what_happened(eventful: Any, run: Callable[..., Any]) -> None:
    plain, whole = run("stats", "--json", "--journal", "journal.db").json()

    assert plain["starts"] == 5
    assert plain["restarts"] == {
        "device lost": 1,
        "died (round, blames plan)": 1,
        "stopped (SIGTERM)": 1,
        "without a word": 1,
    }
    assert plain["rounds"] == {
        "committed": 1,
        "not settled: died (round, blames plan)": 1,
        "rolled-back: memory, blames plan": 1,
    }
    assert plain["deaths"] == [{"blames": "plan", "kind": "round", "deaths": 1}]
    assert plain["decisions"] == {"committed": 1, "rolled-back": 1}
    assert plain["gates"] == {"no-warmup": 1}
    assert plain["outside"] == {"allowed": 4, "refused": 2}
    assert {(one["source"], one["state"]): one["rounds"] for one in plain["sources"]} == {
        ("calibration", "committed"): 1,
        ("calibration", "planned"): 1,
        ("journal", "rolled-back"): 1,
    }
    assert [(one["requests"], one["median_ns"]) for one in plain["requests"]] == [
        (2, 2_500_000_000),
        (1, 2_500_000_000),
    ]
    assert plain["types"]["transition"] == 7
    assert whole["journal"]["events"] == plain["events"] == sum(plain["types"].values())
    assert whole["journal"]["file_bytes"] == eventful.path.stat().st_size
    assert whole["journal"]["wal_bytes"] > 0
    assert whole["journal"]["blobs"] == 2


def test_stats_say_the_same_to_people(eventful: Any, run: Callable[..., Any]) -> None:
    lines = run("stats", "--utc", "--journal", "journal.db").out.splitlines()

    assert lines[0] == "stream worker"
    assert "  deaths    1: blames plan (round) 1" in lines
    assert "  gates     1: no-warmup 1" in lines
    assert "  plans     calibrations 2, restores 1" in lines
    assert any(line.split()[1:5] == ["128x96x1,", "6", "steps,", "batch"] for line in lines)
    assert lines[-1].startswith(f"journal {eventful.path}: ")


def test_stats_agree_with_the_fold(eventful: Any) -> None:
    eventful.journal.close()
    with JournalReader.open(eventful.path) as reader:
        found = tally(reader)["worker"]
        view = fold_stream(reader.events("worker"), "worker")

    assert found.num_starts == len(view.epochs)
    assert sum(found.outcomes.values()) == len(view.rounds)
    assert sum(found.deaths.values()) == sum(epoch.recovered is not None for epoch in view.epochs)
    assert found.sources == Counter((one.source, one.state) for one in view.rounds if one.source is not None)


def test_each_stream_is_counted_for_itself(committed: Any, run: Callable[..., Any]) -> None:
    committed.start(stream="other", epoch="epoch-9")

    *streams, whole = run("stats", "--json", "--journal", "journal.db").json()
    one, _ = run("stats", "--json", "--stream", "other", "--journal", "journal.db").json()

    assert [(plain["stream"], plain["events"]) for plain in streams] == [("other", 1), ("worker", 9)]
    assert (one, whole["journal"]["events"]) == (streams[0], 10)


def test_what_was_pruned_is_told(eventful: Any, run: Callable[..., Any]) -> None:
    for epoch in ("epoch-6", "epoch-7", "epoch-8"):
        eventful.start(epoch=epoch)
        write(eventful, EventType.STOPPED, epoch=epoch, reason="exit", signal=None)
    removed = prune(eventful.journal, keep_since_ns=None, keep_epochs=1, now_ns=eventful.now_ns)

    plain, _ = run("stats", "--json", "--journal", "journal.db").json()

    assert plain["pruned"] == {
        "events": sum(one.num_events for one in removed),
        "epochs": sum(one.num_epochs for one in removed),
        "rounds": sum(one.num_rounds for one in removed),
    }
    assert plain["pruned"]["events"] > 0


def test_a_journal_without_events_has_a_size(story: Any, run: Callable[..., Any]) -> None:
    done = run("stats", "--json", "--journal", "journal.db")

    assert [list(one) for one in done.json()] == [["journal"]]
    assert run("stats", "--journal", "journal.db").err == "the journal has no events yet\n"


def test_payloads_of_another_version_are_passed_over(committed: Any, run: Callable[..., Any]) -> None:
    write(committed, EventType.MEASURED, epoch="epoch-1", number=1, record={"kind": 3})
    write(committed, EventType.SERVING, epoch="epoch-1", decision=["?"])

    done = run("stats", "--json", "--journal", "journal.db")

    assert done.code == 0
    assert done.json()[0]["decisions"] == {"-": 1, "committed": 1}
