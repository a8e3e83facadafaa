"""Host stores: one host copy per weight storage, and the bookkeeping that binds weights to host or device.

weights (Parameter, buffer)     storage          owned by
q.weight --+
tied.weight+--> Cell -------->  host copy        the store, until `release_host`; packed ones lie in one mapping
q.view ----+         \\------->  device copy      the store, while on the device, or the window
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.gpu.cells import Cell, Weight, aligned, bookkeeping, weight_of
from residency.gpu.inventory import Inventory, storage_key
from residency.gpu.packing import Packed, file_backed_cells, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import nn

    from residency.gpu.device import Device

BLOCKS_KNOWN_MAX = 32  # A streamed layer meets few places of the window again and again; each costs views, no memory.


FILE_BACKED_FRACTION_MIN = 0.9  # Tables that a model computes when it is made are in no file.


class HostStore:
    """The weights of some modules, which are moved together: on the device, or bound to their host copies.

    Every method is safe to repeat, also after an exception or an interrupt cut it short. Weights that were added,
    replaced or rebound from outside meanwhile (adapters, `.to`) are adopted with the next move.
    """

    def __init__(self, modules: Callable[[], Iterable[nn.Module]], device: Device) -> None:
        self._device = device
        self._inventory = Inventory(modules)
        self._cells: list[Cell] = []
        self._weights: list[Weight] = []  # of all cells
        self._packed_bytes = 0
        self._is_stale = True
        self._packed: Packed | None = None
        self._fetched: list[int] | None = None  # Versions of the weights when their copy to the window was asked for.
        self._blocks: dict[int, list[tuple[torch.UntypedStorage, list[tuple[torch.Tensor, int]]]]] = {}
        self.on_device = False  # Every weight is on the device.
        self.is_idle = False  # None is. Neither: found in parts, or cut short.
        self.adopt()

    @property
    def num_bytes(self) -> int:
        """Bytes of all weight storages, each once."""
        return sum(cell.num_bytes for cell in self._cells)

    @property
    def packed_bytes(self) -> int:
        """Bytes of one block that holds all of them, each aligned."""
        return self._packed_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host copies now held."""
        return sum(cell.num_bytes for cell in self._cells if cell.host is not None)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host copies that are page-locked now."""
        return sum(cell.num_bytes for cell in self._cells if cell.pinned)

    @property
    def is_file_backed(self) -> bool:
        """Whether the host copy is a mapped file, but for small parts of it. Read-only."""
        mapped = sum(cell.num_bytes for cell in file_backed_cells(self._cells))
        return mapped >= self.num_bytes * FILE_BACKED_FRACTION_MIN

    def adopt(self) -> None:
        """Take in what was added, replaced or rebound from outside; nothing is moved. Cheap if nothing was."""
        if not self._has_drifted():
            return
        self._is_stale = True  # Until the scan is through: an interrupt in between must not hide what changed.
        self._inventory.refresh()
        with bookkeeping(self._device):
            self._scan()
        self._is_stale = False

    def onload(self) -> None:
        """Bring every weight to the device. Raises torch.OutOfMemoryError with everything on the host as before."""
        self.adopt()
        missing = [cell for cell in self._cells if cell.device is None]
        if self.on_device and not missing:
            return
        self.is_idle = False
        with bookkeeping(self._device):
            try:
                for cell, copied in zip(missing, self._upload(missing), strict=True):
                    cell.device = copied
                for cell in missing:
                    assert cell.device is not None
                    cell.bind_device(cell.views(cell.device))
                self.on_device = True
            except BaseException:
                for cell in missing:
                    cell.bind_host()
                    cell.drop_device()
                self.is_idle = all(cell.device is None for cell in self._cells)
                raise

    def copies(self, block: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
        """Return (part of the block, host bytes, is the host side pinned) to copy before `bind` may be called.

        The block has `packed_bytes`. A host copy that is packed whole is one copy. Nothing is moved.
        """
        self._fetched = None
        if self._is_stale:
            self.adopt()  # What was added, replaced or rebound is looked for by `bind`.
        with bookkeeping(self._device):
            found: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
            packed = self._packed
            if packed is not None and packed.holds_all(self._cells):
                found.append((block[: packed.num_bytes], packed.content, packed.is_pinned))
            else:
                found += _cell_copies(self._cells, block)
            self._fetched = [weight.tensor._version for weight in self._weights]
        return found

    def bind(self, block: torch.Tensor) -> bool:
        """Bind every weight to a block that `copies` was copied into; False, with nothing done, if that is outdated."""
        fetched, self._fetched = self._fetched, None
        if fetched is None or not self.is_idle:
            return False
        if self._has_drifted():
            self._is_stale = True
            return False
        if fetched != [weight.tensor._version for weight in self._weights]:
            return False
        with bookkeeping(self._device):
            self.is_idle = False
            for cell, (storage, views) in zip(self._cells, self._parts(block), strict=True):
                cell.device = storage
                cell.bind_device(views)
            self.on_device = True
        return True

    def forget_blocks(self, block: torch.Tensor | None = None) -> None:
        """Let go of the blocks that weights were bound to, those inside of a larger one or all."""
        if block is None:
            self._blocks.clear()
            return
        start = block.data_ptr()
        for address in [one for one in self._blocks if start <= one < start + block.numel()]:
            del self._blocks[address]

    def offload(self) -> None:
        """Bind every weight to its host copy and drop the device's; only changed weights are copied back."""
        # What was bound is bound back; what was added or replaced meanwhile is looked for before the next move.
        if self._is_stale or self._is_rebound() or not self.on_device:
            if self.is_idle and not self._has_drifted():
                return
            self.adopt()
        with bookkeeping(self._device):
            self.on_device = False
            for cell in self._cells:
                self._refresh_host(cell)
            for cell in self._cells:
                cell.bind_host()
            for cell in self._cells:
                cell.drop_device()
            self.is_idle = True

    def pin(self) -> None:
        """Page-lock the host copy, copied once into one exact mapping; no host copy yet: make it.

        Raises MemoryError if the host refuses, with the host copies as they were.
        """
        packed = self.pack()
        if packed is None:
            return
        try:
            self.register(packed)
            self.adopt_packed(packed)
        except BaseException:
            self.discard(packed)
            raise

    def pack(self) -> Packed | None:
        """Return a copy of every weight in one mapping of its own, None if that is there and page-locked already.

        Nothing is bound to it. May run on any thread while nobody else uses the store. Raises MemoryError.
        """
        self.adopt()
        if not self.num_bytes or all(cell.pinned or not cell.num_bytes for cell in self._cells):
            return None
        with bookkeeping(self._device):
            if self._packed is not None and self._packed.holds_all(self._cells):
                for cell in self._cells:
                    self._refresh_host(cell)
                return self._packed
            return pack(self._cells, self._device)

    def register(self, packed: Packed) -> None:
        """Page-lock a packed copy. Raises MemoryError if the host refuses."""
        packed.register(self._device)

    def adopt_packed(self, packed: Packed) -> None:
        """Make a packed copy, page-locked or not, the host copy; what held it before is let go."""
        with bookkeeping(self._device):
            if packed is not self._packed:
                if self._packed is not None:
                    self._packed.unregister(self._device)
                self._packed = packed
                packed.install(self._cells, self._device)
            for cell in self._cells:
                cell.pinned = packed.is_pinned

    def discard(self, packed: Packed) -> None:
        """Let go of a packed copy that was not adopted; of an adopted one only the page lock. May be repeated."""
        packed.unregister(self._device)
        if packed is self._packed:
            for cell in self._cells:
                cell.pinned = False

    def unpin(self) -> None:
        """Release the page lock; the same memory stays as pageable host copy."""
        if self._packed is not None:
            self.discard(self._packed)

    def let_go(self) -> None:
        """Have nothing more to do with these weights: no page locks, no claim on their host memory."""
        self.unpin()
        self.forget_blocks()
        for cell in self._cells:
            if cell.host is not None:
                self._device.unclaim_host(cell.host)

    def release_host(self) -> None:
        """Give up the host copies of weights that are on the device; mapped files, which cost nothing, stay."""
        self.unpin()
        free = file_backed_cells(self._cells)
        for cell in self._cells:
            if cell.device is not None and cell not in free:
                cell.set_host(None)
        # What stays may be an adapter that was loaded later; the packed copy would live for it.
        if self._packed is not None and not any(cell.host in self._packed for cell in self._cells):
            self._packed = None

    def _upload(self, cells: list[Cell]) -> list[torch.UntypedStorage]:
        """Return device copies of some cells, which are on the host."""
        packed = self._packed if len(cells) == len(self._cells) else None
        return self._device.upload_all(
            [(cell.host, cell.pinned) for cell in cells if cell.host is not None],
            whole=packed.content if packed is not None and packed.holds_all(cells) else None,
        )

    def _parts(self, block: torch.Tensor) -> list[tuple[torch.UntypedStorage, list[tuple[torch.Tensor, int]]]]:
        """Return (storage, views) of every cell over a block, from memory if it was bound there before."""
        address = block.data_ptr()
        if address not in self._blocks:
            while len(self._blocks) >= BLOCKS_KNOWN_MAX:
                self._blocks.pop(next(iter(self._blocks)))
            found, start = [], 0
            for cell in self._cells:
                storage = self._device.part(block, start, cell.num_bytes)
                found.append((storage, cell.views(storage)))
                start += aligned(cell.num_bytes)
            self._blocks[address] = found
        return self._blocks[address]

    def _has_drifted(self) -> bool:
        return self._is_stale or not self._inventory.is_current() or self._is_rebound()

    def _is_rebound(self) -> bool:
        for weight in self._weights:
            pointer = weight.tensor.data_ptr()
            if pointer != weight.host_pointer and pointer != weight.device_pointer:
                return True
        return False

    def _scan(self) -> None:
        """Sort the tensors of the inventory into cells, keeping every cell whose storage is still in use."""
        self._blocks.clear()
        known = {s._cdata: cell for cell in self._cells for s in (cell.host, cell.device) if s is not None}
        versions = {id(weight.tensor): weight.version for cell in self._cells for weight in cell.weights}
        members: dict[Cell, list[torch.Tensor]] = {}
        for tensor in self._inventory.tensors:
            key = storage_key(tensor)
            if key not in known:
                known[key] = self._new_cell(tensor.untyped_storage())
            members.setdefault(known[key], []).append(tensor)
        for cell, tensors in members.items():
            # A tensor that is new on a device storage counts as changed.
            cell.weights = [weight_of(tensor, cell, version=versions.get(id(tensor), -1)) for tensor in tensors]
        self._cells = list(members)
        self._weights = [weight for cell in members for weight in cell.weights]
        self._packed_bytes = sum(aligned(cell.num_bytes) for cell in members)
        if self._packed is not None and not any(cell.host in self._packed for cell in self._cells):
            self._packed.unregister(self._device)
            self._packed = None
        self.on_device = bool(members) and all(cell.device is not None for cell in members)
        self.is_idle = all(cell.device is None for cell in members)

    def _new_cell(self, storage: torch.UntypedStorage) -> Cell:
        if self._device.holds(storage):
            return Cell(num_bytes=storage.nbytes(), device=storage)
        self._device.claim_host(storage)
        return Cell(num_bytes=storage.nbytes(), host=storage)

    def _refresh_host(self, cell: Cell) -> None:
        """Make the host copy of a cell hold what its device copy holds."""
        if cell.device is None or not cell.is_changed:
            return
        if cell.host is None:
            storage = self._device.download(cell.device)
            self._device.claim_host(storage)
            cell.set_host(storage)
        else:
            self._device.download(cell.device, into=cell.host)
        cell.mark_in_step()


def _cell_copies(cells: Iterable[Cell], block: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
    found, start = [], 0
    for cell in cells:
        assert cell.host is not None
        if cell.num_bytes:
            source = block.new_empty(0, device="cpu").set_(cell.host)
            found.append((block[start : start + cell.num_bytes], source, cell.pinned))
        start += aligned(cell.num_bytes)
    return found
