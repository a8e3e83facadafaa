"""One protocol for the devices weights live on: CUDA, and an emulated one on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from residency.gpu.records import DeviceReading, LinkReading


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The allocator's figures in bytes; peaks since the last `reset_peaks`."""

    allocated_bytes: int
    reserved_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int


class Mark(Protocol):
    """A point in the work that was given to the device; on CUDA a CUDA event, on the emulated device a time."""

    @property
    def queue(self) -> int:
        """Which queue of work it is in: of two marks in one queue the later one implies the earlier."""
        ...

    @property
    def order(self) -> int:
        """Larger for a later mark of the same queue."""
        ...


class Device(Protocol):
    """A pool of device memory under a cap, and the copies into and out of it.

    Out of memory is `torch.OutOfMemoryError` on every device. Storages, not tensors, are moved, so that tied
    weights move once and views keep their strides.
    """

    @property
    def torch_device(self) -> torch.device:
        """The device that tensors on it report; an execution device is this attribute, never read off a weight."""
        ...

    def reading(self) -> DeviceReading:
        """Return what the device is and the cap in force. Read-only."""
        ...

    def limit(self, cap_bytes: int) -> None:
        """Cap the memory that may be taken from now on, this process's own only. Raises SettingsError if absurd."""

    def memory(self) -> MemoryReading:
        """Return the allocator's figures without waiting for the device. Read-only."""
        ...

    def unreserved_bytes(self) -> int:
        """Return what the allocator may still take under the cap, beside what it has. Read-only."""
        ...

    def reset_peaks(self) -> None:
        """Set both peaks to the current figures."""

    def empty_cache(self) -> None:
        """Give cached, unused device memory back."""

    def synchronize(self) -> None:
        """Block until the device has done all that was asked of it."""

    def now_ns(self) -> int:
        """Return the device's clock in ns: the wall clock on CUDA (synchronize first), a modelled one if emulated."""
        ...

    def upload(self, source: torch.UntypedStorage, *, pinned: bool) -> torch.UntypedStorage:
        """Return a device copy of a host storage. Raises torch.OutOfMemoryError; nothing is kept then."""
        ...

    def upload_all(
        self, sources: Sequence[tuple[torch.UntypedStorage, bool]], *, whole: torch.Tensor | None = None
    ) -> list[torch.UntypedStorage]:
        """Return device copies of several (host storage, is it pinned), all or none, from as little memory as it takes.

        Allocators round every block up; where that costs, one block holds all copies and lives as long as any of them.
        whole: host bytes in which the sources lie one after the other, each aligned; they may be copied as one.
        Raises torch.OutOfMemoryError; nothing is kept then.
        """
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a block of device memory, uint8 of shape (nbytes,). Raises torch.OutOfMemoryError."""
        ...

    def part(self, block: torch.Tensor, start: int, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of its own over a part of a block, which it keeps alive; nothing is counted anew."""
        ...

    def mark(self, *, timed: bool = False) -> Mark:
        """Return the present end of the work that this thread has given to the device. Does not wait."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """Let later work of this thread wait for a mark, on the device; the host does not wait."""

    def copy_ahead(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor, bool]], *, after: Iterable[Mark]) -> Mark:
        """Queue copies (part of a block, host bytes, is the host side pinned) behind all copies queued before.

        They begin once the marks are reached. Returns a mark that is reached when they have ended; until then the
        host bytes must live and stay unchanged. There is one such queue for a device.
        """
        ...

    def elapsed_ns(self, start: Mark, end: Mark) -> int:
        """Return the device's time between two timed marks, after `synchronize`."""
        ...

    def is_capturing(self) -> bool:
        """Whether this thread's work is being captured into a CUDA graph. Read-only."""
        ...

    def download(
        self, source: torch.UntypedStorage, *, into: torch.UntypedStorage | None = None
    ) -> torch.UntypedStorage:
        """Return a host copy of a device storage (or fill `into`). Blocks until the copy ends."""
        ...

    def claim_host(self, storage: torch.UntypedStorage) -> None:
        """Declare a storage as host memory of a weight: kernels that touch it fail. Nothing to do on CUDA."""

    def unclaim_host(self, storage: torch.UntypedStorage) -> None:
        """Undo `claim_host`: the storage is no weight of residency's any more. A second call is a no-op."""
        ...

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage is in this device's pool. Read-only."""
        ...

    def running(self) -> AbstractContextManager[None]:
        """Enter around anything that computes: operands are checked and memory counted. Re-entrant, per thread."""
        ...

    def guard(self) -> None:
        """Let kernels on host weights fail on every thread, outside `running`, too. No-op on CUDA, where they do."""
        ...

    def moving(self) -> AbstractContextManager[None]:
        """Enter around weight bookkeeping by residency itself: nothing is checked or counted twice. Re-entrant."""
        ...

    def pin(self, storage: torch.UntypedStorage) -> bool:
        """Page-lock a touched host storage in place; False if the host refuses. A second call is a no-op."""
        ...

    def unpin(self, storage: torch.UntypedStorage) -> None:
        """Undo `pin`. A second call is a no-op."""

    def moved_bytes(self) -> tuple[int, int]:
        """Return the bytes copied by `upload` and by `download` since the device was made. Read-only."""
        ...

    def measure_link(self) -> LinkReading:
        """Measure the link by real copies (modelled if emulated); cached after the first call."""
        ...

    def close(self) -> None:
        """Stop checking and counting; caps of the allocator stay. A second call is a no-op."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that device memory ran out, by type or by the texts CUDA libraries use."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    # The last one is an out of memory whose text could not be written, because NVML was asked in vain.
    markers = ("out of memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed", "nvml_success == ")
    return isinstance(error, RuntimeError) and any(marker in text for marker in markers)
