"""The same rounds on a CUDA device: real memory, real streams, real time."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

import residency
from residency.gpu.devices import close_devices, open_device
from residency.gpu.placement import Mode

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu
WIDTH = 8192  # 0.25 GiB a layer in single precision: 0.25, 1.5 and 0.75 GiB in all
CAP_BYTES = 2 * 2**30 + 5 * 2**27


@pytest.fixture
def cuda() -> Iterator[Any]:
    """The CUDA device under a cap that all the weights together do not fit."""
    device = open_device("cuda", cap_bytes=CAP_BYTES)
    yield device
    gc.collect()
    torch.cuda.empty_cache()
    close_devices()
    torch.cuda.set_per_process_memory_fraction(1.0)


def attach(worker: Any, tiny: Any, cuda: Any, **options: Any) -> residency.Manager:
    worker.pipeline = tiny.make_pipeline(WIDTH, "cuda")
    options = {"device": cuda, **options}
    manager: residency.Manager = worker.attach(fresh=False, warmup=worker.pipeline.request, **options)
    return manager


def test_a_round_commits_and_the_next_start_restores_the_same_bits(worker: Any, tiny: Any, cuda: Any) -> None:
    first = attach(worker, tiny, cuda)
    committed = first.start()
    assert committed.decision is residency.Decision.COMMITTED, committed.reason
    assert any(one.mode is not Mode.COMPONENT_OFFLOAD for one in committed.placement.components.values())
    output = worker.pipeline.request(tiny.WORKLOAD).cpu()
    assert torch.cuda.max_memory_reserved() <= CAP_BYTES
    first.detach()
    assert {p.device.type for m in worker.pipeline.modules.values() for p in m.parameters()} == {"cpu"}
    restored = attach(worker, tiny, cuda).start()
    assert restored.decision is residency.Decision.RESTORED, restored.reason
    assert restored.placement == committed.placement
    assert restored.num_probes == 0
    assert torch.equal(worker.pipeline.request(tiny.WORKLOAD).cpu(), output)


def test_frozen_weights_are_never_copied_back(worker: Any, tiny: Any, cuda: Any) -> None:
    attach(worker, tiny, cuda).start()
    to_host_bytes = cuda.moved_bytes()[1]
    for _ in range(3):
        worker.pipeline.request(tiny.WORKLOAD)
    assert cuda.moved_bytes()[1] == to_host_bytes


def test_memory_returns_to_what_it_was_after_detach(worker: Any, tiny: Any, cuda: Any) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    manager = attach(worker, tiny, cuda)
    manager.start()
    worker.pipeline.request(tiny.WORKLOAD)
    manager.detach()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_a_real_out_of_memory_in_validation_rolls_back(worker: Any, tiny: Any, cuda: Any) -> None:
    manager = attach(worker, tiny, cuda)
    initial = manager._setup.initial

    def fill(shape: Any) -> None:
        if manager.placement != initial:
            torch.empty(CAP_BYTES, dtype=torch.uint8, device="cuda")

    worker.pipeline.fail = fill
    report = manager.start()
    assert report.decision is residency.Decision.ROLLED_BACK
    assert report.placement == initial
    worker.pipeline.fail = None
    assert worker.pipeline.request(tiny.WORKLOAD).shape == (1, 64, 3 * WIDTH)


def test_pinned_host_copies_are_page_locked_and_released(worker: Any, tiny: Any, cuda: Any) -> None:
    manager = attach(worker, tiny, cuda)
    report = manager.start()
    pinned = [one for one in report.placement.components.values() if one.tier is residency.HostTier.PINNED]
    assert pinned, "a calibrated placement on a real link pins what it moves"
    assert manager._pipeline.pinned_bytes > 0
    manager.detach()
    assert not any(p.is_pinned() for m in worker.pipeline.modules.values() for p in m.parameters())
