"""State as a fold over events: pure, and nothing is executed again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from residency.journal.events import Event, EventType, payload
from residency.journal.views import EpochView, Move, OpenIntent, RoundView, StreamView

__all__ = ["fold", "fold_stream", "payload"]

# The journal's own spelling; what the state machine makes of it is not this folder's business.
_INITIAL_STATE = "measuring"
_SETTLED = frozenset({"committed", "rolled-back"})

# Spelt once: a look-up of an Enum's value per event would be a third of the fold's time.
_STARTED = EventType.EPOCH_STARTED.value
_TRANSITION = EventType.TRANSITION.value
_INTENT = EventType.EFFECT_INTENT.value
_OUTCOME = EventType.EFFECT_OUTCOME.value
_PINNED = EventType.PINNED.value
_GATED = EventType.GATED.value
_SERVING = EventType.SERVING.value
_STOPPED = EventType.STOPPED.value
_RECOVERED = EventType.RECOVERED.value
_ROLLBACK_FAILED = EventType.ROLLBACK_FAILED.value
_POISONED = EventType.POISONED.value
_KEPT = frozenset({_STARTED, _PINNED, _GATED, _SERVING, _STOPPED, _RECOVERED, _ROLLBACK_FAILED, _POISONED})
_ENDS = frozenset({_STOPPED, _RECOVERED})
_LOST = "lost"  # the result that a later start gives to an effect in doubt

Payload = Mapping[str, Any]


def fold(events: Iterable[Event]) -> dict[str, StreamView]:
    """Return every stream that has events among these, folded. Events must come by position, oldest first.

    A part of a journal folds, too; what came before it is then unknown. Types of event that this program does not know
    only move the positions.

    Raises:
        JournalCorrupt: a payload is not a JSON object.
    """
    streams: dict[str, _Stream] = {}
    for event in events:
        stream = streams.get(event.stream)
        if stream is None:
            stream = streams[event.stream] = _Stream(event.stream)
        stream.add(event)
    return {name: stream.view() for name, stream in streams.items()}


def fold_stream(events: Iterable[Event], stream: str) -> StreamView:
    """Return one stream, folded; without epochs if it has no events among these.

    Raises:
        JournalCorrupt: a payload is not a JSON object.
    """
    views = fold(event for event in events if event.stream == stream)
    return views.get(stream, StreamView(stream=stream, epochs=(), last_position=0))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _object(value: object) -> Payload:
    return value if isinstance(value, Mapping) else {}


@dataclass(slots=True)
class _Round:
    epoch: str
    number: int
    previous: str | None
    started_at: int
    first_position: int
    last_position: int
    # Of the last event that its own worker wrote.
    last_at: int
    state: str = _INITIAL_STATE
    source: str | None = None
    placement: str | None = None
    plan: Payload | None = None
    outcome: Payload | None = None
    num_intents: int = 0
    open_intents: dict[str, OpenIntent] = field(default_factory=dict)
    # By the intent's event_id.
    moves: dict[str, Move] = field(default_factory=dict)
    ended_at: int | None = None

    @property
    def settled(self) -> bool:
        return self.state in _SETTLED

    def transition(self, event: Event, content: Payload) -> None:
        # A round that has settled stays so: the measure that follows it belongs to what comes next.
        if self.settled or event.to_state is None:
            return
        self.state = event.to_state
        if event.trigger == "plan":
            self.plan = content
            self.placement = _text(content.get("placement"))
            self.source = _text(content.get("source"))
            self.previous = _text(content.get("previous")) or self.previous
        if self.settled:
            self.outcome = content
            self.ended_at = event.recorded_at

    def intend(self, event: Event, content: Payload) -> None:
        self.num_intents += 1
        self.open_intents[event.event_id] = OpenIntent(
            event_id=event.event_id,
            position=event.position,
            index=_whole(content.get("index")),
            component=_text(content.get("component")) or "",
            undo=content.get("undo") is True,
        )
        self.moves[event.event_id] = Move(
            component=_text(content.get("component")) or "",
            before=_object(content.get("before")),
            after=_object(content.get("after")),
            undo=content.get("undo") is True,
            result=None,
        )

    def settle(self, intent: str, result: str | None) -> bool:
        """Note an outcome; returns False if the intent is not an open one of this round."""
        if self.open_intents.pop(intent, None) is None:
            return False
        self.moves[intent] = replace(self.moves[intent], result=result)
        return True

    def view(self) -> RoundView:
        return RoundView(
            epoch=self.epoch,
            number=self.number,
            state=self.state,
            source=self.source,
            placement=self.placement,
            previous=self.previous,
            plan=self.plan,
            outcome=self.outcome,
            num_intents=self.num_intents,
            open_intents=tuple(self.open_intents.values()),
            started_at=self.started_at,
            ended_at=self.ended_at,
            first_position=self.first_position,
            last_position=self.last_position,
            moves=tuple(self.moves.values()),
        )


@dataclass(slots=True)
class _Epoch:
    epoch: str
    rank: int
    boot_id: str
    pid: int
    started_at: int
    last_at: int
    first_position: int
    last_position: int
    state: str = _INITIAL_STATE
    round: int = 0
    placement: str | None = None
    moving: bool = False
    started: Payload = field(default_factory=dict)
    # The last payload of every type in _KEPT.
    kept: dict[str, Payload] = field(default_factory=dict)
    serving_at: int | None = None
    poisoned_at: int | None = None
    rounds: dict[int, _Round] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        self.last_position = event.position
        result = _text(payload(event).get("result")) if event.type == _OUTCOME else None
        one = self._round_of(event)
        if event.type != _RECOVERED and result != _LOST:
            # A later start writes those; the epoch itself was no longer alive then.
            self.last_at = event.recorded_at
            if one is not None:
                one.last_at = event.recorded_at
        if event.type == _TRANSITION:
            self._transition(event, one)
        elif event.type == _INTENT:
            self._intend(event, one)
        elif event.type == _OUTCOME:
            self._settle_intent(event, result)
        elif event.type in _KEPT:
            self._keep(event)

    def _round_of(self, event: Event) -> _Round | None:
        if event.round <= 0:
            return None
        self.round = max(self.round, event.round)
        one = self.rounds.get(event.round)
        if one is None:
            one = self.rounds[event.round] = _Round(
                epoch=self.epoch,
                number=event.round,
                previous=self.placement,
                started_at=event.recorded_at,
                first_position=event.position,
                last_position=event.position,
                last_at=event.recorded_at,
            )
        one.last_position = event.position
        return one

    def _transition(self, event: Event, one: _Round | None) -> None:
        content = payload(event)
        if event.to_state is not None:
            self.state = event.to_state
        if one is not None:
            one.transition(event, content)
        if event.to_state in _SETTLED:
            self.placement = _text(content.get("placement")) or self.placement
            self.moving = False

    def _intend(self, event: Event, one: _Round | None) -> None:
        if one is not None:
            one.intend(event, payload(event))
            self.moving = self.moving or not one.settled

    def _settle_intent(self, event: Event, result: str | None) -> None:
        if event.causation is not None:
            any(one.settle(event.causation, result) for one in self.rounds.values())

    def _keep(self, event: Event) -> None:
        content = self.kept[event.type] = payload(event)
        if event.type == _STARTED:
            self.started = content
            self.placement = _text(content.get("initial_placement"))
        elif event.type == _SERVING:
            self.serving_at = event.recorded_at
        elif event.type == _POISONED:
            self.poisoned_at = event.recorded_at
        elif event.type in _ENDS:
            self._end_rounds(event)

    def _end_rounds(self, event: Event) -> None:
        # Nothing is in flight in an epoch that is over, whatever state its last round was left in.
        for one in self.rounds.values():
            if one.ended_at is None:
                # When it died is not known; what it wrote last is.
                one.ended_at = one.last_at if event.type == _RECOVERED else event.recorded_at

    def view(self) -> EpochView:
        return EpochView(
            epoch=self.epoch,
            rank=self.rank,
            boot_id=self.boot_id,
            pid=self.pid,
            started_at=self.started_at,
            last_at=self.last_at,
            state=self.state,
            round=self.round,
            placement=self.placement,
            moving=self.moving,
            started=self.started,
            pinned=self.kept.get(_PINNED),
            gated=self.kept.get(_GATED),
            serving=self.kept.get(_SERVING),
            serving_at=self.serving_at,
            stopped=self.kept.get(_STOPPED),
            recovered=self.kept.get(_RECOVERED),
            rollback_failed=self.kept.get(_ROLLBACK_FAILED),
            poisoned=self.kept.get(_POISONED),
            poisoned_at=self.poisoned_at,
            rounds=tuple(one.view() for one in self.rounds.values()),
            first_position=self.first_position,
            last_position=self.last_position,
        )


@dataclass(slots=True)
class _Stream:
    name: str
    epochs: dict[str, _Epoch] = field(default_factory=dict)
    last_position: int = 0

    def add(self, event: Event) -> None:
        self.last_position = event.position
        epoch = self.epochs.get(event.epoch)
        if epoch is None:
            epoch = self.epochs[event.epoch] = _Epoch(
                epoch=event.epoch,
                rank=event.rank,
                boot_id=event.boot_id,
                pid=event.pid,
                started_at=event.recorded_at,
                last_at=event.recorded_at,
                first_position=event.position,
                last_position=event.position,
            )
        epoch.add(event)

    def view(self) -> StreamView:
        return StreamView(
            stream=self.name,
            epochs=tuple(epoch.view() for epoch in self.epochs.values()),
            last_position=self.last_position,
        )
