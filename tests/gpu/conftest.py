"""Small seeded modules and an emulated device for the tests of the mechanism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from residency.gpu.emulated import EmulatedDevice
from residency.gpu.placement import ComponentPlacement, HostTier, Mode

if TYPE_CHECKING:
    from collections.abc import Iterator

OFFLOAD = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PAGEABLE)
OFFLOAD_PINNED = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED)
LAYERWISE = ComponentPlacement(mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PAGEABLE, num_slots=1)
LAYERWISE_PINNED = ComponentPlacement(
    mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PINNED, resident_layers={"blocks": (1, 2)}, num_slots=1
)


class Block(nn.Module):
    """A linear layer, a persistent buffer that it reads, and one that is not in the state dict."""

    shift: torch.Tensor
    table: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("shift", torch.randn(width))
        self.register_buffer("table", torch.randn(width), persistent=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(value) + self.shift + self.table)


class Net(nn.Module):
    """Four blocks between two tied projections; `order` is the order in which the blocks run."""

    def __init__(self, width: int = 8, num_blocks: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.tail = nn.Linear(width, width)
        self.tail.weight = self.head.weight
        self.order = list(range(num_blocks))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.head(value)
        for index in self.order:
            value = self.blocks[index](value)
        result: torch.Tensor = self.tail(value)
        return result

    def encode(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(value)
        return result


class Toys:
    """What the tests are made of."""

    offload, offload_pinned = OFFLOAD, OFFLOAD_PINNED
    layerwise, layerwise_pinned = LAYERWISE, LAYERWISE_PINNED
    every_placement = (OFFLOAD, OFFLOAD_PINNED, LAYERWISE, LAYERWISE_PINNED)
    block = Block

    def net(self, *, seed: int = 0, width: int = 8, num_blocks: int = 4) -> Net:
        """Return a net with seeded weights that wants no gradients."""
        torch.manual_seed(seed)
        return Net(width, num_blocks).requires_grad_(False).eval()

    def value(self, width: int = 8) -> torch.Tensor:
        """Return an input that no device has seen."""
        return torch.randn(2, width, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def toys() -> Toys:
    return Toys()


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """An emulated device with room for everything here."""
    device = EmulatedDevice(total_bytes=2**24)
    yield device
    device.close()
