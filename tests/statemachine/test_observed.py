"""From records to the time phases of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.planner_models import all_resident, flux_inputs, flux_model
from residency.gpu.placement import ComponentPlacement, HostTier, Mode
from residency.gpu.records import RequestKind
from residency.statemachine.planner.make_plan import predict
from residency.statemachine.planner.observed import loops
from residency.statemachine.planner.request_model import RequestModel

if TYPE_CHECKING:
    from residency.gpu.records import RequestRecord
    from residency.statemachine.planner.plan import PlanInputs
    from tests.statemachine.conftest import Build

MS = 10**6


def model_of(inputs: PlanInputs) -> RequestModel:
    return RequestModel.from_records(
        inputs.specs,
        inputs.records,
        inputs.workload,
        inputs.link,
        inputs.cap_bytes,
        placements=inputs.measured_placements().values(),
    )


def test_a_record_gives_back_the_request_that_it_was_measured_from() -> None:
    wanted = flux_model(24, reserve_gib=0)
    found = model_of(flux_inputs(24))
    assert [phase.name for phase in found.phases] == [phase.name for phase in wanted.phases]
    for ours, theirs in zip(found.phases, wanted.phases, strict=True):
        assert ours.passes == theirs.passes
        assert ours.compute_ns == pytest.approx(theirs.compute_ns, abs=10)
        assert ours.beside_bytes == theirs.beside_bytes
        assert [(use.group, use.index, use.compute_ns, use.num_runs) for use in ours.uses[0].layers] == [
            (use.group, use.index, use.compute_ns, 0) for use in theirs.uses[0].layers
        ]


def test_only_what_repeats_with_the_steps_is_scaled_to_those_of_the_workload() -> None:
    found = model_of(flux_inputs(24, steps=28))
    assert [phase.passes for phase in found.phases] == [1, 1, 28, 1]
    assert found.compute_ns == pytest.approx(flux_model(24, steps=28).compute_ns, abs=100)


def test_computing_is_what_was_measured_without_waiting(build: Build) -> None:
    specs = build.specs()
    current = build.placement(specs)
    record = build.record(specs, current, compute_ns=10 * MS)
    waited = tuple(replace(one, wait_ns=one.duration_ns - 7 * MS) if one.active else one for one in record.phases)
    inputs = build.inputs(cap=2**40, records=(replace(record, phases=waited),))
    assert predict(inputs, build.resident(specs)).compute_ns == pytest.approx(3 * 7 * MS, abs=10)
    # A record that tells nothing of waits: the transfers that its placement makes are taken off, as ever.
    inputs = build.inputs(cap=2**40, records=(record,))
    assert predict(inputs, build.resident(specs)).compute_ns == pytest.approx((1 + 4 + 1) * 10 * MS, abs=10)


def test_layers_that_nobody_timed_share_the_time_by_their_bytes(build: Build) -> None:
    specs = build.specs()
    current = build.placement(specs)
    found = model_of(build.inputs(cap=2**40, records=(build.record(specs, current, compute_ns=80 * MS),)))
    layers = next(use for phase in found.phases for use in phase.uses if use.component == "transformer").layers
    assert [layer.compute_ns for layer in layers] == [10 * MS] * 8


def test_layers_come_in_the_order_in_which_they_ran(build: Build) -> None:
    specs = build.specs()
    order = tuple(("blocks", index) for index in (7, 0, 3))
    counts = {"transformer": {"blocks": (4, 0, 0, 4, 0, 0, 0, 8)}}
    record = build.record(specs, build.placement(specs), layer_order={"transformer": order}, layer_uses=counts)
    found = model_of(build.inputs(cap=2**40, records=(record,)))
    (use,) = next(phase for phase in found.phases if phase.name == "transformer").uses
    assert [(layer.index, layer.num_runs) for layer in use.layers] == [(7, 8), (0, 0), (3, 0)]


def test_a_decoder_that_runs_tile_by_tile_does_not_run_more_often_with_more_steps(build: Build) -> None:
    specs = build.specs()
    current = build.placement(specs)

    def tiled(record: RequestRecord, num: int) -> RequestRecord:
        return replace(record, uses=(*record.uses[:-1], ("vae", num)))

    large = tiled(build.record(specs, current), 9)
    small = tiled(build.record(specs, current, workload=replace(build.shape, width=256)), 4)
    target = replace(build.shape, steps=28)
    both = model_of(build.inputs(cap=2**40, records=(small, large), workload=target))
    assert {phase.name: phase.passes for phase in both.phases} == {"encoder": 1, "transformer": 28, "vae": 9}
    # From one shape alone nobody could tell.
    assert loops(large.uses, steps=4, target_steps=28)[-1].target_passes == 57


def test_a_component_that_nothing_reached_runs_at_every_step_without_computing(build: Build) -> None:
    specs = (*build.specs(), build.spec("second", 2**30, layers=(2**28,) * 3))
    record = build.record(specs, build.placement(specs), skip=("second",))
    found = model_of(build.inputs(cap=2**40, specs=specs, records=(record,), workload=replace(build.shape, steps=9)))
    assert (found.phases[-1].name, found.phases[-1].passes, found.phases[-1].compute_ns) == ("second", 9, 0)


def test_without_a_success_the_request_that_came_farthest_tells_what_runs(build: Build) -> None:
    specs = build.specs()
    whole = build.record(specs, build.placement(specs))
    failed = build.failed(whole, last="use:transformer")
    first = build.failed(whole, last="use:encoder")
    found = model_of(build.inputs(cap=2**40, records=(first, failed), workload=replace(build.shape, steps=6)))
    assert [(phase.name, phase.passes) for phase in found.phases] == [("encoder", 1), ("transformer", 6), ("vae", 6)]
    assert found.compute_ns == 0
    nothing = model_of(build.inputs(cap=2**40, records=(), workload=replace(build.shape, steps=6)))
    assert [phase.passes for phase in nothing.phases] == [6, 6, 6]


def test_a_record_of_a_placement_that_is_not_given_is_refused() -> None:
    inputs = flux_inputs(24)
    with pytest.raises(ValueError, match="which is not given"):
        RequestModel.from_records(
            inputs.specs, inputs.records, inputs.workload, inputs.link, 1, placements=[all_resident(flux_model(24))]
        )


def test_a_layer_that_runs_in_some_passes_only_streams_as_often(build: Build) -> None:
    specs = build.specs()
    streams = ComponentPlacement(mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PINNED, num_slots=2)
    current = build.placement(specs, transformer=streams)
    bytes_moved = []
    for times in (4, 2):
        uses = {"transformer": {"blocks": (4,) * 7 + (times,)}}
        record = build.record(specs, current, layer_uses=uses, kind=RequestKind.BASELINE)
        inputs = build.inputs(cap=2**40, current=current, records=(record,))
        bytes_moved.append(predict(inputs, current).to_device_bytes)
    assert bytes_moved[0] - bytes_moved[1] == 2 * 50 * 2**20
