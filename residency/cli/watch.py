"""What `log --until-state` waits for: whether an event is it, or says that it will not come."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from residency.cli.events import describe
from residency.journal.events import EventType, payload
from residency.statemachine.states import SETTLED, State

if TYPE_CHECKING:
    from residency.journal.events import Event
    from residency.journal.reader import JournalReader

# What `serving` calls a start whose round ended in `committed`.
_COMMITTED = frozenset({"committed", "kept", "restored"})
_SETTLED = frozenset(state.value for state in SETTLED)
_STARTED, _SERVING, _STOPPED, _PINNED = (
    kind.value for kind in (EventType.EPOCH_STARTED, EventType.SERVING, EventType.STOPPED, EventType.PINNED)
)
# The reason of a verdict, spelt here because its module would be a tenth of the time that `log` takes.
INTERRUPTED = "interrupted"
_LOST = frozenset({EventType.ROLLBACK_FAILED.value, EventType.POISONED.value})


class Ending(NamedTuple):
    """How the waiting ended: whether the state was reached, and in words."""

    reached: bool
    text: str


class Watch:
    """Sees the events of one stream, oldest first, until the wanted state is reached or can no longer be.

    A start tries more than one round: what it could not restore it calibrates. So a round that is rolled back ends the
    waiting only when the worker serves, or did before that round.
    """

    def __init__(self, wanted: State, *, served: str | None = None) -> None:
        self.wanted = wanted
        # Epochs that have begun to serve.
        self._served = set() if served is None else {served}
        self._last: Event | None = None

    def see(self, event: Event) -> Ending | None:
        """Return how the waiting ends with this event; None if it goes on."""
        if event.type == EventType.TRANSITION.value:
            return self._transition(event)
        if event.type == _SERVING:
            return self._serving(event)
        if event.type in _LOST or (event.type == _STOPPED and event.epoch not in self._served):
            return self._otherwise(event)
        if event.type == _PINNED and self.wanted is not State.MEASURING:
            return self._otherwise(event)
        return None

    def _transition(self, event: Event) -> Ending | None:
        if event.to_state == self.wanted.value:
            return Ending(True, f"reached {self.wanted.value}: {_text(event)}")
        if event.to_state not in _SETTLED or self.wanted is State.MEASURING:
            return None
        if event.to_state == State.COMMITTED.value:
            return self._otherwise(event)
        verdict = payload(event).get("verdict") or {}
        # An interrupted round says nothing yet: the worker's next life goes on.
        is_final = event.epoch in self._served and verdict.get("reason") != INTERRUPTED
        self._last = event
        return self._otherwise(event) if is_final else None

    def _serving(self, event: Event) -> Ending | None:
        self._served.add(event.epoch)
        if self.wanted is State.COMMITTED and payload(event).get("decision") in _COMMITTED:
            return Ending(True, f"reached {self.wanted.value}: {_text(event)}")
        if self.wanted is State.MEASURING:
            return None
        last = self._last
        return self._otherwise(last if last is not None and last.epoch == event.epoch else event)

    def _otherwise(self, event: Event) -> Ending:
        return Ending(False, f"not {self.wanted.value}: {_text(event)}")


def standing(reader: JournalReader, stream: str, position: int) -> tuple[str | None, str | None]:
    """Return, at a position (inclusive), the stream's epoch if it had begun to serve, and its machine's state."""
    served = state = None
    for event in reader.events(stream, before=position + 1, newest_first=True):
        state = state or event.to_state
        if event.type == _SERVING:
            served = event.epoch
        if event.type == _STARTED or (served and state):
            break
    return served, state


def _text(event: Event) -> str:
    return f"event {event.position}, {event.type} {describe(event)}"
