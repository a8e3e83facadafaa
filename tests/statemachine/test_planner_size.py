"""Pipelines of real size: the best placement is proven, and quickly."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.planner_models import flux_inputs as measured_inputs
from residency.errors import PlacementInfeasible
from residency.gpu.placement import Mode
from residency.gpu.records import HostReading, LinkReading
from residency.gpu.specs import LayerGroupSpec
from residency.gpu.workload import Workload
from residency.statemachine.planner.make_plan import make_plan, predict
from residency.statemachine.policy import Policy

if TYPE_CHECKING:
    from residency.gpu.specs import ComponentSpec
    from residency.statemachine.planner.plan import Plan, PlanInputs
    from tests.statemachine.conftest import Build

GIB, MIB = 2**30, 2**20
# As read on one machine: pinned memory is eight times as fast as pageable.
LINK = LinkReading(to_device_pinned=54.5e9, to_device_pageable=6.9e9, to_host_pinned=54.3e9, to_host_pageable=13.2e9)
HOST = HostReading(available_bytes=99_136_778_240, cgroup_cap_bytes=None, pin_budget_bytes=92_380_334_695)


def layered(build: Build, name: str, size: int, **groups: tuple[int, ...]) -> ComponentSpec:
    spec = build.spec(name, size, layers=(1,))
    return replace(spec, groups=tuple(LayerGroupSpec(name=key, layer_bytes=sizes) for key, sizes in groups.items()))


def flux_specs(build: Build) -> tuple[ComponentSpec, ...]:
    """Return components with the sizes of a 12-billion-parameter image pipeline in 16 bits."""
    return (
        layered(build, "text_encoder", 246_121_576, layers=(14_175_744,) * 12),
        layered(build, "text_encoder_2", 9_524_621_312, block=(385_896_448, *(385_892_352,) * 23)),
        layered(build, "transformer", 23_802_816_640, blocks=(679_662_592,) * 19, single=(283_183_616,) * 38),
        layered(
            build,
            "vae",
            167_639_366,
            down=(1_477_888, 5_380_608, 18_886_656, 21_509_120),
            down_mid=(9_443_328,) * 2,
            up=(33_049_600, 33_049_600, 9_710_592, 2_135_296),
            up_mid=(9_443_328,) * 2,
        ),
    )


def flux_inputs(build: Build, *, cap: int = 24 * GIB) -> PlanInputs:
    """Return what a plan was made from where the transformer did not even fit by itself beside its activations."""
    specs = flux_specs(build)
    current = build.placement(specs)
    beside = {"text_encoder": 41 * MIB, "text_encoder_2": 266 * MIB, "transformer": 400 * MIB, "vae": 2 * GIB}
    shape = Workload(width=768, height=768, frames=1, steps=4, batch=1)
    record = build.record(specs, current, activations=beside, workload=shape)
    record = replace(build.failed(record, last="use:transformer", error="Tried to allocate 90.00 MiB"), layer_uses={})
    return build.inputs(
        cap=cap,
        specs=specs,
        records=(record,),
        link=LINK,
        host=HOST,
        policy=Policy(),
        workload=replace(shape, width=1024, height=1024),
    )


def many_inputs(build: Build, *, cap: int, pin_budget: int) -> PlanInputs:
    """Return four components of 19 + 38 layers that run 4 times each, and 12 phases, some with two of them at once."""
    layer_mib = {"one": (642, 283), "two": (131, 477), "three": (389, 92), "four": (520, 610)}
    specs = tuple(
        layered(
            build,
            name,
            (19 * double + 38 * single + 100) * MIB,
            double=(double * MIB,) * 19,
            single=(single * MIB,) * 38,
        )
        for name, (double, single) in layer_mib.items()
    )
    current = build.placement(specs)
    record = build.record(specs, current, activations={s.name: i * GIB for i, s in enumerate(specs, start=1)})
    pairs = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)]
    both = []
    for number, pair in enumerate(pairs, start=1):
        names = tuple(specs[index].name for index in pair)
        held = sum(spec.device_bytes(current.components[spec.name], in_use=spec.name in names) for spec in specs)
        peak = held + number * GIB // 4
        both.append(
            replace(
                record.phases[0],
                key=f"use:{'+'.join(names)}",
                active=names,
                allocated_peak_bytes=peak,
                reserved_peak_bytes=peak,
                duration_ns=0,
            )
        )
    alone = [replace(phase, duration_ns=4 * 170_000_000) if phase.active else phase for phase in record.phases]
    layers = {"double": (3_000_000,) * 19, "single": (2_900_000,) * 38}
    record = replace(
        record,
        phases=(*alone, *both),
        uses=tuple((name, 4) for name in layer_mib),
        layer_uses={name: {"double": (4,) * 19, "single": (4,) * 38} for name in layer_mib},
        layer_ns=dict.fromkeys(layer_mib, layers),
        duration_ns=16 * 170_000_000,
    )
    host = replace(HOST, available_bytes=2**45, pin_budget_bytes=pin_budget)
    assert len(record.phases) == 12
    return build.inputs(cap=cap, specs=specs, records=(record,), link=LINK, host=host, policy=Policy())


def timed(inputs: PlanInputs) -> tuple[Plan, float]:
    """Return a plan and the processor seconds it took."""
    started = time.process_time()
    plan = make_plan(inputs)
    return plan, time.process_time() - started


def assert_fits(plan: Plan) -> None:
    assert all(phase.peak_bytes <= phase.limit_bytes for phase in plan.prediction.phases)


@pytest.mark.parametrize(("cap", "steps"), [(10, 4), (24, 50)])
def test_a_large_image_pipeline_is_planned_in_seconds_to_within_a_few_percent_of_its_bound(
    cap: int, steps: int
) -> None:
    plan, seconds = timed(measured_inputs(cap, steps=steps))
    assert not plan.relaxed
    assert plan.gap_ns <= plan.prediction.duration_ns * 0.03
    assert seconds < 5
    assert_fits(plan)


def test_a_pipeline_of_which_nothing_ran_is_planned_by_what_it_moves(build: Build) -> None:
    # The transformer did not even fit by itself; nobody knows what it computes.
    plan = make_plan(flux_inputs(build))
    assert not plan.relaxed and not plan.prediction.timed
    assert plan.placement.components["transformer"].mode is Mode.LAYERWISE_OFFLOAD
    assert plan.prediction.compute_ns == 0
    assert_fits(plan)


def test_exclusions_of_a_large_pipeline_give_another_one_as_good_each_time() -> None:
    inputs = measured_inputs(16)
    excluded: tuple[str, ...] = ()
    best = None
    for _ in range(2):
        plan = make_plan(replace(inputs, excluded=excluded))
        assert plan.placement.digest not in excluded
        best = best or plan.prediction.duration_ns
        assert plan.prediction.duration_ns == pytest.approx(best, rel=0.03)
        excluded += (plan.placement.digest,)


def test_four_components_of_57_layers_in_12_phases_share_scarce_pinned_memory(build: Build) -> None:
    inputs = many_inputs(build, cap=60 * GIB, pin_budget=40 * GIB)
    plan, seconds = timed(inputs)
    assert not plan.relaxed
    assert plan.prediction.pinned_bytes <= 40 * GIB
    assert plan.prediction.duration_ns < 0.3 * predict(inputs, inputs.current).duration_ns
    assert seconds < 15
    assert_fits(plan)


def test_a_solver_out_of_nodes_still_gives_a_placement_that_fits() -> None:
    inputs = measured_inputs(16)
    plan = make_plan(replace(inputs, policy=replace(inputs.policy, solver_nodes_max=1)))
    assert not plan.exact and plan.gap_ns > 0
    assert_fits(plan)


def test_a_large_pipeline_that_cannot_fit_is_refused_quickly(build: Build) -> None:
    started = time.process_time()
    with pytest.raises(PlacementInfeasible):
        make_plan(flux_inputs(build, cap=GIB // 2))
    assert time.process_time() - started < 2


def test_what_little_more_memory_would_save_is_said() -> None:
    plan = make_plan(measured_inputs(16))
    assert plan.next_cheapest is not None
    assert 0 < plan.next_cheapest.extra_bytes < 4 * GIB
    assert plan.next_cheapest.gain_ns >= plan.prediction.duration_ns * Policy().noticeable_fraction


def test_a_pipeline_that_fits_is_as_fast_as_all_resident_with_less_memory() -> None:
    inputs = measured_inputs(40, policy=Policy(busy_slowdown=0.0))
    plan = make_plan(inputs)
    assert plan.prediction.duration_ns == plan.prediction.compute_ns
    assert plan.prediction.device_bytes < 0.95 * sum(spec.total_bytes for spec in inputs.specs)
    assert plan.exact and plan.bound_by.startswith("nothing")
