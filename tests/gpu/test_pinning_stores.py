"""Pinning real host stores by threads: the same values, real page locks, and no memory left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from residency.gpu.cuda import CudaDevice
from residency.gpu.emulated import EmulatedDevice
from residency.gpu.host_memory import booked_against_kernel
from residency.gpu.pinning import pin_all
from residency.gpu.storage import HostStore

if TYPE_CHECKING:
    from pathlib import Path

    from residency.gpu.device import Device

MIB = 2**20


def layers(toys: Any, device: Device, num_layers: int) -> tuple[Any, list[HostStore]]:
    net = toys.net(width=512, num_blocks=num_layers)
    return net, [HostStore(block.modules, device) for block in net.blocks]


def test_real_stores_are_pinned_and_compute_the_same(toys: Any, device: EmulatedDevice, tmp_path: Path) -> None:
    net, stores = layers(toys, device, 6)
    value = toys.value(512)
    with device.moving():
        expected = net(value)
    assert pin_all(stores, device, lock_path=tmp_path / "lock") == sum(store.packed_bytes for store in stores)
    assert all(store.pinned_bytes == store.num_bytes for store in stores)
    with device.moving():
        assert torch.equal(net(value), expected)


@pytest.mark.gpu
def test_what_threads_registered_is_page_locked_for_cuda(toys: Any, tmp_path: Path) -> None:
    device = CudaDevice()
    net, stores = layers(toys, device, 6)
    expected = [weight.clone() for weight in net.blocks.parameters()]
    assert pin_all(stores, device, lock_path=tmp_path / "lock") == sum(store.packed_bytes for store in stores)
    assert all(weight.is_pinned() for weight in net.blocks.parameters())
    for store in stores:
        store.onload()
    on_device = [weight.cpu() for weight in net.blocks.parameters()]
    assert all(torch.equal(*pair) for pair in zip(on_device, expected, strict=True))
    for store in stores:
        store.offload()
        store.unpin()
    assert not any(weight.is_pinned() for weight in net.blocks.parameters())
    device.close()


def test_fifty_refused_rounds_leave_no_memory_behind(toys: Any, tmp_path: Path) -> None:
    # Of six layers of 1 MiB the second is refused, with its copy and those behind it in flight.
    device = EmulatedDevice(pin_limit_bytes=2 * MIB)
    _, stores = layers(toys, device, 6)
    held = []
    for _ in range(50):
        with pytest.raises(MemoryError):
            pin_all(stores, device, lock_path=tmp_path / "lock")
        for store in stores:
            store.unpin()
        held.append(booked_against_kernel(0).anonymous_bytes)
    assert sum(store.pinned_bytes for store in stores) == 0
    assert max(held[40:]) - max(held[5:15]) < 2 * MIB
