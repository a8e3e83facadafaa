"""A lock between the processes of one host, for what they had better not do at once."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

# Between two looks at a lock that is taken; page-locking a layer takes tens of milliseconds.
_POLL_S_MIN, _POLL_S_MAX = 0.001, 0.02
# O_NONBLOCK: a pipe of that name must not stop the opening.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def default_lock_path() -> Path:
    """Return the lock file of this user in the folder for temporary files.

    Processes that see another such folder (in other containers, say), and those of other users, have another lock.
    """
    return Path(tempfile.gettempdir()) / f"residency-{os.geteuid()}.pin.lock"


class HostLock:
    """An flock that helps where it can: what it guards is done without it rather than not at all.

    Only a plain file of this user's own is used, never through a symbolic link; it is made with mode 0600 and stays.
    The lock ends with the process. Not for several threads at once.

    wait_s: how long to wait for other processes. Once that was in vain, they are not waited for any more.
    """

    def __init__(self, path: Path, *, wait_s: float) -> None:
        self._path = path
        self._wait_s = wait_s
        self._descriptor: int | None = None
        self._is_usable = True

    @contextmanager
    def held(self, *, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[bool]:
        """Hold the lock inside; yields whether it is held. Waits no longer once `is_wanted` returns False.

        A lock that cannot be had is told as a warning, once, and not raised.
        """
        is_held = self._acquire(is_wanted)
        try:
            yield is_held
        finally:
            if is_held and self._descriptor is not None:
                # Not by closing: a process that was forked meanwhile has the same open file.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file; the lock, if held, is given back. A second call is a no-op."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _acquire(self, is_wanted: Callable[[], bool]) -> bool:
        if not self._is_usable:
            return False
        deadline = time.monotonic() + self._wait_s
        pause_s = _POLL_S_MIN
        try:
            while not self._try_acquire():
                if not is_wanted():
                    return False
                if time.monotonic() >= deadline:
                    self._stop_waiting()
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S_MAX)
        except OSError as error:
            self._is_usable = False
            log.warning("going on without the lock %s between processes of this host: %s", self._path, error)
            return False
        return True

    def _try_acquire(self) -> bool:
        if self._descriptor is None:
            self._descriptor = self._open()
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _open(self) -> int:
        descriptor = os.open(self._path, _FLAGS, 0o600)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
            os.close(descriptor)
            raise OSError("it is not a plain file of this user's own")
        return descriptor

    def _stop_waiting(self) -> None:
        if self._wait_s:
            log.warning(
                "going on without the lock %s between processes of this host: another has kept it for %g s",
                self._path,
                self._wait_s,
            )
        self._wait_s = 0
