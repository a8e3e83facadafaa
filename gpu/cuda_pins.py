"""Page-locked host memory of a CUDA device: what is registered with the driver, and by whom."""

from __future__ import annotations

import logging
import threading
from typing import Protocol, SupportsInt, cast

import torch

log = logging.getLogger(__name__)

# One registration of 512 GiB or more fails on some drivers, and a copy across two registrations is refused by all.
PIN_BYTES_MAX = 64 * 2**30
DRAIN_ATTEMPTS_MAX = 3
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered


class _CudaRuntime(Protocol):
    """What is used of the CUDA runtime that torch itself has loaded; both return an error number, 0 for success."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> SupportsInt: ...

    def cudaHostUnregister(self, address: int) -> SupportsInt: ...


class CudaPins:
    """Registers host storages and keeps them alive: memory must never be unmapped while it is registered.

    Any thread may call, the one that copies as well: nothing here waits for copies that are still to be made. A
    registration that the driver does not return from blocks other registrations, nothing else.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        # Address -> the storage, and whether the registration is ours (torch itself may have pinned it).
        self._pinned: dict[int, tuple[torch.UntypedStorage, bool]] = {}

    def pin(self, storage: torch.UntypedStorage) -> bool:
        """Page-lock a storage in place; False if the host refuses. Idempotent."""
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes > PIN_BYTES_MAX:
            return False
        with self._lock, torch.cuda.device(self._device):
            if not nbytes:
                return True
            # By us, or by torch itself. The storage's own method warns in some versions of torch.
            if torch.empty(0, dtype=torch.uint8).set_(storage).is_pinned():
                self._pinned.setdefault(address, (storage, False))
                return True
            error = self._register(storage)
            if error:
                log.warning("the host refuses to page-lock %d bytes (CUDA error %d)", nbytes, error)
                self._drain_errors()
            return not error

    def unpin(self, storage: torch.UntypedStorage) -> None:
        """Undo `pin`, after the copies from it that are on their way have ended. A second call is a no-op.

        Whatever interrupts it, the storage is kept alive for as long as it may be registered.
        """
        address = storage.data_ptr()
        with self._lock, torch.cuda.device(self._device):
            _, is_ours = self._pinned.get(address, (storage, False))
            if is_ours:
                torch.cuda.synchronize(self._device)
                error = self._unregister(address)
                if error:
                    log.warning("unpinning failed with CUDA error %d; the memory is kept", error)
                    return
            self._pinned.pop(address, None)

    def clear(self) -> None:
        """Unpin everything."""
        with self._lock:
            storages = [storage for storage, _ in self._pinned.values()]
        for storage in storages:
            self.unpin(storage)

    def _register(self, storage: torch.UntypedStorage) -> int:
        """Register and book a storage, both or neither; return the driver's error, 0 for success."""
        address = storage.data_ptr()
        try:
            error = int(_runtime().cudaHostRegister(address, storage.nbytes(), 0))
            if not error:
                self._pinned[address] = (storage, True)
        except BaseException:
            # An interrupt between the two: what nobody has booked, nobody would ever unregister.
            self._unregister(address)
            self._pinned.pop(address, None)
            raise
        return error

    def _unregister(self, address: int) -> int:
        """Unregister what may be registered; return the driver's error, 0 if it is not registered any more."""
        error = int(_runtime().cudaHostUnregister(address))
        if error:
            self._drain_errors()
        return 0 if error == _NOT_REGISTERED else error

    def _drain_errors(self) -> None:
        # A failed registration leaves an error behind that torch would report at its next, innocent kernel launch.
        # torch offers no call that clears it, but a launch of our own reports it, and that clears it.
        for _ in range(DRAIN_ATTEMPTS_MAX):
            try:
                torch.zeros(1, device=self._device)
                torch.cuda.synchronize(self._device)
            except torch.OutOfMemoryError:
                return
            except RuntimeError:
                continue
            return


def _runtime() -> _CudaRuntime:
    return cast("_CudaRuntime", torch.cuda.cudart())  # type: ignore[no-untyped-call]
