"""The planner: equal to brute force, and right about memory, time, pins, exclusions and what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from residency.errors import PlacementInfeasible
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.records import HostReading, RequestKind
from residency.statemachine.planner.constraints import extrapolate, phase_limits
from residency.statemachine.planner.layer_choice import layers_of
from residency.statemachine.planner.make_plan import make_plan, predict, request_model
from residency.statemachine.planner.plan import Plan, PlanInputs
from residency.statemachine.planner.timing import timing_record
from residency.statemachine.policy import Policy

if TYPE_CHECKING:
    from tests.statemachine.conftest import Build

MIB = 2**20
LAYERWISE = ComponentPlacement(mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PAGEABLE, num_slots=1)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_everything_is_resident_when_everything_fits(build: Build) -> None:
    plan = make_plan(build.inputs(cap=600 * MIB))
    assert plan.placement == build.resident(build.specs())
    assert plan.bound_by.startswith("nothing")
    assert plan.next_cheapest is None


def test_weights_inside_a_measured_peak_are_not_charged_twice(build: Build) -> None:
    # The largest phase held the transformer already; to keep all three resident needs exactly 580 + 10 MiB.
    assert make_plan(build.inputs(cap=590 * MIB)).placement == build.resident(build.specs())
    assert make_plan(build.inputs(cap=590 * MIB - 1)).placement != build.resident(build.specs())


def test_the_reserve_is_the_measured_gap_and_a_fixed_part_that_small_devices_can_afford(build: Build) -> None:
    specs = build.specs()
    current = build.placement(specs)
    records = (build.record(specs, current, gap=7 * MIB),)
    policy = Policy()
    cap = 2**40
    (*_, phase) = make_plan(build.inputs(cap=cap, records=records, policy=policy)).prediction.phases
    assert phase.reserve_bytes == 7 * MIB + 256 * MIB
    assert policy.measured_reserve(640 * MIB) == 40 * MIB
    doubled = make_plan(build.inputs(cap=cap, records=records, policy=policy, reserve_factor=2.0))
    assert doubled.prediction.phases[-1].reserve_bytes == 2 * phase.reserve_bytes


def test_a_raised_reserve_never_forbids_the_placement_that_ran(build: Build) -> None:
    specs = build.specs()
    plan = make_plan(build.inputs(cap=452 * MIB, specs=specs, policy=Policy(), reserve_factor=2.0))
    assert not plan.relaxed
    assert all(phase.peak_bytes <= phase.limit_bytes for phase in plan.prediction.phases)


def test_only_what_is_beside_the_weights_grows_with_the_shape(build: Build) -> None:
    # Scaling whole peaks made 183 GiB out of 30.
    target = replace(build.shape, width=1024, height=1024)
    plan = make_plan(build.inputs(cap=2**40, workload=target))
    phase = next(one for one in plan.prediction.phases if one.key == "use:transformer")
    assert phase.peak_bytes == 580 * MIB + int(10 * MIB * 4 * 1.2)
    assert not phase.measured
    assert phase.reserve_bytes == int(2**40 * 0.10)


def test_two_shapes_give_a_line_and_one_gives_a_ratio() -> None:
    assert extrapolate({100: 50, 200: 70}, target=1000, margin=1.0) == 230
    assert extrapolate({100: 50}, target=1000, margin=1.2) == 600
    # A falling line is noise.
    assert extrapolate({100: 70, 200: 50}, target=400, margin=1.0) == 280


def test_a_success_at_the_target_shape_makes_smaller_ones_irrelevant_to_memory(build: Build) -> None:
    specs = build.specs()
    current = build.placement(specs)
    small = replace(build.shape, width=64, height=64)
    records = (
        build.record(specs, current, workload=small, activations={"vae": 200 * MIB}),
        build.record(specs, current),
    )
    plan = make_plan(build.inputs(cap=590 * MIB, records=records))
    assert plan.placement == build.resident(specs)
    assert plan.prediction.measured


def test_a_component_that_no_probe_reached_keeps_room_for_itself(build: Build) -> None:
    specs = (*build.specs(), build.spec("second", 440 * MIB))
    current = build.placement(specs)
    records = (build.record(specs, current, skip=("second",), activations={"vae": 30 * MIB}),)
    plan = make_plan(build.inputs(cap=560 * MIB, specs=specs, current=current, records=records))
    beside = sum(s.device_bytes(plan.placement.components[s.name], in_use=False) for s in specs if s.name != "second")
    # Whatever it needs beside its weights is not known; the most that any phase needed is assumed.
    assert beside + 440 * MIB + 30 * MIB <= 560 * MIB
    unseen = next(one for one in plan.prediction.phases if one.key.endswith("(not observed)"))
    assert unseen.peak_bytes >= 440 * MIB + 30 * MIB
    assert any(phase.key == "use:second (not observed)" for phase in plan.prediction.phases)


def test_a_whole_component_lingers_after_its_use_and_a_window_is_there_all_the_time(build: Build) -> None:
    specs = build.specs()
    inputs = build.inputs(cap=2**40, specs=specs)
    whole = predict(inputs, build.placement(specs))
    layered = predict(inputs, build.placement(specs, transformer=LAYERWISE))
    after = {one.key: one.peak_bytes for one in whole.phases}["after:transformer"]
    after_layered = {one.key: one.peak_bytes for one in layered.phases}["after:transformer"]
    assert (after, after_layered) == ((440 + 10) * MIB, (40 + 50 + 10) * MIB)
    during = {one.key: one.peak_bytes for one in layered.phases}["use:transformer"]
    assert during == 40 * MIB + 50 * MIB + 10 * MIB


def test_a_failed_request_at_the_target_shape_is_a_measurement(build: Build) -> None:
    specs = build.specs()
    current = build.placement(specs)
    failed = build.failed(build.record(specs, current), last="use:transformer")
    inputs = build.inputs(cap=440 * MIB, specs=specs, records=(failed,))
    plan = make_plan(inputs)
    assert plan.placement.components["transformer"].mode is Mode.LAYERWISE_OFFLOAD
    assert not plan.keep and not plan.prediction.timed
    assert plan.prediction.compute_ns == 0


def test_a_failure_above_the_target_shape_says_nothing_about_the_target(build: Build) -> None:
    specs = build.specs()
    resident = build.resident(specs)
    good = build.record(specs, resident)
    larger = build.failed(replace(good, workload=replace(build.shape, width=1024)), last="use:transformer")
    inputs = build.inputs(cap=600 * MIB, current=resident, records=(good, larger))
    assert make_plan(inputs).keep
    smaller = replace(good, workload=replace(build.shape, width=64))
    alone = replace(inputs, records=(smaller, larger), cap_bytes=2**40)
    assert [one.key for one in make_plan(alone).prediction.phases] == [phase.key for phase in smaller.phases]


def test_only_what_ran_under_the_current_or_the_initial_placement_is_beyond_the_reserve(build: Build) -> None:
    # A suspect that ran before it died must not be let through by its own records.
    specs = build.specs()
    current, suspect = build.placement(specs), build.resident(specs)
    records = (build.record(specs, current), build.record(specs, suspect))
    inputs = build.inputs(cap=592 * MIB, records=records, placements=(suspect,), policy=Policy(), reserve_factor=2.0)
    assert make_plan(inputs).placement != suspect


def test_the_size_that_the_allocator_refused_counts_for_the_phase_that_failed(build: Build) -> None:
    specs = build.specs()
    current = build.placement(specs)
    whole = build.record(specs, current)
    wanted = {}
    for text in ("out of memory", "CUDA out of memory. Tried to allocate 200.00 MiB. GPU 0 has a total capacity of 1"):
        failed = build.failed(whole, last="use:transformer", error=text)
        phases = predict(build.inputs(cap=440 * MIB, specs=specs, records=(failed,)), current).phases
        wanted[text] = next(one for one in phases if one.key == "use:transformer").peak_bytes
    silent, told = wanted.values()
    assert told > silent


def test_noise_never_buys_memory_for_more_than_a_small_part_of_a_request(build: Build) -> None:
    policy = Policy(reserve_measured_bytes=0)
    plan = make_plan(build.inputs(cap=600 * MIB, noise_ns=10**12, policy=policy))
    assert plan.placement == build.resident(build.specs())


def test_nothing_fits_after_a_measured_failure_and_the_error_says_what_is_short(build: Build) -> None:
    specs = (build.spec("transformer", 440 * MIB, modes=(Mode.RESIDENT, Mode.COMPONENT_OFFLOAD)),)
    current = build.placement(specs)
    failed = build.failed(build.record(specs, current), last="use:transformer")
    with pytest.raises(PlacementInfeasible) as caught:
        make_plan(build.inputs(cap=400 * MIB, specs=specs, records=(failed,)))
    assert caught.value.exit_code == 72
    assert "use:transformer" in str(caught.value)
    assert caught.value.fields["needed_bytes"] > 400 * MIB


def test_phases_that_fit_one_by_one_but_not_together_name_the_cap_that_would_do(build: Build) -> None:
    # Each phase could be had by placing the other component elsewhere; no placement satisfies both.
    specs = (
        build.spec("encoder", 100 * MIB, modes=(Mode.RESIDENT,)),
        build.spec("transformer", 100 * MIB, modes=(Mode.RESIDENT,)),
    )
    current = build.resident(specs)
    failed = build.failed(build.record(specs, current), last="use:transformer")
    with pytest.raises(PlacementInfeasible) as caught:
        make_plan(build.inputs(cap=500 * MIB, specs=specs, current=current, records=(failed,)))
    assert caught.value.fields["needed_bytes"] > 500 * MIB


def test_an_estimate_alone_never_takes_a_running_placement_away(build: Build) -> None:
    huge = replace(build.shape, width=8192, height=8192)
    plan = make_plan(build.inputs(cap=500 * MIB, workload=huge))
    assert plan.relaxed
    specs = build.specs()
    for phase, before in zip(
        plan.prediction.phases,
        predict(build.inputs(cap=500 * MIB, workload=huge), build.placement(specs)).phases,
        strict=True,
    ):
        assert phase.peak_bytes <= before.peak_bytes


# --- time ------------------------------------------------------------------------------------------------------------


def test_time_is_scaled_to_the_steps_of_the_workload_only_where_steps_repeat(build: Build) -> None:
    specs = build.specs()
    resident = build.resident(specs)
    target = replace(build.shape, steps=28)
    inputs = build.inputs(cap=2**40, current=resident, records=(build.record(specs, resident),), workload=target)
    prediction = make_plan(inputs).prediction
    assert prediction.compute_ns == 10_000_000 * (28 + 1 + 1)
    assert prediction.duration_ns == prediction.compute_ns + prediction.transfer_ns


def test_layers_that_ran_once_in_a_one_step_measurement_are_scaled_too(build: Build) -> None:
    # A single measured iteration once made every block look one-shot.
    specs = build.specs()
    current = build.placement(specs, transformer=LAYERWISE)
    once = replace(build.shape, steps=1)
    records = (build.record(specs, current, workload=once, target_steps=28),)
    inputs = build.inputs(cap=300 * MIB, current=current, records=records, workload=replace(build.shape, steps=28))
    # What streams is hidden by what else computes, 20 ms a step.
    assert predict(inputs, current).transfer_ns == pytest.approx(1e9 * 28 * (400 + 100 + 40) / 1024, rel=0.06)


def test_transfers_measured_in_the_record_are_not_counted_as_compute(build: Build) -> None:
    specs = build.specs()
    offloaded, resident = build.placement(specs), build.resident(specs)
    slow = build.inputs(cap=2**40, current=offloaded, records=(build.record(specs, offloaded),))
    fast = build.inputs(cap=2**40, current=resident, records=(build.record(specs, resident),))
    assert predict(slow, resident).duration_ns == pytest.approx(predict(fast, resident).duration_ns, abs=10)


def test_time_is_read_from_a_steady_record_of_median_duration(build: Build) -> None:
    specs = build.specs()
    current = build.placement(specs)
    cold = build.record(specs, current, kind=RequestKind.PROBE, duration_ns=1)
    samples = [build.record(specs, current, duration_ns=duration) for duration in (30, 10, 20)]
    found = timing_record([cold, *samples], build.shape)
    assert found is not None and found.duration_ns == 20
    assert timing_record([build.failed(cold)], build.shape) is None


def test_within_the_noise_fewer_device_bytes_win(build: Build) -> None:
    quiet = make_plan(build.inputs(cap=600 * MIB))
    noisy = make_plan(build.inputs(cap=600 * MIB, noise_ns=25_000_000))
    assert quiet.placement.components["vae"] == RESIDENT
    assert noisy.placement.components["vae"] == build.pinned
    assert noisy.prediction.transfer_ns <= quiet.prediction.transfer_ns + 25_000_000


# --- host memory, exclusions, what is never touched ------------------------------------------------------------------


def test_the_pin_budget_holds_and_what_is_pinned_already_may_stay(build: Build) -> None:
    specs = build.specs()
    none = HostReading(available_bytes=2**40, cgroup_cap_bytes=None, pin_budget_bytes=0)
    plan = make_plan(build.inputs(cap=460 * MIB, host=none))
    assert plan.prediction.pinned_bytes == 0
    pinned = build.placement(specs, vae=build.pinned)
    records = (build.record(specs, pinned),)
    kept = make_plan(build.inputs(cap=460 * MIB, current=pinned, records=records, host=none))
    assert kept.prediction.pinned_bytes <= 40 * MIB


def test_only_layers_that_leave_the_device_take_pinned_memory(build: Build) -> None:
    specs = build.specs()
    kept = replace(LAYERWISE, tier=HostTier.PINNED, resident_layers={"blocks": (0, 2, 4)})
    inputs = build.inputs(cap=2**40, specs=specs)
    assert predict(inputs, build.placement(specs, transformer=kept)).pinned_bytes == 5 * 50 * MIB


def test_host_memory_that_is_not_there_is_not_planned_with(build: Build) -> None:
    specs = build.specs()
    short = HostReading(available_bytes=39 * MIB, cgroup_cap_bytes=None, pin_budget_bytes=2**40)
    plan = make_plan(build.inputs(cap=460 * MIB, host=short))
    assert plan.prediction.pinned_bytes == 0
    assert set(plan.placement.components) == {spec.name for spec in specs}


def test_excluded_placements_are_not_chosen_but_the_current_and_initial_ones_may_be(build: Build) -> None:
    first = make_plan(build.inputs(cap=460 * MIB))
    second = make_plan(build.inputs(cap=460 * MIB, excluded=(first.placement.digest,)))
    assert second.placement != first.placement
    runner_up = first.alternatives[0]
    assert runner_up.name == "runner-up"
    assert second.prediction.duration_ns <= runner_up.duration_ns
    resident = build.resident(build.specs())
    kept = build.inputs(
        cap=600 * MIB,
        current=resident,
        records=(build.record(build.specs(), resident),),
        excluded=(resident.digest,),
    )
    assert make_plan(kept).keep


def test_configured_and_fixed_components_stay_where_they_are(build: Build) -> None:
    specs = (*build.specs()[:2], build.spec("vae", 40 * MIB, fixed_reason="foreign hooks"))
    plan = make_plan(build.inputs(cap=2**40, specs=specs, configured={"encoder": "set by the user"}))
    assert plan.placement.components["encoder"] == build.pageable
    assert plan.placement.components["vae"] == build.pageable
    assert plan.num_candidates["encoder"] == plan.num_candidates["vae"] == 1


def test_one_configured_component_does_not_freeze_the_others(build: Build) -> None:
    plan = make_plan(build.inputs(cap=2**40, configured={"encoder": "set by the user"}))
    assert plan.placement.components["transformer"] == plan.placement.components["vae"] == RESIDENT


def test_layers_that_run_more_often_are_kept_first(build: Build) -> None:
    base = build.spec("transformer", 800 * MIB, layers=(50 * MIB,) * 4)
    seldom = replace(base.groups[0], name="refiner")
    spec = replace(base, groups=(*base.groups, seldom))
    specs = (spec,)
    current = build.placement(specs)
    uses = {"transformer": {"blocks": (4,) * 4, "refiner": (1,) * 4}}
    inputs = build.inputs(cap=2**40, specs=specs, records=(build.record(specs, current, layer_uses=uses),))
    model = request_model(inputs, phase_limits(inputs))
    assert layers_of(model, spec).path()[:5] == tuple((num, 0) for num in range(5))


# --- the value itself ------------------------------------------------------------------------------------------------


def test_inputs_and_plan_survive_the_journal_and_give_the_same_plan_again(build: Build) -> None:
    inputs = build.inputs(cap=470 * MIB, noise_ns=1000, excluded=("x",))
    plan = make_plan(inputs)
    read = msgspec.convert(json.loads(msgspec.json.encode(inputs, order="sorted")), PlanInputs)
    assert read == inputs
    assert make_plan(read) == plan
    assert msgspec.json.decode(msgspec.json.encode(plan, order="sorted"), type=Plan) == plan


def test_inputs_that_lead_nowhere_are_refused(build: Build) -> None:
    specs = build.specs()
    other = build.record(specs, build.resident(specs))
    with pytest.raises(ValueError, match="which is not given"):
        build.inputs(cap=MIB, records=(other,))
    assert build.inputs(cap=MIB, records=(other,), placements=(build.resident(specs),)).records
    with pytest.raises(ValueError, match="is not one of"):
        build.inputs(cap=MIB, initial=Placement(components={"nobody": RESIDENT}))


def test_a_plan_says_what_bound_it_and_what_else_there_was(build: Build) -> None:
    plan = make_plan(build.inputs(cap=560 * MIB))
    assert plan.bound_by == "device memory in phase 'use:vae'"
    hint = plan.next_cheapest
    assert hint is not None
    # A hint is an estimate about another cap: it must not sound as if something would happen by itself.
    assert hint.text == (
        "30.0 MiB more would allow encoder resident: -0.0488 s (estimated; needs a higher cap and a new calibration)"
    )
    assert plan.alternatives[0].name == "runner-up"
    assert build.placement(build.specs()).digest in {one.digest for one in plan.alternatives}
    assert all(one.digest == one.placement.digest for one in plan.alternatives)


def test_a_hint_from_a_smaller_shape_says_that_it_is_extrapolated(build: Build) -> None:
    target = replace(build.shape, width=1024)
    plan = make_plan(build.inputs(cap=620 * MIB, workload=target))
    assert plan.next_cheapest is not None
    assert "extrapolated, not measured" in plan.next_cheapest.text


def test_a_gain_that_nobody_would_notice_is_no_advice(build: Build) -> None:
    # The decoder would need the least memory, and save 1 ms of a request of 2 s.
    specs = (build.spec("encoder", 100 * MIB), build.spec("vae", 2 * MIB))
    current = build.placement(specs)
    record = build.record(specs, current, compute_ns=1_000_000_000, activations={"vae": 20 * MIB})
    hints = {}
    for fraction in (0.0, 0.01, 0.5):
        policy = replace(build.policy, noticeable_fraction=fraction)
        inputs = build.inputs(cap=111 * MIB, specs=specs, records=(record,), policy=policy)
        plan = make_plan(inputs)
        assert plan.bound_by.startswith("device memory in phase")
        hints[fraction] = plan.next_cheapest and plan.next_cheapest.component
    assert hints == {0.0: "vae", 0.01: "encoder", 0.5: None}
