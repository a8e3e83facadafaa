"""From what a round knows to its plan, and to the event that keeps the plan with all its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from residency.statemachine.planner.plan import PlanInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.gpu.placement import Placement
    from residency.gpu.records import RequestRecord
    from residency.statemachine.context import RoundContext
    from residency.statemachine.planner.plan import Plan
    from residency.statemachine.source import Source
    from residency.statemachine.validating import Baseline


def plan_round(
    context: RoundContext,
    source: Source,
    measured: Sequence[RequestRecord],
    current: Placement,
    baseline: Baseline,
) -> tuple[PlanInputs, Plan]:
    """Return the plan of a round and everything it was made from. Raises PlacementInfeasible, RankFailed."""
    worker = context.worker
    inputs = PlanInputs(
        specs=worker.specs,
        configured=context.configured,
        current=current,
        initial=context.initial,
        records=(*measured, *source.records),
        placements=source.placements,
        cap_bytes=worker.device().cap_bytes,
        link=worker.link(),
        host=worker.host(),
        workload=context.workload,
        workloads=context.workloads,
        policy=context.policy,
        noise_ns=baseline.noise_ns(context.policy),
        excluded=source.excluded,
        reserve_factor=source.reserve_factor,
    )
    return context.ranks.plan(inputs)


def plan_payload(
    source: Source, plan: Plan | None, inputs: PlanInputs | None, *, target: Placement, previous: Placement
) -> dict[str, Any]:
    """Return the payload of the plan's event."""
    payload: dict[str, Any] = {
        "placement": target.digest,
        "previous": previous.digest,
        "source": source.kind.value,
        "from_round": source.from_round,
    }
    if plan is not None and inputs is not None:
        payload |= {key: value for key, value in msgspec.to_builtins(plan).items() if key != "placement"}
        payload["inputs"] = msgspec.to_builtins(inputs)
        if plan.next_cheapest is not None:
            payload["next_cheapest"]["text"] = plan.next_cheapest.text
    return payload
