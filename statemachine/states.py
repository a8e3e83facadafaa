"""The six states and the seven triggers of a round, as data."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where a round is. The value is the journal's spelling."""

    MEASURING = "measuring"
    PLANNED = "planned"
    APPLIED = "applied"
    VALIDATING = "validating"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled-back"


class Trigger(Enum):
    """What takes a round from one state to the next. The value is the journal's spelling."""

    PLAN = "plan"
    KEEP = "keep"
    APPLY = "apply"
    VALIDATE = "validate"
    COMMIT = "commit"
    ROLL_BACK = "roll_back"
    MEASURE = "measure"


INITIAL = State.MEASURING

# (trigger, from, to): the machine, the diagram and the documentation are generated from this list.
TRANSITIONS: tuple[tuple[Trigger, State, State], ...] = (
    (Trigger.PLAN, State.MEASURING, State.PLANNED),
    (Trigger.KEEP, State.PLANNED, State.COMMITTED),
    (Trigger.APPLY, State.PLANNED, State.APPLIED),
    (Trigger.VALIDATE, State.APPLIED, State.VALIDATING),
    (Trigger.COMMIT, State.VALIDATING, State.COMMITTED),
    (Trigger.ROLL_BACK, State.MEASURING, State.ROLLED_BACK),
    (Trigger.ROLL_BACK, State.PLANNED, State.ROLLED_BACK),
    (Trigger.ROLL_BACK, State.APPLIED, State.ROLLED_BACK),
    (Trigger.ROLL_BACK, State.VALIDATING, State.ROLLED_BACK),
    (Trigger.MEASURE, State.COMMITTED, State.MEASURING),
    (Trigger.MEASURE, State.ROLLED_BACK, State.MEASURING),
)

# States in which a round has ended; every other one is in flight.
SETTLED = frozenset({State.COMMITTED, State.ROLLED_BACK})

# What a kill switch thrown in mid-round still allows, so that the machine ends in its initial state.
ALLOWED_WHEN_PINNED = frozenset({Trigger.ROLL_BACK, Trigger.MEASURE})
