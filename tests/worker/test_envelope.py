"""Request shapes: several that must fit, and what becomes of a request that is larger than all of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

import residency
from residency.errors import OutsideEnvelope, SettingsError
from residency.gpu.workload import shape_of_call
from residency.statemachine.planner.envelope import Standing

SHAPE = residency.Workload(width=128, height=128, frames=1, steps=6, batch=1)
LARGER = residency.Workload(width=192, height=192, frames=1, steps=6, batch=1)
HUGE = residency.Workload(width=4096, height=4096, frames=1, steps=6, batch=1)
CAP = 3 * 2**20


def request(worker: Any, manager: residency.Manager, shape: residency.Workload) -> None:
    """Begin a request of a shape; what runs in it is small, for the bracket is what is tested."""
    with manager.request(shape):
        worker.pipeline.request(SHAPE)


def counts(manager: residency.Manager) -> dict[str, int]:
    found: dict[str, int] = manager.status()["outside"]["counts"]
    return found


def measured(worker: Any) -> set[tuple[str, int]]:
    """Return kind and width of every request that was measured."""
    records = [json.loads(event.payload)["record"] for event in worker.events() if event.type == "measured"]
    return {(one["kind"], one["workload"]["width"]) for one in records}


def test_every_shape_that_is_given_is_measured_and_planned_for(worker: Any) -> None:
    worker.attach(workload=None, workloads=[SHAPE, LARGER], cap=9 * 2**19).start()
    assert {("probe", 128), ("probe", 192), ("baseline", 128)} <= measured(worker)
    (plan,) = [json.loads(e.payload) for e in worker.events() if e.type == "transition" and e.trigger == "plan"]
    assert [one["width"] for one in plan["inputs"]["workloads"]] == [192]
    assert plan["envelope"]["measured"][-1]["width"] == 192
    assert plan["envelope"]["units_max"] >= 192 * 192


def test_a_new_placement_is_committed_only_once_every_shape_has_run_under_it(worker: Any) -> None:
    report = worker.attach(workload=None, workloads=[SHAPE, LARGER], cap=7 * 2**19).start()
    assert report.decision is residency.Decision.COMMITTED
    assert {("validation", 128), ("validation", 192)} <= measured(worker)


def test_the_first_of_the_shapes_is_the_one_whose_time_counts(worker: Any) -> None:
    manager = worker.attach(workload=SHAPE, workloads=[LARGER, SHAPE], cap=CAP)
    assert (manager._setup.workload, manager._setup.workloads) == (SHAPE, (LARGER,))


def test_other_shapes_are_part_of_the_fingerprint(worker: Any) -> None:
    one, other = worker.attach(), worker.attach(workloads=[LARGER])
    assert one._setup.fingerprint_digest != other._setup.fingerprint_digest
    assert "workloads" not in one._setup.fingerprint


def test_a_request_outside_is_allowed_and_counted_where_nobody_said_otherwise(worker: Any) -> None:
    manager = worker.attach(cap=CAP)
    manager.start()
    request(worker, manager, SHAPE)
    assert sum(counts(manager).values()) == 0
    request(worker, manager, HUGE)
    request(worker, manager, HUGE)
    assert counts(manager)["allowed"] == 2
    manager.detach()
    (stopped,) = [json.loads(event.payload) for event in worker.events() if event.type == "stopped"]
    assert stopped["outside"]["allowed"] == 2


def test_a_request_outside_is_refused_before_anything_runs_if_that_is_asked_for(worker: Any) -> None:
    manager = worker.attach(cap=CAP, outside="refuse")
    manager.start()
    num_calls = len(worker.pipeline.calls)
    with pytest.raises(OutsideEnvelope, match="workloads="):
        request(worker, manager, HUGE)
    assert len(worker.pipeline.calls) == num_calls
    request(worker, manager, SHAPE)
    assert counts(manager)["refused"] == 1


def test_a_request_outside_is_calibrated_for_and_then_served(worker: Any) -> None:
    manager = worker.attach(cap=CAP, outside="recalibrate")
    manager.start()
    envelope = manager._admission.envelope
    assert envelope is not None
    # A little more than what is safe by extrapolation: what is measured needs no such margin.
    width = int(envelope.units_max**0.5) // 16 * 16 + 16
    shape = residency.Workload(width=width, height=width, frames=1, steps=6, batch=1)
    assert envelope.standing(shape) is Standing.OUTSIDE
    before = manager.status()["round"]
    with manager.request(shape):
        worker.pipeline.request(shape)
    assert manager.status()["round"] == before + 1
    assert counts(manager)["recalibrated"] == 1
    with manager.request(shape):
        worker.pipeline.request(shape)
    assert manager.status()["round"] == before + 1


def test_what_cannot_be_calibrated_for_is_refused_and_not_tried_again(worker: Any) -> None:
    manager = worker.attach(cap=CAP, outside="recalibrate")
    manager.start()
    impossible = residency.Workload(width=1024, height=1024, frames=1, steps=6, batch=1)
    for _ in range(2):
        with pytest.raises(OutsideEnvelope):
            request(worker, manager, impossible)
    rounds = manager.status()["round"]
    assert rounds == 2
    assert counts(manager)["refused"] == 2
    request(worker, manager, SHAPE)


def test_a_restored_placement_knows_its_envelope(worker: Any) -> None:
    first = worker.attach(cap=CAP)
    first.start()
    known = first._admission.envelope
    first.detach()
    again = worker.attach(cap=CAP)
    assert again.start().decision is residency.Decision.RESTORED
    assert known is not None and again._admission.envelope == known


def test_a_hint_ranks_placements_for_a_shape_and_promises_nothing(worker: Any) -> None:
    manager = worker.attach(cap=CAP)
    report = manager.start()
    hint = manager.hint(LARGER)
    assert hint.shape == LARGER and hint.ranking
    assert "nothing is moved" in hint.note
    assert any(one.digest == report.placement.digest and one.is_in_force for one in hint.ranking)
    assert manager.placement == report.placement and manager.status()["round"] == report.round


def test_without_a_plan_there_is_no_envelope_and_no_hint(worker: Any) -> None:
    manager = worker.attach(warmup=None)
    manager.start()
    request(worker, manager, HUGE)
    assert manager.status()["outside"]["envelope"] is None
    assert sum(counts(manager).values()) == 0
    with pytest.raises(SettingsError, match="calibrate first"):
        manager.hint(HUGE)


@pytest.mark.parametrize("wrong", [{"outside": "maybe"}, {"workloads": "512x512"}, {"workloads": [(512, 512)]}])
def test_what_is_no_shape_or_no_policy_is_refused(worker: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="pass"):
        worker.attach(**wrong)


def test_a_shape_is_read_from_the_call_of_a_pipeline() -> None:
    asked = shape_of_call({"width": 512, "num_inference_steps": 3, "prompt": ["a", "b"]}, SHAPE)
    assert asked == residency.Workload(width=512, height=128, frames=1, steps=3, batch=2)
    video = shape_of_call({"num_frames": 17, "num_images_per_prompt": 2, "prompt": "a", "height": None}, SHAPE)
    assert video == residency.Workload(width=128, height=128, frames=17, steps=6, batch=2)
