"""Host stores: one host copy per weight storage, and the bookkeeping that binds weights to host or device.

weights (Parameter, buffer)     storage          owned by
q.weight --+
tied.weight+--> Cell -------->  host copy        the store, until `release_host`
q.view ----+         \\------->  device copy      the store, while on the device
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from residency.gpu.host_memory import allocate
from residency.gpu.inventory import Inventory, storage_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from residency.gpu.device import Device


@contextmanager
def bookkeeping(device: Device) -> Iterator[None]:
    """Enter around rebinding: version counters stay valid, autograd is off, and the device checks nothing."""
    with torch.inference_mode(False), torch.no_grad(), device.moving():
        yield


@dataclass(slots=True)
class _Weight:
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
        self.host_view = None if storage is None else self.view(storage)
        self.host_pointer = None if self.host_view is None else self.host_view.data_ptr()

    def bind_host(self) -> None:
        if self.host_view is not None:
            self.tensor.data = self.host_view

    def bind_device(self, storage: torch.UntypedStorage) -> None:
        view = self.view(storage)
        self.version = self.tensor._version
        self.device_pointer = view.data_ptr()
        self.tensor.data = view


@dataclass(slots=True, eq=False)
class _Cell:
    """One weight storage. `mapped`: its host copy is an exact mapping of ours, which can be pinned in place."""

    num_bytes: int
    host: torch.UntypedStorage | None = None
    device: torch.UntypedStorage | None = None
    mapped: bool = False
    pinned: bool = False
    weights: list[_Weight] = field(default_factory=list)

    @property
    def is_changed(self) -> bool:
        """Whether the device copy holds something that the host copy does not."""
        return self.host is None or any(weight.tensor._version != weight.version for weight in self.weights)

    def mark_in_step(self) -> None:
        for weight in self.weights:
            weight.version = weight.tensor._version

    def set_host(self, storage: torch.UntypedStorage | None, *, mapped: bool) -> None:
        for weight in self.weights:
            weight.set_host(storage)
        self.host, self.mapped = storage, mapped

    def bind_host(self) -> None:
        for weight in self.weights:
            weight.bind_host()

    def drop_device(self) -> None:
        self.device = None
        for weight in self.weights:
            weight.device_pointer = None


class HostStore:
    """The weights of some modules, which are moved together: on the device, or bound to their host copies.

    Every method is safe to repeat, also after an exception or an interrupt cut it short. Weights that were added,
    replaced or rebound from outside meanwhile (adapters, `.to`) are adopted with the next move.
    """

    def __init__(self, modules: Callable[[], Iterable[nn.Module]], device: Device) -> None:
        self._device = device
        self._inventory = Inventory(modules)
        self._cells: list[_Cell] = []
        self._is_stale = True
        self.on_device = False  # Every weight is on the device.
        self.is_idle = False  # None is. Neither: found in parts, or cut short.
        self.adopt()

    @property
    def num_bytes(self) -> int:
        """Bytes of all weight storages, each once."""
        return sum(cell.num_bytes for cell in self._cells)

    @property
    def host_bytes(self) -> int:
        """Bytes of host copies now held."""
        return sum(cell.num_bytes for cell in self._cells if cell.host is not None)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host copies that are page-locked now."""
        return sum(cell.num_bytes for cell in self._cells if cell.pinned)

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
                sources = [(cell.host, cell.pinned) for cell in missing if cell.host is not None]
                for cell, copied in zip(missing, self._device.upload_all(sources), strict=True):
                    cell.device = copied
                for cell in missing:
                    _bind_device(cell)
                self.on_device = True
            except BaseException:
                for cell in missing:
                    cell.bind_host()
                    cell.drop_device()
                self.is_idle = all(cell.device is None for cell in self._cells)
                raise

    def offload(self) -> None:
        """Bind every weight to its host copy and drop the device's; only changed weights are copied back."""
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
        """Page-lock every host copy, copying each once into an exact mapping; no host copy yet: make it.

        Raises MemoryError if the host refuses; what is pinned by then stays so, until `unpin`.
        """
        self.adopt()
        with bookkeeping(self._device):
            for cell in self._cells:
                if cell.num_bytes and not cell.pinned:
                    self._pin(cell)

    def unpin(self) -> None:
        """Release the page locks; the same memory stays as pageable host copy."""
        for cell in self._cells:
            self._unpin(cell)

    def let_go(self) -> None:
        """Have nothing more to do with these weights: no page locks, no claim on their host memory."""
        self.unpin()
        for cell in self._cells:
            if cell.host is not None:
                self._device.unclaim_host(cell.host)

    def release_host(self) -> None:
        """Give up the host copies of weights that are on the device."""
        self.unpin()
        for cell in self._cells:
            if cell.device is not None:
                cell.set_host(None, mapped=False)

    def _has_drifted(self) -> bool:
        return self._is_stale or not self._inventory.is_current() or self._is_rebound()

    def _is_rebound(self) -> bool:
        return any(
            weight.tensor.data_ptr() not in (weight.host_pointer, weight.device_pointer)
            for cell in self._cells
            for weight in cell.weights
        )

    def _scan(self) -> None:
        """Sort the tensors of the inventory into cells, keeping every cell whose storage is still in use."""
        known = {s._cdata: cell for cell in self._cells for s in (cell.host, cell.device) if s is not None}
        versions = {id(weight.tensor): weight.version for cell in self._cells for weight in cell.weights}
        members: dict[_Cell, list[_Weight]] = {}
        for tensor in self._inventory.tensors:
            key = storage_key(tensor)
            if key not in known:
                known[key] = self._new_cell(tensor.untyped_storage())
            # A tensor that is new on a device storage counts as changed.
            weight = _weight_of(tensor, known[key], version=versions.get(id(tensor), -1))
            members.setdefault(known[key], []).append(weight)
        for cell in self._cells:
            if cell not in members:
                self._unpin(cell)
        for cell, weights in members.items():
            cell.weights = weights
        self._cells = list(members)
        self.on_device = bool(members) and all(cell.device is not None for cell in members)
        self.is_idle = all(cell.device is None for cell in members)

    def _new_cell(self, storage: torch.UntypedStorage) -> _Cell:
        if self._device.holds(storage):
            return _Cell(num_bytes=storage.nbytes(), device=storage)
        self._device.claim_host(storage)
        return _Cell(num_bytes=storage.nbytes(), host=storage)

    def _refresh_host(self, cell: _Cell) -> None:
        """Make the host copy of a cell hold what its device copy holds."""
        if cell.device is None or not cell.is_changed:
            return
        if cell.host is None:
            storage = self._device.download(cell.device)
            self._device.claim_host(storage)
            cell.set_host(storage, mapped=False)
        else:
            self._device.download(cell.device, into=cell.host)
        cell.mark_in_step()

    def _pin(self, cell: _Cell) -> None:
        if not cell.mapped:
            self._map(cell)
        assert cell.host is not None
        try:
            cell.pinned = self._device.pin(cell.host)
        except BaseException:
            self._device.unpin(cell.host)  # An interrupt just after it was locked: nobody else would unlock it.
            cell.pinned = False
            raise
        if not cell.pinned:
            raise MemoryError(
                f"the host refuses to page-lock {cell.num_bytes} bytes; "
                "lower host_ram, or raise the limit on locked memory"
            )

    def _unpin(self, cell: _Cell) -> None:
        if cell.pinned and cell.host is not None:
            self._device.synchronize()  # A copy in flight may still read what is unlocked here.
            self._device.unpin(cell.host)
            cell.pinned = False

    def _map(self, cell: _Cell) -> None:
        """Put the host copy into an exact mapping of our own; whatever held it before is let go."""
        storage = allocate(cell.num_bytes)
        self._device.claim_host(storage)
        if cell.device is not None and cell.is_changed:
            self._device.download(cell.device, into=storage)
        else:
            assert cell.host is not None
            storage.copy_(cell.host, non_blocking=False)
        cell.set_host(storage, mapped=True)
        cell.mark_in_step()
        if cell.device is None:
            cell.bind_host()


def _bind_device(cell: _Cell) -> None:
    assert cell.device is not None
    for weight in cell.weights:
        weight.bind_device(cell.device)


def _weight_of(tensor: torch.Tensor, cell: _Cell, *, version: int) -> _Weight:
    """Describe a tensor as it is now."""
    weight = _Weight(tensor, int(tensor.storage_offset()), tuple(tensor.size()), tuple(tensor.stride()), version)
    weight.set_host(cell.host)
    if cell.device is not None:
        weight.device_pointer = weight.view(cell.device).data_ptr()
    return weight
