"""The emulated device: two pools in CPU memory, an exact ledger, a cap, and a modelled clock."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from residency.gpu.cells import storage_of_part
from residency.gpu.clock import ModelledClock, ModelledSpeeds
from residency.gpu.device import MemoryReading
from residency.gpu.kernels import KernelGuard
from residency.gpu.ledger import StorageLedger
from residency.gpu.limits import check_cap, check_same_size
from residency.gpu.records import DeviceReading, LinkReading
from residency.gpu.threads import forget, guard_other_threads, leave_before_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from residency.gpu.device import Mark

# Larger than any single card, so that every real cap can be emulated; memory is counted, not reserved.
TOTAL_BYTES = 256 * 2**30


@dataclass(frozen=True, slots=True)
class TimeMark:
    """A point in modelled time."""

    time_ns: int

    @property
    def queue(self) -> int:
        """One for all: time is."""
        return 0

    @property
    def order(self) -> int:
        """The time itself."""
        return self.time_ns


class _ThreadGuard(threading.local):
    guard: KernelGuard | None = None


class EmulatedDevice:
    """A device whose memory is CPU memory that is counted, and whose time is modelled.

        host pool     claimed weights; metadata and host-to-host copies are allowed, kernels on it fail
        device pool   uploads, what operators make, and what they first see as operands (inputs)

    Memory inside one operator (its workspace) is not seen. Under `torch.inference_mode` torch hands over composite
    operators whole, so that their intermediates are not seen either; under `torch.no_grad` they are.
    It serves several threads with one ledger. It is never evidence about speed.

    total_bytes: its memory, and the cap without `cap_bytes`. pin_limit_bytes: what may be pinned at once; None:
    everything. allocator_settings: what `reading` tells of them; they change nothing here.
    """

    def __init__(
        self,
        *,
        total_bytes: int = TOTAL_BYTES,
        cap_bytes: int | None = None,
        speeds: ModelledSpeeds | None = None,
        pin_limit_bytes: int | None = None,
        allocator_settings: str = "",
    ) -> None:
        self._ledger = StorageLedger(total_bytes=total_bytes, cap_bytes=total_bytes)
        self._clock = ModelledClock(speeds or ModelledSpeeds())
        self._pin_limit_bytes = pin_limit_bytes
        self.allocator_settings = allocator_settings
        self._local = _ThreadGuard()
        self._lock = threading.Lock()
        # Address -> the storage, and its bytes when it was pinned.
        self._pinned: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._pinned_bytes = 0
        self._to_device_bytes = 0
        self._to_host_bytes = 0
        if cap_bytes is not None:
            self.limit(cap_bytes)

    @property
    def torch_device(self) -> torch.device:
        """The CPU: tensors of both pools report it."""
        return torch.device("cpu")

    def reading(self) -> DeviceReading:
        """Return what the device is and the cap in force. Read-only."""
        return DeviceReading(
            kind="emulated",
            name="emulated device",
            index=0,
            total_bytes=self._ledger.total_bytes,
            cap_bytes=self._ledger.cap_bytes,
            driver="modelled",
            torch_version=str(torch.__version__),
            allocator_settings=self.allocator_settings,
        )

    def limit(self, cap_bytes: int) -> None:
        """Cap the device pool from now on. Raises SettingsError if the cap is not within the device's memory."""
        check_cap(cap_bytes, total_bytes=self._ledger.total_bytes)
        self._ledger.cap_bytes = cap_bytes

    def memory(self) -> MemoryReading:
        """Return the ledger's figures; reserved is allocated, because nothing is cached. Read-only."""
        allocated_bytes, peak_bytes = self._ledger.figures()
        return MemoryReading(
            allocated_bytes=allocated_bytes,
            reserved_bytes=allocated_bytes,
            allocated_peak_bytes=peak_bytes,
            reserved_peak_bytes=peak_bytes,
        )

    def unreserved_bytes(self) -> int:
        """Return what is left under the cap. Read-only."""
        return max(0, self._ledger.cap_bytes - self._ledger.figures()[0])

    def reset_peaks(self) -> None:
        """Set both peaks to the current figures."""
        self._ledger.reset_peak()

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def synchronize(self) -> None:
        """Do nothing: every operator has ended when it returns."""

    def now_ns(self) -> int:
        """Return the modelled clock in ns."""
        return self._clock.now_ns()

    def upload(self, source: torch.UntypedStorage, *, pinned: bool) -> torch.UntypedStorage:
        """Return a device copy of a host storage. Raises torch.OutOfMemoryError; nothing is kept then."""
        nbytes = source.nbytes()
        self._ledger.check_room(nbytes)
        with self.moving():
            target = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
            try:
                if not self._ledger.closed:
                    self._ledger.add_device(target)
            except torch.OutOfMemoryError as error:
                # Another thread was faster; its memory must not be held by this traceback.
                del target
                raise error.with_traceback(None) from None
            target.copy_(source)
        speeds = self._clock.speeds
        self._clock.add_copy(nbytes, bytes_per_s=speeds.to_device_pinned if pinned else speeds.to_device_pageable)
        with self._lock:
            self._to_device_bytes += nbytes
        return target

    def upload_all(
        self, sources: Sequence[tuple[torch.UntypedStorage, bool]], *, whole: torch.Tensor | None = None
    ) -> list[torch.UntypedStorage]:
        """Return device copies of several (host storage, is it pinned), all or none. Raises torch.OutOfMemoryError.

        whole: of no use here, nothing is rounded up.
        """
        self._ledger.check_room(sum(source.nbytes() for source, _ in sources))
        return [self.upload(source, pinned=pinned) for source, pinned in sources]

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a block of the device pool, uint8 of shape (nbytes,). Raises torch.OutOfMemoryError."""
        self._ledger.check_room(nbytes)
        with self.moving():
            block = torch.empty(nbytes, dtype=torch.uint8)
            if not self._ledger.closed:
                self._ledger.add_device(block.untyped_storage())
            return block

    def part(self, block: torch.Tensor, start: int, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of its own over a part of a block, which it keeps alive; it is not counted again."""
        with self.moving():
            if not nbytes:
                return block.new_empty(0).untyped_storage()
            storage = storage_of_part(block[start : start + nbytes])
        if not self._ledger.closed:
            self._ledger.add_part(storage)
        return storage

    def mark(self, *, timed: bool = False) -> TimeMark:
        """Return the present of the modelled clock."""
        return TimeMark(self._clock.now_ns())

    def wait_for(self, mark: Mark) -> None:
        """Let the modelled time pass until the mark is reached."""
        assert isinstance(mark, TimeMark)
        self._clock.wait_until(mark.time_ns)

    def copy_ahead(
        self, copies: Sequence[tuple[torch.Tensor, torch.Tensor, bool]], *, after: Iterable[Mark]
    ) -> TimeMark:
        """Copy at once, and queue the copies on the modelled link; the mark is when they would have ended."""
        end_ns = max((mark.time_ns for mark in after if isinstance(mark, TimeMark)), default=0)
        speeds, num_bytes = self._clock.speeds, 0
        with self.moving():
            for target, source, pinned in copies:
                target.copy_(source)
                num_bytes += source.numel()
                speed = speeds.to_device_pinned if pinned else speeds.to_device_pageable
                end_ns = self._clock.queue_copy(source.numel(), bytes_per_s=speed, after_ns=end_ns)
        with self._lock:
            self._to_device_bytes += num_bytes
        return TimeMark(end_ns)

    def elapsed_ns(self, start: Mark, end: Mark) -> int:
        """Return the modelled time between two marks."""
        assert isinstance(start, TimeMark) and isinstance(end, TimeMark)
        return end.time_ns - start.time_ns

    def is_capturing(self) -> bool:
        """Return False: there are no CUDA graphs here."""
        return False

    def download(
        self, source: torch.UntypedStorage, *, into: torch.UntypedStorage | None = None
    ) -> torch.UntypedStorage:
        """Return a host copy of a device storage (or fill `into`), in the host pool.

        Raises ValueError if `into` has another size.
        """
        nbytes = source.nbytes()
        check_same_size(source, into)
        with self.moving():
            target = torch.empty(nbytes, dtype=torch.uint8).untyped_storage() if into is None else into
            target.copy_(source)
        self.claim_host(target)
        speeds = self._clock.speeds
        pinned = target.data_ptr() in self._pinned
        self._clock.add_copy(nbytes, bytes_per_s=speeds.to_host_pinned if pinned else speeds.to_host_pageable)
        with self._lock:
            self._to_host_bytes += nbytes
        return target

    def claim_host(self, storage: torch.UntypedStorage) -> None:
        """Declare a storage as host memory of a weight: kernels that touch it fail from now on, if it has content."""
        if not self._ledger.closed and storage.nbytes():
            self._ledger.add_host(storage)

    def unclaim_host(self, storage: torch.UntypedStorage) -> None:
        """Let kernels use the storage again; the next one that runs counts it as an input."""
        self._ledger.forget_host(storage)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage is in the device pool. Read-only."""
        entry = self._ledger.find(storage)
        return entry is not None and entry.on_device

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter around anything that computes: operands are checked, memory and time counted.

        Re-entrant, per thread.
        """
        guard = self._guard_of_thread()
        guard.running_depth += 1
        try:
            # After the count: `guard_thread` may come at any call, and must see that it is entered here.
            if guard.running_depth == 1 and not guard.permanent:
                guard.enter()
            yield
        finally:
            guard.running_depth -= 1
            if not guard.running_depth and not guard.permanent:
                guard.leave()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Enter around weight bookkeeping: nothing is checked or counted. Re-entrant, per thread.

        Gradients and inference mode are off inside, so that tensors made here can be used under either.
        """
        guard = self._guard_of_thread()
        with torch.inference_mode(mode=False), torch.no_grad():
            guard.moving_depth += 1
            try:
                yield
            finally:
                guard.moving_depth -= 1

    def guard(self) -> None:
        """Let kernels on host weights fail outside `running`, too: on this thread, and as soon as may be on all others.

        A thread that starts later is guarded from its start, one that runs already from its next call on, of a function
        of Python or C. A second call is a no-op. Nothing is counted outside `running`, so that a pipeline can be loaded
        on a guarded thread.
        """
        if not self._guard_of_thread().permanent and not self._ledger.closed:
            self.guard_thread()
            guard_other_threads(self)

    def guard_thread(self) -> None:
        """Let kernels on host weights fail outside `running` on this very thread. A second call is a no-op."""
        guard = self._guard_of_thread()
        if not guard.permanent and not self._ledger.closed:
            guard.permanent = True
            if not guard.running_depth:
                guard.enter()
            leave_before_end()

    def pin(self, storage: torch.UntypedStorage) -> bool:
        """Count a host storage as page-locked and keep it alive; False beyond `pin_limit_bytes`. Idempotent."""
        nbytes = storage.nbytes()
        with self._lock:
            if not nbytes or storage.data_ptr() in self._pinned:
                return True
            if self._pin_limit_bytes is not None and self._pinned_bytes + nbytes > self._pin_limit_bytes:
                return False
            self._pinned[storage.data_ptr()] = (storage, nbytes)
            self._pinned_bytes += nbytes
            return True

    def unpin(self, storage: torch.UntypedStorage) -> None:
        """Undo `pin`. A second call is a no-op."""
        with self._lock:
            _, nbytes = self._pinned.pop(storage.data_ptr(), (storage, 0))
            self._pinned_bytes -= nbytes

    def moved_bytes(self) -> tuple[int, int]:
        """Return the bytes copied by `upload` and by `download` since the device was made. Read-only."""
        with self._lock:
            return self._to_device_bytes, self._to_host_bytes

    def measure_link(self) -> LinkReading:
        """Return the modelled speeds of the link."""
        speeds = self._clock.speeds
        return LinkReading(
            to_device_pinned=float(speeds.to_device_pinned),
            to_device_pageable=float(speeds.to_device_pageable),
            to_host_pinned=float(speeds.to_host_pinned),
            to_host_pageable=float(speeds.to_host_pageable),
        )

    def close(self) -> None:
        """Stop checking and counting, on every thread. A second call is a no-op."""
        self._ledger.close()
        forget(self)
        with self._lock:
            self._pinned.clear()
            self._pinned_bytes = 0
        guard = self._guard_of_thread()
        if guard.permanent:
            guard.permanent = False
            # One that is not the last mode stays entered, and does nothing any more.
            if not guard.running_depth:
                guard.leave()

    def _guard_of_thread(self) -> KernelGuard:
        guard = self._local.guard
        if guard is None:
            guard = self._local.guard = KernelGuard(self._ledger, self._clock)
        return guard
