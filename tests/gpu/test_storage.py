"""Host stores: every storage once, exactly bound, copied back only if changed, restored on any exception."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from residency.gpu.emulated import EmulatedDevice
from residency.gpu.storage import HostStore

if TYPE_CHECKING:
    from collections.abc import Iterator


def store_of(module: nn.Module, device: EmulatedDevice) -> HostStore:
    return HostStore(lambda: module.modules(), device)


def geometry(module: nn.Module) -> dict[str, object]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: (id(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.data_ptr()) for name, t in named}


def run(device: EmulatedDevice, module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    with device.running(), torch.no_grad():
        result: torch.Tensor = module(value)
        return result


def test_a_tied_weight_is_moved_once_and_stays_tied(toys: Any, device: EmulatedDevice) -> None:
    net = toys.net(num_blocks=1)
    store = store_of(net, device)
    store.onload()
    unique = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in [*net.parameters(), *net.buffers()]}
    assert device.moved_bytes()[0] == sum(unique.values()) == store.num_bytes == device.memory().allocated_bytes
    assert net.head.weight.data_ptr() == net.tail.weight.data_ptr()


def test_two_parameters_over_one_storage_stay_views_of_one_storage(device: EmulatedDevice) -> None:
    base = torch.arange(12.0)
    module: Any = nn.Module()
    module.register_buffer("whole", base)
    module.register_buffer("turned", base.view(3, 4).t())
    module.part = nn.Parameter(base[5:9], requires_grad=False)
    before, store = geometry(module), store_of(module, device)
    store.onload()
    assert device.moved_bytes()[0] == 48
    assert module.turned.stride() == (1, 4) and module.part.storage_offset() == 5
    with torch.no_grad():
        module.part.add_(1)
    assert torch.equal(module.whole[5:9], module.part)
    store.offload()
    assert geometry(module) == before
    assert torch.equal(module.whole[5:9], torch.arange(5.0, 9.0) + 1)


def test_buffers_leave_the_device_with_the_parameters(toys: Any, device: EmulatedDevice) -> None:
    block = toys.block(8)
    store = store_of(block, device)
    store.onload()
    store.offload()
    assert device.memory().allocated_bytes == 0
    assert not any(device.holds(tensor.untyped_storage()) for tensor in [*block.parameters(), *block.buffers()])
    assert store.num_bytes == sum(t.nbytes for t in [*block.parameters(), *block.buffers()])


def test_a_weight_on_the_host_makes_a_kernel_fail_until_it_is_loaded(toys: Any, device: EmulatedDevice) -> None:
    block, value = toys.block(8), toys.value()
    store = store_of(block, device)
    with pytest.raises(RuntimeError, match="same device"):
        run(device, block, value)
    store.onload()
    run(device, block, value)


def test_unchanged_weights_are_never_copied_back_and_memory_does_not_grow(toys: Any, device: EmulatedDevice) -> None:
    net, value = toys.net(), toys.value()
    expected = net(value).clone()
    store, before = store_of(net, device), geometry(net)
    for _ in range(50):
        store.onload()
        assert torch.equal(run(device, net, value), expected)
        store.offload()
    assert device.moved_bytes()[1] == 0
    assert geometry(net) == before
    assert store.host_bytes == store.num_bytes


@pytest.mark.parametrize("inference", [False, True])
def test_a_weight_changed_in_place_on_the_device_is_copied_back_alone(
    toys: Any, device: EmulatedDevice, *, inference: bool
) -> None:
    block = toys.block(8)
    store = store_of(block, device)
    expected = block.linear.weight.clone() + 1
    store.onload()
    with device.running(), torch.inference_mode(inference), torch.no_grad():
        block.linear.weight.add_(1)
        block.table.mul_(2)
    store.offload()
    assert device.moved_bytes()[1] == block.linear.weight.nbytes + block.table.nbytes
    assert torch.equal(block.linear.weight, expected)
    store.onload()
    assert torch.equal(block.linear.weight, expected)
    store.offload()
    assert device.moved_bytes()[1] == block.linear.weight.nbytes + block.table.nbytes


def test_a_weight_changed_while_away_is_what_the_device_gets_next(toys: Any, device: EmulatedDevice) -> None:
    block = toys.block(8)
    store = store_of(block, device)
    store.pin()
    with torch.no_grad():
        block.linear.weight.data.copy_(torch.full((8, 8), 3.0))
    store.onload()
    assert torch.equal(block.linear.weight, torch.full((8, 8), 3.0))


def test_out_of_memory_in_mid_load_leaves_everything_on_the_host(toys: Any) -> None:
    net = toys.net()
    device = EmulatedDevice(total_bytes=2**20, cap_bytes=700)
    store, before = store_of(net, device), geometry(net)
    with pytest.raises(torch.OutOfMemoryError):
        store.onload()
    assert device.memory().allocated_bytes == 0
    assert geometry(net) == before
    assert store.is_idle and not store.on_device


class InterruptedDevice(EmulatedDevice):
    """Raises KeyboardInterrupt at the n-th call of a method that moves or locks bytes."""

    def __init__(self, *, method: str, at: int) -> None:
        super().__init__(total_bytes=2**24)
        self._method, self._left = method, at

    def _count(self, method: str) -> None:
        if method == self._method:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt

    def upload(self, source: torch.UntypedStorage, *, pinned: bool) -> torch.UntypedStorage:
        self._count("upload")
        return super().upload(source, pinned=pinned)

    def download(
        self, source: torch.UntypedStorage, *, into: torch.UntypedStorage | None = None
    ) -> torch.UntypedStorage:
        self._count("download")
        return super().download(source, into=into)

    def pin(self, storage: torch.UntypedStorage) -> bool:
        self._count("pin")
        return super().pin(storage)


@pytest.mark.parametrize("at", [1, 3, 9])
def test_an_interrupt_in_mid_load_leaves_everything_on_the_host(toys: Any, at: int) -> None:
    net = toys.net()
    device = InterruptedDevice(method="upload", at=at)
    store, before = store_of(net, device), geometry(net)
    with pytest.raises(KeyboardInterrupt):
        store.onload()
    assert geometry(net) == before and device.memory().allocated_bytes == 0
    store.onload()
    assert store.on_device


@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupt_in_mid_write_back_loses_no_change(toys: Any, at: int) -> None:
    net = toys.net()
    device = InterruptedDevice(method="download", at=at)
    store = store_of(net, device)
    store.onload()
    with torch.no_grad():
        for weight in [*net.parameters(), *net.buffers()]:
            weight.add_(1)
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        store.offload()
    store.offload()
    assert store.is_idle and device.memory().allocated_bytes == 0
    assert all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())


def test_pinning_copies_once_and_unpinning_keeps_the_memory(toys: Any, device: EmulatedDevice) -> None:
    block = toys.block(8)
    expected = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    store = store_of(block, device)
    store.pin()
    pinned = geometry(block)
    assert store.pinned_bytes == store.host_bytes == store.num_bytes
    store.unpin()
    store.pin()
    store.unpin()
    assert geometry(block) == pinned
    assert store.pinned_bytes == 0
    assert all(torch.equal(tensor, expected[name]) for name, tensor in block.state_dict().items())


def test_a_refused_pin_is_a_memory_error_and_unpin_takes_the_rest_back(toys: Any) -> None:
    block = toys.block(8)
    device = EmulatedDevice(total_bytes=2**20, pin_limit_bytes=300)
    store = store_of(block, device)
    with pytest.raises(MemoryError, match="refuses to page-lock"):
        store.pin()
    store.unpin()
    assert store.pinned_bytes == 0
    store.onload()
    assert store.on_device


def test_a_released_host_copy_is_made_again_when_it_is_needed(toys: Any, device: EmulatedDevice) -> None:
    block = toys.block(8)
    expected = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    store = store_of(block, device)
    store.pin()
    store.onload()
    store.release_host()
    assert store.host_bytes == store.pinned_bytes == 0
    store.pin()
    store.offload()
    assert store.pinned_bytes == store.num_bytes
    assert device.moved_bytes()[1] == store.num_bytes
    assert all(torch.equal(tensor, expected[name]) for name, tensor in block.state_dict().items())


def test_weights_found_on_the_device_get_their_host_copies_by_download(toys: Any, device: EmulatedDevice) -> None:
    block, value = toys.block(8), toys.value()
    expected = run(device, block, value).clone()  # the ledger now knows every weight as device memory
    store = store_of(block, device)
    assert store.on_device and store.host_bytes == 0
    store.offload()
    assert device.moved_bytes() == (0, store.num_bytes)
    store.onload()
    assert torch.equal(run(device, block, value), expected)


def add_parameter(block: Any) -> Iterator[nn.Parameter]:
    block.linear.register_parameter("extra", nn.Parameter(torch.ones(8), requires_grad=False))
    yield block.linear.extra


def add_child(block: Any) -> Iterator[nn.Parameter]:
    block.adapter = nn.Linear(8, 2).requires_grad_(False)
    yield from block.adapter.parameters()


def replace_parameter(block: Any) -> Iterator[nn.Parameter]:
    block.linear.weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)
    yield block.linear.weight


def rebind(block: Any) -> Iterator[nn.Parameter]:
    block.linear.weight.data = torch.ones(8, 8)
    yield block.linear.weight


def replace_buffer(block: Any) -> Iterator[torch.Tensor]:
    block.table = torch.ones(8)
    yield block.table


@pytest.mark.parametrize("change", [add_parameter, add_child, replace_parameter, rebind, replace_buffer])
@pytest.mark.parametrize("while_loaded", [False, True])
def test_weights_added_or_replaced_from_outside_are_adopted(
    toys: Any, device: EmulatedDevice, change: Any, *, while_loaded: bool
) -> None:
    block = toys.block(8)
    store = store_of(block, device)
    if while_loaded:
        store.onload()
    new = list(change(block))
    expected = [tensor.clone() for tensor in new]
    store.onload()
    assert all(device.holds(tensor.untyped_storage()) for tensor in [*block.parameters(), *block.buffers()])
    store.offload()
    assert not any(device.holds(tensor.untyped_storage()) for tensor in [*block.parameters(), *block.buffers()])
    assert device.memory().allocated_bytes == 0
    assert all(torch.equal(tensor, value) for tensor, value in zip(new, expected, strict=True))
    assert store.num_bytes == sum(t.nbytes for t in [*block.parameters(), *block.buffers()])
