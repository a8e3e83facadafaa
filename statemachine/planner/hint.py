"""What another placement would give for a request shape that was not planned for: a hint, and never a promise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from residency.errors import PlacementInfeasible
from residency.gpu.workload import Workload
from residency.statemachine.planner.envelope import Envelope, Standing
from residency.statemachine.planner.make_plan import make_plan

if TYPE_CHECKING:
    from residency.gpu.placement import Placement
    from residency.statemachine.planner.plan import PlanInputs

DISCLAIMER = "estimated from other shapes; nothing is moved for it: calibrate with this shape in workloads= to have it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A placement for some shape: which it is, its digest, estimated ns of a request, and bytes it would hold.

    fits: by the estimate. is_in_force: it is the one that serves now.
    """

    name: str
    digest: str
    duration_ns: int
    device_bytes: int
    pinned_bytes: int
    fits: bool
    is_in_force: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """What a plan for a shape would say. ranking: fastest first; empty if nothing fits by the estimate.

    standing: of the shape in the present envelope. note: what it is worth, for people.
    """

    shape: Workload
    standing: Standing
    ranking: tuple[Ranked, ...]
    bound_by: str
    note: str


def hint_for(inputs: PlanInputs, placement: Placement, envelope: Envelope, shape: Workload) -> Hint:
    """Return the ranking of placements for a shape, by the records of the last plan. Pure; moves nothing.

    placement: the one in force. Raises MeasurementRefused for inputs that are absurd.
    """
    known = (*inputs.placements, inputs.current)
    asked = replace(inputs, workload=shape, workloads=(), current=placement, placements=known, enough_ns=0)
    standing = envelope.standing(shape)
    try:
        plan = make_plan(asked)
    except PlacementInfeasible as error:
        return Hint(shape=shape, standing=standing, ranking=(), bound_by=str(error), note=DISCLAIMER)
    found = [
        Ranked(
            name="planned",
            digest=plan.placement.digest,
            duration_ns=plan.prediction.duration_ns,
            device_bytes=plan.prediction.device_bytes,
            pinned_bytes=plan.prediction.pinned_bytes,
            fits=True,
            is_in_force=plan.keep,
        )
    ]
    found += [
        Ranked(
            name=one.name,
            digest=one.digest,
            duration_ns=one.duration_ns,
            device_bytes=one.device_bytes,
            pinned_bytes=one.pinned_bytes,
            fits=one.feasible,
            is_in_force=one.placement == placement,
        )
        for one in plan.alternatives
    ]
    ranking = tuple(sorted(found, key=lambda one: (not one.fits, one.duration_ns, one.digest)))
    return Hint(shape=shape, standing=standing, ranking=ranking, bound_by=plan.bound_by, note=DISCLAIMER)
