"""Termination signals in mid-round: they roll back first, and never strike inside an effect."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from residency.errors import ProcessPoisoned, RollbackFailed, RoundUndecided

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)

# Signal -> its handler before rounds, while a process that was signalled writes its last words; see deliver().
_kept: dict[int, Any] = {}


class Terminated(BaseException):
    """Raised where a termination signal interrupts a round. Not an Exception: no `except Exception` may eat it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def signal_name(self) -> str:
        """The signal's name, such as 'SIGTERM'."""
        return signal.Signals(self.signum).name


class Interrupts:
    """While entered, SIGTERM and SIGINT raise `Terminated`, at once or after what must not be interrupted.

    One signal ends the process, so that further ones do nothing: they would strike while it rolls back, or writes why
    it ends. Handlers are restored on exit, after `Terminated` by `deliver`. Outside the main thread signals cannot be
    caught; then it does nothing.
    """

    def __init__(self) -> None:
        self._pending: int | None = None
        self._depth = 0
        self._entered = 0
        self._is_ending = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Other threads are not counted: they may leave last, and could not restore the handlers.
        if threading.current_thread() is not threading.main_thread():
            return self
        self._entered += 1
        if self._entered == 1:
            self._is_ending = False
            for signum in SIGNALS:
                # What the process ignores (under nohup, say) it goes on ignoring.
                if signal.getsignal(signum) != signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._entered -= 1
        if self._entered == 0:
            pending, self._pending = self._pending, None
            # What ends the process by itself must say so.
            is_told = isinstance(error, (RollbackFailed, ProcessPoisoned, RoundUndecided, Terminated))
            _kept.update(self._previous)
            self._previous.clear()
            if pending is not None and not is_told:
                self._is_ending = True
                raise Terminated(pending) from error
            if not isinstance(error, Terminated):
                _restore()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold signals back inside; one that came meanwhile raises `Terminated` when the outermost one ends well."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            self.check()

    def check(self) -> None:
        """Raise `Terminated` now if a signal was held back; where stopping is safe even inside `deferred`."""
        if self._pending is not None and not self._is_ending:
            signum, self._pending = self._pending, None
            self._is_ending = True
            raise Terminated(signum)

    def interrupt(self, signum: int) -> None:
        """Have a round on another thread raise `Terminated` at its next safe point, as if the signal had come there."""
        self._pending = signum

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._is_ending:
            return
        if self._depth:
            self._pending = signum
        else:
            self._is_ending = True
            raise Terminated(signum)


def _restore() -> None:
    for signum, handler in _kept.items():
        signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
    _kept.clear()


def deliver(signum: int) -> None:
    """End the process as the signal would have done it. Blocks until the signal arrives."""
    _restore()
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    os.kill(os.getpid(), signum)


class StopNotice:
    """Calls back once when the process is asked to terminate while it serves, then lets the signal do its work.

    Only SIGTERM is watched (an interrupt unwinds the worker by itself), and only from the main thread.
    """

    def __init__(self, on_stop: Callable[[int], None]) -> None:
        self._on_stop = on_stop
        self._previous: Any = None
        self._installed = False

    def install(self) -> None:
        """Watch for SIGTERM. A second call is a no-op."""
        if not self._installed and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def remove(self) -> None:
        """Put the previous handler back, unless somebody installed another one since. A second call is a no-op."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)
            self._installed = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._on_stop(signum)
        previous = self._previous
        if callable(previous):
            previous(signum, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
