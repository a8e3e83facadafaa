"""What a worker does when its host, its journal or its own warmup is not as planned."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

import residency
from residency import sources
from residency.errors import PipelineBusy, SettingsError, UnknownComponent
from residency.gpu.emulated import EmulatedDevice
from residency.gpu.placement import HostTier


def tiers(report: residency.Report) -> set[HostTier | None]:
    return {one.tier for one in report.placement.components.values()}


def test_another_bound_on_pinned_memory_is_another_fingerprint(worker: Any) -> None:
    first = worker.attach().start()
    assert HostTier.PINNED in tiers(first)
    worker.managers[-1].detach()
    second = worker.attach(host_ram="64KiB").start()
    assert second.decision is residency.Decision.COMMITTED
    assert second.num_requests > 1
    assert worker.managers[-1]._pipeline.pinned_bytes <= 64 * 2**10


def test_a_host_that_refuses_to_page_lock_gets_a_plan_without_it(worker: Any) -> None:
    manager = worker.attach()
    worker.device._pin_limit_bytes = 0
    report = manager.start()
    assert report.decision is residency.Decision.COMMITTED, report.reason
    assert HostTier.PINNED not in tiers(report)
    assert manager._pipeline.pinned_bytes == 0


def test_a_remembered_placement_that_can_no_longer_be_pinned_is_not_blamed(worker: Any) -> None:
    assert HostTier.PINNED in tiers(worker.attach().start())
    worker.managers[-1].detach()
    manager = worker.attach()
    worker.device._pin_limit_bytes = 0
    report = manager.start()
    assert report.decision is residency.Decision.COMMITTED, report.reason
    blamed = [one.outcome["verdict"]["blames"] for one in worker.view().rounds if one.state == "rolled-back"]
    assert blamed and "plan" not in blamed


def test_a_placement_file_that_cannot_be_pinned_is_a_clear_error_and_moves_nothing(worker: Any, tmp_path: Any) -> None:
    worker.attach().start()
    worker.managers[-1].export_placement(tmp_path / "placement.json")
    worker.managers[-1].detach()
    manager = worker.attach(placement=tmp_path / "placement.json")
    worker.device._pin_limit_bytes = 0
    with pytest.raises(SettingsError, match="limit on locked memory"):
        manager.start()
    assert worker.device.memory().allocated_bytes == 0


def test_an_identity_of_an_unknown_component_is_refused(worker: Any) -> None:
    with pytest.raises(UnknownComponent, match="no component 'weights'"):
        worker.attach(identity={"weights": "revision 1"})


def test_a_restore_compares_outputs_only_if_every_component_is_identified(worker: Any) -> None:
    worker.attach(identity={"encoder": "revision 1"}).start()
    worker.managers[-1].detach()
    manager = worker.attach(identity={"encoder": "revision 1"})
    with torch.no_grad(), worker.device.moving():
        worker.pipeline.modules["decoder"].layer.weight.mul_(2)
    report = manager.start()
    assert report.decision is residency.Decision.RESTORED
    assert "output not judged" in report.reason


def test_a_remembered_placement_that_cannot_be_read_is_measured_anew(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.attach().start()
    worker.managers[-1].detach()

    class Newer:
        @staticmethod
        def from_bytes(data: bytes) -> None:
            raise msgspec.ValidationError("Invalid enum value 'a-mode-of-tomorrow'")

    monkeypatch.setattr(sources, "Placement", Newer)
    assert worker.attach().start().decision is residency.Decision.COMMITTED


def test_a_warmup_that_also_fails_after_the_way_back_leaves_a_worker_that_serves(worker: Any) -> None:
    manager = worker.attach()
    manager._setup.worker.place(manager._setup.initial)
    initial, plain, moved = manager.placement, worker.pipeline.request, []

    def warmup(shape: Any) -> torch.Tensor:
        moved.extend([True] if manager.placement != initial else [])
        if moved:
            raise PipelineBusy(holder="somebody", waited_s=1.0)
        output: torch.Tensor = plain(shape)
        return output

    manager._setup.worker._warmup = warmup
    report = manager.start()
    assert report.decision is residency.Decision.ROLLED_BACK
    assert report.placement == initial
    assert manager.ready


def test_a_suspect_is_not_judged_by_the_output_of_other_weights(worker: Any) -> None:
    """Names and shapes are all that is known without an identity; the next process may hold other weights."""
    manager = worker.attach(identity=None)

    class Vanish(Exception):
        pass

    def vanish(state: str) -> None:
        if state == "validating":
            raise Vanish

    manager._status.leaving = vanish
    # As a death leaves it: no rollback, no word, the lock gone with the process.
    manager._epoch.end = lambda **_: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("residency.statemachine.round.Round._end_early", lambda self, error: (_ for _ in ()).throw(error))
        with pytest.raises(Vanish):
            manager.start()
    manager._epoch._stream_lock.close()
    again = worker.attach(identity=None)
    with torch.no_grad(), worker.device.moving():
        worker.pipeline.modules["decoder"].layer.weight.mul_(2)
    report = again.start()
    assert worker.view().rounds[-1].source == "suspect"
    assert report.decision is residency.Decision.COMMITTED, report.reason


def test_a_way_back_that_fails_is_tried_once(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = worker.attach()
    manager.start()
    monkeypatch.setattr(type(manager._pipeline), "check", _refuse)
    monkeypatch.setenv("RESIDENCY_DISABLE", "1")
    before = len(worker.events())
    for _ in range(3):
        with manager.request():
            pass
    # The round's beginning, and no more of it at the second and third request.
    assert len(worker.events()) - before <= 2
    assert isinstance(worker.device, EmulatedDevice)


def _refuse(*_: Any) -> None:
    raise RuntimeError("the device is busy with something else")


@pytest.mark.parametrize("call", ["start", "detach"])
def test_a_warmup_that_calls_back_into_the_manager_is_refused_at_once(worker: Any, call: str) -> None:
    manager = worker.attach()
    plain = worker.pipeline.request

    def warmup(shape: Any) -> torch.Tensor:
        getattr(manager, call)()
        output: torch.Tensor = plain(shape)
        return output

    manager._setup.worker._warmup = warmup
    report = manager.start()
    assert f"the round whose warmup calls {call}()" in report.reason
    assert report.placement == manager.placement == manager._setup.initial


def test_a_worker_that_no_placement_lets_serve_does_not_start(worker: Any) -> None:
    manager = worker.attach()

    def fail(shape: Any) -> None:
        raise torch.OutOfMemoryError("emulated out of memory")

    worker.pipeline.fail = fail
    with pytest.raises(residency.ResidencyError, match="no placement fits") as caught:
        manager.start()
    assert caught.value.exit_code == 72
    assert not manager.ready


def test_what_a_placement_ran_out_of_memory_with_is_known_to_the_next(worker: Any) -> None:
    """The initial placement fails early, so that its failure tells little of what a request needs beside weights."""
    manager = worker.attach(cap=int(1.55 * 2**20))

    def need_more(shape: Any) -> None:
        torch.ones(2**17, device=worker.pipeline.device)

    worker.pipeline.fail = need_more
    assert manager.start().decision is residency.Decision.COMMITTED
    first, second = worker.view().rounds
    assert (first.state, second.state) == ("rolled-back", "committed")
    known = [one["placement_digest"] for one in second.plan["inputs"]["records"]]
    assert first.placement in known


def test_phases_that_nothing_reached_refuse_no_placement_where_nothing_runs(worker: Any) -> None:
    manager = worker.attach(cap=int(1.7 * 2**20))
    worker.pipeline.fail = lambda shape: torch.ones(117_964, device=worker.pipeline.device)
    report = manager.start()
    assert report.decision is residency.Decision.COMMITTED
    assert any(one.plan["relaxed"] for one in worker.view().rounds)


def test_a_detach_that_is_refused_as_busy_leaves_the_kill_switch_working(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = worker.attach()
    manager.start()
    assert manager.placement != manager._setup.initial
    with manager.request(), pytest.raises(PipelineBusy):
        manager.detach()
    monkeypatch.setenv("RESIDENCY_DISABLE", "1")
    with manager.request():
        pass
    assert manager.placement == manager._setup.initial


@pytest.mark.parametrize("name", [5, None, ("a",), "\udcff", ""])
def test_a_component_name_that_no_journal_could_hold_is_refused(worker: Any, name: object) -> None:
    modules = {name: worker.pipeline.modules["encoder"]}
    with pytest.raises(SettingsError, match="is no text"):
        residency.attach(modules, journal=worker.journal, device=worker.device)
