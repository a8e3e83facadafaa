"""What only the CUDA device promises: real page locks, drained errors, and the driver's facts."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import torch

from residency.gpu import cuda, cuda_pins
from residency.gpu.cuda import CudaDevice, driver_version
from residency.gpu.host_memory import allocate
from residency.gpu.storage import HostStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 2**20
GIB = 2**30


class Driver:
    """The calls of the CUDA runtime that page-lock memory, on a host without one; `interrupt` names the next to raise.

    As a signal would, the interrupt comes after the call has done its work.
    """

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.refusal = 0
        self.interrupt = ""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.refusal:
            return self.refusal
        if address in self.registered:
            return 712
        self.registered.add(address)
        self._maybe_interrupt("register")
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.registered:
            return 713
        self.registered.remove(address)
        self._maybe_interrupt("unregister")
        return 0

    def synchronize(self, device: torch.device) -> None:
        self._maybe_interrupt("synchronize")

    def _maybe_interrupt(self, call: str) -> None:
        if call == self.interrupt:
            self.interrupt = ""
            raise KeyboardInterrupt


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the driver says of memory, in place of a card's."""
    figures = {"free": 70 * GIB, "total": 80 * GIB, "reserved": 0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (figures["free"], figures["total"]))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: figures["reserved"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    return figures


@pytest.fixture
def driver(memory: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_pins, "_runtime", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", driver.synchronize)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda_pins.CudaPins, "_drain_errors", lambda device: None)  # It launches a kernel.
    return driver


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.limit(device.reading().total_bytes)
    device.close()


def touched(nbytes: int) -> torch.UntypedStorage:
    storage = allocate(nbytes)
    as_tensor(storage).fill_(7)
    return storage


def as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def test_the_driver_version_is_read_from_the_kernel_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(cuda, "_DRIVER_FILE", file)
    for line, version in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue Sep  9 2025", "580.159.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)", "580.95.05"),
    ):
        file.write_text(f"{line}\nGCC version:  gcc version 12.2.0\n", encoding="utf-8")
        assert driver_version() == version


def test_without_a_kernel_module_the_driver_version_is_still_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_DRIVER_FILE", tmp_path / "missing")
    assert driver_version().split()[0] in {"unknown", "cuda"}


@pytest.mark.parametrize(
    ("free", "total", "reserved", "cap"),
    [
        (70 * GIB, 80 * GIB, 0, 70 * GIB),
        (70 * GIB + 5 * MIB, 80 * GIB, 0, 70 * GIB),
        (50 * GIB + 900 * MIB, 80 * GIB, 20 * GIB + 100 * MIB, 70 * GIB),
        (2 * GIB, 80 * GIB, 0, 2 * GIB),
        (2 * GIB - 1, 80 * GIB, 0, 2 * GIB - 1),
        (1_000, 2_000, 500, 1_500),
    ],
)
def test_without_a_limit_the_cap_is_what_this_process_could_take_in_whole_gib(
    memory: dict[str, int], free: int, total: int, reserved: int, cap: int
) -> None:
    memory.update(free=free, total=total, reserved=reserved)
    reading = CudaDevice().reading()
    assert (reading.cap_bytes, reading.total_bytes) == (cap, total)


def test_without_a_limit_the_cap_is_that_of_the_opening_whatever_is_taken_later(memory: dict[str, int]) -> None:
    device = CudaDevice()
    memory["free"] = 10 * GIB
    assert device.reading().cap_bytes == 70 * GIB


def test_a_limit_stays_as_given_and_is_enforced(memory: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: fractions.append(part))
    assert CudaDevice(cap_bytes=80 * GIB).reading().cap_bytes == 80 * GIB
    assert CudaDevice(cap_bytes=10 * GIB + 1).reading().cap_bytes == 10 * GIB + 1
    assert fractions == [1.0, (10 * GIB + 1) / (80 * GIB)]
    CudaDevice()
    assert len(fractions) == 2


def test_an_interrupt_while_pinning_leaves_nothing_registered_that_is_not_booked(driver: Driver) -> None:
    device, storage = CudaDevice(), touched(MIB)
    driver.interrupt = "register"
    with pytest.raises(KeyboardInterrupt):
        device.pin(storage)
    assert not driver.registered
    assert device.pin(storage)
    assert driver.registered == {storage.data_ptr()}
    device.close()
    assert not driver.registered


@pytest.mark.parametrize("call", ["synchronize", "unregister"])
def test_an_interrupt_while_unpinning_keeps_the_memory_until_it_is_unpinned(
    driver: Driver, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    device, storage = CudaDevice(), touched(MIB)
    alive = weakref.ref(storage)
    device.pin(storage)
    driver.interrupt = call
    with pytest.raises(KeyboardInterrupt):
        device.unpin(storage)
    del storage
    gc.collect()
    assert alive() is not None
    device.close()
    gc.collect()
    assert alive() is None
    assert not driver.registered and not caplog.records


def test_a_storage_whose_unpinning_was_interrupted_can_be_pinned_again(driver: Driver) -> None:
    device, storage = CudaDevice(), touched(MIB)
    device.pin(storage)
    driver.interrupt = "unregister"
    with pytest.raises(KeyboardInterrupt):
        device.unpin(storage)
    assert device.pin(storage)
    assert driver.registered == {storage.data_ptr()}
    device.close()


def test_a_store_whose_pinning_was_interrupted_has_nothing_registered(driver: Driver) -> None:
    device = CudaDevice()
    layer = torch.nn.Linear(4, 4).requires_grad_(False)
    store = HostStore(lambda: layer.modules(), device)
    driver.interrupt = "register"
    with pytest.raises(KeyboardInterrupt):
        store.pin()
    assert not driver.registered and not store.pinned_bytes
    store.pin()
    assert len(driver.registered) == 1 and store.pinned_bytes == store.num_bytes
    store.unpin()
    assert not driver.registered


def test_a_refused_pin_says_no_more_than_is_true(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.refusal = 2
    assert not CudaDevice().pin(touched(4096))
    assert caplog.messages == ["the host refuses to page-lock 4096 bytes (CUDA error 2)"]


@pytest.mark.gpu
def test_without_a_limit_the_cap_leaves_out_what_others_hold(device: CudaDevice) -> None:
    reading = device.reading()
    assert 0 < reading.cap_bytes < reading.total_bytes
    assert CudaDevice().reading().cap_bytes == reading.cap_bytes


@pytest.mark.gpu
def test_pinning_twice_locks_once(device: CudaDevice) -> None:
    storage = touched(MIB)
    assert device.pin(storage) and device.pin(storage)
    device.unpin(storage)
    assert not as_tensor(storage).is_pinned()


@pytest.mark.gpu
def test_memory_that_torch_has_pinned_is_left_to_torch(device: CudaDevice) -> None:
    tensor = torch.ones(MIB, dtype=torch.uint8).pin_memory()
    assert device.pin(tensor.untyped_storage())
    device.unpin(tensor.untyped_storage())
    assert tensor.is_pinned()


@pytest.mark.gpu
def test_a_pinned_storage_is_page_locked_and_then_not(device: CudaDevice) -> None:
    storage = touched(5 * MIB)
    assert not as_tensor(storage).is_pinned()
    assert device.pin(storage)
    assert as_tensor(storage).is_pinned()
    device.unpin(storage)
    assert not as_tensor(storage).is_pinned()


@pytest.mark.gpu
def test_a_storage_too_large_for_one_registration_stays_pageable(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_pins, "PIN_BYTES_MAX", MIB)
    storage = touched(MIB + 1)
    assert not device.pin(storage)
    assert not as_tensor(storage).is_pinned()


@pytest.mark.gpu
def test_a_refused_pin_leaves_no_error_behind(device: CudaDevice) -> None:
    storage = touched(3 * 4096)
    # The driver refuses to register a page twice.
    assert int(cuda_pins._runtime().cudaHostRegister(storage.data_ptr() + 4096, 4096, 0)) == 0
    assert not device.pin(storage)
    assert torch.ones(8, device=device.torch_device).sum().item() == 8.0
    assert int(cuda_pins._runtime().cudaHostUnregister(storage.data_ptr() + 4096)) == 0
    assert device.pin(storage)
    device.unpin(storage)


@pytest.mark.gpu
def test_closing_unpins_everything(device: CudaDevice) -> None:
    storage = touched(MIB)
    device.pin(storage)
    device.close()
    assert not as_tensor(storage).is_pinned()


@pytest.mark.gpu
def test_weights_on_the_host_are_refused_by_torch_itself(device: CudaDevice) -> None:
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="same device"), device.running():
        layer(torch.ones(1, 4, device=device.torch_device))


@pytest.mark.gpu
def test_the_link_is_measured_under_a_small_cap(device: CudaDevice) -> None:
    device.empty_cache()
    device.limit(device.memory().reserved_bytes + 32 * MIB)
    reading = device.measure_link()
    assert reading.to_device_pinned > 2**30
    assert reading.to_host_pageable > 2**28


@pytest.mark.gpu
def test_an_upload_follows_the_kernels_of_its_stream(device: CudaDevice) -> None:
    source = touched(64 * MIB)
    assert device.pin(source)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        uploaded = device.upload(source, pinned=True)
        assert int(as_tensor(uploaded).sum(dtype=torch.int64)) == 7 * 64 * MIB
    device.unpin(source)


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [GIB // 8 + 7, 33 * MIB, MIB + 1])
def test_pageable_memory_that_goes_through_buffers_arrives_bit_for_bit(device: CudaDevice, nbytes: int) -> None:
    sources = [touched(nbytes) for _ in range(2)]
    for seed, source in enumerate(sources):
        as_tensor(source).copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=_seeded(seed)))
    copies = device.upload_all([(source, False) for source in sources])
    # Whoever changes the source afterwards does not change the copy.
    expected = [as_tensor(source).clone() for source in sources]
    for source in sources:
        as_tensor(source).zero_()
    for copy, values in zip(copies, expected, strict=True):
        assert torch.equal(as_tensor(device.download(copy)), values)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
