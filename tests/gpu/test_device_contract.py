"""What every device promises, on the emulated one and, where there is one, on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from residency.errors import SettingsError
from residency.gpu.cells import aligned, storage_of_part
from residency.gpu.cuda import CudaDevice
from residency.gpu.device import Device, is_out_of_memory
from residency.gpu.emulated import EmulatedDevice
from residency.gpu.host_memory import allocate

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 2**20


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device: Device = EmulatedDevice() if request.param == "emulated" else CudaDevice()
    device.empty_cache()
    device.reset_peaks()
    yield device
    device.limit(device.reading().total_bytes)
    device.close()


def host_bytes(nbytes: int, *, seed: int = 0) -> torch.UntypedStorage:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    storage = allocate(nbytes)
    storage.copy_(values.untyped_storage())
    return storage


def as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 4 * MIB + 3])
def test_what_is_uploaded_comes_back_bit_for_bit(device: Device, pinned: bool, nbytes: int) -> None:
    source = host_bytes(nbytes)
    if pinned:
        assert device.pin(source)
    uploaded = device.upload(source, pinned=pinned)
    device.synchronize()
    back = device.download(uploaded)
    device.unpin(source)
    assert torch.equal(as_tensor(back), as_tensor(source))
    assert device.moved_bytes() == (nbytes, nbytes)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("sizes", [(700, 4 * MIB + 3, 1), (512, 0, 9)])
def test_what_lies_packed_is_uploaded_as_one_and_comes_back_bit_for_bit(
    device: Device, pinned: bool, sizes: tuple[int, ...]
) -> None:
    whole = host_bytes(sum(map(aligned, sizes)))
    content, start, parts = as_tensor(whole), 0, list[torch.Tensor]()
    for nbytes in sizes:
        parts.append(content[start : start + nbytes])
        start += aligned(nbytes)
    assert not pinned or device.pin(whole)
    sources = [storage_of_part(part) if part.numel() else allocate(0) for part in parts]
    copies = device.upload_all([(source, pinned) for source in sources], whole=content)
    device.synchronize()
    assert [copy.nbytes() for copy in copies] == list(sizes)
    for copy, part in zip(copies, parts, strict=True):
        assert device.holds(copy) or not part.numel()
        assert torch.equal(as_tensor(device.download(copy)), part)
    assert device.moved_bytes()[0] == sum(sizes)
    device.unpin(whole)


def test_a_download_fills_the_given_storage(device: Device) -> None:
    uploaded = device.upload(host_bytes(1000), pinned=False)
    target = allocate(1000)
    assert device.download(uploaded, into=target) is target
    assert torch.equal(as_tensor(target), as_tensor(host_bytes(1000)))


def test_a_download_into_another_size_is_refused(device: Device) -> None:
    uploaded = device.upload(host_bytes(1000), pinned=False)
    with pytest.raises(ValueError, match="1000 bytes cannot be copied into one of 999 bytes"):
        device.download(uploaded, into=allocate(999))


def test_only_what_was_uploaded_is_held(device: Device) -> None:
    source = host_bytes(1000)
    uploaded = device.upload(source, pinned=False)
    assert device.holds(uploaded)
    assert not device.holds(source)
    assert not device.holds(device.download(uploaded))


def test_an_upload_is_counted_until_it_is_dropped(device: Device) -> None:
    before = device.memory()
    uploaded = device.upload(host_bytes(4 * MIB), pinned=False)
    during = device.memory()
    assert during.allocated_bytes == before.allocated_bytes + 4 * MIB
    assert during.reserved_bytes >= during.allocated_bytes
    del uploaded
    after = device.memory()
    assert after.allocated_bytes == before.allocated_bytes
    assert after.allocated_peak_bytes == during.allocated_bytes
    device.reset_peaks()
    assert device.memory().allocated_peak_bytes == before.allocated_bytes


def test_results_of_kernels_are_counted_until_they_are_dropped(device: Device) -> None:
    before_bytes = device.memory().allocated_bytes
    with device.running():
        ones = torch.ones(MIB, device=device.torch_device)
        total = ones * 2 + 1
        del ones
    assert device.memory().allocated_bytes == before_bytes + 4 * MIB
    del total
    assert device.memory().allocated_bytes == before_bytes


def test_past_the_cap_torch_out_of_memory_is_raised_and_nothing_is_kept(device: Device) -> None:
    source = host_bytes(64 * MIB)
    device.empty_cache()
    before = device.memory()
    device.limit(before.reserved_bytes + 32 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 64.00 MiB") as caught:
        device.upload(source, pinned=False)
    assert is_out_of_memory(caught.value)
    assert device.memory().allocated_bytes == before.allocated_bytes
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 64.00 MiB"), device.running():
        torch.empty(64 * MIB, dtype=torch.uint8, device=device.torch_device)
    assert device.memory().allocated_bytes == before.allocated_bytes
    assert device.holds(device.upload(host_bytes(16 * MIB), pinned=False))


def test_a_cap_can_be_raised_again(device: Device) -> None:
    source = host_bytes(64 * MIB)
    device.empty_cache()
    device.limit(device.memory().reserved_bytes + 32 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        device.upload(source, pinned=False)
    device.limit(device.reading().total_bytes)
    assert device.holds(device.upload(source, pinned=False))


def test_the_reading_tells_the_cap_in_force(device: Device) -> None:
    total_bytes = device.reading().total_bytes
    # What others hold of a real device is not in the cap; the emulated one is all ours.
    assert 0.9 * total_bytes < device.reading().cap_bytes <= total_bytes
    device.limit(total_bytes // 2)
    assert device.reading().cap_bytes == total_bytes // 2


@pytest.mark.parametrize("beyond", [True, False])
def test_an_absurd_cap_is_refused_and_changes_nothing(device: Device, beyond: bool) -> None:
    before = device.reading()
    with pytest.raises(SettingsError, match="give a size above 0 and at most that of the device"):
        device.limit(before.total_bytes + 1 if beyond else 0)
    assert device.reading() == before


def test_weights_uploaded_in_inference_mode_are_no_inference_tensors(device: Device) -> None:
    layer = torch.nn.Linear(4, 4)
    with torch.inference_mode(), device.running():
        uploaded = device.upload(layer.weight.untyped_storage(), pinned=False)
        with device.moving():
            layer.weight.data = torch.empty(0, device=device.torch_device).set_(uploaded, 0, (4, 4), (4, 1))
            layer.bias.data = layer.bias.data.to(device.torch_device)
    assert not layer.weight.is_inference()
    with device.running():
        result = layer(torch.ones(1, 4, device=device.torch_device))
        result.sum().backward()
    assert layer.weight.grad is not None


def test_running_and_moving_nest_in_any_order(device: Device) -> None:
    with device.running(), device.moving(), device.running(), device.moving():
        pass
    before_bytes = device.memory().allocated_bytes
    with device.running(), device.running():
        with device.moving():
            pass
        with device.running():
            pass
        kept = torch.ones(MIB, device=device.torch_device)
    assert device.memory().allocated_bytes == before_bytes + kept.nbytes


def test_pinning_twice_and_unpinning_twice_are_no_ops(device: Device) -> None:
    storage = host_bytes(3 * MIB + 5)
    assert device.pin(storage)
    assert device.pin(storage)
    device.unpin(storage)
    device.unpin(storage)
    assert device.pin(storage)
    device.unpin(storage)
    assert torch.equal(as_tensor(storage), as_tensor(host_bytes(3 * MIB + 5)))


def test_the_link_is_measured_once_and_every_speed_is_positive(device: Device) -> None:
    before = device.memory().allocated_bytes
    reading = device.measure_link()
    speeds = (
        reading.to_device_pinned,
        reading.to_device_pageable,
        reading.to_host_pinned,
        reading.to_host_pageable,
    )
    assert all(speed > 0 for speed in speeds)
    assert device.measure_link() is reading or device.measure_link() == reading
    assert device.memory().allocated_bytes == before
    assert device.moved_bytes() == (0, 0)


def test_the_clock_advances_with_work(device: Device) -> None:
    started_ns = device.now_ns()
    with device.running():
        torch.ones(MIB, device=device.torch_device).sum()
    device.synchronize()
    assert device.now_ns() > started_ns


def test_closing_twice_is_a_no_op(device: Device) -> None:
    device.close()
    device.close()
    with device.running():
        torch.ones(1, device=device.torch_device)


def test_several_uploads_are_copies_of_their_own_size_and_are_given_back(device: Device) -> None:
    sources = [host_bytes(1000), host_bytes(0), host_bytes(513, seed=1)]
    before = device.memory().allocated_bytes
    copies = device.upload_all([(source, False) for source in sources])
    device.synchronize()
    assert [copy.nbytes() for copy in copies] == [1000, 0, 513]
    assert all(torch.equal(as_tensor(device.download(c)), as_tensor(s)) for s, c in zip(sources, copies, strict=True))
    assert all(copy.nbytes() == 0 or device.holds(copy) for copy in copies)
    last = copies.pop()
    copies.clear()
    assert torch.equal(as_tensor(device.download(last)), as_tensor(sources[-1]))
    del last
    assert device.memory().allocated_bytes == before


def test_several_uploads_that_do_not_fit_leave_nothing(device: Device) -> None:
    device.limit(64 * MIB)
    before = device.memory().allocated_bytes
    half = allocate(40 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        device.upload_all([(half, False), (half, False)])
    assert device.memory().allocated_bytes == before


def test_a_part_of_a_block_is_device_memory_of_its_own_size_that_is_counted_once(device: Device) -> None:
    before = device.memory().allocated_bytes
    block = device.allocate(2 * MIB)
    taken = device.memory().allocated_bytes
    part = device.part(block, 512, 1000)
    assert (part.nbytes(), part.data_ptr() - block.data_ptr()) == (1000, 512)
    assert device.holds(part) and device.part(block, 0, 0).nbytes() == 0
    assert device.memory().allocated_bytes == taken >= before + 2 * MIB
    del block
    assert device.memory().allocated_bytes == taken  # The part keeps it alive.
    del part
    assert device.memory().allocated_bytes == before


def test_a_block_that_does_not_fit_leaves_nothing(device: Device) -> None:
    device.limit(64 * MIB)
    before = device.memory().allocated_bytes
    with pytest.raises(torch.OutOfMemoryError):
        device.allocate(80 * MIB)
    assert device.memory().allocated_bytes == before


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_ahead_end_before_what_waits_for_them(device: Device, pinned: bool) -> None:
    sources = [host_bytes(4 * MIB, seed=seed) for seed in range(3)]
    for source in sources if pinned else []:
        assert device.pin(source)
    block = device.allocate(4 * MIB)
    seen = []
    free = device.mark()
    for source in sources:
        # One block for all: the next copy into it may not begin before this one was read.
        ready = device.copy_ahead([(block, as_tensor(source), pinned)], after=[free])
        device.wait_for(ready)
        with device.running():
            seen.append(block.to(torch.int32))
        free = device.mark()
    device.synchronize()
    for source, found in zip(sources, seen, strict=True):
        assert torch.equal(found.cpu(), as_tensor(source).to(torch.int32))
        device.unpin(source)
    assert device.moved_bytes() == (3 * 4 * MIB, 0)


def test_marks_of_one_queue_are_in_order_and_time_passes_between_them(device: Device) -> None:
    first = device.mark(timed=True)
    with device.running():
        torch.ones(MIB, device=device.torch_device).sum()
    second = device.mark(timed=True)
    device.synchronize()
    assert first.queue == second.queue and first.order < second.order
    assert device.elapsed_ns(first, second) > 0
    assert not device.is_capturing()
