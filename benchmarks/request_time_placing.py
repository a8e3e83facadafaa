"""Which placement ours is measured under at a cap, by the records of an all-resident run; and its bounds."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from residency.gpu.placement import RESIDENT, Placement
from residency.gpu.records import LinkReading, RequestRecord
from residency.gpu.specs import ComponentSpec
from residency.gpu.workload import Workload
from residency.statemachine.planner.best import best_placement, fastest_placement
from residency.statemachine.planner.bound import placement_bound
from residency.statemachine.planner.request_model import RequestModel
from residency.statemachine.planner.timeline import simulate
from residency.statemachine.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from residency.statemachine.planner.time_phase import ComponentUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A placement, and the times that no request can go below, in ns.

    bound_ns: of the placement. best_bound_ns: the least of all placements that fit the cap, without any reserve.
    busy_*: the same with what computing takes while the link is busy; None where nobody measured that.
    simulated_ns: what the request should take by the model that chose the placement.
    """

    placement: Placement
    bound_ns: int
    best_bound_ns: int
    busy_bound_ns: int | None
    busy_best_bound_ns: int | None
    simulated_ns: int
    to_device_bytes: int
    search_s: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {**plain, "placement_digest": self.placement.digest}


def fastest(model: RequestModel) -> Placement:
    """Return the placement that is simulated fastest. Raises PlacementInfeasible."""
    return fastest_placement(model)[0]


def plan(
    resident: Mapping[str, Any],
    *,
    link: Mapping[str, Any],
    cap_bytes: int,
    choose: Callable[[RequestModel], Placement] = fastest,
) -> Planned:
    """Return the placement that is chosen under a cap. `resident`, `link`: the rows of those modes.

    Raises PlacementInfeasible if nothing fits, ValueError if the record cannot be read.
    """
    started = time.perf_counter()
    # What a worker gets keeps a reserve beside the measured peaks; what would be possible does not.
    model = request_model(resident, link=link, cap_bytes=cap_bytes, reserve_bytes=Policy().measured_reserve(cap_bytes))
    free = replace(model, reserve_bytes=0)
    placement = choose(model)
    search_s = time.perf_counter() - started
    timeline = simulate(model, placement)
    slowdown = resident.get("busy", {}).get("slowdown")
    busy = None if slowdown is None else slowed(free, slowdown)
    return Planned(
        placement=placement,
        bound_ns=placement_bound(model, placement).total_ns,
        best_bound_ns=best_placement(free)[1].total_ns,
        busy_bound_ns=None if busy is None else placement_bound(busy, placement).total_ns,
        busy_best_bound_ns=None if busy is None else best_placement(busy)[1].total_ns,
        simulated_ns=timeline.request_ns,
        to_device_bytes=timeline.to_device_bytes,
        search_s=search_s,
    )


def request_model(
    resident: Mapping[str, Any], *, link: Mapping[str, Any], cap_bytes: int, reserve_bytes: int
) -> RequestModel:
    """Return the model of one request, from the rows of an all-resident run and of the link."""
    specs = msgspec.convert(resident["specs"], type=tuple[ComponentSpec, ...])
    record = msgspec.convert(resident["record"], type=RequestRecord)
    speeds = link["link"]
    reading = LinkReading(
        # At the sizes of the layers themselves, which is what the bound is defined by.
        to_device_pinned=resident.get("layer_link_bytes_per_s") or speeds["to_device_pinned"],
        to_device_pageable=speeds["to_device_pageable"],
        to_host_pinned=speeds["to_host_pinned"],
        to_host_pageable=speeds["to_host_pageable"],
    )
    model = RequestModel.from_records(
        specs,
        [record],
        msgspec.convert(resident["workload"], type=Workload),
        reading,
        cap_bytes,
        placements=[Placement(components={spec.name: RESIDENT for spec in specs})],
        reserve_bytes=reserve_bytes,
        busy_slowdown=min(0.5, max(0.0, resident.get("busy", {}).get("slowdown", {}).get("request", 1.0) - 1.0)),
    )
    # Observing a request costs it some time, which no bound may have.
    observed_s, plain_s = record.duration_ns / 1e9, resident["median_s"]
    return slowed(model, {"request": min(1.0, plain_s / observed_s)})


def slowed(model: RequestModel, slowdown: Mapping[str, float]) -> RequestModel:
    """Return the model with every component's compute times its slowdown, or that of the whole request."""

    def scaled(use: ComponentUse) -> ComponentUse:
        factor = slowdown.get(use.component, slowdown.get("request", 1.0))
        layers = tuple(replace(layer, compute_ns=round(layer.compute_ns * factor)) for layer in use.layers)
        return replace(use, compute_ns=round(use.compute_ns * factor), layers=layers)

    return replace(model, phases=tuple(replace(phase, uses=tuple(map(scaled, phase.uses))) for phase in model.phases))
