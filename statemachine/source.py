"""Where a round's plan comes from, and how a round ended, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from residency.gpu.placement import Placement
from residency.gpu.records import RequestRecord
from residency.gpu.workload import Workload
from residency.statemachine.planner.plan import Plan
from residency.statemachine.states import State
from residency.statemachine.validation import Verdict


class SourceKind(Enum):
    """Where a plan comes from. The value is the journal's spelling."""

    CALIBRATION = "calibration"  # measured and planned in this round
    SUSPECT = "suspect"  # planned again, more carefully, from an earlier round's records
    JOURNAL = "journal"  # the placement that was committed last
    PREVIOUS = "previous"  # the one committed before the current one
    INITIAL = "initial"  # what the worker serves if residency does nothing more
    CURRENT = "current"  # the one in force, to validate it again


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A round's plan, or what to plan from.

    target: the placement to go to; None if it is to be planned.
    records, placements: of earlier rounds, to plan from; to compare with as well, where nothing is measured (SUSPECT).
    expected_output: digest that validation must see again, None if nothing is known.
    shape: of the validation request; None for the default workload's.
    reserve_factor, excluded: see PlanInputs. from_round: the round it is taken from, 0 for none.
    """

    kind: SourceKind
    target: Placement | None = None
    records: tuple[RequestRecord, ...] = ()
    placements: tuple[Placement, ...] = ()
    expected_output: str | None = None
    shape: Workload | None = None
    reserve_factor: float = 1.0
    excluded: tuple[str, ...] = ()
    from_round: int = 0

    @property
    def is_measured(self) -> bool:
        """Whether the round measures a baseline of its own."""
        return self.kind is SourceKind.CALIBRATION


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """How a round ended.

    source: where its plan came from. state: where the machine is now. reason: one line for people. target: digest of
    its plan's placement, None before there was one. kept: the plan was the placement in force. pinned: the kill
    switch ended it. error: what went wrong, None if nothing did.
    """

    number: int
    source: SourceKind
    state: State
    reason: str
    target: str | None = None
    kept: bool = False
    pinned: bool = False
    verdict: Verdict | None = None
    plan: Plan | None = None
    error: Exception | None = None
    records: tuple[RequestRecord, ...] = ()
