"""Weight storages and the tensors over them: what is bound where, and whether host and device are in step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from residency.gpu.device import Device

# What allocators give; kernels with vector loads count on it. Every weight of a packed copy begins at a multiple.
ALIGNMENT_BYTES = 512


@contextmanager
def bookkeeping(device: Device) -> Iterator[None]:
    """Enter around rebinding: version counters stay valid, autograd is off, and the device checks nothing.

    All of that is what `moving` promises; the name says why it is entered.
    """
    with device.moving():
        yield


def storage_of_part(part: torch.Tensor) -> torch.UntypedStorage:
    """Return a storage of its own, of its exact size, over a contiguous part of a block, which it keeps alive.

    part: uint8, one-dimensional, not empty.
    """
    # Through DLPack; the capsule, because the protocol around it costs more than all the rest of binding a layer.
    storage: torch.UntypedStorage = from_dlpack(to_dlpack(part)).untyped_storage()
    return storage


def aligned(nbytes: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True)
class Weight:
    """One tensor of a cell: its geometry, its version when last in step with the host, and where it may point."""

    tensor: torch.Tensor
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    version: int = -1
    host_view: torch.Tensor | None = None
    host_pointer: int | None = None
    device_pointer: int | None = None

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return this weight's geometry over another storage of the same bytes."""
        empty = torch.empty(0, dtype=self.tensor.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def set_host(self, storage: torch.UntypedStorage | None) -> None:
        """Take another host copy, or none."""
        self.host_view = None if storage is None else self.view(storage)
        self.host_pointer = None if self.host_view is None else self.host_view.data_ptr()

    def bind_host(self) -> None:
        """Point the tensor at the host copy, if there is one."""
        if self.host_view is not None:
            self.tensor.data = self.host_view

    def bind_device(self, view: torch.Tensor, pointer: int) -> None:
        """Point the tensor at a view of the device copy; from now on changes are seen."""
        self.version = self.tensor._version
        self.device_pointer = pointer
        self.tensor.data = view


@dataclass(slots=True, eq=False)
class Cell:
    """One weight storage: its host copy, its device copy, and the tensors over it. `pinned`: the host copy is."""

    num_bytes: int
    host: torch.UntypedStorage | None = None
    device: torch.UntypedStorage | None = None
    pinned: bool = False
    weights: list[Weight] = field(default_factory=list)

    @property
    def is_changed(self) -> bool:
        """Whether the device copy holds something that the host copy does not."""
        return self.host is None or any(weight.tensor._version != weight.version for weight in self.weights)

    def mark_in_step(self) -> None:
        """Book that both copies hold the same."""
        for weight in self.weights:
            weight.version = weight.tensor._version

    def set_host(self, storage: torch.UntypedStorage | None) -> None:
        """Take another host copy, or none."""
        for weight in self.weights:
            weight.set_host(storage)
        self.host, self.pinned = storage, False

    def bind_host(self) -> None:
        """Point every tensor at the host copy."""
        for weight in self.weights:
            weight.bind_host()

    def bind_device(self, views: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Point every tensor at its view of the device copy."""
        for weight, (view, pointer) in zip(self.weights, views, strict=True):
            weight.bind_device(view, pointer)

    def views(self, storage: torch.UntypedStorage) -> list[tuple[torch.Tensor, int]]:
        """Return every tensor's geometry over a storage, with its address."""
        found = [weight.view(storage) for weight in self.weights]
        return [(view, view.data_ptr()) for view in found]

    def drop_device(self) -> None:
        """Let go of the device copy."""
        self.device = None
        for weight in self.weights:
            weight.device_pointer = None


def weight_of(tensor: torch.Tensor, cell: Cell, *, version: int) -> Weight:
    """Describe a tensor as it is now."""
    weight = Weight(tensor, int(tensor.storage_offset()), tuple(tensor.size()), tuple(tensor.stride()), version)
    weight.set_host(cell.host)
    if cell.device is not None:
        weight.device_pointer = weight.view(cell.device).data_ptr()
    return weight
