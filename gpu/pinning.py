"""Pinning many stores fast: threads copy, one registers at a time on this host, the caller binds the weights in order.

stores     pack (threads)      register (one thread, host-wide lock)     adopt (the caller, in order)
0 1 2 ---> [3] [4] [5] ------> [2] ------------------------------------> [1] ---> [0] pinned
           |<------ at most `num_in_flight` copies beside the weights ----->|
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from residency.errors import describe
from residency.gpu.host_lock import HostLock, default_lock_path
from residency.gpu.host_memory import trim
from residency.gpu.pinning_watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from residency.gpu.device import Device

log = logging.getLogger(__name__)

# How long a wait for another thread lasts before it is asked whether there is still something to wait for.
POLL_S = 0.05
END_WAIT_S = 30.0  # for what is under way when all is cancelled: one registration and a few copies
# What is let go of is kept by the C library's heap, if it came from there (as weights of up to 32 MiB may), until it is
# trimmed: it would come on top of the copies. Once for so many bytes, because trimming looks at the whole heap.
TRIM_BYTES = 2**30


class PackedCopy(Protocol):
    """What a store has packed: memory that holds a copy of its weights."""

    @property
    def num_bytes(self) -> int:
        """How large it is."""
        ...


PackedT = TypeVar("PackedT", bound=PackedCopy)


class Packable(Protocol[PackedT]):
    """A store whose weights can be copied into one block of host memory, which is then page-locked.

    No method is called by two threads at once for one store, except `discard`.
    """

    def pack(self) -> PackedT | None:
        """Return a copy of the weights, bound to nothing; None if there is nothing to do. Called on any thread.

        Leaves nothing behind if it raises.
        """
        ...

    def register(self, packed: PackedT) -> None:
        """Page-lock a copy. Called on one thread for all stores. Raises MemoryError if the host refuses."""
        ...

    def adopt_packed(self, packed: PackedT) -> None:
        """Bind the weights to the copy and let go of what held them before. Called on the thread of `pin_all`."""
        ...

    def discard(self, packed: PackedT) -> None:
        """Release the page lock and let go of the copy; weights that are bound to it already keep its memory.

        Called on any thread, for copies that were not registered as well; may be repeated.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningBounds:
    """How much is done at once, and how long it is waited for.

    num_threads: that copy. num_in_flight: copies that exist beside the weights at once, being filled, page-locked or
    bound; the host needs room for as many of the largest. lock_wait_s: for other processes that page-lock.
    slow_s: a step that takes longer is told as a warning. stall_s: without any progress for so long it is given up.
    """

    num_threads: int = 3
    num_in_flight: int = 4
    lock_wait_s: float = 60.0
    slow_s: float = 30.0
    stall_s: float = 900.0

    def __post_init__(self) -> None:
        if min(self.num_threads, self.num_in_flight) < 1 or min(self.lock_wait_s, self.slow_s, self.stall_s) < 0:
            raise ValueError(f"{self} leaves nothing to work with; give counts of at least 1 and times of at least 0")


DEFAULT_BOUNDS = PinningBounds()


def pin_all(
    stores: Sequence[Packable[PackedT]],
    device: Device,
    *,
    lock_path: Path | None = None,
    names: Sequence[str] = (),
    bounds: PinningBounds = DEFAULT_BOUNDS,
    adopted: list[Packable[PackedT]] | None = None,
) -> int:
    """Page-lock the host copies of all stores and return how many bytes were, or raise with everything else undone.

    What is to be unpinned is unpinned before. Nobody else uses the stores meanwhile. Beside the weights the host needs
    room for `bounds.num_in_flight` copies, and for `TRIM_BYTES` of memory on its way back. lock_path: the file that
    processes of this host lock around every registration; None: `default_lock_path`. names: of the stores, for the log.

    Raises what a store raised (MemoryError: the host refuses), the caller's own interrupts, and TimeoutError if
    nothing has moved for `bounds.stall_s`. Stores whose turn had not come are then as they were, and their copies are
    given back. `adopted` is given every store whose weights were bound, at once: these stay pinned until `unpin`,
    which is harmless on all others. A registration that hangs cannot be cancelled: its copy, and those behind it, are
    given back when it returns, until when the device may not answer; a process in that state had better end.
    """
    jobs = [
        _Job(store, names[index] if index < len(names) else f"host copy {index + 1} of {len(stores)}")
        for index, store in enumerate(stores)
    ]
    if not jobs:
        return 0
    device.synchronize()  # The threads copy in no order with streams of the caller.
    lock = HostLock(default_lock_path() if lock_path is None else lock_path, wait_s=bounds.lock_wait_s)
    return _Pinning(jobs, device, lock, bounds).run([] if adopted is None else adopted)


@dataclass(slots=True, eq=False)
class _Job(Generic[PackedT]):
    """One store on its way. Whoever takes the claim is the one who adopts or discards what was packed."""

    store: Packable[PackedT]
    name: str
    packed: PackedT | None = None
    is_packed: threading.Event = field(default_factory=threading.Event)
    _claim: deque[bool] = field(default_factory=lambda: deque([True]))

    def claim(self) -> bool:
        """Take the claim; False if somebody else has. Atomic, also under interrupts."""
        try:
            return self._claim.pop()
        except IndexError:
            return False


class _Pinning(Generic[PackedT]):
    """One run. The caller's thread, which interrupts may hit, shares only queues and flags with the others."""

    def __init__(self, jobs: list[_Job[PackedT]], device: Device, lock: HostLock, bounds: PinningBounds) -> None:
        self._jobs = jobs
        self._device = device
        self._lock = lock
        self._watch = Watch(slow_s=bounds.slow_s, stall_s=bounds.stall_s, num_jobs=len(jobs))
        self._waiting = deque(jobs)
        self._tokens: SimpleQueue[None] = SimpleQueue()  # One for each copy that may exist beside the weights.
        for _ in range(bounds.num_in_flight):
            self._tokens.put(None)
        self._ready: SimpleQueue[_Job[PackedT] | None] = SimpleQueue()  # In order; None: look for an error.
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._error: BaseException | None = None
        self._is_cancelled = False
        self._is_done = False
        self._is_closed = False  # What is packed from now on is discarded by the thread that packed it.
        self._caller = threading.current_thread()
        # Daemons: a registration that hangs must not keep the process from ending.
        self._packers = [
            threading.Thread(target=self._pack_some, name=f"residency-pack-{index}", daemon=True)
            for index in range(min(bounds.num_threads, bounds.num_in_flight, len(jobs)))
        ]
        self._registrar = threading.Thread(target=self._register_all, name="residency-register", daemon=True)

    def run(self, adopted: list[Packable[PackedT]]) -> int:
        """Do it all; see `pin_all`."""
        num_bytes = trimmed_bytes = 0
        try:
            _start(self._registrar)
            for _ in self._jobs:
                num_bytes += self._adopt(self._next_ready(), adopted)
                if num_bytes - trimmed_bytes >= TRIM_BYTES:
                    trim()
                    trimmed_bytes = num_bytes
            self._is_done = True
        except BaseException as error:
            self._is_cancelled = True
            self._wait_for_end()
            if any(thread.is_alive() for thread in (self._registrar, *self._packers)):
                error.add_note(f"still under way: {self._watch.under_way()}; its memory is given back when it ends")
            else:
                # Gigabytes would live for as long as the traceback, whose frames hold them.
                traceback.clear_frames(error.__traceback__)
                self._error = None
            raise
        self._wait_for_end()
        if num_bytes:
            trim()
            self._watch.tell_end()
        return num_bytes

    def _next_ready(self) -> _Job[PackedT]:
        """Wait for the next store in order. Raises what a thread raised."""
        while True:
            job = _get(self._ready)
            if self._error is not None:
                raise self._error
            self._watch.look()
            if job is not None:
                return job
            if not self._registrar.is_alive():
                raise RuntimeError("the thread that page-locks host copies has ended; try again")

    def _adopt(self, job: _Job[PackedT], adopted: list[Packable[PackedT]]) -> int:
        packed = job.packed
        num_bytes = 0 if packed is None else packed.num_bytes
        if packed is not None:
            try:
                if not job.claim():
                    raise self._error or RuntimeError(f"{job.name} was given up by another thread; try again")
                adopted.append(job.store)
                job.store.adopt_packed(packed)
            except BaseException:
                # Whatever cut it short, and where: a second discard is harmless, a page lock that nobody knows is not.
                job.store.discard(packed)
                raise
            finally:
                job.packed = None
        self._watch.progress(num_bytes)
        self._tokens.put(None)
        return num_bytes

    def _wait_for_end(self) -> None:
        """Wait, for a bounded time, until no thread of this run is left."""
        self._ended.put(None)
        for _ in self._packers:
            self._tokens.put(None)
        for thread in (self._registrar, *self._packers):
            if thread.is_alive():
                thread.join(POLL_S if self._watch.is_stalled else END_WAIT_S)

    def _pack_some(self) -> None:
        """Run by every thread that copies."""
        with self._reporting(), self._current_device():
            while self._take_token() and (job := self._next_waiting()) is not None:
                with self._watch.step(f"copying {job.name}"):
                    job.packed = job.store.pack()
                job.is_packed.set()
                if self._is_closed:
                    self._give_back(job)

    def _register_all(self) -> None:
        """Run by the thread that registers. It also gives back what is not adopted: no interrupt hits it."""
        with self._reporting(), self._current_device():
            with self._reporting():
                for packer in self._packers:
                    packer.start()
                self._register_in_order()
            if not self._is_done:
                self._give_back_rest()
        self._lock.close()

    def _register_in_order(self) -> None:
        for job in self._jobs:
            if not self._await_packed(job):
                return
            if job.packed is not None:
                self._register(job, job.packed)
            self._ready.put(job)
        while not self._is_done and not self._is_cancelled and self._caller.is_alive():
            _wait(self._ended)

    def _register(self, job: _Job[PackedT], packed: PackedT) -> None:
        with ExitStack() as stack:
            with self._watch.step("waiting for other processes that page-lock"):
                stack.enter_context(self._lock.held(is_wanted=lambda: not self._is_cancelled))
            if not self._is_cancelled:
                with self._watch.step(f"page-locking {packed.num_bytes} bytes of {job.name}"):
                    job.store.register(packed)

    def _await_packed(self, job: _Job[PackedT]) -> bool:
        """Wait until a store is packed; False if that is not wanted any more."""
        while not self._is_cancelled and self._caller.is_alive():
            if job.is_packed.wait(POLL_S):
                return not self._is_cancelled
            if not any(packer.is_alive() for packer in self._packers) and not job.is_packed.is_set():
                raise RuntimeError(f"no thread is left that would copy {job.name}; try again")
        return False

    def _take_token(self) -> bool:
        """Wait until one more copy may exist; False if none is wanted any more."""
        while self._waiting and not self._is_cancelled and not self._is_done and self._caller.is_alive():
            if _wait(self._tokens):
                return not self._is_cancelled
        return False

    def _next_waiting(self) -> _Job[PackedT] | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _give_back_rest(self) -> None:
        self._is_cancelled = self._is_closed = True
        for packer in self._packers:
            if packer.is_alive():
                packer.join(END_WAIT_S)
        for job in reversed(self._jobs):
            self._give_back(job)

    def _give_back(self, job: _Job[PackedT]) -> None:
        packed = job.packed
        if packed is None or not job.claim():
            return
        job.packed = None
        try:
            job.store.discard(packed)
        except Exception as error:  # noqa: BLE001 - the others are to be given back nevertheless
            log.warning("giving back the copy of %s failed: %s", job.name, describe(error))

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Enter in every thread: whatever ends it is raised by the caller. The first one counts."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - also what would end a thread without a word
            if self._error is None:
                self._error = error
            self._is_cancelled = True
            self._ready.put(None)

    def _current_device(self) -> AbstractContextManager[object]:
        # A new thread starts with the first device: what it asks of the driver would open a context there.
        device = self._device.torch_device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _start(thread: threading.Thread) -> None:
    """Start a thread. An interrupt meanwhile is raised as such, not as what it makes of a lock of `threading`'s own."""
    try:
        thread.start()
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


_Item = TypeVar("_Item")


def _get(queue: SimpleQueue[_Item]) -> _Item | None:
    """Return the next item; None after a short while without any."""
    try:
        return queue.get(timeout=POLL_S)
    except Empty:
        return None


def _wait(queue: SimpleQueue[None]) -> bool:
    """Take the next token; False after a short while without any."""
    try:
        queue.get(timeout=POLL_S)
    except Empty:
        return False
    return True
