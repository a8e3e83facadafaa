"""State as a fold over events: pure, and nothing is executed again."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from residency.errors import JournalCorrupt
from residency.journal.events import Event, EventType, payload
from residency.journal.pruned import Pruned, read_pruned
from residency.journal.views import Clearing, EpochView, Move, OpenIntent, RoundView, StreamView

__all__ = ["fold", "fold_stream", "payload", "pruned_of"]

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
_CLEARED = EventType.QUARANTINE_CLEARED.value
_PRUNED = EventType.PRUNED.value
_KEPT = frozenset({_STARTED, _PINNED, _GATED, _SERVING, _STOPPED, _RECOVERED, _ROLLBACK_FAILED, _POISONED})
_ENDS = frozenset({_STOPPED, _RECOVERED})
# Written by others about an epoch that is no longer alive.
_AFTERWARDS = frozenset({_RECOVERED, _CLEARED, _PRUNED})
# Of other types the payload says nothing that the fold needs: most events are records of requests.
_READ = frozenset({*_KEPT, _TRANSITION, _INTENT, _OUTCOME, _CLEARED})
_LOST = "lost"  # the result that a later start gives to an effect in doubt

Payload = Mapping[str, Any]
_NOTHING: Payload = {}


def fold(events: Iterable[Event]) -> dict[str, StreamView]:
    """Return every stream that has events among these, folded. Events must come by position, oldest first.

    A part of a journal folds, too; what came before it is then unknown. Types of event that this program does not know
    only move the positions.

    Raises:
        JournalCorrupt: a payload is not a JSON object, or says nothing of what was pruned.
    """
    streams: dict[str, _Stream] = {}
    with _collector_paused():
        for event in events:
            stream = streams.get(event.stream)
            if stream is None:
                stream = streams[event.stream] = _Stream(event.stream)
            stream.add(event)
        return {name: stream.view() for name, stream in streams.items()}


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's collector from looking through what a fold keeps, again and again: that is half of its time.

    Nothing here makes a cycle that it would have to find.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def fold_stream(events: Iterable[Event], stream: str) -> StreamView:
    """Return one stream, folded; without epochs if it has no events among these.

    Raises:
        JournalCorrupt: a payload is not a JSON object, or says nothing of what was pruned.
    """
    views = fold(event for event in events if event.stream == stream)
    return views.get(stream, StreamView(stream=stream, epochs=(), last_position=0))


def pruned_of(event: Event) -> Pruned:
    """Return what an event of type `pruned` says. Raises JournalCorrupt if it says nothing of that."""
    try:
        return read_pruned(payload(event))
    except ValueError as error:
        raise JournalCorrupt(
            journal=f"event {event.position}",
            problem=f"the payload does not say what was pruned ({error})",
            remedy="see 'residency verify'",
        ) from error


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
    # Intents by event_id, and the results of those that have one.
    intents: dict[str, tuple[Event, Payload]] = field(default_factory=dict)
    results: dict[str, str | None] = field(default_factory=dict)
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

    def view(self) -> RoundView:
        in_doubt = [(event, content) for name, (event, content) in self.intents.items() if name not in self.results]
        return RoundView(
            epoch=self.epoch,
            number=self.number,
            state=self.state,
            source=self.source,
            placement=self.placement,
            previous=self.previous,
            plan=self.plan,
            outcome=self.outcome,
            num_intents=len(self.intents),
            open_intents=tuple(_open_intent(event, content) for event, content in in_doubt),
            started_at=self.started_at,
            ended_at=self.ended_at,
            first_position=self.first_position,
            last_position=self.last_position,
            moves=tuple(_move(content, result=self.results.get(name)) for name, (_, content) in self.intents.items()),
        )


def _open_intent(event: Event, content: Payload) -> OpenIntent:
    return OpenIntent(
        event_id=event.event_id,
        position=event.position,
        index=_whole(content.get("index")),
        component=_text(content.get("component")) or "",
        undo=content.get("undo") is True,
    )


def _move(content: Payload, *, result: str | None) -> Move:
    return Move(
        component=_text(content.get("component")) or "",
        before=_object(content.get("before")),
        after=_object(content.get("after")),
        undo=content.get("undo") is True,
        result=result,
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
    num_events: int = 0
    state: str = _INITIAL_STATE
    round: int = 0
    placement: str | None = None
    moving: bool = False
    started: Payload = field(default_factory=dict)
    # The last payload of every type in _KEPT.
    kept: dict[str, Payload] = field(default_factory=dict)
    serving_at: int | None = None
    poisoned_at: int | None = None
    clearings: list[Clearing] = field(default_factory=list)
    # The rounds of intents, by event_id.
    intents: dict[str, _Round] = field(default_factory=dict)
    rounds: dict[int, _Round] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        kind, at = event.type, event.recorded_at
        self.last_position = event.position
        self.num_events += 1
        one: _Round | None = None
        if event.round > 0:
            one = self.rounds.get(event.round) or self._begin_round(event)
            one.last_position = event.position
        content = payload(event) if kind in _READ else _NOTHING
        if kind not in _AFTERWARDS and not (kind == _OUTCOME and content.get("result") == _LOST):
            self.last_at = at
            if one is not None:
                one.last_at = at
        if kind == _TRANSITION:
            self._transition(event, one, content)
        elif kind == _INTENT:
            self._intend(event, one, content)
        elif kind == _OUTCOME:
            self._settle_intent(event, content)
        elif kind in _KEPT:
            self._keep(event, content)
        elif kind == _CLEARED:
            self._clear(event, content)

    def _begin_round(self, event: Event) -> _Round:
        self.round = max(self.round, event.round)
        found = self.rounds[event.round] = _Round(
            epoch=self.epoch,
            number=event.round,
            previous=self.placement,
            started_at=event.recorded_at,
            first_position=event.position,
            last_position=event.position,
            last_at=event.recorded_at,
        )
        return found

    def _transition(self, event: Event, one: _Round | None, content: Payload) -> None:
        if event.to_state is not None:
            self.state = event.to_state
        if one is not None:
            one.transition(event, content)
        if event.to_state in _SETTLED:
            self.placement = _text(content.get("placement")) or self.placement
            self.moving = False

    def _intend(self, event: Event, one: _Round | None, content: Payload) -> None:
        if one is not None:
            one.intents[event.event_id] = event, content
            self.intents[event.event_id] = one
            self.moving = self.moving or not one.settled

    def _settle_intent(self, event: Event, content: Payload) -> None:
        # The first outcome counts; one without an intent is for verify to tell.
        intent = event.causation or ""
        one = self.intents.get(intent)
        if one is not None and intent not in one.results:
            one.results[intent] = _text(content.get("result"))

    def _keep(self, event: Event, content: Payload) -> None:
        self.kept[event.type] = content
        if event.type == _STARTED:
            self.started = content
            self.placement = _text(content.get("initial_placement"))
        elif event.type == _SERVING:
            self.serving_at = event.recorded_at
        elif event.type == _POISONED:
            self.poisoned_at = event.recorded_at
        elif event.type in _ENDS:
            self._end_rounds(event)

    def _clear(self, event: Event, content: Payload) -> None:
        cleared = Clearing(
            fingerprint=_text(content.get("fingerprint")) or "",
            placement=_text(content.get("placement")),
            reason=_text(content.get("reason")) or "",
            at_ns=event.recorded_at,
            position=event.position,
        )
        self.clearings.append(cleared)

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
            clearings=tuple(self.clearings),
            num_events=self.num_events,
            rounds=tuple(one.view() for one in self.rounds.values()),
            first_position=self.first_position,
            last_position=self.last_position,
        )


@dataclass(slots=True)
class _Stream:
    name: str
    epochs: dict[str, _Epoch] = field(default_factory=dict)
    last_position: int = 0
    pruned: Pruned | None = None

    def add(self, event: Event) -> None:
        self.last_position = event.position
        if event.type == _PRUNED:
            self.pruned = pruned_of(event)
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
            pruned=self.pruned,
        )
