"""Locks beside a journal: one around every write, one per stream for an epoch's life. Both die with the process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import weakref
from typing import TYPE_CHECKING, Self

from residency.errors import JournalError, StreamInUse
from residency.journal.header import unusable
from residency.journal.location import beside

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

# Between two looks at a lock that is taken; an append takes about a millisecond.
_POLL_S_MIN, _POLL_S_MAX = 0.000_5, 0.02

_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """An exclusive flock on a file made for it. Not reentrant; two objects exclude each other in one process, too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
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
        """Take the lock, waiting for at most `wait_s` seconds. Blocks.

        Raises:
            JournalError: it stayed taken, or the lock file cannot be used.
        """
        deadline = time.monotonic() + wait_s
        pause_s = _POLL_S_MIN
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                raise JournalError(
                    journal=str(self.path),
                    problem=f"another writer has kept it locked for longer than {wait_s:g} s",
                    remedy="end that process, then try again",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S_MAX)

    def release(self) -> None:
        """Give the lock back. A second call is a no-op."""
        # Without asking whether it is held: an interrupt may have come between taking it and noting so.
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the lock back and close the file. A second call is a no-op."""
        descriptor, self._descriptor = self._descriptor, None
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
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._descriptor

    def _forget_if_replaced(self, descriptor: int) -> bool:
        mine = os.fstat(descriptor)
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            self.close()
            return True
        if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
            return False
        self.close()
        return True


def _close_in_child() -> None:
    # A child shares the parent's lock: kept open, it would outlive the parent. Closing does not release the parent's.
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


class StreamLock:
    """The right of one live epoch to write a stream. Ends with release(), or with the process however it ends."""

    def __init__(self, lock: FileLock, stream: str) -> None:
        self._lock = lock
        self.stream = stream

    @classmethod
    def take(cls, journal: Path, stream: str) -> Self:
        """Take the stream, without waiting.

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
        return cls(lock, stream)

    def release(self) -> None:
        """Give the stream back. A second call is a no-op."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
