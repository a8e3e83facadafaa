"""Packed host copies: all weights of a store in one mapping, page-locked and copied to the device as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from residency.gpu.cells import Cell, aligned, storage_of_part
from residency.gpu.file_mapping import file_backed
from residency.gpu.host_memory import allocate, copy_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.gpu.device import Device


class Packed:
    """One exact mapping that holds a copy of every weight storage of a store, each at an aligned offset.

    | cell 0 ......|pad| cell 1 ....|pad| cell 2 |      one mapping, one registration, one copy to the device
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._starts: dict[Cell, int] = {}
        start = 0
        for cell in cells:
            self._starts[cell] = start
            start += aligned(cell.num_bytes)
        self.num_bytes = start
        self._storage = allocate(start)
        self.content = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        self.is_pinned = False
        self._parts: dict[Cell, torch.UntypedStorage] = {}

    def __contains__(self, storage: object) -> bool:
        return any(part is storage for part in self._parts.values())

    def holds_all(self, cells: Sequence[Cell]) -> bool:
        """Whether it is the host copy of exactly these cells, in this order. Read-only."""
        if len(cells) != len(self._starts):
            return False
        for cell, packed in zip(cells, self._starts, strict=True):
            if cell is not packed or cell.host is not self._parts.get(cell):
                return False
        return True

    def slice_of(self, cell: Cell) -> torch.Tensor:
        """Return the bytes of a cell; shares memory."""
        start = self._starts[cell]
        return self.content[start : start + cell.num_bytes]

    def fill(self, cell: Cell, source: torch.UntypedStorage) -> None:
        """Copy the bytes of a cell from other host memory."""
        copy_into(self._storage, source, offset_bytes=self._starts[cell])

    def register(self, device: Device) -> None:
        """Page-lock it. Raises MemoryError if the host refuses. A second call is a no-op."""
        try:
            self.is_pinned = device.pin(self._storage)
        except BaseException:
            device.unpin(self._storage)  # An interrupt just after it was locked: nobody else would unlock it.
            self.is_pinned = False
            raise
        if not self.is_pinned:
            raise MemoryError(
                f"the host refuses to page-lock {self.num_bytes} bytes; "
                "lower host_ram, or raise the limit on locked memory"
            )

    def unregister(self, device: Device) -> None:
        """Release the page lock, after the copies from it have ended. A second call is a no-op."""
        if self.is_pinned:
            device.synchronize()
            device.unpin(self._storage)
            self.is_pinned = False

    def install(self, cells: Sequence[Cell], device: Device) -> None:
        """Make it the host copy of the cells; those that are not on the device are bound to it."""
        for cell in cells:
            # Through DLPack every weight gets a storage of its own, of its exact size, which keeps the mapping alive.
            part = self.slice_of(cell)
            storage = storage_of_part(part) if cell.num_bytes else part.new_empty(0).untyped_storage()
            self._parts[cell] = storage
            device.claim_host(storage)
            cell.set_host(storage)
            cell.mark_in_step()
            if cell.device is None:
                cell.bind_host()


def pack(cells: Sequence[Cell], device: Device) -> Packed:
    """Return a packed copy of what the cells hold now. Raises MemoryError."""
    packed = Packed(cells)
    for cell in cells:
        if not cell.num_bytes:
            continue
        if cell.device is not None and cell.is_changed:
            device.download(cell.device, into=storage_of_part(packed.slice_of(cell)))
        else:
            assert cell.host is not None
            packed.fill(cell, cell.host)
    return packed


def file_backed_cells(cells: Sequence[Cell]) -> set[Cell]:
    """Return the cells whose host copy is a mapped file. Read-only."""
    on_host = [(cell, cell.host) for cell in cells if cell.host is not None and cell.num_bytes]
    ranges = [(storage.data_ptr(), cell.num_bytes) for cell, storage in on_host]
    return {cell for (cell, _), is_file in zip(on_host, file_backed(ranges), strict=True) if is_file}
