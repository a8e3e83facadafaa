"""The planner's choice: the same as by brute force, and found within the node bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residency.errors import PlacementInfeasible
from residency.gpu.placement import RESIDENT, HostTier, Mode, Placement
from residency.gpu.records import HostReading, LinkReading
from residency.gpu.workload import Workload
from residency.statemachine.candidates import candidates
from residency.statemachine.planner import make_plan
from residency.statemachine.policy import Policy
from residency.statemachine.timing import timing_record

if TYPE_CHECKING:
    from residency.statemachine.plan import PlanInputs
    from tests.statemachine.conftest import Build

MIB = 2**20


def held(inputs: PlanInputs, placement: Placement, active: tuple[str, ...], lingering: str | None) -> int:
    total = 0
    for spec in inputs.specs:
        one = placement.components[spec.name]
        stays = one.mode is Mode.COMPONENT_OFFLOAD and lingering == spec.name
        total += spec.device_bytes(one, in_use=spec.name in active or stays)
    return total


def is_feasible(inputs: PlanInputs, placement: Placement) -> bool:
    """Say by the definition, as changes against what was measured, whether a placement fits."""
    (record,) = inputs.records
    for phase in record.phases:
        change = held(inputs, placement, phase.active, phase.lingering) - held(
            inputs, inputs.current, phase.active, phase.lingering
        )
        reserve = phase.reserved_peak_bytes - phase.allocated_peak_bytes
        reserve += min(inputs.policy.reserve_measured_bytes, inputs.cap_bytes // inputs.policy.reserve_cap_divisor)
        ran = phase.reserved_peak_bytes <= inputs.cap_bytes
        if phase.allocated_peak_bytes + change + reserve > inputs.cap_bytes and not (ran and change <= 0):
            return False
    pinned = pinned_bytes(inputs, placement)
    return pinned <= max(inputs.host.pin_budget_bytes, pinned_bytes(inputs, inputs.current))


def pinned_bytes(inputs: PlanInputs, placement: Placement) -> int:
    return sum(
        spec.total_bytes - spec.device_bytes(one, in_use=False)
        for spec in inputs.specs
        if (one := placement.components[spec.name]).tier is HostTier.PINNED
    )


def transfer_ns(inputs: PlanInputs, placement: Placement, build: Build) -> int:
    uses = dict(inputs.records[0].uses)
    return sum(build.transfer_ns(s, placement.components[s.name], uses=uses[s.name]) for s in inputs.specs)


def compute_ns(inputs: PlanInputs, build: Build) -> int:
    return inputs.records[0].duration_ns - transfer_ns(inputs, inputs.current, build)


def brute_force(inputs: PlanInputs, build: Build) -> Placement | None:
    record = timing_record(inputs.records, inputs.workload)
    options = [[one.placement for one in candidates(spec, inputs, record)] for spec in inputs.specs]
    harmless = {inputs.current.digest, inputs.initial.digest}
    names = [spec.name for spec in inputs.specs]
    found = [
        placement
        for chosen in product(*options)
        if is_feasible(inputs, placement := Placement(components=dict(zip(names, chosen, strict=True))))
        and (placement.digest not in inputs.excluded or placement.digest in harmless)
    ]
    if not found:
        return None
    fastest = min(transfer_ns(inputs, one, build) for one in found)
    tolerance = min(inputs.noise_ns, compute_ns(inputs, build) + fastest)
    near = [one for one in found if transfer_ns(inputs, one, build) <= fastest + tolerance]

    def thrift(one: Placement) -> tuple[int, int, int, str]:
        changes = sum(one.components[n] != inputs.current.components[n] for n in names)
        return held(inputs, one, (), None), pinned_bytes(inputs, one), changes, one.digest

    return min(near, key=thrift)


@st.composite
def small_inputs(draw: st.DrawFn, build: Build) -> PlanInputs:
    sizes = st.integers(1, 40)
    specs = tuple(
        build.spec(
            name,
            draw(sizes) * MIB + sum(layers := tuple(draw(st.lists(sizes, max_size=3))) if name != "vae" else ()) * MIB,
            layers=tuple(size * MIB for size in layers),
        )
        for name in ("encoder", "transformer", "vae")[: draw(st.integers(1, 3))]
    )
    modes = st.sampled_from([RESIDENT, build.pageable, build.pinned])
    current = Placement(components={spec.name: draw(modes) for spec in specs})
    inputs = build.inputs(
        cap=draw(st.integers(20, 240)) * MIB,
        specs=specs,
        current=current,
        records=(build.record(specs, current, gap=draw(st.sampled_from([0, 3 * MIB]))),),
        noise_ns=draw(st.sampled_from([0, 10_000_000, 60_000_000])),
        policy=Policy(reserve_measured_bytes=draw(st.sampled_from([0, 4 * MIB])), equal_fraction_max=1.0),
        host=HostReading(
            available_bytes=2**40, cgroup_cap_bytes=None, pin_budget_bytes=draw(st.integers(0, 120)) * MIB
        ),
    )
    # One best placement after the other: an option that another one beats is needed once that one is excluded.
    for _ in range(draw(st.integers(0, 3))):
        best = brute_force(inputs, build)
        if best is not None:
            inputs = replace(inputs, excluded=(*inputs.excluded, best.digest))
    return inputs


@given(data=st.data())
def test_the_plan_is_the_one_that_brute_force_finds(build: Build, data: st.DataObject) -> None:
    inputs = data.draw(small_inputs(build))
    wanted = brute_force(inputs, build)
    if wanted is None:
        # The current placement outgrew the cap: only then is there nothing, and an estimate may not hide it.
        with pytest.raises(PlacementInfeasible) as caught:
            make_plan(replace(inputs, records=(*inputs.records, build.failed(inputs.records[0]))))
        assert caught.value.fields["needed_bytes"] > inputs.cap_bytes
        return
    plan = make_plan(inputs)
    assert plan.placement == wanted
    assert plan.exact and not plan.relaxed
    assert plan.keep is (wanted == inputs.current)
    assert plan.prediction.transfer_ns == transfer_ns(inputs, wanted, build)
    assert {one.component for one in plan.changes} == set(inputs.current.changes_to(wanted))


@given(data=st.data())
def test_a_hint_promises_no_more_than_the_model_holds(build: Build, data: st.DataObject) -> None:
    inputs = data.draw(small_inputs(build))
    if inputs.records[0].reserved_peak_bytes > inputs.cap_bytes:
        return  # nothing runs under less than it was measured with
    plan = make_plan(inputs)
    hint = plan.next_cheapest
    if hint is None:
        return
    target = Placement(components={**plan.placement.components, hint.component: hint.placement})
    assert hint.extra_bytes > 0 and hint.gain_ns > inputs.noise_ns
    assert not is_feasible(replace(inputs, cap_bytes=inputs.cap_bytes + hint.extra_bytes - 1), target)
    assert is_feasible(replace(inputs, cap_bytes=inputs.cap_bytes + hint.extra_bytes), target)
    gain = transfer_ns(inputs, plan.placement, build) - transfer_ns(inputs, target, build)
    assert hint.gain_ns == gain


def test_a_pipeline_of_real_size_is_solved_exactly_within_the_node_bound(build: Build) -> None:
    gib = 2**30
    specs = (
        build.spec("text_encoder", gib // 4, layers=(gib // 64,) * 12),
        build.spec("text_encoder_2", 9 * gib, layers=(gib * 3 // 8,) * 24),
        build.spec("transformer", 23 * gib, layers=(gib * 2 // 5,) * 57),
        build.spec("vae", gib // 6, layers=(gib // 64,) * 4),
    )
    current = build.placement(specs)
    link = LinkReading(to_device_pinned=50e9, to_device_pageable=12e9, to_host_pinned=50e9, to_host_pageable=12e9)
    records = (build.record(specs, current, activations={spec.name: 2 * gib for spec in specs}),)
    for cap in (12, 24, 28, 32, 40):
        inputs = build.inputs(
            cap=cap * gib,
            specs=specs,
            records=records,
            link=link,
            policy=Policy(),
            workload=Workload(width=512, height=512, frames=1, steps=28, batch=1),
        )
        plan = make_plan(inputs)
        assert plan.exact
        assert plan.num_nodes < 50_000
