"""What only the CUDA device promises: real page locks, drained errors, and the driver's facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from residency.gpu import cuda
from residency.gpu.cuda import CudaDevice, driver_version
from residency.gpu.host_memory import allocate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 2**20


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
    monkeypatch.setattr(cuda, "PIN_BYTES_MAX", MIB)
    storage = touched(MIB + 1)
    assert not device.pin(storage)
    assert not as_tensor(storage).is_pinned()


@pytest.mark.gpu
def test_a_refused_pin_leaves_no_error_behind(device: CudaDevice) -> None:
    storage = touched(3 * 4096)
    # The driver refuses to register a page twice.
    assert int(cuda._runtime().cudaHostRegister(storage.data_ptr() + 4096, 4096, 0)) == 0
    assert not device.pin(storage)
    assert torch.ones(8, device=device.torch_device).sum().item() == 8.0
    assert int(cuda._runtime().cudaHostUnregister(storage.data_ptr() + 4096)) == 0
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
