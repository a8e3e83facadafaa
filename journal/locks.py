"""Locks beside a journal: one around every write, one per stream for an epoch's life. Both die with the process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Self

from residency.errors import JournalError, StreamInUse
from residency.journal.header import unusable
from residency.journal.location import beside
from residency.journal.turns import join, leave, somebody_waits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

# How long one waits in the queue at most; afterwards the lock is whoever's asks first.
_PATIENCE_S = 1.0

_locks: weakref.WeakSet[FileLock | _Waiting] = weakref.WeakSet()


class FileLock:
    """An exclusive flock on a file made for it. Not reentrant; two objects exclude each other in one process, too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = os.fspath(path)
        self._descriptor: int | None = None
        # Of the file that is open: which one it is.
        self._key: tuple[int, int] | None = None
        # Whether those who came later wait for it to leave the queue.
        self._is_in_queue = False
        _locks.add(self)

    def try_acquire(self) -> bool:
        """Take the lock if it is free.

        Raises:
            JournalError: the lock file cannot be made or opened.
        """
        try:
            while True:
                descriptor = self._open()
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._forget_if_replaced(descriptor)
                    return False
                # Somebody may have removed the file since; then another process locks another file of that name.
                if not self._forget_if_replaced(descriptor):
                    return True
        except OSError as error:
            raise unusable(self.path, error) from error

    def acquire(self, *, wait_s: float) -> None:
        """Take the lock, waiting for at most `wait_s` seconds, in the order of those who wait. Blocks.

        Raises:
            JournalError: it stayed taken, or the lock file cannot be used.
        """
        deadline = time.monotonic() + wait_s
        must_wait = self._must_wait()
        while must_wait or not self.try_acquire():
            must_wait = False
            try:
                self._wait(deadline)
            except OSError as error:
                raise unusable(self.path, error) from error
            if self._descriptor is None:
                raise JournalError(
                    journal=str(self.path),
                    problem=f"another writer has kept it locked for longer than {wait_s:g} s",
                    remedy="end that process, then try again",
                )
            # Somebody may have removed the file meanwhile, as above.
            if not self._forget_if_replaced(self._descriptor):
                return

    def _wait(self, deadline: float) -> None:
        """Have a descriptor that holds the lock, or none. Whatever interrupts it, nobody else is kept from the lock."""
        self.close()
        # A process that is stopped in the queue must not keep the others from a lock that is free.
        self._wait_once(min(deadline, time.monotonic() + _PATIENCE_S), in_turn=True)
        if self._descriptor is None and time.monotonic() < deadline:
            self._wait_once(deadline, in_turn=False)

    def _wait_once(self, deadline: float, *, in_turn: bool) -> None:
        waiting = _Waiting(self.path, in_turn=in_turn)
        try:
            if waiting.wait(deadline):
                self._is_in_queue = in_turn
                self._descriptor = waiting.own
                waiting.own = None
        except BaseException:
            if waiting.own is not None:
                self._descriptor = None
            raise
        finally:
            waiting.give_up()

    def _must_wait(self) -> bool:
        """Whether others came before. A lock that is free this very moment is theirs."""
        try:
            return somebody_waits(self._open())
        except OSError as error:
            raise unusable(self.path, error) from error

    def release(self) -> None:
        """Give the lock back. A second call is a no-op."""
        # Without asking whether it is held: an interrupt may have come between taking it and noting so.
        if self._descriptor is not None:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            except OSError:
                # What was done under the lock is done: no error of it. Closed, the file lets go, too.
                self.close()
                return
            if self._is_in_queue:
                self._is_in_queue = False
                leave(self._descriptor)

    def close(self) -> None:
        """Give the lock back and close the file. A second call is a no-op."""
        descriptor, self._descriptor = self._descriptor, None
        self._key, self._is_in_queue = None, False
        if descriptor is not None:
            os.close(descriptor)

    def read(self) -> str:
        """Return what the holder wrote about itself; empty if nothing."""
        try:
            return self.path.read_text("utf-8", errors="replace").strip()
        except OSError:
            return ""

    def write(self, text: str) -> None:
        """Write who holds it, for people; the lock itself does not depend on it."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode(), 0)

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._descriptor

    def _forget_if_replaced(self, descriptor: int) -> bool:
        if self._key is None:
            mine = os.fstat(descriptor)
            self._key = (mine.st_dev, mine.st_ino)
        try:
            there = os.stat(self._name)
        except FileNotFoundError:
            self.close()
            return True
        if self._key == (there.st_dev, there.st_ino):
            return False
        self.close()
        return True


class _Waiting:
    """Waits for a lock on a thread of its own, because the system cannot be told when to stop.

    Looking again and again instead, a writer among eight that never pause would wait for a second.
    """

    def __init__(self, path: Path, *, in_turn: bool) -> None:
        self.own: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._in_turn = in_turn
        self._lock = threading.Lock()
        self._is_done = threading.Event()
        self._is_over = False
        self._problem: OSError | None = None
        _locks.add(self)
        threading.Thread(target=self._run, args=(self.own,), name="residency-journal-lock", daemon=True).start()

    def wait(self, deadline: float) -> bool:
        """Whether `own` has the lock by then. Blocks; raises OSError if the system refuses to lock."""
        if not self._is_done.wait(max(0.0, deadline - time.monotonic())):
            return False
        if self._problem is not None:
            raise self._problem
        return True

    def give_up(self) -> None:
        """Let go of what was not taken over: now, or once the lock is had."""
        with self._lock:
            self._is_over = True
            if self._is_done.is_set():
                self.close()
            elif self.own is not None:
                # Whoever came later goes on at once.
                leave(self.own)

    def close(self) -> None:
        """Close the file, and with it the lock. A second call is a no-op."""
        descriptor, self.own = self.own, None
        if descriptor is not None:
            os.close(descriptor)

    def _run(self, descriptor: int) -> None:
        try:
            if self._in_turn:
                join(descriptor)
            if not self._is_over:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            self._problem = error
        with self._lock:
            self._is_done.set()
            if self._is_over:
                self.close()


def _close_in_child() -> None:
    # A child shares the parent's lock: kept open, it would outlive the parent. Closing does not release the parent's.
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


class StreamLock:
    """The right of one live epoch to write a stream. Ends with release(), or with the process however it ends."""

    def __init__(self, stream: str, release: Callable[[], None]) -> None:
        self.stream = stream
        self._release = release

    def release(self) -> None:
        """Give the stream back. A second call is a no-op."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def hold_stream(journal: Path, stream: str) -> StreamLock:
    """Take a stream of a journal in a file, without waiting.

    Raises:
        StreamInUse: another live epoch holds it.
        JournalError: the lock file cannot be used.
    """
    # A digest, because a stream's name may hold what a file's name must not.
    name = hashlib.sha256(stream.encode()).hexdigest()[:16]
    lock = FileLock(beside(journal, f".stream-{name}.lock"))
    if not lock.try_acquire():
        holder = lock.read() or "another process"
        lock.close()
        raise StreamInUse(journal=str(journal), stream=stream, holder=holder)
    lock.write(f"process {os.getpid()}")
    return StreamLock(stream, lock.close)
