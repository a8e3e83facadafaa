"""The state machine of a round: the only place that knows the `transitions` library."""

from __future__ import annotations

import logging
import threading

from transitions import Machine

from residency.errors import TransitionRefused
from residency.statemachine.states import ALLOWED_WHEN_PINNED, INITIAL, TRANSITIONS, State, Trigger

# The library writes a line per step; a worker that logs at INFO must not see them.
logging.getLogger("transitions").setLevel(logging.WARNING)

_TARGETS: dict[tuple[State, Trigger], State] = {(source, trigger): target for trigger, source, target in TRANSITIONS}


class _Model:
    """What the library writes the state to; never registered, so that no trigger becomes a method beside `fire`."""

    current: State


def _unpinned(*, pinned: bool) -> bool:
    return not pinned


class RoundMachine:
    """Where a round is, and which triggers it allows.

    A trigger either succeeds and changes the state, or raises TransitionRefused and changes nothing. No product work
    runs in its callbacks: check first, journal, then fire. Building one at a state runs nothing.
    """

    def __init__(self, round_number: int, state: State = INITIAL) -> None:
        self.round_number = round_number
        self._model = _Model()
        self._firing = threading.Lock()
        self._machine = Machine(
            model=None,
            states=State,
            initial=INITIAL,
            auto_transitions=False,  # to_<state>() would jump past the table
            queued=False,  # a queued trigger returns True whatever the guard said
            send_event=False,
            model_attribute="current",
        )
        for trigger, source, target in TRANSITIONS:
            guard = None if trigger in ALLOWED_WHEN_PINNED else _unpinned
            self._machine.add_transition(trigger.value, source, target, conditions=guard)
        self._machine.set_state(State(state), self._model)

    @property
    def state(self) -> State:
        """The state now. Read-only."""
        return self._model.current

    def may(self, trigger: Trigger, *, pinned: bool = False) -> bool:
        """Whether `fire` would accept the trigger now. Read-only."""
        return (self.state, trigger) in _TARGETS and (not pinned or trigger in ALLOWED_WHEN_PINNED)

    def check(self, trigger: Trigger, *, pinned: bool = False) -> State:
        """Return the state that the trigger would lead to. Read-only. Raises TransitionRefused."""
        target = _TARGETS.get((self.state, trigger))
        if target is None:
            allowed = ", ".join(repr(one.value) for one in Trigger if (self.state, one) in _TARGETS)
            raise self._refused(trigger, f"only {allowed} can follow")
        if not self.may(trigger, pinned=pinned):
            allowed = ", ".join(sorted(repr(one.value) for one in ALLOWED_WHEN_PINNED))
            raise self._refused(trigger, f"the kill switch is on, which allows only {allowed}; unset it and restart")
        return target

    def fire(self, trigger: Trigger, *, pinned: bool = False) -> State:
        """Take the trigger and return the new state. Raises TransitionRefused; the state is unchanged then."""
        if not self._firing.acquire(blocking=False):
            raise self._refused(trigger, "another trigger is being taken; fire one at a time")
        try:
            target = self.check(trigger, pinned=pinned)
            # The library answers False, without an exception, when a guard says no.
            if not self._machine.events[trigger.value].trigger(self._model, pinned=pinned):
                raise self._refused(trigger, "its guard said no")
            assert self.state is target
            return target
        finally:
            self._firing.release()

    def _refused(self, trigger: Trigger, reason: str) -> TransitionRefused:
        return TransitionRefused(
            round_number=self.round_number, state=self.state.value, trigger=trigger.value, reason=reason
        )
