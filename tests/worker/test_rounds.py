"""Rounds from end to end: real weights, a real journal, a modelled clock."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

import residency
from residency.errors import PlacementInfeasible
from residency.gpu.placement import Mode
from residency.gpu.records import RequestKind
from residency.journal.reader import JournalReader
from residency.journal.verify import verify
from residency.statemachine.states import TRANSITIONS


def served(worker: Any) -> torch.Tensor:
    output: torch.Tensor = worker.pipeline.request(
        residency.Workload(width=128, height=128, frames=1, steps=6, batch=1)
    )
    return output


def test_first_start_calibrates_and_commits_a_faster_placement(worker: Any) -> None:
    manager = worker.attach()
    before = worker.view() if worker.journal.exists() else None
    report = manager.start()
    assert before is None
    assert report.decision is residency.Decision.COMMITTED
    assert manager.ready
    initial = {one.mode for one in manager._setup.initial.components.values()}
    assert initial == {Mode.COMPONENT_OFFLOAD}
    assert any(one.mode is not Mode.COMPONENT_OFFLOAD for one in report.placement.components.values())
    assert report.num_probes == 1


def test_every_transition_is_journaled_and_legal(worker: Any) -> None:
    worker.attach().start()
    legal = {(trigger.value, source.value, target.value) for trigger, source, target in TRANSITIONS}
    rows = [e for e in worker.events() if e.type == "transition"]
    assert [row.trigger for row in rows] == ["plan", "apply", "validate", "commit"]
    assert all((row.trigger, row.from_state, row.to_state) in legal for row in rows)
    assert all(a.to_state == b.from_state for a, b in itertools.pairwise(rows))


def test_every_effect_lies_between_its_intent_and_its_outcome(worker: Any) -> None:
    worker.attach().start()
    effects = [e for e in worker.events() if e.type.startswith("effect.")]
    assert effects
    for intent, outcome in zip(effects[::2], effects[1::2], strict=True):
        assert (intent.type, outcome.type) == ("effect.intent", "effect.outcome")
        assert outcome.causation == intent.event_id
        assert json.loads(outcome.payload)["result"] == "applied"


def test_second_start_restores_without_a_probe_and_serves_the_same(worker: Any) -> None:
    first = worker.attach()
    committed = first.start()
    output = served(worker)
    first.detach()
    second = worker.attach()
    restored = second.start()
    assert restored.decision is residency.Decision.RESTORED
    assert restored.placement == committed.placement
    assert restored.num_probes == 0
    assert restored.num_requests == 1
    assert torch.equal(served(worker), output)


def test_everything_that_fits_is_kept(worker: Any) -> None:
    report = worker.attach(cap=64 * 2**20).start()
    assert report.decision is residency.Decision.KEPT
    assert {one.mode for one in report.placement.components.values()} == {Mode.RESIDENT}


def test_a_kept_placement_is_restored_next_time(worker: Any) -> None:
    worker.attach(cap=64 * 2**20).start()
    worker.managers[0].detach()
    assert worker.attach(cap=64 * 2**20).start().decision is residency.Decision.RESTORED


def test_another_cap_is_another_fingerprint_and_calibrates(worker: Any) -> None:
    worker.attach().start()
    worker.managers[0].detach()
    report = worker.attach(cap=64 * 2**20).start()
    assert report.decision is residency.Decision.KEPT
    assert report.num_requests > 1


def fails_in_validation(worker: Any, error: BaseException) -> None:
    """Raise in every request after the weights have moved."""
    initial = worker.managers[-1].placement

    def fail(shape: Any) -> None:
        if worker.managers[-1].placement != initial:
            raise error

    worker.pipeline.fail = fail


def test_out_of_memory_in_validation_rolls_back_and_blames_the_plan(worker: Any) -> None:
    manager = worker.attach()
    manager._setup.worker.place(manager._setup.initial)
    fails_in_validation(worker, torch.OutOfMemoryError("emulated out of memory"))
    report = manager.start()
    assert report.decision is residency.Decision.ROLLED_BACK
    assert report.placement == manager._setup.initial
    (one,) = worker.view().rounds
    assert one.state == "rolled-back"
    assert one.outcome is not None
    assert one.outcome["verdict"]["blames"] == "plan"
    worker.pipeline.fail = None
    assert served(worker).shape == (1, 64, 768)


def test_a_request_that_fails_in_validation_is_no_verdict_on_the_plan(worker: Any) -> None:
    manager = worker.attach()
    manager._setup.worker.place(manager._setup.initial)
    fails_in_validation(worker, ValueError("a step count of 4 is not supported"))
    report = manager.start()
    assert report.decision is residency.Decision.ROLLED_BACK
    (one,) = worker.view().rounds
    assert one.outcome is not None
    assert one.outcome["verdict"]["blames"] == "request"
    manager.detach()
    # The next start tries the same plan again: it was never found wanting.
    assert worker.attach().start().decision is residency.Decision.COMMITTED


def test_changed_output_rolls_back(worker: Any) -> None:
    manager = worker.attach()
    initial = manager._setup.initial
    request = worker.pipeline.request

    def warmup(shape: Any) -> torch.Tensor:
        output: torch.Tensor = request(shape)
        return output if manager.placement == initial else output + 1e-6

    manager._setup.worker._warmup = warmup
    report = manager.start()
    assert report.decision is residency.Decision.ROLLED_BACK
    assert "output" in report.reason


def test_changed_output_within_a_declared_tolerance_commits(worker: Any) -> None:
    manager = worker.attach(tolerance=1e-3)
    initial = manager._setup.initial
    request = worker.pipeline.request

    def warmup(shape: Any) -> torch.Tensor:
        output: torch.Tensor = request(shape)
        return output if manager.placement == initial else output + 1e-6

    manager._setup.worker._warmup = warmup
    assert manager.start().decision is residency.Decision.COMMITTED


def test_a_random_warmup_is_not_judged_by_its_output(worker: Any) -> None:
    manager = worker.attach()
    request = worker.pipeline.request
    manager._setup.worker._warmup = lambda shape: request(shape) + torch.rand(())
    assert manager.start().decision is residency.Decision.COMMITTED


@pytest.mark.parametrize("error", [ValueError("no such prompt"), None], ids=["raises", "returns nothing"])
def test_a_broken_warmup_leaves_the_worker_gated_on_its_initial_placement(worker: Any, error: Exception | None) -> None:
    def warmup(shape: Any) -> None:
        if error is not None:
            raise error

    manager = worker.attach(warmup=warmup)
    report = manager.start()
    assert report.decision is residency.Decision.GATED
    assert "warmup" in report.reason
    assert report.error is not None
    assert report.placement == manager._setup.initial
    assert served(worker).shape == (1, 64, 768)


def test_rollback_warms_the_restored_placement_again(worker: Any) -> None:
    manager = worker.attach()
    manager._setup.worker.place(manager._setup.initial)
    fails_in_validation(worker, torch.OutOfMemoryError("emulated out of memory"))
    manager.start()
    records = [json.loads(e.payload)["record"] for e in worker.events() if e.type == "measured"]
    assert records[-1]["kind"] == RequestKind.REWARM.value
    assert records[-1]["succeeded"]


def test_calibration_and_validation_run_the_same_number_of_steps(worker: Any) -> None:
    """A pipeline that rejects fewer steps than it was calibrated with must not lose a correct plan."""

    def refuse(shape: Any) -> None:
        if shape.steps < 4:
            raise ValueError("at least 4 steps are needed")

    manager = worker.attach()
    worker.pipeline.fail = refuse
    assert manager.start().decision is residency.Decision.COMMITTED
    assert {shape.steps for shape in worker.pipeline.calls} == {4}


def test_a_cap_below_the_largest_component_is_refused_at_attach(worker: Any) -> None:
    with pytest.raises(PlacementInfeasible, match="'denoiser' .*needs at least 1.6 MiB, the cap is 1.0 MiB"):
        worker.attach(cap=2**20, modes={"denoiser": "component-offload"})


def test_the_journal_of_every_outcome_verifies(worker: Any) -> None:
    worker.attach().start()
    worker.managers[0].detach()
    worker.attach().start()
    reader = JournalReader.open(worker.journal)
    assert [finding for finding in verify(reader) if not finding.is_note] == []
    reader.close()


def test_a_plan_is_validated_at_the_default_shape_even_if_only_a_smaller_one_could_be_measured(worker: Any) -> None:
    manager = worker.attach()

    def too_large(shape: Any) -> None:
        if shape.width == 128:
            raise torch.OutOfMemoryError("emulated out of memory")

    worker.pipeline.fail = too_large
    report = manager.start()
    assert report.decision is not residency.Decision.COMMITTED
    records = [json.loads(e.payload)["record"] for e in worker.events() if e.type == "measured"]
    assert all(not one["succeeded"] for one in records if one["workload"]["width"] == 128)
