"""State as a fold: golden sequences of events, and what each of their prefixes folds to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from residency.errors import JournalCorrupt
from residency.journal.events import Event, EventType
from residency.journal.fold import fold, fold_stream
from residency.journal.views import EpochView, Move, OpenIntent, RoundView

Add = Callable[..., Event]


class Log:
    """Events as a worker would write them, one every ten nanoseconds."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(
        self,
        kind: EventType,
        number: int = 0,
        payload: dict[str, Any] | None = None,
        *,
        stream: str = "worker",
        epoch: str = "e1",
        pid: int = 100,
        **columns: str | None,
    ) -> Event:
        position = len(self.events) + 1
        event = Event(
            position=position,
            stream=stream,
            stream_version=position,
            event_id=f"id-{position}",
            epoch=epoch,
            round=number,
            rank=3,
            type=kind.value,
            schema_version=1,
            from_state=columns.get("from_state"),
            to_state=columns.get("to_state"),
            trigger=columns.get("trigger"),
            recorded_at=position * 10,
            boot_id="boot",
            pid=pid,
            causation=columns.get("causation"),
            payload=msgspec.json.encode(payload or {}),
            previous_hash=bytes(32),
            hash=bytes(32),
        )
        self.events.append(event)
        return event

    def start(self, *, epoch: str = "e1", placement: str = "p0") -> None:
        self.add(EventType.EPOCH_STARTED, 0, {"initial_placement": placement, "fingerprint": {"gpu": 1}}, epoch=epoch)

    def move(self, number: int, trigger: str, to: str, payload: dict[str, Any], *, epoch: str = "e1") -> None:
        self.add(EventType.TRANSITION, number, payload, trigger=trigger, to_state=to, epoch=epoch)

    def effect(self, number: int, index: int, *, undo: bool = False, result: str | None = "applied") -> Event:
        intent = self.add(EventType.EFFECT_INTENT, number, {"index": index, "component": f"c{index}", "undo": undo})
        if result is not None:
            self.add(EventType.EFFECT_OUTCOME, number, {"result": result}, causation=intent.event_id)
        return intent

    def calibrate(self, number: int, placement: str, *, previous: str = "p0") -> None:
        """A whole round that commits: 10 events."""
        self.add(EventType.MEASURED, number, {"record": {}})
        self.move(number, "plan", "planned", {"placement": placement, "previous": previous, "source": "calibration"})
        self.effect(number, 0)
        self.effect(number, 1)
        self.move(number, "apply", "applied", {"placement": placement, "num_effects": 2})
        self.move(number, "validate", "validating", {})
        self.add(EventType.MEASURED, number, {"record": {}})
        self.move(number, "commit", "committed", {"placement": placement, "verdict": {"ok": True}})

    @property
    def epoch(self) -> EpochView:
        return fold_stream(self.events, "worker").epochs[-1]

    @property
    def round(self) -> RoundView:
        return self.epoch.rounds[-1]


@pytest.fixture
def log() -> Log:
    return Log()


def test_nothing_folds_to_nothing() -> None:
    assert fold([]) == {}
    view = fold_stream([], "worker")
    assert (view.epochs, view.last_position, view.highest_round, view.rounds) == ((), 0, 0, ())


def test_an_epoch_begins_measuring_in_its_initial_placement(log: Log) -> None:
    log.start()
    epoch = log.epoch
    assert (epoch.state, epoch.round, epoch.placement, epoch.moving) == ("measuring", 0, "p0", False)
    assert (epoch.rank, epoch.boot_id, epoch.pid, epoch.started_at) == (3, "boot", 100, 10)
    assert epoch.fingerprint == {"gpu": 1}
    assert epoch.rounds == () and not epoch.ended


def test_a_committed_round_folds_to_its_plan_and_outcome(log: Log) -> None:
    log.start()
    log.calibrate(1, "p1")
    assert log.round == RoundView(
        epoch="e1",
        number=1,
        state="committed",
        source="calibration",
        placement="p1",
        previous="p0",
        plan={"placement": "p1", "previous": "p0", "source": "calibration"},
        outcome={"placement": "p1", "verdict": {"ok": True}},
        num_intents=2,
        open_intents=(),
        started_at=20,
        ended_at=110,
        first_position=2,
        last_position=11,
        moves=tuple(Move(component=name, before={}, after={}, undo=False, result="applied") for name in ("c0", "c1")),
    )
    assert (log.epoch.state, log.epoch.placement, log.epoch.round) == ("committed", "p1", 1)


# After every event of start + calibrate: epoch state, placement in force, moving, open intents, round ended.
PREFIXES = [
    ("measuring", "p0", False, 0, None),  # epoch.started
    ("measuring", "p0", False, 0, False),  # measured
    ("planned", "p0", False, 0, False),  # plan
    ("planned", "p0", True, 1, False),  # intent
    ("planned", "p0", True, 0, False),  # outcome
    ("planned", "p0", True, 1, False),  # intent
    ("planned", "p0", True, 0, False),  # outcome
    ("applied", "p0", True, 0, False),  # apply
    ("validating", "p0", True, 0, False),  # validate
    ("validating", "p0", True, 0, False),  # measured
    ("committed", "p1", False, 0, True),  # commit
]


@pytest.mark.parametrize("length", range(1, len(PREFIXES) + 1))
def test_every_crash_point_of_a_round_folds_to_what_was_known_then(length: int, log: Log) -> None:
    log.start()
    log.calibrate(1, "p1")
    (epoch,) = fold_stream(log.events[:length], "worker").epochs
    state, placement, moving, num_open, ended = PREFIXES[length - 1]
    assert (epoch.state, epoch.placement, epoch.moving) == (state, placement, moving)
    assert sum(len(one.open_intents) for one in epoch.rounds) == num_open
    assert [one.ended_at is not None for one in epoch.rounds] == ([] if ended is None else [ended])


def test_a_kept_plan_commits_without_effects(log: Log) -> None:
    log.start()
    log.move(1, "plan", "planned", {"placement": "p0", "source": "calibration"})
    log.move(1, "keep", "committed", {"placement": "p0"})
    assert (log.round.state, log.round.num_intents, log.epoch.moving, log.epoch.placement) == (
        "committed",
        0,
        False,
        "p0",
    )


def test_a_rolled_back_round_is_in_the_placement_it_restored(log: Log) -> None:
    log.start()
    log.move(1, "plan", "planned", {"placement": "p1", "previous": "p0", "source": "calibration"})
    log.effect(1, 0)
    log.effect(1, 0, undo=True, result="undone")
    log.move(1, "roll_back", "rolled-back", {"placement": "p0", "verdict": {"blames": "plan"}})
    assert (log.round.state, log.round.placement, log.round.num_intents) == ("rolled-back", "p1", 2)
    assert log.round.outcome == {"placement": "p0", "verdict": {"blames": "plan"}}
    assert (log.epoch.placement, log.epoch.moving, log.epoch.state) == ("p0", False, "rolled-back")


def test_an_intent_without_outcome_is_in_doubt(log: Log) -> None:
    log.start()
    log.move(1, "plan", "planned", {"placement": "p1"})
    log.effect(1, 0)
    intent = log.effect(1, 1, undo=True, result=None)
    assert log.round.open_intents == (
        OpenIntent(event_id=intent.event_id, position=intent.position, index=1, component="c1", undo=True),
    )


def test_the_measure_after_a_settled_round_moves_the_machine_and_not_the_round(log: Log) -> None:
    log.start()
    log.calibrate(1, "p1")
    log.move(1, "measure", "measuring", {"placement": "p1"})
    assert (log.epoch.state, log.epoch.placement) == ("measuring", "p1")
    assert (log.round.state, log.round.ended_at) == ("committed", 110)
    log.move(2, "measure", "measuring", {"placement": "p1"})
    assert [(one.number, one.state, one.previous) for one in log.epoch.rounds] == [
        (1, "committed", "p0"),
        (2, "measuring", "p1"),
    ]
    assert log.epoch.round == 2


def test_a_second_round_of_an_epoch_starts_from_the_first_ones_placement(log: Log) -> None:
    log.start()
    log.calibrate(1, "p1")
    log.calibrate(2, "p2", previous="p1")
    assert [(one.placement, one.previous) for one in log.epoch.rounds] == [("p1", "p0"), ("p2", "p1")]
    assert log.epoch.placement == "p2"
    assert fold_stream(log.events, "worker").highest_round == 2


def test_recovery_closes_the_dead_epochs_round_and_leaves_its_state(log: Log) -> None:
    log.start()
    log.move(1, "plan", "planned", {"placement": "p1"})
    intent = log.effect(1, 0, result=None)
    alive_until = log.events[-1].recorded_at
    log.add(EventType.EFFECT_OUTCOME, 1, {"result": "lost"}, causation=intent.event_id, pid=200)
    log.add(EventType.RECOVERED, 1, {"by_epoch": "e2", "death": {"blames": "plan"}}, pid=200)
    epoch = log.epoch
    assert epoch.recovered == {"by_epoch": "e2", "death": {"blames": "plan"}}
    assert epoch.ended and epoch.pid == 100
    # Not until the closing events, which a later start wrote: it may have come days afterwards.
    assert (log.round.state, log.round.open_intents, log.round.ended_at) == ("planned", (), alive_until)
    assert epoch.last_at == alive_until
    assert [(move.result, move.leaves) for move in log.round.moves] == [("lost", None)]


def test_epochs_of_a_stream_are_kept_apart_in_their_order(log: Log) -> None:
    log.start()
    log.calibrate(1, "p1")
    log.start(epoch="e2", placement="p9")
    log.move(2, "plan", "planned", {"placement": "p1", "source": "journal"}, epoch="e2")
    view = fold_stream(log.events, "worker")
    assert [(epoch.epoch, epoch.placement, epoch.state) for epoch in view.epochs] == [
        ("e1", "p1", "committed"),
        ("e2", "p9", "planned"),
    ]
    assert [(one.epoch, one.number) for one in view.rounds] == [("e1", 1), ("e2", 2)]
    assert view.last_position == len(log.events)


def test_streams_are_folded_apart(log: Log) -> None:
    log.add(EventType.EPOCH_STARTED, 0, {"initial_placement": "a0"}, stream="a")
    log.add(EventType.EPOCH_STARTED, 0, {"initial_placement": "b0"}, stream="b")
    log.add(EventType.SERVING, 0, {"placement": "a0"}, stream="a")
    views = fold(log.events)
    assert {name: view.epochs[0].placement for name, view in views.items()} == {"a": "a0", "b": "b0"}
    assert {name: view.last_position for name, view in views.items()} == {"a": 3, "b": 2}
    assert fold_stream(log.events, "b") == views["b"]


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [
        (EventType.PINNED, "pinned"),
        (EventType.GATED, "gated"),
        (EventType.SERVING, "serving"),
        (EventType.STOPPED, "stopped"),
        (EventType.RECOVERED, "recovered"),
        (EventType.ROLLBACK_FAILED, "rollback_failed"),
        (EventType.POISONED, "poisoned"),
    ],
)
def test_the_last_payload_of_its_kind_is_kept(kind: EventType, attribute: str, log: Log) -> None:
    log.start()
    assert getattr(log.epoch, attribute) is None
    log.add(kind, 0, {"number": 1})
    log.add(kind, 0, {"number": 2})
    assert getattr(log.epoch, attribute) == {"number": 2}


def test_serving_and_stopped_are_dated(log: Log) -> None:
    log.start()
    log.add(EventType.SERVING, 0, {"placement": "p0"})
    assert (log.epoch.serving_at, log.epoch.ended) == (20, False)
    log.add(EventType.STOPPED, 0, {"reason": "exit"})
    assert (log.epoch.serving_at, log.epoch.ended, log.epoch.last_at) == (20, True, 30)


@pytest.mark.parametrize(
    ("undo", "result", "leaves"),
    [
        (False, None, None),
        (False, "applied", {"mode": "after"}),
        (False, "failed", {"mode": "before"}),
        (False, "lost", None),
        (True, None, None),
        (True, "undone", {"mode": "before"}),
        (True, "failed", None),
    ],
)
def test_a_move_leaves_a_component_where_its_outcome_says(
    undo: bool, result: str | None, leaves: dict[str, str] | None
) -> None:
    move = Move(component="vae", before={"mode": "before"}, after={"mode": "after"}, undo=undo, result=result)

    assert move.leaves == leaves


def test_a_rollback_that_failed_leaves_the_machine_where_it_was(log: Log) -> None:
    log.start()
    log.move(1, "plan", "planned", {"placement": "p1"})
    log.effect(1, 0)
    log.add(EventType.ROLLBACK_FAILED, 1, {"problems": ["lost"]})
    assert (log.epoch.state, log.epoch.moving, log.round.ended_at) == ("planned", True, None)


def test_a_lost_device_is_dated_and_leaves_the_machine_and_its_effects_where_they_were(log: Log) -> None:
    log.start()
    log.move(1, "plan", "planned", {"placement": "p1"})
    log.add(EventType.EFFECT_INTENT, 1, {"index": 0, "component": "vae", "undo": False})
    assert log.epoch.poisoned_at is None
    log.add(EventType.POISONED, 1, {"problem": "CUDA error: misaligned address", "state": "planned"})
    assert (log.epoch.state, log.epoch.moving, log.round.ended_at) == ("planned", True, None)
    assert log.epoch.poisoned_at == log.epoch.last_at
    assert [one.component for one in log.round.open_intents] == ["vae"]


def test_an_event_of_an_unknown_kind_only_moves_the_positions(log: Log) -> None:
    log.start()
    log.events.append(log.events[0]._replace(position=2, type="weather", payload=b"not even JSON", recorded_at=20))
    assert (log.epoch.state, log.epoch.last_position, log.epoch.last_at) == ("measuring", 2, 20)


def test_a_part_of_a_journal_folds_too(log: Log) -> None:
    log.start()
    log.calibrate(1, "p1")
    (epoch,) = fold_stream(log.events[7:], "worker").epochs
    assert (epoch.started, epoch.state, epoch.placement, epoch.rounds[0].plan) == ({}, "committed", "p1", None)


def test_a_damaged_payload_is_an_error_rather_than_a_guess(log: Log) -> None:
    log.start()
    log.events[0] = log.events[0]._replace(payload=b'{"initial')
    with pytest.raises(JournalCorrupt, match="event 1"):
        fold(log.events)


def test_a_fold_does_not_depend_on_where_it_was_cut_into_pages(log: Log) -> None:
    log.start()
    log.calibrate(1, "p1")
    assert fold(iter(log.events)) == fold(log.events) == fold(tuple(log.events))
