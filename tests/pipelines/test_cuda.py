"""The three real pipelines on a CUDA device: the same bits under every mode, and an exact way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from residency.gpu.adapters import components_of
from residency.gpu.devices import close_devices, open_device
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.gpu.specs import ComponentSpec

pytestmark = pytest.mark.gpu


@pytest.fixture
def resident(subject: Any) -> Iterator[ManagedPipeline]:
    """The subject on the CUDA device, every component resident; detached at the end."""
    modules, owner = components_of(subject.pipe)
    pipeline = ManagedPipeline(modules, device=open_device("cuda", cap_bytes=None), owner=owner)
    for name in modules:
        pipeline.place(name, RESIDENT)
    yield pipeline
    pipeline.detach()
    close_devices()


def placements(spec: ComponentSpec) -> list[ComponentPlacement]:
    found = []
    for tier in (HostTier.PAGEABLE, HostTier.PINNED):
        found.append(ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=tier))
        if Mode.LAYERWISE_OFFLOAD in spec.modes:
            found.append(ComponentPlacement(mode=Mode.LAYERWISE_OFFLOAD, tier=tier, num_slots=1))
    return found


def test_every_mode_of_every_component_gives_the_same_bits_on_cuda(subject: Any, resident: ManagedPipeline) -> None:
    subject.request()  # the first request tunes kernels
    expected = subject.request().clone()
    for spec in resident.specs:
        for target in placements(spec):
            resident.place(spec.name, target)
            assert torch.equal(subject.request(), expected), (spec.name, target)
        resident.place(spec.name, RESIDENT)


@pytest.mark.parametrize("choice", [0, -1])
def test_all_components_at_once_give_the_same_bits_on_cuda(
    subject: Any, resident: ManagedPipeline, choice: int
) -> None:
    subject.request()
    expected = subject.request().clone()
    for spec in resident.specs:
        resident.place(spec.name, placements(spec)[choice])
    to_host_bytes = resident.device.moved_bytes()[1]
    for _ in range(2):
        assert torch.equal(subject.request(), expected)
    assert resident.device.moved_bytes()[1] == to_host_bytes


def test_detach_returns_every_weight_to_the_host(subject: Any, resident: ManagedPipeline) -> None:
    resident.detach()
    modules = components_of(subject.pipe)[0]
    tensors = [t for m in modules.values() for t in [*m.parameters(), *m.buffers()]]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert resident.num_hooks == 0
