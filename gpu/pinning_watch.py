"""The watch over pinning: tells of steps that take long, of progress in long runs, and when nothing moves any more."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

PROGRESS_S = 10.0  # Long enough that a quick run says nothing in between.
GIB = 2**30


@dataclass(slots=True, eq=False)
class _Step:
    text: str
    told_after_s: float
    since_s: float = field(default_factory=time.monotonic)
    since: str = field(default_factory=lambda: time.strftime("%H:%M:%S"))


class Watch:
    """Told by threads what they begin and end; looked at by the one that waits for them, which logs and raises.

    slow_s: a step of so many seconds is told as a warning, and again after each doubling. stall_s: no step begun or
    ended and nothing pinned for so long is a stall.
    """

    def __init__(self, *, slow_s: float, stall_s: float, num_jobs: int) -> None:
        self._slow_s = slow_s
        self._stall_s = stall_s
        self._num_jobs = num_jobs
        self._num_done = 0
        self._num_bytes = 0
        self._steps: dict[int, _Step] = {}
        self._started_s = self._moved_s = self._told_s = time.monotonic()
        self.is_stalled = False

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Enter around one step of the calling thread."""
        thread = threading.get_ident()
        self._steps[thread] = _Step(text, self._slow_s)
        self._moved_s = time.monotonic()
        try:
            yield
        finally:
            del self._steps[thread]
            self._moved_s = time.monotonic()

    def progress(self, num_bytes: int) -> None:
        """Book one store as done."""
        self._num_done += 1
        self._num_bytes += num_bytes
        self._moved_s = time.monotonic()

    def look(self) -> None:
        """Log what there is to tell. Raises TimeoutError if nothing moves any more."""
        now_s = time.monotonic()
        for step in list(self._steps.values()):
            if now_s - step.since_s >= step.told_after_s:
                step.told_after_s = max(2 * step.told_after_s, now_s - step.since_s)
                log.warning("%s takes long: %.0f s, since %s", step.text, now_s - step.since_s, step.since)
        if now_s - self._told_s >= PROGRESS_S:
            self._told_s = now_s
            log.info("page-locking: %s, %.0f s", self._figures(), now_s - self._started_s)
        if now_s - self._moved_s >= self._stall_s:
            self.is_stalled = True
            raise TimeoutError(
                f"page-locking has not moved for {now_s - self._moved_s:.0f} s ({self.under_way()}); "
                "it cannot be cancelled safely, end this process and start it with a smaller host_ram"
            )

    def tell_end(self) -> None:
        """Log what was done, in one line."""
        log.info("page-locked %s in %.2f s", self._figures(), time.monotonic() - self._started_s)

    def under_way(self) -> str:
        """Return the steps that are not ended, oldest first. Read-only."""
        steps = sorted(self._steps.values(), key=lambda step: step.since_s)
        return ", ".join(f"{step.text} since {step.since}" for step in steps) or "nothing"

    def _figures(self) -> str:
        return f"{self._num_done} of {self._num_jobs} host copies, {self._num_bytes / GIB:.2f} GiB"
