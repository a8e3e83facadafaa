"""Policy numbers, request shapes to measure with, and the placement a worker begins with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residency.errors import ModeUnavailable, PlacementInfeasible, UnknownComponent
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode
from residency.gpu.workload import Workload
from residency.statemachine.initial import configured_placements, initial_placement
from residency.statemachine.policy import GIB, MIB, Policy
from residency.statemachine.probing import bounded_workload, fit_probe, measured_steps

if TYPE_CHECKING:
    from typing import Any

    from tests.statemachine.conftest import Build

IMAGE = Workload(width=1024, height=1024, frames=1, steps=28, batch=1)
VIDEO = Workload(width=1280, height=720, frames=81, steps=40, batch=1)
LAYERWISE = ComponentPlacement(mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PAGEABLE, num_slots=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"step_floor": 0},
        {"samples_max": 0},
        {"activation_margin": 0.9},
        {"suspect_reserve_factor": 0.5},
        {"reserve_extrapolated_fraction": 0.5},
        {"reserve_measured_bytes": -1},
    ],
)
def test_a_policy_that_could_not_be_meant_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        Policy(**changes)


def test_the_probe_margin_is_allocator_slack_and_smaller_than_the_planners_reserve() -> None:
    # A planner's reserve as the margin once shrank probes with 10 GiB to spare.
    policy = Policy()
    assert policy.probe_margin(32 * GIB) == 1 * GIB < policy.extrapolated_reserve(32 * GIB)
    assert policy.probe_margin(80 * GIB) == int(80 * GIB * 0.02)
    assert policy.probe_margin(640 * MIB) == 40 * MIB


@pytest.mark.parametrize(
    ("target", "width", "height", "frames"),
    [
        (IMAGE, 768, 768, 1),
        (replace(IMAGE, width=512, height=512), 512, 512, 1),
        (replace(IMAGE, width=2048, height=1024), 1024, 512, 1),
        (VIDEO, 832, 464, 17),
        (replace(VIDEO, frames=16), 832, 464, 16),
        (replace(VIDEO, frames=14), 832, 464, 14),
        (replace(VIDEO, frames=24), 832, 464, 16),
        (replace(VIDEO, frames=97, width=704, height=480), 704, 480, 17),
    ],
)
def test_the_bounded_shape_is_small_and_in_the_pattern_of_the_target(
    target: Workload, width: int, height: int, frames: int
) -> None:
    small = bounded_workload(target, Policy())
    assert (small.width, small.height, small.frames, small.batch) == (width, height, frames, 1)


def test_a_measured_request_has_the_step_floor_but_never_more_steps_than_the_worker_was_made_for() -> None:
    policy = Policy()
    assert measured_steps(IMAGE, policy) == 4
    # A distilled pipeline may refuse four steps, as others refuse one.
    assert measured_steps(replace(IMAGE, steps=1), policy) == 1


def test_calibration_and_validation_run_the_same_number_of_steps(build: Build) -> None:
    # A one-step validation was once refused by a pipeline, and a correct promotion rolled back for it.
    specs = build.specs()
    placement = build.placement(specs)
    for steps in (1, 2, 4, 28):
        target = replace(IMAGE, steps=steps)
        small = bounded_workload(target, Policy())
        record = build.record(specs, placement, workload=small)
        probe = fit_probe(target, record, specs, placement, 2**40, Policy())
        assert small.steps == probe.steps == min(steps, Policy().step_floor)


@given(width=st.integers(1, 4096), height=st.integers(1, 4096), frames=st.integers(1, 300), batch=st.integers(1, 8))
def test_a_bounded_shape_is_never_larger_than_its_target(width: int, height: int, frames: int, batch: int) -> None:
    target = Workload(width=width, height=height, frames=frames, steps=30, batch=batch)
    small = bounded_workload(target, Policy())
    assert small.width <= width and small.height <= height and small.frames <= frames and small.batch <= batch
    assert bounded_workload(small, Policy()).units <= small.units


def test_a_probe_that_fits_runs_the_whole_target_shape(build: Build) -> None:
    specs = build.specs()
    placement = build.placement(specs)
    record = build.record(specs, placement, workload=bounded_workload(VIDEO, Policy()))
    assert fit_probe(VIDEO, record, specs, placement, 2**40, Policy()) == replace(VIDEO, steps=4)


def test_a_probe_shrinks_frames_first_and_then_the_area(build: Build) -> None:
    specs = build.specs()
    placement = build.placement(specs)
    record = build.record(specs, placement, workload=bounded_workload(VIDEO, Policy()))
    found = [fit_probe(VIDEO, record, specs, placement, cap * MIB, Policy()) for cap in range(2000, 470, -1)]
    shapes = list(dict.fromkeys((shape.width, shape.height, shape.frames) for shape in found))
    assert shapes[0] == (1280, 720, 81)
    assert shapes[1][:2] == (1280, 720) and shapes[1][2] < 81
    # The last resort is the shape that ran.
    assert shapes[-1] == (832, 464, 17)
    frames = [shape[2] for shape in shapes[:-1]]
    assert frames == sorted(frames, reverse=True)
    assert all((count - 1) % 8 == 0 for count in frames)


def test_a_probe_counts_weights_once_and_scales_only_the_rest(build: Build) -> None:
    # 440 MiB of streamed weights once counted as activation and shrank the probe for nothing.
    specs = build.specs()
    placement = build.placement(specs)
    target = replace(build.shape, width=1024, height=1024)
    record = build.record(specs, placement)
    needed = 440 * MIB + int(10 * MIB * 4 * 1.2)
    cap = needed * 16 // 15 + 1
    assert fit_probe(target, record, specs, placement, cap, Policy()).units == target.units
    assert fit_probe(target, record, specs, placement, cap - 17, Policy()).units < target.units


def test_a_probe_never_shrinks_below_the_shape_that_ran(build: Build) -> None:
    specs = build.specs()
    placement = build.placement(specs)
    small = bounded_workload(VIDEO, Policy())
    record = build.record(specs, placement, workload=small)
    assert fit_probe(VIDEO, record, specs, placement, 455 * MIB, Policy()) == small
    assert fit_probe(VIDEO, build.failed(record), specs, placement, 2**40, Policy()) == small


# --- the initial placement -------------------------------------------------------------------------------------------


def test_all_is_resident_if_all_fits_with_the_reserve(build: Build) -> None:
    specs, policy = build.specs(), Policy()
    assert initial_placement(specs, {}, 645 * MIB, policy) == build.resident(specs)
    assert initial_placement(specs, {}, 643 * MIB, policy) == build.placement(specs)


def test_configured_modes_are_kept_and_count_for_what_fits(build: Build) -> None:
    specs = build.specs()
    configured = configured_placements(specs, {"vae": "resident", "transformer": Mode.LAYERWISE_OFFLOAD})
    found = initial_placement(specs, configured, 560 * MIB, Policy())
    assert found.components["vae"] == RESIDENT
    assert found.components["transformer"] == LAYERWISE
    assert found.components["encoder"] == RESIDENT


def test_a_component_that_may_not_move_keeps_its_mode(build: Build) -> None:
    specs = (*build.specs()[:2], build.spec("vae", 40 * MIB, modes=(Mode.RESIDENT,), fixed_reason="foreign hooks"))
    assert initial_placement(specs, {}, 500 * MIB, Policy()).components["vae"] == RESIDENT


def test_a_cap_under_the_largest_thing_that_must_be_there_is_an_error_that_names_it(build: Build) -> None:
    specs = build.specs()
    with pytest.raises(PlacementInfeasible, match="component 'encoder'") as caught:
        initial_placement(specs, {}, 99 * MIB, Policy())
    assert caught.value.exit_code == 72
    resident = {"transformer": RESIDENT}
    with pytest.raises(PlacementInfeasible, match="component"):
        initial_placement(specs, resident, 439 * MIB, Policy())


def test_a_transformer_that_only_fits_in_layers_is_no_error_at_the_start(build: Build) -> None:
    # Its failing first request is a measurement from which the plan finds the layers.
    assert initial_placement(build.specs(), {}, 200 * MIB, Policy()) == build.placement(build.specs())


def test_configuring_what_is_not_there_or_not_possible_says_what_is(build: Build) -> None:
    specs = build.specs()
    with pytest.raises(UnknownComponent, match="encoder, transformer, vae"):
        configured_placements(specs, {"unet": "resident"})
    with pytest.raises(UnknownComponent):
        initial_placement(specs, {"unet": RESIDENT}, 2**40, Policy())
    with pytest.raises(ModeUnavailable, match="it has no layers to stream; it can be resident, component-offload"):
        configured_placements(specs, {"vae": "layerwise-offload"})
    with pytest.raises(ModeUnavailable, match="there is no such mode"):
        configured_placements(specs, {"vae": "offload"})
    fixed = (build.spec("vae", MIB, modes=(Mode.RESIDENT,), fixed_reason="weights are DTensors"),)
    with pytest.raises(ModeUnavailable, match="weights are DTensors"):
        configured_placements(fixed, {"vae": "component-offload"})
