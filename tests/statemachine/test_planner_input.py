"""Inputs that no plan may rest on: each is refused, and the refusal names it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from residency.errors import MeasurementRefused
from residency.gpu.placement import RESIDENT, Mode
from residency.gpu.records import HostReading
from residency.statemachine.planner.make_plan import make_plan, predict
from residency.statemachine.planner.request_model import ComponentUse, LayerUse, RequestModel, TimePhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from residency.statemachine.planner.plan import PlanInputs
    from tests.statemachine.conftest import Build

MIB = 2**20
NAN = float("nan")


def recorded(**changes: Any) -> Callable[[PlanInputs], PlanInputs]:
    def change(inputs: PlanInputs) -> PlanInputs:
        return replace(inputs, records=(replace(inputs.records[0], **changes),))

    return change


def phased(**changes: Any) -> Callable[[PlanInputs], PlanInputs]:
    def change(inputs: PlanInputs) -> PlanInputs:
        first, *others = inputs.records[0].phases
        return recorded(phases=(replace(first, **changes), *others))(inputs)

    return change


def linked(**changes: Any) -> Callable[[PlanInputs], PlanInputs]:
    return lambda inputs: replace(inputs, link=replace(inputs.link, **changes))


def given(**changes: Any) -> Callable[[PlanInputs], PlanInputs]:
    return lambda inputs: replace(inputs, **changes)


def sized(name: str, **changes: Any) -> Callable[[PlanInputs], PlanInputs]:
    return lambda inputs: replace(
        inputs, specs=tuple(replace(spec, **changes) if spec.name == name else spec for spec in inputs.specs)
    )


ABSURD: dict[str, tuple[Callable[[PlanInputs], PlanInputs], str]] = {
    "a link without speed": (linked(to_device_pinned=0.0), "the link: it moves 0.0 bytes"),
    "a link of NaN": (linked(to_device_pageable=NAN), "the link: it moves nan bytes"),
    "an endless link": (linked(to_device_pinned=float("inf")), "the link: it moves inf bytes"),
    "no device": (given(cap_bytes=0), "the device: its cap is 0 bytes"),
    "a negative cap": (given(cap_bytes=-5), "the device: its cap is -5 bytes"),
    "less than no host": (
        given(host=HostReading(available_bytes=-1, cgroup_cap_bytes=None, pin_budget_bytes=0)),
        "the host: -1 bytes",
    ),
    "noise of NaN": (given(noise_ns=NAN), "the noise: it is nan ns"),
    "a reserve of NaN": (given(reserve_factor=NAN), "the reserve: its factor is nan"),
    "negative weights": (sized("vae", total_bytes=-1), "component 'vae': it has -1 bytes"),
    "weights of an exbibyte": (sized("vae", total_bytes=2**61), "component 'vae': it has"),
    "layers larger than all": (sized("transformer", total_bytes=5 * MIB), "component 'transformer': its layers have"),
    "no layers to stream": (
        sized("vae", modes=(Mode.RESIDENT, Mode.LAYERWISE_OFFLOAD)),
        "component 'vae': it can be offloaded layer by layer, but has no layers",
    ),
    "a duration of NaN": (recorded(duration_ns=NAN), r"record 1 \(baseline\): it took nan ns"),
    "a negative duration": (recorded(duration_ns=-1), "it took -1 ns"),
    "a negative baseline": (recorded(baseline_allocated_bytes=-1), "-1 bytes were allocated before it"),
    "a phase of NaN": (phased(duration_ns=NAN), "phase 'use:encoder' took nan ns"),
    "a negative wait": (phased(wait_ns=-7), "of which -7 ns of waiting"),
    "a phase without peak": (phased(allocated_peak_bytes=-1), "phase 'use:encoder' has peaks of -1"),
    "a peak of an exbibyte": (phased(reserved_peak_bytes=2**70), "phase 'use:encoder' has peaks"),
    "a stranger in a phase": (phased(active=("unet",)), "phase 'use:encoder' is of unet, which is no component"),
    "a stranger that ran": (recorded(uses=(("unet", 1),)), "it ran 'unet', which is no component"),
    "half a use": (recorded(uses=(("vae", 0.5),)), "it ran 'vae' 0.5 times"),
    "missing phases": (
        lambda inputs: recorded(phases=inputs.records[0].phases[-1:])(inputs),
        "it has no memory phase of encoder, transformer, which ran",
    ),
    "layers that are not there": (
        recorded(layer_uses={"transformer": {"blocks": (1,) * 9}}),
        "it has uses of 9 layers in 'transformer', 'blocks', which has 8",
    ),
    "a layer of NaN": (
        recorded(layer_ns={"transformer": {"blocks": (NAN,) * 8}}),
        "it has ns of .nan.* in 'transformer', 'blocks'",
    ),
    "layers of a stranger": (recorded(layer_uses={"unet": {"blocks": (1,)}}), "in 'unet', 'blocks', which has 0"),
    "less memory than weights": (
        lambda inputs: recorded(phases=tuple(replace(one, allocated_peak_bytes=0) for one in inputs.records[0].phases))(
            inputs
        ),
        "has a peak of 0 bytes under a placement that holds",
    ),
}


@pytest.mark.parametrize("name", ABSURD)
def test_what_is_absurd_is_refused_by_name(build: Build, name: str) -> None:
    change, message = ABSURD[name]
    inputs = change(build.inputs(cap=500 * MIB))
    with pytest.raises(MeasurementRefused, match=message):
        make_plan(inputs)
    with pytest.raises(MeasurementRefused, match=message):
        predict(inputs, inputs.current)


def test_two_components_of_one_name_are_refused(build: Build) -> None:
    inputs = build.inputs(cap=500 * MIB)
    with pytest.raises(MeasurementRefused, match="two are named 'vae'"):
        make_plan(replace(inputs, specs=(*inputs.specs, inputs.specs[-1])))


def test_a_record_that_was_not_taken_under_the_placement_it_names_is_refused(build: Build) -> None:
    specs = build.specs()
    resident = build.resident(specs)
    record = build.record(specs, build.placement(specs, vae=RESIDENT), placement_digest=resident.digest)
    inputs = build.inputs(cap=2**40, current=resident, records=(record,))
    with pytest.raises(MeasurementRefused, match="phase 'use:encoder' has a peak of 157286400 bytes"):
        make_plan(inputs)


def test_one_refusal_says_what_to_do(build: Build) -> None:
    with pytest.raises(MeasurementRefused) as caught:
        make_plan(build.inputs(cap=0))
    assert str(caught.value) == (
        "nothing can be planned from the device: its cap is 0 bytes; measure again, and report it if it comes again"
    )
    assert caught.value.fields == {"subject": "the device", "problem": "its cap is 0 bytes"}


def test_requests_of_one_shape_may_run_different_components(build: Build) -> None:
    # A pipeline that keeps the prompt's embeddings runs its encoder once.
    specs = build.specs()
    current = build.placement(specs)
    records = (build.record(specs, current), build.record(specs, current, skip=("encoder",)))
    assert make_plan(build.inputs(cap=2**40, records=records)).placement == build.resident(specs)


# --- a request that is built by hand ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (TimePhase(name="x", uses=(), passes=0), "passes"),
        (TimePhase(name="x", uses=(), beside_bytes=-1), "less than no bytes"),
        (TimePhase(name="x", uses=(ComponentUse(component="unet", compute_ns=1),)), "which is no component"),
        (TimePhase(name="x", uses=(ComponentUse(component="vae", compute_ns=-1),)), "computes for -1 ns"),
        (
            TimePhase(
                name="x",
                uses=(
                    ComponentUse(component="vae", compute_ns=1, layers=(LayerUse(group="up", index=0, compute_ns=0),)),
                ),
            ),
            "has no layer 0",
        ),
    ],
)
def test_a_request_that_cannot_be_is_refused(build: Build, phase: TimePhase, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestModel(specs=build.specs(), phases=(phase,), pinned_bytes_per_s=1, pageable_bytes_per_s=1, cap_bytes=MIB)


def test_a_link_that_moves_nothing_is_no_request(build: Build) -> None:
    with pytest.raises(ValueError, match="less than a byte a second"):
        RequestModel(specs=build.specs(), phases=(), pinned_bytes_per_s=0, pageable_bytes_per_s=1, cap_bytes=MIB)
