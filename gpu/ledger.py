"""Ledger of the emulated device: which pool every storage is in, what the device pool holds, and what fits in it."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch


class StorageEntry(weakref.ref[torch.UntypedStorage]):
    """One storage the ledger knows: a weak reference, so that the entry ends when the storage does."""

    __slots__ = ("is_part", "key", "nbytes", "on_device")

    key: int
    nbytes: int  # what the pool counts for it: nothing on the host, or for a part of another storage
    on_device: bool
    is_part: bool


class StorageLedger:
    """Exact count of the storages in the device pool, and a list of those in the host pool. Thread-safe.

        storage ----weak----> entry (pool, bytes) <---- entries[address]
           | dies                 |
           `--> dead queue -------'   settled, oldest first, before the next look at the ledger

    The death of a storage is only queued where it happens, because that can be anywhere: inside the ledger itself,
    or in another thread. An address that is used again is told apart by the entry's own storage.
    """

    def __init__(self, *, total_bytes: int, cap_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.cap_bytes = cap_bytes
        self.closed = False
        self._lock = threading.RLock()
        self._entries: dict[int, StorageEntry] = {}
        self._dead: deque[weakref.ref[torch.UntypedStorage]] = deque()
        self._allocated_bytes = 0
        self._peak_bytes = 0

    def find(self, storage: torch.UntypedStorage) -> StorageEntry | None:
        """Return the entry of a storage, or None if the ledger does not know it. Read-only."""
        entry = self._entries.get(storage._cdata)
        return entry if entry is not None and entry() is storage else None

    def add_device(self, storage: torch.UntypedStorage) -> StorageEntry:
        """Count a storage as device memory, unless it is known already, and return its entry.

        Raises torch.OutOfMemoryError, with nothing counted, if the cap does not allow it.
        """
        with self._lock:
            entry = self.find(storage)
            if entry is None:
                entry = self._grow_new(storage)
            return entry

    def add_part(self, storage: torch.UntypedStorage) -> None:
        """Know a storage as device memory that is counted already, with the block it is a part of."""
        with self._lock:
            self._settle_deaths()
            if self.find(storage) is None:
                self._remember(storage, on_device=True).is_part = True

    def add_host(self, storage: torch.UntypedStorage) -> None:
        """Put a storage into the host pool, taking it out of the device pool if it was there."""
        with self._lock:
            self._settle_deaths()
            entry = self.find(storage)
            if entry is None:
                self._remember(storage, on_device=False)
            elif entry.on_device:
                self._allocated_bytes -= entry.nbytes
                entry.nbytes, entry.on_device = 0, False

    def forget_host(self, storage: torch.UntypedStorage) -> None:
        """Take a storage out of the host pool. A second call is a no-op."""
        with self._lock:
            entry = self.find(storage)
            if entry is not None and not entry.on_device:
                del self._entries[entry.key]

    def note_size(self, entry: StorageEntry, nbytes: int) -> None:
        """Count what a known device storage has grown or shrunk to. Raises torch.OutOfMemoryError; nothing changes."""
        with self._lock:
            if entry.on_device and not entry.is_part and entry.nbytes != nbytes:
                self._settle_deaths()
                self._take(nbytes - entry.nbytes)
                entry.nbytes = nbytes

    def figures(self) -> tuple[int, int]:
        """Return the bytes of the device pool and their peak, after a look at every storage's present size."""
        with self._lock:
            self._refresh()
            return self._allocated_bytes, self._peak_bytes

    def reset_peak(self) -> None:
        """Set the peak to the present figure."""
        with self._lock:
            self._refresh()
            self._peak_bytes = self._allocated_bytes

    def check_room(self, nbytes: int) -> None:
        """Raise torch.OutOfMemoryError, in torch's words, if that many more bytes exceed the cap."""
        with self._lock:
            self._settle_deaths()
            self._require_room(nbytes)

    def close(self) -> None:
        """Forget every storage, for good."""
        with self._lock:
            self.closed = True
            self._entries.clear()
            self._dead.clear()
            self._allocated_bytes = self._peak_bytes = 0

    def _grow_new(self, storage: torch.UntypedStorage) -> StorageEntry:
        nbytes = storage.nbytes()
        self._settle_deaths()
        self._take(nbytes)
        entry = self._remember(storage, on_device=True)
        entry.nbytes = nbytes
        return entry

    def _remember(self, storage: torch.UntypedStorage, *, on_device: bool) -> StorageEntry:
        key = storage._cdata
        entry = StorageEntry(storage, self._dead.append)
        entry.key, entry.nbytes, entry.on_device, entry.is_part = key, 0, on_device, False
        self._entries[key] = entry
        return entry

    def _take(self, nbytes: int) -> None:
        self._require_room(nbytes)
        self._allocated_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)

    def _require_room(self, nbytes: int) -> None:
        if nbytes > 0 and self._allocated_bytes + nbytes > self.cap_bytes:
            raise torch.OutOfMemoryError(self._out_of_memory_text(nbytes))

    def _settle_deaths(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            assert isinstance(entry, StorageEntry)
            self._allocated_bytes -= entry.nbytes
            entry.nbytes = 0
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]

    def _refresh(self) -> None:
        # `storage.resize_` passes no dispatcher; what it did is seen here at the latest.
        self._settle_deaths()
        for entry in list(self._entries.values()):
            storage = entry()
            is_counted = entry.on_device and not entry.is_part and storage is not None
            if is_counted and storage is not None and storage.nbytes() != entry.nbytes:
                self._allocated_bytes += storage.nbytes() - entry.nbytes
                entry.nbytes = storage.nbytes()
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)

    def _out_of_memory_text(self, nbytes: int) -> str:
        free_bytes = max(0, self.cap_bytes - self._allocated_bytes)
        return (
            f"emulated device out of memory. Tried to allocate {format_bytes(nbytes)}. Device 0 has a total capacity "
            f"of {format_bytes(self.total_bytes)} of which {format_bytes(free_bytes)} is free. "
            f"{format_bytes(self.cap_bytes)} allowed; {format_bytes(self._allocated_bytes)} is allocated"
        )


def format_bytes(nbytes: int) -> str:
    """Return a size as torch writes it: '512 bytes', '1.50 KiB', '20.00 MiB', '24.00 GiB'."""
    if nbytes < 2**10:
        return f"{nbytes} bytes"
    for unit, factor in (("KiB", 2**10), ("MiB", 2**20)):
        if nbytes < factor * 2**10:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes / 2**30:.2f} GiB"
