"""The CUDA device: torch's allocator under a cap, page-locked host memory, and copies over the link."""

from __future__ import annotations

import re
import threading
import time
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from residency.gpu.cells import aligned, storage_of_part
from residency.gpu.cuda_link import time_link
from residency.gpu.cuda_pins import CudaPins
from residency.gpu.cuda_queue import CopyQueue, EventMark, QueuedMark
from residency.gpu.cuda_upload import StagedUpload
from residency.gpu.device import MemoryReading
from residency.gpu.host_memory import allocate
from residency.gpu.limits import check_cap, check_same_size
from residency.gpu.records import DeviceReading, LinkReading

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from residency.gpu.device import Mark

GIB = 2**30
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


class CudaDevice:
    """One CUDA device through torch. Streams: everything runs on the caller's current stream.

    Storages that are pinned are kept alive until they are unpinned, because memory must never be unmapped while it
    is registered with the driver.

    cap_bytes: the limit, enforced as `limit` does. None: nothing is enforced, and the cap in `reading` is what this
    process could take when the device was opened, in whole GiB (less than 2 GiB: exactly): what was free, and what
    torch had reserved already. The CUDA contexts and the memory of other processes are not in it.
    """

    def __init__(self, index: int = 0, *, cap_bytes: int | None = None, allocator_settings: str = "") -> None:
        self._device = torch.device("cuda", index)
        self.allocator_settings = allocator_settings
        free_bytes, self._total_bytes = torch.cuda.mem_get_info(self._device)
        self._cap_bytes = _whole_gib(free_bytes + torch.cuda.memory_reserved(self._device))
        self._lock = threading.Lock()
        self._pins = CudaPins(self._device)
        self._staged = StagedUpload(self._pins)
        self._to_device_bytes = 0
        self._to_host_bytes = 0
        self._link_lock = threading.Lock()
        self._link: LinkReading | None = None
        self._queue = CopyQueue(self._device, self._staged)
        if cap_bytes is not None:
            self.limit(cap_bytes)

    @property
    def torch_device(self) -> torch.device:
        """The CUDA device with its index."""
        return self._device

    def reading(self) -> DeviceReading:
        """Return what the device is and the cap in force. Read-only."""
        return DeviceReading(
            kind="cuda",
            name=torch.cuda.get_device_name(self._device),
            index=self._device.index,
            total_bytes=self._total_bytes,
            cap_bytes=self._cap_bytes,
            driver=driver_version(),
            torch_version=str(torch.__version__),
            allocator_settings=self.allocator_settings,
        )

    def limit(self, cap_bytes: int) -> None:
        """Cap what this process's torch allocator may reserve from now on; the CUDA context is not in it.

        Raises SettingsError if the cap is not within the device's memory.
        """
        check_cap(cap_bytes, total_bytes=self._total_bytes)
        torch.cuda.set_per_process_memory_fraction(cap_bytes / self._total_bytes, self._device)
        self._cap_bytes = cap_bytes

    def memory(self) -> MemoryReading:
        """Return the allocator's figures without waiting for the device. Read-only."""
        return MemoryReading(
            allocated_bytes=torch.cuda.memory_allocated(self._device),
            reserved_bytes=torch.cuda.memory_reserved(self._device),
            allocated_peak_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_peak_bytes=torch.cuda.max_memory_reserved(self._device),
        )

    def unreserved_bytes(self) -> int:
        """Return what torch's allocator may still take under the cap; other processes may have taken it. Read-only."""
        return max(0, self._cap_bytes - torch.cuda.memory_reserved(self._device))

    def reset_peaks(self) -> None:
        """Set both peaks to the current figures."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def empty_cache(self) -> None:
        """Give cached, unused device memory back."""
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Block until the device has done all that was asked of it. Raises TimeoutError if host memory is not read."""
        self._queue.settle()
        torch.cuda.synchronize(self._device)

    def now_ns(self) -> int:
        """Return the host's monotonic clock in ns; it means the device's only after `synchronize`."""
        return time.perf_counter_ns()

    def upload(self, source: torch.UntypedStorage, *, pinned: bool) -> torch.UntypedStorage:
        """Return a device copy of a host storage, in the order of the current stream.

        From pinned memory it returns before the copy ends, so `source` must live and stay unchanged until then.
        Raises torch.OutOfMemoryError; nothing is kept then.
        """
        nbytes = source.nbytes()
        with self.moving(), torch.cuda.device(self._device):
            target = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._copy_in(target, _as_bytes(source), pinned=pinned)
        with self._lock:
            self._to_device_bytes += nbytes
        return target.untyped_storage()

    def upload_all(
        self, sources: Sequence[tuple[torch.UntypedStorage, bool]], *, whole: torch.Tensor | None = None
    ) -> list[torch.UntypedStorage]:
        """Return device copies of several (host storage, is it pinned), all or none, in one block of the allocator.

        Storage by storage the allocator would round and split: 22 GiB of weights in 1,400 tensors reserved 24 GiB.
        whole: host bytes in which the sources lie as in that block: one copy then. Ordering and lifetime of sources as
        in `upload`. Raises torch.OutOfMemoryError; nothing is kept then.
        """
        sizes = [source.nbytes() for source, _ in sources]
        starts = [0, *accumulate(aligned(nbytes) for nbytes in sizes)]
        copies = []
        with self.moving(), torch.cuda.device(self._device):
            block = self.allocate(starts[-1])
            if whole is not None:
                self._copy_in(block, whole, pinned=all(pinned for _, pinned in sources))
            for (source, pinned), start, nbytes in zip(sources, starts, sizes, strict=False):
                if whole is None:
                    self._copy_in(block[start : start + nbytes], _as_bytes(source), pinned=pinned)
                copies.append(self.part(block, start, nbytes))
        with self._lock:
            self._to_device_bytes += sum(sizes)
        return copies

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a block of torch's allocator, uint8 of shape (nbytes,). Raises torch.OutOfMemoryError."""
        with self.moving():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def part(self, block: torch.Tensor, start: int, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of its own over a part of a block, which it keeps alive."""
        with self.moving():
            if not nbytes:
                return block.new_empty(0).untyped_storage()
            # Through DLPack every part gets a storage of its own, of its exact size.
            return storage_of_part(block[start : start + nbytes])

    def mark(self, *, timed: bool = False) -> EventMark:
        """Record a CUDA event on the caller's current stream."""
        return EventMark(torch.cuda.current_stream(self._device.index), timed=timed)

    def wait_for(self, mark: Mark) -> None:
        """Let the caller's current stream wait for a CUDA event.

        The host waits only for copies from pageable memory that were not even begun: they are late. Raises what kept
        them from being made, and TimeoutError.
        """
        assert isinstance(mark, EventMark | QueuedMark)
        torch.cuda.current_stream(self._device.index).wait_event(mark.event)

    def copy_ahead(
        self, copies: Sequence[tuple[torch.Tensor, torch.Tensor, bool]], *, after: Iterable[Mark]
    ) -> EventMark | QueuedMark:
        """Queue copies on the one copy stream, after CUDA events of the streams that compute. The host does not wait.

        What is pageable is read by a thread of its own; what is asked for meanwhile comes after it.
        """
        with self.moving():
            end = self._queue.put(copies, after)
        with self._lock:
            self._to_device_bytes += sum(source.numel() for _, source, _ in copies)
        return end

    def elapsed_ns(self, start: Mark, end: Mark) -> int:
        """Return the time between two timed CUDA events in ns, after `synchronize`."""
        assert isinstance(start, EventMark) and isinstance(end, EventMark)
        elapsed_ms = float(start.event.elapsed_time(end.event))
        return round(elapsed_ms * 1e6)

    def is_capturing(self) -> bool:
        """Whether the caller's current stream is being captured into a CUDA graph. Read-only."""
        return bool(torch.cuda.is_current_stream_capturing())

    def download(
        self, source: torch.UntypedStorage, *, into: torch.UntypedStorage | None = None
    ) -> torch.UntypedStorage:
        """Return a host copy of a device storage (or fill `into`), after the work of the current stream.

        Blocks until the copy ends. Raises ValueError if `into` has another size.
        """
        nbytes = source.nbytes()
        check_same_size(source, into)
        with self.moving(), torch.cuda.device(self._device):
            target = _as_bytes(allocate(nbytes) if into is None else into)
            if into is None:
                target.zero_()  # Touched by all cores at once; the copy would fault the pages in one by one.
            target.copy_(_as_bytes(source), non_blocking=False)
        with self._lock:
            self._to_host_bytes += nbytes
        return target.untyped_storage() if into is None else into

    def claim_host(self, storage: torch.UntypedStorage) -> None:
        """Do nothing: torch itself refuses kernels on host weights."""

    def unclaim_host(self, storage: torch.UntypedStorage) -> None:
        """Do nothing, as `claim_host` did."""

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage is in this device's memory. Read-only."""
        return storage.device == self._device

    def running(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: torch checks operands and counts memory itself."""
        return nullcontext()

    def guard(self) -> None:
        """Do nothing: torch itself refuses kernels on host weights, on every thread."""

    def moving(self) -> AbstractContextManager[None]:
        """Enter around weight bookkeeping. Re-entrant, per thread.

        Gradients and inference mode are off inside, so that tensors made here can be used under either.
        """
        # Entered several times for every use of a streamed layer, mostly where both are off already.
        return _OFF if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()) else _switched_off()

    def pin(self, storage: torch.UntypedStorage) -> bool:
        """Page-lock a host storage in place and keep it alive; False if the host refuses. Idempotent.

        Touch the memory first: the driver registers present pages ten times as fast.
        """
        return self._pins.pin(storage)

    def unpin(self, storage: torch.UntypedStorage) -> None:
        """Undo `pin`, after the copies from it have ended. A second call is a no-op.

        Whatever interrupts it, the storage is kept alive for as long as it may be registered. Raises TimeoutError, with
        nothing unpinned, if copies that were asked for are not made.
        """
        self._queue.settle()
        self._pins.unpin(storage)

    def moved_bytes(self) -> tuple[int, int]:
        """Return the bytes copied by `upload` and by `download` since the device was made. Read-only."""
        with self._lock:
            return self._to_device_bytes, self._to_host_bytes

    def measure_link(self) -> LinkReading:
        """Measure the link by real copies, each direction, pinned and pageable; cached after the first call.

        The copies are smaller if the cap leaves little room. Raises torch.OutOfMemoryError if it leaves none.
        """
        with self._link_lock:
            if self._link is None:
                with self.moving(), torch.cuda.device(self._device):
                    self._link = time_link(self)
                self.empty_cache()
            return self._link

    def close(self) -> None:
        """Unpin everything. Caps of the allocator stay. A second call is a no-op.

        Raises TimeoutError, with everything still pinned, if a copy that was begun does not end.
        """
        self._queue.close()
        self._queue.settle()  # What hangs holds the buffers, and may go on to copy from what would be unpinned.
        self._staged.close()
        self._pins.clear()

    def _copy_in(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool) -> None:
        if pinned:
            target.copy_(source, non_blocking=True)
        else:
            self._staged.copy(target, source)


_OFF = nullcontext()


@contextmanager
def _switched_off() -> Iterator[None]:
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def driver_version() -> str:
    """Return the version of the NVIDIA kernel driver, else that of its CUDA interface, else 'unknown'. Read-only."""
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    if found:
        return found.group(1)
    interface = getattr(torch._C, "_cuda_getDriverVersion", None)
    return f"cuda {interface()}" if interface is not None else "unknown"


def _whole_gib(nbytes: int) -> int:
    """Round down, so that the few MiB by which two starts differ do not count; a small device keeps all it has."""
    return nbytes if nbytes < 2 * GIB else nbytes // GIB * GIB


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the whole storage as a tensor of bytes; shares memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
