"""What a fold over events yields: the state of a stream, its epochs and its rounds, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from residency.journal.pruned import Pruned


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIntent:
    """An effect in doubt: an intent without outcome. `undo` is true if it was to take an effect back."""

    event_id: str
    position: int
    index: int
    component: str
    undo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One effect of a round as the journal knows it. `undo` is true if it was to take an effect back.

    before, after: of the component, decoded. result: of its outcome; None while it has none.
    """

    component: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    undo: bool
    result: str | None

    @property
    def leaves(self) -> Mapping[str, Any] | None:
        """Where the component is after it; None if it is in doubt."""
        if self.result == "applied":
            return self.after
        # An effect that fails takes itself back; an undo that fails leaves nobody knows what.
        return self.before if self.result == "undone" or (self.result == "failed" and not self.undo) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """One round of one epoch.

    state: the last to_state. placement: digest of its plan's target, None before the plan.
    previous: digest of the placement in force when it began. source: where the plan came from.
    plan, outcome: payloads of its plan transition and of the transition that settled it, decoded.
    moves: its effects in the order of their intents.
    *_at in ns since the Unix epoch. ended_at is None while it is in flight, and may be if its worker died; once a later
    start has closed it, it is the time of the last event that its own worker wrote.
    """

    epoch: str
    number: int
    state: str
    source: str | None
    placement: str | None
    previous: str | None
    plan: Mapping[str, Any] | None
    outcome: Mapping[str, Any] | None
    num_intents: int
    open_intents: tuple[OpenIntent, ...]
    started_at: int
    ended_at: int | None
    first_position: int
    last_position: int
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Clearing:
    """An operator's word that what a placement was blamed for so far counts no more.

    fingerprint: digest of the one under which it counted. placement: digest, None for every one. at_ns: since the Unix
    epoch.
    """

    fingerprint: str
    placement: str | None
    reason: str
    at_ns: int
    position: int

    def covers(self, *, placement: str | None, fingerprint: str) -> bool:
        """Whether it forgives what was held against this placement under this fingerprint."""
        return fingerprint == self.fingerprint and self.placement in (None, placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochView:
    """One life of a worker.

    state: of its machine. round: the round it is in or ended in. placement: digest of the one in force.
    moving: whether effects of an unsettled round may have changed it. started: payload of epoch.started.
    pinned, gated, serving, stopped, recovered, rollback_failed, poisoned: payloads of those events, None without one.
    clearings: those written since it began and before the next one did; they are about it and every epoch before it.
    """

    epoch: str
    rank: int
    boot_id: str
    pid: int
    started_at: int
    last_at: int
    state: str
    round: int
    placement: str | None
    moving: bool
    started: Mapping[str, Any]
    pinned: Mapping[str, Any] | None
    gated: Mapping[str, Any] | None
    serving: Mapping[str, Any] | None
    serving_at: int | None
    stopped: Mapping[str, Any] | None
    recovered: Mapping[str, Any] | None
    rollback_failed: Mapping[str, Any] | None
    rounds: tuple[RoundView, ...]
    first_position: int
    last_position: int
    poisoned: Mapping[str, Any] | None = None
    poisoned_at: int | None = None
    clearings: tuple[Clearing, ...] = ()
    num_events: int = 0

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Part -> value of what must be equal for a placement to be reused."""
        found = self.started.get("fingerprint", {})
        return found if isinstance(found, Mapping) else {}

    @property
    def ended(self) -> bool:
        """Whether it is known to be over: stopped in an orderly way, or closed by a later start."""
        return self.stopped is not None or self.recovered is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamView:
    """One stream, folded. Epochs oldest first. pruned: what is no longer there of it, None if nothing was removed."""

    stream: str
    epochs: tuple[EpochView, ...]
    last_position: int
    pruned: Pruned | None = None

    @property
    def rounds(self) -> tuple[RoundView, ...]:
        """All rounds of all epochs, oldest first."""
        return tuple(one for epoch in self.epochs for one in epoch.rounds)

    @property
    def highest_round(self) -> int:
        """The highest round number that the stream knows, also of rounds that were pruned; 0 if none."""
        before = 0 if self.pruned is None else self.pruned.highest_round
        return max((before, *(one.number for one in self.rounds)))
