"""A thread of its own for copies that block: page faults and slow disks stall nobody else."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

_Result = TypeVar("_Result")

# As long as a disk may take for what is wanted next; it hangs, or is too slow to serve from.
WAIT_S = 60.0
EXIT_WAIT_S = 5.0  # for one copy; whoever ended the process with a signal soon sends one that cannot be waited out


@dataclass(slots=True, eq=False)
class _Errand(Generic[_Result]):
    work: Callable[[], _Result]
    done: Future[_Result] = field(default_factory=Future)


class CopyThread(Generic[_Result]):
    """Does what it is asked to, one errand after the other, in order. The thread begins with the first one.

    A process that ends closes it: a thread that comes back from a copy while the interpreter goes would abort it.
    """

    def __init__(self) -> None:
        self._errands: SimpleQueue[_Errand[_Result] | None] = SimpleQueue()
        self._last: Future[_Result] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether all that was asked for is done. Read-only."""
        return self._last is None or self._last.done()

    def ask(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Have something done after all that was asked for before; the result is what it returns or raises.

        One thread at a time may ask. Raises RuntimeError if it is closed.
        """
        if self._is_closed:
            raise RuntimeError("the device is closed, nothing is copied any more; open it again")
        if self._thread is None:
            # A daemon: a file system that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="residency-copies", daemon=True)
            self._thread.start()
            atexit.register(self._close_at_exit)
        errand = _Errand(work)
        self._last = errand.done  # Before it is put: who is interrupted in between waits in vain, but never too short.
        self._errands.put(errand)
        return errand.done

    def wait(self, *, wait_s: float = WAIT_S) -> None:
        """Return once all that was asked for is done, however it ended. Raises TimeoutError after `wait_s`."""
        if self._last is not None and wait([self._last], timeout=wait_s).not_done:
            raise slow(wait_s)

    def close(self, *, wait_s: float = WAIT_S) -> None:
        """Do what is under way, refuse the rest, end the thread; waits for at most `wait_s`. May be repeated."""
        self._is_closed = True
        if self._thread is not None:
            self._errands.put(None)
            self._thread.join(wait_s)
            atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        self.close(wait_s=EXIT_WAIT_S)

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            self._do(errand)
            del errand  # The thread waits for long; it must not keep alive what it has copied.
        with suppress(Empty):
            while True:
                left = self._errands.get_nowait()
                if left is not None:
                    self._do(left)

    def _do(self, errand: _Errand[_Result]) -> None:
        try:
            if self._is_closed:
                raise RuntimeError("the device was closed before this copy; open it again")
            result = errand.work()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the result raises it
            errand.done.set_exception(error.with_traceback(None))  # Its frames would keep what they held alive.
        else:
            errand.done.set_result(result)


def result_of(done: Future[_Result], *, wait_s: float = WAIT_S) -> _Result:
    """Return the result of an errand, or raise what it raised. Raises TimeoutError if it takes longer than `wait_s`."""
    if wait([done], timeout=wait_s).not_done:
        raise slow(wait_s)
    return done.result()


def slow(wait_s: float) -> TimeoutError:
    """Return the error of a copy that takes too long."""
    return TimeoutError(
        f"copies to the device have not ended within {wait_s:g} s; the disk of a mapped file may hang, or be too slow: "
        "keep the weights on another one, or in memory (a host tier that is not mapped)"
    )
