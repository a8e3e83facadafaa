"""One user at a time: requests of one thread nest, everyone else waits up to a bound."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from residency.errors import PipelineBusy

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hold:
    thread: int
    holder: str
    is_exclusive: bool


class RequestGate:
    """Serializes the threads that use a pipeline. Holds are tokens: taking and returning one is a single step.

    Whoever waits to have it exclusively goes before new requests, else a busy worker would never let a round begin.
    """

    def __init__(self) -> None:
        # Entered by itself: the condition's own `__exit__` is Python code, which an interrupt can cut short.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._holds: dict[object, _Hold] = {}
        self._waiting: set[object] = set()

    def acquire(self, token: object, *, holder: str, timeout_s: float, is_exclusive: bool = False) -> None:
        """Take the pipeline for this thread, which may hold it already. Raises PipelineBusy after `timeout_s`."""
        hold = _Hold(thread=threading.get_ident(), holder=holder, is_exclusive=is_exclusive)
        started = time.monotonic()
        with self._lock:
            if not self._condition.wait_for(lambda: self._is_free_for(hold), timeout=max(0.0, timeout_s)):
                raise PipelineBusy(holder=self.holder or "another thread", waited_s=time.monotonic() - started)
            self._holds[token] = hold

    def release(self, token: object) -> None:
        """Return a token; one that was never taken, or is returned already, is ignored."""
        with self._lock:
            self._waiting.discard(token)
            self._holds.pop(token, None)
            self._condition.notify_all()

    @property
    def holder(self) -> str | None:
        """Who holds the pipeline, in words, or None. Read-only."""
        holds = list(self._holds.values())
        return holds[0].holder if holds else None

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the pipeline. Read-only."""
        return any(hold.thread == threading.get_ident() for hold in list(self._holds.values()))

    @property
    def is_mine_exclusively(self) -> bool:
        """Whether this thread holds the pipeline for a round. Read-only."""
        mine = threading.get_ident()
        return any(hold.thread == mine and hold.is_exclusive for hold in list(self._holds.values()))

    @contextmanager
    def exclusive(self, *, holder: str, timeout_s: float) -> Iterator[None]:
        """Keep every other thread out. Raises PipelineBusy, also inside a request of this very thread."""
        if self.is_mine and not self.is_mine_exclusively:
            # Waiting would be for ever: the request that has to end first is the caller's own.
            raise PipelineBusy(holder=f"{self.holder} of this thread", waited_s=0.0)
        token = object()
        try:
            try:
                self._waiting.add(token)  # until `release`
                self.acquire(token, holder=holder, timeout_s=timeout_s, is_exclusive=True)
                yield
            finally:
                self.release(token)
        finally:
            self.release(token)  # Again: an interrupt may have come before or inside the first one.

    def _is_free_for(self, hold: _Hold) -> bool:
        if any(other.thread != hold.thread for other in self._holds.values()):
            return False
        return hold.is_exclusive or bool(self._holds) or not self._waiting
