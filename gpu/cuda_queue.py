"""The one queue of copies to a CUDA device: a stream, and a thread for what the host must first read."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from residency.gpu.copy_thread import CopyThread, result_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from residency.gpu.cuda_upload import StagedUpload
    from residency.gpu.device import Mark

_mark_numbers = itertools.count()


class EventMark:
    """A CUDA event, recorded where a stream's work ended then."""

    __slots__ = ("event", "order", "queue")

    def __init__(self, stream: torch.cuda.Stream, *, timed: bool) -> None:
        self.event: torch.cuda.Event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        self.event.record(stream)
        self.queue = int(stream.cuda_stream)
        self.order = next(_mark_numbers)


class QueuedMark:
    """The end of copies that a thread has been asked to make."""

    __slots__ = ("_done", "order", "queue")

    def __init__(self, done: Future[EventMark], *, queue: int) -> None:
        self._done, self.queue, self.order = done, queue, next(_mark_numbers)

    @property
    def event(self) -> torch.cuda.Event:
        """The CUDA event; blocks until the copies are on their way, and raises what kept them from it."""
        return result_of(self._done).event


class CopyQueue:
    """Copies (part of a block, host bytes, is the host side pinned), first in, first out, on one stream.

    pinned                      -> stream
    pageable, mapped   thread   -> stream     and whatever is asked for until the thread is done
    """

    def __init__(self, device: torch.device, staged: StagedUpload) -> None:
        self._device, self._staged = device, staged
        self._stream: torch.cuda.Stream | None = None
        self._thread: CopyThread[EventMark] = CopyThread()

    def put(
        self, copies: Sequence[tuple[torch.Tensor, torch.Tensor, bool]], after: Iterable[Mark]
    ) -> EventMark | QueuedMark:
        """Ask for copies once the marks are reached; returns a mark that is reached when they have ended.

        One thread at a time. Raises RuntimeError if the queue is closed.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        queue = int(self._stream.cuda_stream)
        # Earlier copies have ended before later ones begin.
        marks = [mark for mark in after if mark.queue != queue]
        if self._thread.is_idle and all(pinned for _, _, pinned in copies):
            return self._copy(self._stream, copies, marks)
        stream = self._stream

        def work() -> EventMark:
            # Both are a matter of each thread.
            with torch.inference_mode(mode=False), torch.no_grad():
                return self._copy(stream, copies, marks)

        return QueuedMark(self._thread.ask(work), queue=queue)

    def settle(self) -> None:
        """Return once all copies that were asked for are on their way. Raises TimeoutError.

        Never while holding a lock that those copies need: of the buffers, or of what is page-locked.
        """
        self._thread.wait()

    def close(self) -> None:
        """Make no more copies. A second call is a no-op."""
        self._thread.close()

    def _copy(
        self,
        stream: torch.cuda.Stream,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor, bool]],
        marks: Iterable[Mark],
    ) -> EventMark:
        # A new thread starts with the first device, which setting the stream back would open a context on.
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for mark in marks:
                assert isinstance(mark, EventMark)
                stream.wait_event(mark.event)
            for target, source, pinned in copies:
                if pinned:
                    target.copy_(source, non_blocking=True)
                else:
                    self._staged.copy(target, source)
            return EventMark(stream, timed=False)
