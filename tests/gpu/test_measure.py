"""What one measured request records, and that measuring leaves nothing behind."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch

from residency.errors import PipelineBusy, WarmupFailed
from residency.gpu.emulated import EmulatedDevice
from residency.gpu.measure import measure_request
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT
from residency.gpu.records import RequestKind, RequestRecord
from residency.gpu.workload import Workload

WIDTH = 64
WORKLOAD = Workload(width=8, height=8, frames=1, steps=4, batch=1)


class Worker:
    """An encoder used once, a denoiser used `steps` times, and a decoder used once."""

    def __init__(self, toys: Any, device: EmulatedDevice) -> None:
        names = ("encoder", "denoiser", "decoder")
        self.nets = {name: toys.net(seed=seed, width=WIDTH) for seed, name in enumerate(names)}
        self.pipeline = ManagedPipeline(self.nets, device=device)
        self._value = toys.value(WIDTH)

    def run(self, steps: int = 4) -> torch.Tensor:
        with torch.no_grad():
            value = self.nets["encoder"](self._value)
            for _ in range(steps):
                value = self.nets["denoiser"](value) * 0.5
            result: torch.Tensor = self.nets["decoder"](value)
            return result

    def measure(self, run: Any = None) -> tuple[RequestRecord, object]:
        return measure_request(
            self.pipeline, run or self.run, kind=RequestKind.PROBE, workload=WORKLOAD, target_steps=28
        )


@pytest.fixture
def worker(toys: Any, device: EmulatedDevice) -> Worker:
    return Worker(toys, device)


def test_phases_uses_and_layer_uses_are_those_of_the_request(worker: Worker) -> None:
    record, output = worker.measure()
    assert [phase.key for phase in record.phases] == [
        "before",
        "use:encoder",
        "after:encoder",
        "use:denoiser",
        "after:denoiser",
        "use:decoder",
        "after:decoder",
    ]
    assert record.uses == (("encoder", 1), ("denoiser", 4), ("decoder", 1))
    assert record.layer_uses["denoiser"] == {"blocks": (4, 4, 4, 4)}
    assert [phase.num_occurrences for phase in record.phases] == [1, 1, 1, 4, 4, 1, 1]
    assert record.phases[3].active == ("denoiser",) and record.phases[4].lingering == "denoiser"
    assert (record.kind, record.workload, record.target_steps) == (RequestKind.PROBE, WORKLOAD, 28)
    assert isinstance(output, torch.Tensor) and record.succeeded


def test_a_use_inside_a_use_is_a_phase_of_both(worker: Worker) -> None:
    outer: Any = worker.nets["encoder"]
    inner = outer.blocks[0].forward
    outer.blocks[0].forward = lambda value: worker.nets["decoder"](inner(value))
    record, _ = worker.measure()
    keys = [phase.key for phase in record.phases]
    assert keys[:4] == ["before", "use:encoder", "use:decoder+encoder", "after:encoder"]
    assert record.phases[1].num_occurrences == 2


def test_peaks_hold_the_weights_in_use_and_durations_add_up(worker: Worker) -> None:
    record, _ = worker.measure()
    total = worker.pipeline.component("encoder").spec.total_bytes
    peaks = {phase.key: phase.allocated_peak_bytes - record.baseline_allocated_bytes for phase in record.phases}
    assert all(total <= peak < 1.5 * total for key, peak in peaks.items() if key != "before")
    assert sum(phase.duration_ns for phase in record.phases) == record.duration_ns > 0
    assert record.allocated_peak_bytes == max(phase.allocated_peak_bytes for phase in record.phases)


def test_bytes_moved_are_counted_for_this_request_only(worker: Worker) -> None:
    worker.run()
    record, _ = worker.measure()
    assert record.to_device_bytes == 3 * worker.pipeline.component("encoder").spec.total_bytes
    assert record.to_host_bytes == 0
    for name in worker.nets:
        worker.pipeline.place(name, RESIDENT)
    assert worker.measure()[0].to_device_bytes == 0


def test_equal_requests_give_equal_records(worker: Worker) -> None:
    worker.measure()
    first, second = worker.measure()[0], worker.measure()[0]
    assert first == second
    assert first.output_digest is not None


def test_hooks_for_measuring_are_gone_afterwards(worker: Worker, toys: Any) -> None:
    worker.pipeline.place("denoiser", toys.layerwise)
    hooks = worker.pipeline.num_hooks
    worker.measure()
    assert worker.pipeline.num_hooks == hooks
    with pytest.raises(WarmupFailed):
        worker.measure(lambda: None)
    assert worker.pipeline.num_hooks == hooks


@pytest.mark.parametrize("minimal", [False, True])
def test_streamed_layers_are_counted_as_often_as_resident_ones(
    toys: Any, device: EmulatedDevice, *, minimal: bool
) -> None:
    net, value = toys.net(), toys.value()
    net.order = [3, 1, 1]
    pipeline = ManagedPipeline({"net": net}, device=device, minimal=minimal)
    for placement in (RESIDENT, toys.layerwise_pinned):
        pipeline.place("net", placement)
        record, _ = measure_request(
            pipeline, lambda: net(value), kind=RequestKind.BASELINE, workload=WORKLOAD, target_steps=4
        )
        assert record.layer_uses["net"] == {"blocks": (0, 2, 0, 1)}
        assert record.uses == (("net", 1),)
    pipeline.detach()


def test_running_out_of_memory_gives_a_failed_record_and_frees_the_activations(toys: Any) -> None:
    device = EmulatedDevice(total_bytes=2**24)
    worker = Worker(toys, device)
    worker.measure()
    idle = device.memory().allocated_bytes
    device.limit(worker.pipeline.component("encoder").spec.total_bytes + 1_000)
    record, output = worker.measure()
    assert output is None and record.output_digest is None
    assert (record.succeeded, record.out_of_memory) == (False, True)
    assert record.error is not None and "out of memory" in record.error
    assert record.phases[-1].key == "after:encoder"
    assert device.memory().allocated_bytes == idle
    device.limit(2**24)
    assert worker.measure()[0].succeeded


def test_any_other_exception_is_a_failed_warmup_that_carries_its_record(worker: Worker) -> None:
    def fail() -> object:
        worker.run()
        raise ValueError("steps must be at least 5")

    with pytest.raises(WarmupFailed, match="raised ValueError: steps must be at least 5") as caught:
        worker.measure(fail)
    record = caught.value.fields["record"]
    assert isinstance(record, RequestRecord)
    assert (record.succeeded, record.out_of_memory) == (False, False)
    assert isinstance(caught.value.__cause__, ValueError)
    assert pickle.loads(pickle.dumps(caught.value)).fields["record"] == record


class Unreadable:
    """An output that looks like a picture, and raises when it is read."""

    mode, size = "RGB", (8, 8)

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def tobytes(self) -> bytes:
        raise self.error


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (None, "returned nothing"),
        (Unreadable(ValueError("closed file")), "returned an output that cannot be read (ValueError: closed file)"),
    ],
)
def test_a_warmup_without_a_readable_output_has_failed_and_carries_its_record(
    worker: Worker, output: object, problem: str
) -> None:
    def run() -> object:
        worker.run()
        return output

    hooks = worker.pipeline.num_hooks
    with pytest.raises(WarmupFailed, match=re.escape(problem)) as caught:
        worker.measure(run)
    record = caught.value.fields["record"]
    assert isinstance(record, RequestRecord)
    assert (record.succeeded, record.out_of_memory, record.output_digest) == (False, False, None)
    assert record.error is not None and problem in record.error
    assert record.phases[-1].key == "after:decoder"
    assert pickle.loads(pickle.dumps(caught.value)).fields["record"] == record
    assert worker.pipeline.num_hooks == hooks
    assert worker.measure()[0].succeeded


def test_an_output_that_does_not_fit_while_it_is_read_ran_out_of_memory(worker: Worker) -> None:
    hooks = worker.pipeline.num_hooks
    record, output = worker.measure(lambda: Unreadable(torch.OutOfMemoryError("CUDA out of memory")))
    assert output is None
    assert (record.succeeded, record.out_of_memory, record.output_digest) == (False, True, None)
    assert worker.pipeline.num_hooks == hooks


def test_an_interrupt_while_the_output_is_read_leaves_no_hooks(worker: Worker) -> None:
    hooks = worker.pipeline.num_hooks
    with pytest.raises(KeyboardInterrupt):
        worker.measure(lambda: Unreadable(KeyboardInterrupt()))
    assert worker.pipeline.num_hooks == hooks
    assert worker.measure()[0].succeeded


def test_errors_of_residency_and_interrupts_pass_through(worker: Worker, device: EmulatedDevice) -> None:
    def busy() -> object:
        raise PipelineBusy(holder="round 2", waited_s=1.0)

    def interrupted() -> object:
        worker.run()
        raise KeyboardInterrupt

    hooks = worker.pipeline.num_hooks
    with pytest.raises(PipelineBusy):
        worker.measure(busy)
    with pytest.raises(KeyboardInterrupt):
        worker.measure(interrupted)
    assert worker.pipeline.num_hooks == hooks
    assert device.memory().allocated_bytes < 2_000
