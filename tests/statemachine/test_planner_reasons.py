"""What a plan says about itself: phases, limits that bind, prices, and what is next."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.planner_models import GIB, flux_inputs
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode
from residency.gpu.records import HostReading
from residency.statemachine.planner.make_plan import make_plan, predict

if TYPE_CHECKING:
    from residency.statemachine.planner.plan import Plan
    from tests.statemachine.conftest import Build

MIB = 2**20


@pytest.fixture(scope="module")
def tight() -> Plan:
    return make_plan(flux_inputs(12))


def test_a_request_is_told_phase_by_phase(tight: Plan) -> None:
    prediction = tight.prediction
    assert [(one.name, one.passes) for one in prediction.time_phases] == [
        ("text_encoder", 1),
        ("text_encoder_2", 1),
        ("transformer", 4),
        ("vae", 1),
    ]
    assert sum(one.compute_ns for one in prediction.time_phases) == prediction.compute_ns
    exposed = sum(one.exposed_ns for one in prediction.time_phases)
    # The rest of the difference is computing that is slower beside copies.
    assert 0 < prediction.transfer_ns - exposed <= 0.03 * prediction.duration_ns
    assert prediction.duration_ns == prediction.compute_ns + prediction.transfer_ns
    assert prediction.to_device_bytes > 40 * GIB


def test_the_limits_that_bind_are_told_with_what_is_left_of_them(tight: Plan) -> None:
    first = tight.binding[0]
    assert (first.kind, first.name) == ("device", "use:transformer")
    slack = {phase.key: phase.limit_bytes - phase.peak_bytes for phase in tight.prediction.phases}
    for one in tight.binding:
        assert one.slack_bytes == slack[one.name]
    # Nothing that is away would fit into what is left.
    assert all(0 <= one.slack_bytes < 0.264 * GIB for one in tight.binding)


def test_scarce_pinned_memory_binds_by_name(build: Build) -> None:
    specs = build.specs()
    streams = ComponentPlacement(mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PAGEABLE, num_slots=2)
    current = build.placement(specs, transformer=streams)
    host = HostReading(available_bytes=2**40, cgroup_cap_bytes=None, pin_budget_bytes=410 * MIB)
    inputs = build.inputs(cap=200 * MIB, current=current, records=(build.record(specs, current),), host=host)
    assert "pinned" in {one.kind for one in make_plan(inputs).binding}
    plenty = replace(host, pin_budget_bytes=2**40)
    assert "pinned" not in {one.kind for one in make_plan(replace(inputs, host=plenty)).binding}


def test_nothing_binds_where_everything_is_on_the_device(build: Build) -> None:
    plan = make_plan(build.inputs(cap=2**40))
    assert plan.placement == build.resident(build.specs())
    assert plan.binding == ()
    assert all(price.gain_ns_per_gib is None and price.loss_ns_per_gib for price in plan.prices)


def test_memory_is_worth_most_to_what_streams_at_every_step(tight: Plan) -> None:
    prices = {price.component: price for price in tight.prices}
    # A GiB of what streams takes 19 ms of the link, and 4 times as much if it does so at every step.
    assert 40e6 < (prices["transformer"].loss_ns_per_gib or 0) < 120e6
    assert 30e6 < (prices["transformer"].gain_ns_per_gib or 0) < 120e6
    assert prices["text_encoder_2"].loss_ns_per_gib is None  # it has nothing left to give
    assert (prices["text_encoder_2"].gain_ns_per_gib or 0) < 30e6


def test_what_may_not_be_placed_has_no_price(build: Build) -> None:
    plan = make_plan(build.inputs(cap=500 * MIB, configured={"vae": "set"}))
    assert {price.component for price in plan.prices} == {"encoder", "transformer"}


def test_a_change_tells_how_long_the_request_waits_for_a_component(tight: Plan) -> None:
    change = next(one for one in tight.changes if one.component == "transformer")
    assert change.transfer_before_ns == pytest.approx(22.17 / 51.6 * 1e9, rel=0.01)
    assert 0 < change.transfer_after_ns < change.transfer_before_ns


def test_the_runner_up_is_the_second_best_that_fits(build: Build) -> None:
    inputs = build.inputs(cap=560 * MIB)
    plan = make_plan(inputs)
    runner_up = plan.alternatives[0]
    assert runner_up.name == "runner-up" and runner_up.feasible
    second = make_plan(replace(inputs, excluded=(plan.placement.digest,)))
    assert second.prediction.duration_ns <= runner_up.duration_ns
    assert runner_up.duration_ns == predict(inputs, runner_up.placement).duration_ns


def test_a_mode_that_is_asked_for_is_the_only_one_weighed(build: Build) -> None:
    inputs = build.inputs(cap=600 * MIB, modes={"transformer": Mode.LAYERWISE_OFFLOAD})
    plan = make_plan(inputs)
    assert plan.placement.components["transformer"].mode is Mode.LAYERWISE_OFFLOAD
    assert plan.placement.components["encoder"] == RESIDENT
    assert plan.num_candidates["transformer"] < make_plan(replace(inputs, modes={})).num_candidates["transformer"]
