"""Lets something be done at the start of every thread from now on."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import FrameType


class ThreadGuard(Protocol):
    """What wants to know of new threads."""

    def guard(self) -> None:
        """Called on every thread that starts."""
        ...


_guards: weakref.WeakSet[ThreadGuard] = weakref.WeakSet()
_lock = threading.Lock()


def guard_new_threads(guard: ThreadGuard) -> None:
    """Have `guard.guard()` called first on every thread that `threading` starts from now on, while the guard lives.

    Threads that run already, and those that C code makes, are not reached. A profiler that was set for new threads
    before goes on as it was.
    """
    with _lock:
        if not isinstance(threading.getprofile(), _Starting):
            # The profile hook is the one call that `threading` makes on a new thread before the thread's own code.
            threading.setprofile(_Starting(threading.getprofile()))
        _guards.add(guard)


def forget(guard: ThreadGuard) -> None:
    """Undo `guard_new_threads`. A second call is a no-op."""
    with _lock:
        _guards.discard(guard)
        hook = threading.getprofile()
        if not _guards and isinstance(hook, _Starting):
            threading.setprofile(hook.previous)  # type: ignore[arg-type]


class _Starting:
    """The profile function of a thread that has just started; it takes itself away at its first call."""

    def __init__(self, previous: object) -> None:
        self.previous = previous

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        sys.setprofile(self.previous)  # type: ignore[arg-type]
        for guard in list(_guards):
            guard.guard()
