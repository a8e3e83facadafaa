"""The courier: a thread that reads weights from mapped files into page-locked buffers, ahead of their use."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Self

import torch

from residency.gpu.host_memory import copy_into

if TYPE_CHECKING:
    from types import TracebackType

NUM_BUFFERS = 2  # One is read from while the other is filled; more would only wait for the same disk.


@dataclass(slots=True, eq=False)
class _Errand:
    parts: Sequence[tuple[torch.UntypedStorage, int]]
    into: torch.UntypedStorage
    done: Future[int] = field(default_factory=Future)


class Courier:
    """Copies host memory on a thread of its own, one errand after the other, so that page faults stall nobody else.

    max_pending: errands that may be asked for and not yet done; as many as there are buffers. Use it with one thread.
    """

    def __init__(self, *, max_pending: int = NUM_BUFFERS) -> None:
        self._errands: SimpleQueue[_Errand | None] = SimpleQueue()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        for _ in range(max_pending):
            self._tokens.put(None)
        self._is_closed = False
        # A daemon: a file system that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="residency-courier", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fetch(
        self, parts: Sequence[tuple[torch.UntypedStorage, int]], into: torch.UntypedStorage, *, wait_s: float = 60.0
    ) -> Future[int]:
        """Have host storages copied to their offsets of a buffer; the result is how many bytes were.

        Whoever asks sees to it that the device has read what was in the buffer before, and that nobody changes the
        sources until then. The result raises ValueError if a part does not fit (the buffer is undefined then), and
        RuntimeError if the courier was closed first. Raises TimeoutError if errands asked for before are not done
        within `wait_s`, and RuntimeError if the courier is closed. A mapped file that can no longer be read ends the
        process with SIGBUS, as it does for every reader.
        """
        if self._is_closed:
            raise RuntimeError("the courier is closed; make another")
        try:
            self._tokens.get(timeout=wait_s)
        except Empty:
            raise TimeoutError(
                f"the copies asked for before have not ended within {wait_s:g} s; the disk may be too slow or hang"
            ) from None
        errand = _Errand(parts, into)
        self._errands.put(errand)
        return errand.done

    def close(self, *, wait_s: float = 60.0) -> None:
        """Do what is under way, refuse the rest, end the thread. Waits for at most `wait_s`. May be repeated."""
        self._is_closed = True
        self._errands.put(None)
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            self._do(errand)
            self._tokens.put(None)
            del errand  # The thread waits for long; it must not keep the last sources alive meanwhile.
        while True:
            try:
                left = self._errands.get_nowait()
            except Empty:
                return
            if left is not None and left.done.set_running_or_notify_cancel():
                left.done.set_exception(RuntimeError("the courier was closed before this copy; make another"))

    def _do(self, errand: _Errand) -> None:
        if not errand.done.set_running_or_notify_cancel():
            return
        try:
            if self._is_closed:
                raise RuntimeError("the courier was closed before this copy; make another")
            for source, offset_bytes in errand.parts:
                copy_into(errand.into, source, offset_bytes=offset_bytes)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the result raises it
            errand.done.set_exception(error.with_traceback(None))  # Its frames would keep the sources alive.
        else:
            errand.done.set_result(sum(source.nbytes() for source, _ in errand.parts))
