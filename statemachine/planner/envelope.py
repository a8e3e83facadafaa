"""The request shapes that a placement was measured for, and those that it should hold for by extrapolation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from residency.gpu.workload import Workload
from residency.statemachine.planner.constraints import phase_limits

if TYPE_CHECKING:
    from residency.gpu.placement import Placement
    from residency.statemachine.planner.plan import PlanInputs

_LARGER_MAX = 64  # times the largest measured size: beyond, an extrapolation means nothing
_HALVINGS = 12


class Standing(Enum):
    """How a request shape stands to an envelope. The value is its spelling in output."""

    MEASURED = "measured"  # no larger than a shape that ran
    EXTRAPOLATED = "extrapolated"  # larger, but its memory should fit, margins and reserve included
    OUTSIDE = "outside"  # nobody knows that it fits


class Outside(Enum):
    """What is done about a request outside of the envelope. The value is what `attach(outside=)` takes."""

    ALLOW = "allow"
    REFUSE = "refuse"
    RECALIBRATE = "recalibrate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What a placement is good for. measured: the shapes that ran, smallest first, whatever their steps.

    units_max: the largest size (see Workload.units) whose memory should fit by extrapolation; at least that of the
    largest measured shape. Memory grows with the size, and not with the steps.
    """

    measured: tuple[Workload, ...]
    units_max: int

    def standing(self, shape: Workload) -> Standing:
        """Return how a shape stands to it."""
        if any(shape.units <= one.units for one in self.measured):
            return Standing.MEASURED
        return Standing.EXTRAPOLATED if shape.units <= self.units_max else Standing.OUTSIDE


def envelope_of(inputs: PlanInputs, placement: Placement) -> Envelope:
    """Return the envelope of a placement by the records of a plan. Pure.

    Extrapolated as a plan would be: what is beside the weights grows with the size, with a margin on it and a larger
    reserve. Where something failed, nothing as large is inside of it.
    """
    shapes: dict[tuple[int, ...], Workload] = {}
    for record in inputs.records:
        if record.succeeded:
            one = record.workload
            shapes[one.units, one.width, one.height, one.frames, one.batch] = one
    measured = tuple(one for _, one in sorted(shapes.items()))
    largest = max((one.units for one in measured), default=0)
    if not largest or not _holds(inputs, placement, largest):
        return Envelope(measured=measured, units_max=largest)
    inside, outside = largest, largest * _LARGER_MAX
    if _holds(inputs, placement, outside):
        return Envelope(measured=measured, units_max=outside)
    for _ in range(_HALVINGS):
        middle = (inside + outside) // 2
        if _holds(inputs, placement, middle):
            inside = middle
        else:
            outside = middle
    return Envelope(measured=measured, units_max=inside)


def _holds(inputs: PlanInputs, placement: Placement, units: int) -> bool:
    """Say whether a request of some size should fit."""
    if any(one.out_of_memory and one.workload.units <= units for one in inputs.records):
        return False
    shape = replace(inputs.workload, width=units, height=1, frames=1, batch=1)
    asked = replace(inputs, workload=shape, workloads=())
    return all(limit.weight_bytes(asked, placement) <= limit.weight_limit(asked) for limit in phase_limits(asked))
