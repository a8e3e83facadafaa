"""One component: layer groups, every mode and the way between them, and nothing half done."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from residency.errors import ModeUnavailable, PipelineBusy
from residency.gpu.component import ManagedComponent
from residency.gpu.emulated import EmulatedDevice
from residency.gpu.layers import find_layer_groups
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode


def run(device: EmulatedDevice, component: ManagedComponent, value: torch.Tensor) -> torch.Tensor:
    component.load()
    try:
        with device.running(), torch.no_grad():
            result: torch.Tensor = component.module(value)
            return result
    finally:
        component.evict()


def pointers(module: nn.Module) -> dict[str, int]:
    return {name: t.data_ptr() for name, t in [*module.named_parameters(), *module.named_buffers()]}


def test_a_spec_counts_every_storage_once_and_buffers_with_their_layers(toys: Any, device: EmulatedDevice) -> None:
    net = toys.net(num_blocks=3)
    spec = ManagedComponent("net", net, device).spec
    block_bytes = (64 + 8 + 8 + 8) * 4
    assert spec.total_bytes == (64 + 8 + 8) * 4 + 3 * block_bytes
    assert [(group.name, group.layer_bytes) for group in spec.groups] == [("blocks", (block_bytes,) * 3)]
    assert spec.modes == (Mode.RESIDENT, Mode.COMPONENT_OFFLOAD, Mode.LAYERWISE_OFFLOAD)
    assert spec.entry_points == ("forward", "encode")


def test_the_weights_digest_tells_shapes_and_ties_but_not_where_weights_are(toys: Any, device: EmulatedDevice) -> None:
    component = ManagedComponent("net", toys.net(), device)
    digest = component.spec.weights_digest
    component.place(RESIDENT)
    assert (
        component.spec.weights_digest == digest == ManagedComponent("net", toys.net(seed=3), device).spec.weights_digest
    )
    untied = toys.net()
    untied.tail.weight = nn.Parameter(untied.head.weight.clone(), requires_grad=False)
    assert ManagedComponent("net", untied, device).spec.weights_digest != digest


def test_lists_that_cannot_be_streamed_are_no_groups(toys: Any) -> None:
    net = toys.net()
    net.mixed = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
    net.single = nn.ModuleList([nn.Linear(2, 2)])
    net.twice = nn.ModuleList([nn.Linear(2, 2)] * 2)
    net.empty = nn.ModuleList([nn.Identity(), nn.Identity()])
    net.sharing = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    net.sharing[0].weight = net.head.weight
    net.whole = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    net.whole._compiled_call_impl = net.whole._call_impl
    assert list(find_layer_groups(net)) == ["blocks"]


def test_layers_that_are_compiled_themselves_can_be_streamed(toys: Any) -> None:
    net = toys.net()
    for block in net.blocks:
        block._compiled_call_impl = block._call_impl
    assert list(find_layer_groups(net)) == ["blocks"]


def test_a_list_inside_a_layer_of_a_group_is_no_group_but_one_inside_a_mixed_list_is(toys: Any) -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    uniform, mixed = nn.Module(), nn.Module()
    uniform.stages = nn.ModuleList([Stage(), Stage()])
    mixed.stages = nn.ModuleList([Stage(), nn.Linear(2, 2)])
    assert list(find_layer_groups(uniform)) == ["stages"]
    assert list(find_layer_groups(mixed)) == ["stages.0.inner"]


def test_every_move_between_two_placements_keeps_values_bytes_and_hooks(toys: Any, device: EmulatedDevice) -> None:
    value = toys.value()
    component = ManagedComponent("net", toys.net(), device)
    component.place(RESIDENT)
    expected = run(device, component, value).clone()
    spec = component.spec
    placements = (RESIDENT, *toys.every_placement)
    for before, after in itertools.product(placements, placements):
        component.place(before)
        component.place(after)
        inputs = value.nbytes
        assert torch.equal(run(device, component, value), expected), (before, after)
        assert device.memory().allocated_bytes - inputs == spec.device_bytes(after, in_use=False)
        assert component.placement == after
        streamed = 4 - len(after.resident_layers.get("blocks", ())) if after.num_slots else 0
        assert component.num_hooks == streamed
        pinned = spec.total_bytes - spec.device_bytes(after, in_use=False) if after.tier is HostTier.PINNED else 0
        assert component.pinned_bytes == pinned


def test_without_a_window_one_streamed_layer_at_a_time_is_on_the_device(toys: Any, device: EmulatedDevice) -> None:
    component = ManagedComponent("net", toys.net(width=64), device)
    component.place(toys.layerwise_pinned)
    device.reset_peaks()
    run(device, component, toys.value(64))
    spec = component.spec
    limit = spec.device_bytes(toys.layerwise_pinned, in_use=True) + max(spec.groups[0].layer_bytes)
    activations = 16 * 2 * 64 * 4
    assert limit <= device.memory().allocated_peak_bytes <= limit + activations


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [0, 0, 3], [1], [2, 0, 2, 0]])
def test_layers_in_another_order_skipped_or_repeated_are_served(
    toys: Any, device: EmulatedDevice, order: list[int]
) -> None:
    net, value = toys.net(), toys.value()
    net.order = order
    with torch.no_grad():
        expected = net(value).clone()
    component = ManagedComponent("net", net, device)
    component.place(toys.layerwise)
    assert torch.equal(run(device, component, value), expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_a_layer_leaves_what_was_before_the_call(
    toys: Any, device: EmulatedDevice, error: type[BaseException]
) -> None:
    net, value = toys.net(), toys.value()
    component = ManagedComponent("net", net, device)
    component.place(toys.layerwise_pinned)
    idle, before = device.memory().allocated_bytes, pointers(net)

    def fail(value: torch.Tensor) -> torch.Tensor:
        raise error

    component.place(RESIDENT)
    net.blocks[3].linear.forward = fail
    component.place(toys.layerwise_pinned)
    with pytest.raises(error):
        run(device, component, value)
    del net.blocks[3].linear.forward
    assert device.memory().allocated_bytes - value.nbytes == idle
    streamed = [name for name in before if name.startswith(("blocks.0", "blocks.3"))]
    assert all(pointers(net)[name] == before[name] for name in streamed)
    run(device, component, value)


def test_a_weight_changed_in_a_streamed_layer_survives(toys: Any, device: EmulatedDevice) -> None:
    net, value = toys.net(), toys.value()
    component = ManagedComponent("net", net, device)
    component.place(toys.layerwise)
    forward = net.blocks[0].linear.forward

    def count(value: torch.Tensor) -> torch.Tensor:
        net.blocks[0].shift.add_(1)
        result: torch.Tensor = forward(value)
        return result

    net.blocks[0].linear.forward = count
    before = net.blocks[0].shift.clone()
    for _ in range(3):
        run(device, component, value)
    assert torch.equal(net.blocks[0].shift, before + 1 + 1 + 1)


def test_an_adapter_added_to_a_streamed_layer_comes_and_goes_with_it(toys: Any, device: EmulatedDevice) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down = base, nn.Linear(8, 8).requires_grad_(False)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.base(value) + self.down(value)
            return result

    net, value = toys.net(), toys.value()
    component = ManagedComponent("net", net, device)
    component.place(toys.layerwise)
    net.blocks[0].linear = Adapted(net.blocks[0].linear)
    got = run(device, component, value).clone()
    assert device.memory().allocated_bytes - value.nbytes == component.spec.device_bytes(toys.layerwise, in_use=False)
    component.restore()
    with torch.no_grad():
        assert torch.equal(net(value.clone()), got)


def test_residents_that_a_move_does_not_concern_keep_their_addresses(toys: Any, device: EmulatedDevice) -> None:
    net = toys.net()
    component = ManagedComponent("net", net, device)
    component.place(toys.layerwise_pinned)
    before = pointers(net)
    component.place(
        ComponentPlacement(
            mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PINNED, resident_layers={"blocks": (1,)}, num_slots=1
        )
    )
    component.place(toys.layerwise_pinned)
    kept = [name for name in before if not name.startswith("blocks.2")]
    assert all(pointers(net)[name] == before[name] for name in kept)


def test_a_move_that_does_not_fit_leaves_everything_as_it_was(toys: Any) -> None:
    net = toys.net()
    device = EmulatedDevice(total_bytes=2**20, cap_bytes=900)
    component = ManagedComponent("net", net, device)
    component.place(toys.layerwise)
    before, idle = pointers(net), device.memory().allocated_bytes
    with pytest.raises(torch.OutOfMemoryError):
        component.place(RESIDENT)
    assert (component.placement, component.num_hooks) == (toys.layerwise, 4)
    assert (pointers(net), device.memory().allocated_bytes) == (before, idle)


def test_a_refused_pin_leaves_the_component_resident(toys: Any) -> None:
    net, value = toys.net(), toys.value()
    device = EmulatedDevice(total_bytes=2**20, pin_limit_bytes=1000)
    component = ManagedComponent("net", net, device)
    component.place(RESIDENT)
    before = pointers(net)
    with pytest.raises(MemoryError):
        component.place(toys.offload_pinned)
    assert (component.placement, component.pinned_bytes, pointers(net)) == (RESIDENT, 0, before)
    run(device, component, value)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.MAPPED), "mapped file"),
        (
            ComponentPlacement(
                mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PINNED, resident_layers={"blocks": (4,)}, num_slots=1
            ),
            "has 4 layers",
        ),
        (
            ComponentPlacement(
                mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PINNED, resident_layers={"other": (0,)}, num_slots=1
            ),
            "'other' has 0 layers",
        ),
    ],
)
def test_a_placement_that_it_cannot_take_is_refused_before_anything_moves(
    toys: Any, device: EmulatedDevice, target: ComponentPlacement, reason: str
) -> None:
    component = ManagedComponent("net", toys.net(), device)
    with pytest.raises(ModeUnavailable, match=reason):
        component.place(target)
    assert device.moved_bytes() == (0, 0)


def test_a_component_without_layers_cannot_be_layerwise(toys: Any, device: EmulatedDevice) -> None:
    component = ManagedComponent("block", toys.block(8), device)
    assert Mode.LAYERWISE_OFFLOAD not in component.spec.modes
    with pytest.raises(ModeUnavailable, match="no repeated layers"):
        component.check(toys.layerwise)


def test_a_component_is_not_moved_while_a_call_is_inside(toys: Any, device: EmulatedDevice) -> None:
    component = ManagedComponent("net", toys.net(), device)
    component.users.add(object())
    with pytest.raises(PipelineBusy):
        component.place(RESIDENT)


def test_release_host_keeps_only_what_the_placement_streams(toys: Any, device: EmulatedDevice) -> None:
    component = ManagedComponent("net", toys.net(), device)
    component.place(toys.layerwise_pinned)
    component.release_host()
    spec = component.spec
    assert component.host_bytes == spec.total_bytes - spec.device_bytes(toys.layerwise_pinned, in_use=False)
    component.place(RESIDENT)
    component.release_host()
    assert component.host_bytes == component.pinned_bytes == 0


class Refusing(EmulatedDevice):
    """Raises at the first download, and counts how often its cache is emptied."""

    def __init__(self, *errors: BaseException) -> None:
        super().__init__(total_bytes=2**24)
        self._errors = list(errors)
        self.num_emptied = self._cached_bytes = 0

    def reserve(self, nbytes: int) -> None:
        self._cached_bytes = nbytes

    def unreserved_bytes(self) -> int:
        return super().unreserved_bytes() - self._cached_bytes

    def download(
        self, source: torch.UntypedStorage, *, into: torch.UntypedStorage | None = None
    ) -> torch.UntypedStorage:
        if self._errors:
            raise self._errors.pop()
        return super().download(source, into=into)

    def empty_cache(self) -> None:
        self.num_emptied += 1


@pytest.mark.parametrize("num_changed", [1, 3])
def test_a_part_that_cannot_leave_the_device_does_not_keep_the_others_there(toys: Any, num_changed: int) -> None:
    device = Refusing(MemoryError("no host memory"))
    net = toys.net()
    component = ManagedComponent("net", net, device)
    component.load()
    for block in net.blocks[:num_changed]:
        block.shift.add_(1)  # so that it has to be copied back
    expected = {name: weight.clone() for name, weight in net.state_dict().items()}
    with pytest.raises(MemoryError, match="no host memory"):
        component.evict()
    assert device.memory().allocated_bytes == component.spec.groups[0].layer_bytes[0]
    component.evict()
    assert device.memory().allocated_bytes == 0
    assert all(torch.equal(weight, expected[name]) for name, weight in net.state_dict().items())


@pytest.mark.parametrize(("room", "num_emptied"), [(1.9, 1), (9.0, 0)])
def test_eviction_gives_memory_back_only_where_pieces_of_it_could_keep_the_next_load_out(
    toys: Any, room: float, num_emptied: int
) -> None:
    device = Refusing()
    component = ManagedComponent("net", toys.net(), device)
    component.load()
    allocated_bytes = device.memory().allocated_bytes
    device.limit(round(allocated_bytes * room))
    device.reserve(allocated_bytes)  # what an allocator keeps of the component once it has gone
    component.evict()
    assert device.num_emptied == num_emptied
    component.evict()
    assert device.num_emptied == num_emptied


def test_an_interrupted_eviction_is_finished_before_the_interrupt_is_obeyed(toys: Any) -> None:
    device = Refusing(KeyboardInterrupt())
    net = toys.net()
    component = ManagedComponent("net", net, device)
    component.load()
    net.blocks[0].shift.add_(1)
    with pytest.raises(KeyboardInterrupt):
        component.evict()
    assert device.memory().allocated_bytes == 0


def test_a_component_found_in_parts_on_the_device_is_put_right_by_its_first_move(
    toys: Any, device: EmulatedDevice
) -> None:
    net, value = toys.net(), toys.value()
    with device.running(), torch.no_grad():
        net.head(value)
    component = ManagedComponent("net", net, device)
    assert component.placement == toys.offload
    component.place(toys.offload)
    assert device.memory().allocated_bytes == value.nbytes
    run(device, component, value)
