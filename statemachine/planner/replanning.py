"""Planning again from what a journal holds: the same plan, or what it would be under other limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from residency.errors import ModeUnavailable, PlacementInfeasible, ResidencyError, UnknownComponent, describe
from residency.statemachine.planner.make_plan import can_fit, make_plan
from residency.statemachine.planner.plan import PLANNER_VERSION, PlanInputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residency.gpu.placement import Mode
    from residency.statemachine.planner.plan import Plan

_FRONTIER_SIMULATIONS = 24  # a point of a curve need not be the last word
_FRONTIER_HALVINGS = 6  # to the least memory that will do


class Sameness(Enum):
    """What planning again says of a journaled plan. The value is the word for people."""

    SAME = "the same"
    DIFFERENT = "another"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The best plan under a cap. device_bytes: held between requests."""

    cap_bytes: int
    duration_ns: int
    compute_ns: int
    device_bytes: int
    pinned_bytes: int
    digest: str


def journaled_inputs(plan: Mapping[str, Any] | None) -> PlanInputs | None:
    """Return what a journaled plan was made from; None if it was not planned, or by a version that said less."""
    plain = (plan or {}).get("inputs")
    if not plain:
        return None
    try:
        return msgspec.convert(plain, type=PlanInputs)
    except (msgspec.ValidationError, ValueError):
        return None


def check_plan(plan: Mapping[str, Any] | None) -> tuple[Sameness, str]:
    """Return whether planning again gives a journaled plan, digest for digest, and why not, for people."""
    inputs = journaled_inputs(plan)
    if inputs is None or (plan or {}).get("planner_version") != PLANNER_VERSION:
        return compare_plan(plan, None)
    try:
        return compare_plan(plan, make_plan(inputs).placement.digest)
    except ResidencyError as error:
        return Sameness.DIFFERENT, describe(error)


def compare_plan(plan: Mapping[str, Any] | None, digest: str | None) -> tuple[Sameness, str]:
    """Return whether a journaled plan is the one of a digest (None: its inputs cannot be read), and why not."""
    version = (plan or {}).get("planner_version")
    if plan is None or version is None:
        return Sameness.NOT_CHECKED, "it was not planned from measurements"
    if version != PLANNER_VERSION:
        return Sameness.NOT_CHECKED, f"it was planned by version {version}, this is version {PLANNER_VERSION}"
    if digest is None:
        return Sameness.NOT_CHECKED, "its inputs cannot be read"
    wanted = plan.get("placement")
    return (Sameness.SAME, "") if digest == wanted else (Sameness.DIFFERENT, f"{digest} instead of {wanted}")


def what_if(
    inputs: PlanInputs,
    *,
    vram_bytes: int | None = None,
    host_ram_bytes: int | None = None,
    steps: int | None = None,
    modes: Mapping[str, Mode] | None = None,
) -> PlanInputs:
    """Return the inputs under another cap, with other memory for host copies, other steps, or modes that are given.

    Raises UnknownComponent, ModeUnavailable for a mode that a component cannot take.
    """
    by_name = {spec.name: spec for spec in inputs.specs}
    for name, mode in (modes or {}).items():
        if name not in by_name:
            raise UnknownComponent(component=name, known=tuple(sorted(by_name)))
        if mode not in by_name[name].modes or by_name[name].fixed_reason is not None:
            raise ModeUnavailable(
                component=name,
                mode=mode.value,
                reason=by_name[name].fixed_reason or "it has no layers to stream",
                possible=tuple(one.value for one in by_name[name].modes),
            )
    host = inputs.host
    if host_ram_bytes is not None:
        host = replace(host, available_bytes=host_ram_bytes, pin_budget_bytes=host_ram_bytes)
    return replace(
        inputs if vram_bytes is None else under_cap(inputs, vram_bytes),
        host=host,
        workload=inputs.workload if steps is None else replace(inputs.workload, steps=steps),
        configured={name: why for name, why in inputs.configured.items() if name not in (modes or {})},
        modes={**inputs.modes, **(modes or {})},
    )


def under_cap(inputs: PlanInputs, cap_bytes: int) -> PlanInputs:
    """Return the inputs under another cap. What was given up under a smaller one may do: it was for want of memory.

    What is held against placements counts under the fingerprint that they were tried under, and the cap is part of it.
    """
    if cap_bytes == inputs.cap_bytes:
        return inputs
    measured = inputs.measured_cap_bytes or inputs.cap_bytes
    excluded = inputs.excluded if cap_bytes <= measured else ()
    return replace(inputs, cap_bytes=cap_bytes, measured_cap_bytes=measured, excluded=excluded)


def frontier(inputs: PlanInputs, *, num_points: int = 10) -> tuple[Point, ...]:
    """Return the best plans between the least memory that will do and what keeps all on the device, least first.

    A plan that needs less memory is listed for more of it, too, where nothing faster was found. Nothing if even all
    memory would not do.
    """
    policy = replace(inputs.policy, simulations_max=min(inputs.policy.simulations_max, _FRONTIER_SIMULATIONS))
    base = replace(inputs, policy=policy)
    enough = _enough_bytes(base)
    least, most = 0, enough
    for _ in range(_FRONTIER_HALVINGS):
        middle = (least + most) // 2
        if not can_fit(under_cap(base, max(1, middle))):
            least = middle
        else:
            most = middle
    points: list[Point] = []
    for number in range(num_points):
        cap = most + (enough - most) * number // max(1, num_points - 1)
        plan = _plan(base, cap)
        if plan is None:
            continue
        point = Point(
            cap_bytes=cap,
            duration_ns=plan.prediction.duration_ns,
            compute_ns=plan.prediction.compute_ns,
            device_bytes=plan.prediction.device_bytes,
            pinned_bytes=plan.prediction.pinned_bytes,
            digest=plan.placement.digest,
        )
        if points and points[-1].duration_ns < point.duration_ns:
            point = replace(points[-1], cap_bytes=cap)
        points.append(point)
    return tuple(points)


def _enough_bytes(inputs: PlanInputs) -> int:
    """Return a cap under which everything fits: twice as much until nothing binds."""
    cap = max(inputs.cap_bytes, sum(spec.total_bytes for spec in inputs.specs))
    for _ in range(8):
        plan = _plan(inputs, cap)
        if plan is not None and plan.bound_by.startswith("nothing"):
            peaks = [phase.peak_bytes + phase.reserve_bytes for phase in plan.prediction.phases]
            return max([*peaks, 1])
        cap += cap // 4
    return cap


def _plan(inputs: PlanInputs, cap_bytes: int) -> Plan | None:
    try:
        plan = make_plan(under_cap(inputs, cap_bytes))
    except PlacementInfeasible:
        return None
    return None if plan.relaxed else plan
