"""Pipelines as models of one request: the image pipeline of 31 GiB that documents tell figures of, and a video one.

Sizes are those of the real classes; the image pipeline's times were measured on one H200, the video pipeline's are
estimates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.records import HostReading, LinkReading, PhaseRecord, RequestKind, RequestRecord
from residency.gpu.specs import ComponentSpec, LayerGroupSpec
from residency.gpu.workload import Workload
from residency.statemachine.planner.holdings import weight_bytes
from residency.statemachine.planner.plan import PlanInputs
from residency.statemachine.planner.request_model import ComponentUse, LayerUse, RequestModel, TimePhase
from residency.statemachine.planner.timeline import simulate

GIB = 2**30
MS = 10**6


def gib(value: float) -> int:
    """Return GiB in bytes."""
    return round(value * GIB)


def component(name: str, size: float, **groups: tuple[float, int]) -> ComponentSpec:
    """Return a component of `size` GiB with layer groups of (GiB a layer, layers)."""
    modes = (Mode.RESIDENT, Mode.COMPONENT_OFFLOAD, *((Mode.LAYERWISE_OFFLOAD,) if groups else ()))
    return ComponentSpec(
        name=name,
        class_name=name,
        total_bytes=gib(size),
        groups=tuple(
            LayerGroupSpec(name=group, layer_bytes=(gib(each),) * number) for group, (each, number) in groups.items()
        ),
        modes=modes,
        fixed_reason=None,
        weights_digest=name,
        entry_points=("forward",),
    )


def use(name: str, compute_ms: float, **groups: tuple[float, int]) -> ComponentUse:
    """Return a pass that computes for `compute_ms`, with layers of (ms a layer, layers) in it."""
    layers = tuple(
        LayerUse(group=group, index=index, compute_ns=round(each * MS))
        for group, (each, number) in groups.items()
        for index in range(number)
    )
    return ComponentUse(component=name, compute_ns=round(compute_ms * MS), layers=layers)


def flux_model(cap_gib: float, *, steps: int = 4, reserve_gib: float = 0.25, link_gib_s: float = 51.6) -> RequestModel:
    """Return one request of 1024x1024 as measured on one card, under a cap."""
    encoder = use("text_encoder", 5, layers=(0.4, 12))
    second = use("text_encoder_2", 24.3, block=(1.0, 24))
    return RequestModel(
        specs=(
            component("text_encoder", 0.23, layers=(0.0132, 12)),
            component("text_encoder_2", 8.87, block=(0.359, 24)),
            component("transformer", 22.17, double=(0.633, 19), single=(0.264, 38)),
            component("vae", 0.16),
        ),
        phases=(
            TimePhase(name="text_encoder", uses=(encoder,), beside_bytes=gib(0.25)),
            TimePhase(name="text_encoder_2", uses=(second,), beside_bytes=gib(0.25)),
            TimePhase(
                name="transformer",
                uses=(use("transformer", 172.8, double=(3.19, 19), single=(2.92, 38)),),
                passes=steps,
                beside_bytes=gib(0.5),
            ),
            TimePhase(name="vae", uses=(use("vae", 86.5),), beside_bytes=gib(2.45)),
        ),
        pinned_bytes_per_s=gib(link_gib_s),
        pageable_bytes_per_s=gib(8.0),
        cap_bytes=gib(cap_gib),
        reserve_bytes=gib(reserve_gib),
    )


def wan_model(cap_gib: float, *, steps: int = 4, reserve_gib: float = 0.25, link_gib_s: float = 51.6) -> RequestModel:
    """Return one request of 33 frames of 832x480 with the dimensions of a 14B video model, under a cap."""
    encoder = use("text_encoder", 18, block=(0.7, 24))
    return RequestModel(
        specs=(
            component("text_encoder", 10.6, block=(0.36, 24)),
            component("transformer", 26.5, blocks=(0.654, 40)),
            component("vae", 0.24),
        ),
        phases=(
            TimePhase(name="text_encoder", uses=(encoder,), beside_bytes=gib(0.25)),
            TimePhase(
                name="transformer",
                uses=(use("transformer", 1230, blocks=(30.0, 40)),),
                passes=steps,
                beside_bytes=gib(1.2),
            ),
            TimePhase(name="vae", uses=(use("vae", 900),), beside_bytes=gib(5.0)),
        ),
        pinned_bytes_per_s=gib(link_gib_s),
        pageable_bytes_per_s=gib(8.0),
        cap_bytes=gib(cap_gib),
        reserve_bytes=gib(reserve_gib),
    )


def all_resident(model: RequestModel) -> Placement:
    """Return the placement that keeps everything on the device."""
    return Placement(components={spec.name: RESIDENT for spec in model.specs})


def flux_inputs(
    cap_gib: float, *, steps: int = 4, noise_ms: float = 0, link_gib_s: float = 51.6, **changes: Any
) -> PlanInputs:
    """Return what a plan is made from after one request of 4 steps with everything offloaded whole, pinned."""
    model = flux_model(cap_gib, steps=4, link_gib_s=link_gib_s)
    offloaded = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED)
    current = Placement(components={spec.name: offloaded for spec in model.specs})
    shape = Workload(width=1024, height=1024, frames=1, steps=4, batch=1)
    return PlanInputs(
        **{
            "specs": model.specs,
            "configured": {},
            "current": current,
            "initial": current,
            "records": (measured(model, current, shape),),
            "cap_bytes": gib(cap_gib),
            "link": LinkReading(
                to_device_pinned=float(gib(link_gib_s)),
                to_device_pageable=float(gib(8.0)),
                to_host_pinned=float(gib(51.5)),
                to_host_pageable=float(gib(14.3)),
            ),
            "host": HostReading(available_bytes=gib(200), cgroup_cap_bytes=None, pin_budget_bytes=gib(100)),
            "workload": replace(shape, steps=steps),
            "noise_ns": round(noise_ms * MS),
            **changes,
        }
    )


def measured(model: RequestModel, placement: Placement, shape: Workload) -> RequestRecord:
    """Return the record of one request of a model under a placement, as a worker would write it."""
    timeline = simulate(model, placement)
    phases, layer_uses, layer_ns, order = [], {}, {}, {}
    for phase, found in zip(model.phases, timeline.phases, strict=True):
        (use,) = phase.uses
        peak = weight_bytes(model.specs, placement, active=(use.component,), lingering=None) + phase.beside_bytes
        phases.append(
            PhaseRecord(
                key=f"use:{use.component}",
                active=(use.component,),
                lingering=None,
                allocated_peak_bytes=peak,
                reserved_peak_bytes=peak,
                duration_ns=found.duration_ns,
                num_occurrences=phase.passes,
                wait_ns=found.exposed_ns,
            )
        )
        peak = weight_bytes(model.specs, placement, active=(), lingering=use.component)
        phases.append(
            replace(
                phases[-1],
                key=f"after:{use.component}",
                active=(),
                lingering=use.component,
                allocated_peak_bytes=peak,
                reserved_peak_bytes=peak,
                duration_ns=0,
                wait_ns=0,
            )
        )
        groups = {name: [one for one in use.layers if one.group == name] for name in {one.group for one in use.layers}}
        layer_uses[use.component] = {name: (phase.passes,) * len(found) for name, found in groups.items()}
        layer_ns[use.component] = {name: tuple(one.compute_ns for one in found) for name, found in groups.items()}
        order[use.component] = tuple((one.group, one.index) for one in use.layers)
    return RequestRecord(
        kind=RequestKind.BASELINE,
        workload=shape,
        target_steps=shape.steps,
        placement_digest=placement.digest,
        succeeded=True,
        out_of_memory=False,
        error=None,
        baseline_allocated_bytes=0,
        baseline_reserved_bytes=0,
        phases=tuple(phases),
        uses=tuple((phase.uses[0].component, phase.passes) for phase in model.phases),
        layer_uses=layer_uses,
        duration_ns=timeline.request_ns,
        to_device_bytes=timeline.to_device_bytes,
        to_host_bytes=0,
        output_digest="aa",
        layer_ns=layer_ns,
        layer_order=order,
    )
