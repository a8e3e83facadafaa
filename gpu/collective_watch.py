"""Signs of life between ranks, and the end of a process whose round does not go on."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from residency.errors import RankFailed, describe

log = logging.getLogger(__name__)

EXIT_CODE = 73  # as of RoundUndecided: the process cannot say where it stands among the others
BEATS = 8  # in the time after which silence counts
LAST_WORDS_S = 2.0
LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealings:
    """How ranks deal with each other: limits in s, and what the words in a register mean.

    step_s: for what a rank does between two exchanges. silence_s: without a sign of life, after which a rank counts as
    gone. grace_s: for a request to come back by itself. store_s: for an answer of the store. ended: what a register
    holds -> what it means for those who wait, None if they go on. abort: (rank, why) -> what ends it for all.
    interrupt: makes a request that waits for another rank raise. on_fatal: told why this process ends.
    """

    step_s: float
    silence_s: float
    grace_s: float
    store_s: float
    ended: Callable[[bytes], RankFailed | None]
    abort: Callable[[int, str], bytes]
    interrupt: Callable[[], None] | None = None
    on_fatal: Callable[[str], None] = lambda _: None


@dataclass(slots=True)
class _Work:
    """What the round's thread does. since: monotonic, in s."""

    what: str
    since: float
    limit_s: float
    with_peers: bool


class Watch:
    """Two threads beside a round: one gives and takes signs of life, one looks at the time.

    Looks whether another rank is gone, or has ended what all are about, while this one waits for it in a request; then
    interrupts that once, and ends the process if that does not help. So does it if anything outlasts its limit.
    """

    def __init__(self, store: Any, *, space: str, rank: int, size: int, dealings: Dealings) -> None:
        self._store, self._space, self._rank, self._size = store, space, rank, size
        self._dealings = dealings
        self._work: _Work | None = None
        self._passed = ""
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._lost: int | None = None
        self._trouble: str | None = None
        self._troubled_at: float | None = None
        self._was_interrupted = False
        self._talked_at = time.monotonic()
        self._problem: str | None = None
        self._closed = threading.Event()
        for run in (self._talk, self._look):
            threading.Thread(target=run, name=f"residency-ranks{run.__name__}", daemon=True).start()

    def work(self, what: str, *, limit_s: float | None = None, with_peers: bool = False, passed: str = "") -> None:
        """From now on the round's thread does this. passed: the last step that all have taken, if it is another."""
        self._passed = passed or self._passed
        limit_s = self._dealings.step_s if limit_s is None else limit_s
        self._work = _Work(what, time.monotonic(), limit_s, with_peers)

    def rest(self) -> None:
        """From now on it waits in an exchange, which has a limit of its own."""
        self._work = None

    def lost(self) -> int | None:
        """Return a rank that is gone, None if none is known to be."""
        return self._lost

    def close(self) -> None:
        """Stop both threads. Raises nothing."""
        self._closed.set()

    def _key(self, name: str) -> str:
        return f"{self._space}/{name}"

    # One thread: what others say.

    def _talk(self) -> None:
        beat = 0
        while not self._closed.is_set():
            beat += 1
            try:
                self._store.set(self._key(f"beat/{self._rank}"), str(beat))
                for rank in range(self._size):
                    if rank != self._rank:
                        self._listen(rank)
                self._find_trouble()
            except Exception as error:  # noqa: BLE001 - whatever it says, the store cannot be talked to
                self._problem = f"the group's store is lost ({describe(error)})"
                return
            self._talked_at = time.monotonic()
            self._closed.wait(self._dealings.silence_s / BEATS)
        with suppress(Exception):
            # Who leaves in order is not gone.
            self._store.set(self._key(f"left/{self._rank}"), "the round has ended there")

    def _listen(self, rank: int) -> None:
        key = self._key(f"beat/{rank}")
        if not self._store.check([key]):
            return  # it has not entered yet: whoever waits for it has a limit
        value, now = bytes(self._store.get(key)), time.monotonic()
        before = self._seen.get(rank)
        if before is None or before[0] != value:
            self._seen[rank] = value, now
        elif now - before[1] > self._dealings.silence_s and not self._store.check([self._key(f"left/{rank}")]):
            self._lost = rank

    def _find_trouble(self) -> None:
        if self._store.check([self._key("register")]):
            ended = self._dealings.ended(bytes(self._store.get(self._key("register"))))
            if ended is not None:
                self._trouble = str(ended)
        if self._store.check([self._key("trouble")]):
            # Steps are numbered: what failed before the last one that all have taken is over.
            step = bytes(self._store.get(self._key("trouble"))).decode()
            if step > self._passed:
                self._trouble = self._trouble or f"the request failed on another rank ({step})"

    # The other: the time.

    def _look(self) -> None:
        while not self._closed.wait(LOOK_S):
            work, now = self._work, time.monotonic()
            if work is None:
                continue
            if now - work.since > work.limit_s:
                self._fatal(f"{work.what} has taken longer than {work.limit_s:g} s")
            if work.with_peers:
                self._look_after(work, now)
            else:
                self._troubled_at = None

    def _look_after(self, work: _Work, now: float) -> None:
        """See to it that nobody waits in a request for a rank that has failed."""
        silent = now - self._talked_at > max(self._dealings.silence_s, self._dealings.store_s)
        store = self._problem or ("the group's store does not answer" if silent else None)
        gone = None if self._lost is None else f"rank {self._lost} gives no sign of life"
        reason = store or gone or self._trouble
        if reason is None:
            self._troubled_at = None
        elif self._troubled_at is None or self._troubled_at < work.since:
            self._troubled_at = now
        elif now - self._troubled_at > self._dealings.grace_s:
            if self._dealings.interrupt is None or self._was_interrupted:
                self._fatal(f"{work.what} does not come back, though {reason}")
            self._was_interrupted, self._troubled_at = True, now
            threading.Thread(target=self._dealings.interrupt, name="residency-interrupt", daemon=True).start()

    def _fatal(self, why: str) -> None:
        """End the process: nobody else can, for its thread waits for what will not come."""
        if self._closed.is_set():
            return
        log.critical("rank %d ends with code %d: %s", self._rank, EXIT_CODE, why)
        for run in (lambda: self._say_over(why), lambda: self._dealings.on_fatal(why)):
            last = threading.Thread(target=run, daemon=True)
            last.start()
            last.join(LAST_WORDS_S)
        os._exit(EXIT_CODE)

    def _say_over(self, why: str) -> None:
        with suppress(Exception):
            self._store.compare_set(self._key("register"), "", self._dealings.abort(self._rank, why).decode())
