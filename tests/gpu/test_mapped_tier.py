"""Host copies that are mapped files: streamed from where they are, not copied in memory, kept through a commit."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from residency.errors import ModeUnavailable
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode
from residency.gpu.storage import HostStore

if TYPE_CHECKING:
    from pathlib import Path

    from residency.gpu.emulated import EmulatedDevice

WIDTH = 64
MAPPED = ComponentPlacement(
    mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.MAPPED, resident_layers={"blocks": (1,)}, num_slots=2
)
MAPPED_WHOLE = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.MAPPED)


@pytest.fixture
def net(toys: Any, tmp_path: Path) -> Any:
    """A net whose weights are views of a mapped file, as a loader leaves them."""
    net = toys.net(width=WIDTH)
    for block in net.blocks:
        # What is not in the file is small beside what is.
        block.table = torch.randn(WIDTH)
    state = {name: tensor.contiguous() for name, tensor in net.state_dict().items() if name != "tail.weight"}
    save_file(state, tmp_path / "net.safetensors")
    net.load_state_dict(load_file(tmp_path / "net.safetensors"), assign=True, strict=False)
    net.tail.weight = net.head.weight
    return net.requires_grad_(False)


@pytest.mark.parametrize("placement", [MAPPED, MAPPED_WHOLE])
def test_mapped_weights_are_used_from_their_file_and_give_the_same(
    net: Any, toys: Any, device: EmulatedDevice, placement: ComponentPlacement
) -> None:
    value = toys.value(WIDTH)
    with torch.no_grad():
        expected = net(value).clone()
    addresses = [block.linear.weight.data_ptr() for block in net.blocks]
    pipeline = ManagedPipeline({"net": net}, device=device)
    pipeline.place("net", placement)
    for _ in range(3):
        with torch.no_grad(), pipeline.request():
            assert torch.equal(net(value), expected)
    away = [index for index in range(4) if placement.mode is Mode.COMPONENT_OFFLOAD or index != 1]
    assert [net.blocks[index].linear.weight.data_ptr() for index in away] == [addresses[index] for index in away]
    assert pipeline.pinned_bytes == 0


def test_a_commit_keeps_the_mapping_so_that_there_is_a_way_back(net: Any, toys: Any, device: EmulatedDevice) -> None:
    value = toys.value(WIDTH)
    with torch.no_grad():
        expected = net(value).clone()
    pipeline = ManagedPipeline({"net": net}, device=device)
    pipeline.place("net", RESIDENT)
    pipeline.commit()
    pipeline.place("net", MAPPED)
    with torch.no_grad(), pipeline.request():
        assert torch.equal(net(value), expected)
    assert device.moved_bytes()[1] < 4 * WIDTH * 5  # Only what no file holds came back.


def test_a_packed_copy_is_let_go_of_though_the_file_of_an_adapter_stays_mapped(
    toys: Any, device: EmulatedDevice, tmp_path: Path
) -> None:
    block = toys.block(WIDTH)
    store = HostStore(lambda: block.modules(), device)
    store.pin()
    packed = weakref.ref(block.linear.weight.untyped_storage())
    save_file({"adapter": torch.ones(WIDTH, WIDTH)}, tmp_path / "adapter.safetensors")
    block.adapter = torch.nn.Parameter(load_file(tmp_path / "adapter.safetensors")["adapter"], requires_grad=False)
    store.onload()
    store.release_host()
    assert store.host_bytes == 4 * WIDTH**2
    assert packed() is None


def test_weights_that_are_in_no_file_cannot_be_mapped(toys: Any, device: EmulatedDevice) -> None:
    pipeline = ManagedPipeline({"net": toys.net()}, device=device)
    with pytest.raises(ModeUnavailable, match="mapped file"):
        pipeline.place("net", MAPPED)
    assert device.moved_bytes() == (0, 0)
