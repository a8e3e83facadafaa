"""Bytes between the ranks of one group, over the store that a launcher of torch.distributed gives; all within limits.

A store and no collective: one with a silent rank leaves a gloo group unusable for the others, and holds the thread that
waits in it.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed

from residency.errors import RankFailed, SettingsError, describe
from residency.gpu.collective_watch import Dealings, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Result = TypeVar("Result")

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.0005, 0.02  # between two looks: short steps are over in a millisecond
_LOOK_S = 0.25  # between two looks for a rank that is gone
_EMPTY = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """This process in a group. members: the ranks in the world, in the group's order. store: that all of them reach."""

    rank: int
    size: int
    members: tuple[int, ...]
    store: Any


def group_facts(group: Any, *, store: Any, rank: int | None, size: int | None) -> GroupFacts:
    """Return where this process stands: as given, or as torch.distributed knows it. Raises SettingsError."""
    if rank is not None or size is not None:
        if rank is None or size is None or store is None or not 0 <= rank < size:
            raise SettingsError(f"ranks= has rank={rank!r} and size={size!r}; give both, and the store of all of them")
        return GroupFacts(rank=rank, size=size, members=tuple(range(size)), store=store)
    if not (distributed.is_available() and distributed.is_initialized()):
        raise SettingsError(
            "ranks= needs torch.distributed, which is not initialized; call init_process_group first, or leave it out"
        )
    number = distributed.get_rank(group)
    if number < 0:
        raise SettingsError("ranks= names a group that this process is no part of; attach only where its pipeline is")
    members = tuple(distributed.get_process_group_ranks(group))
    if store is None:
        # There is no public name for it; every launcher's store is found here, torchrun's as well.
        store = distributed.distributed_c10d._get_default_store()
    return GroupFacts(rank=number, size=len(members), members=members, store=store)


class LimitedStore:
    """A store whose every answer is waited for on this thread, within a limit: a server that is stopped answers none.

    Raises RankFailed once it has not answered, or says that it is gone; from then on at every call.
    """

    def __init__(self, store: Any, *, answer_s: float) -> None:
        self._store, self._answer_s = store, answer_s
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: str | None = None
        threading.Thread(target=self._serve, name="residency-store", daemon=True).start()

    @property
    def failure(self) -> str | None:
        """Why it cannot be used any more; None while it can."""
        return self._failure

    def put(self, key: str, content: bytes) -> None:
        """Write a key."""
        self._call(lambda store: store.set(key, content))

    def read(self, keys: list[str]) -> list[bytes] | None:
        """Return what the keys hold, None unless all of them are there."""
        return self._call(lambda store: [bytes(store.get(key)) for key in keys] if store.check(keys) else None)

    def put_once(self, key: str, content: bytes) -> bytes:
        """Write a key unless it is there, and return what it holds then."""
        return self._call(lambda store: bytes(store.compare_set(key, _EMPTY, content)))

    def close(self) -> None:
        """Let go of it. Raises nothing."""
        self._asked.put(None)

    def _call(self, ask: Callable[[Any], Result]) -> Result:
        if self._failure is None:
            answers: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
            self._asked.put(lambda: answers.put(_outcome(ask, self._store)))
            try:
                answer = answers.get(timeout=self._answer_s)
            except queue.Empty:
                self._failure = f"it has not answered for {self._answer_s:g} s"
            else:
                if not isinstance(answer, BaseException):
                    return answer
                self._failure = describe(answer)
        raise RankFailed(rank=None, problem=f"the group's store is lost ({self._failure})", pinned=False)

    def _serve(self) -> None:
        while (ask := self._asked.get()) is not None:
            ask()


def _outcome(ask: Callable[[Any], Result], store: Any) -> Result | BaseException:
    try:
        return ask(store)
    except Exception as error:  # noqa: BLE001 - handed to the thread that waits
        return error


class StoreTransport:
    """The statemachine's Transport over a store. Every rank makes one, under one name and as often as the others."""

    def __init__(self, store: Any, *, rank: int, size: int, name: str, dealings: Dealings) -> None:
        self.rank, self.size = rank, size
        self._name, self._dealings = name, dealings
        # One for all that is asked here: each question is short, and making another connection can take seconds.
        self._connection = _connection(store)
        self._store = LimitedStore(self._connection, answer_s=dealings.store_s)
        self._epoch = ""
        self._space = ""
        self._watch: Watch | None = None
        self._is_gone = False

    @property
    def is_broken(self) -> bool:
        """Whether a rank is gone, or the store."""
        return self._is_gone or self._store.failure is not None

    def join(self, epoch: str, *, limit_s: float) -> str:
        """Wait for all ranks of this start and return the epoch that rank 0 proposed. Raises RankFailed.

        What an earlier start left in the store is told from this one by a number that every rank draws anew.
        """
        nonce = str(uuid.uuid4())
        self._store.put(f"{self._name}/hello/{self.rank}", nonce.encode())
        deadline, pause_s = time.monotonic() + limit_s, _PAUSE_MIN_S
        told: list[str] = []
        while True:
            if self.rank == 0:
                told = self._call_the_roll(epoch, told)
            if (said := self._answer_the_roll(nonce)) is not None:
                return said
            self._look_for_refusals()
            if time.monotonic() > deadline:
                missing = self._missing([f"{self._name}/hello/{rank}" for rank in range(self.size)])
                problem = f"not all of the {self.size} ranks came to their start within {limit_s:g} s"
                raise RankFailed(rank=missing[0] if missing else None, problem=problem, pinned=False)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _look_for_refusals(self) -> None:
        for rank in range(self.size):
            found = self._store.read([f"{self._name}/refused/{rank}"])
            if found is not None:
                self._raise(rank, found[0].decode())

    def _call_the_roll(self, epoch: str, told: list[str]) -> list[str]:
        """Write down who has come, if that has changed."""
        found = self._store.read([f"{self._name}/hello/{rank}" for rank in range(self.size)])
        here = told if found is None else [one.decode() for one in found]
        if here != told:
            self._store.put(f"{self._name}/roll", json.dumps([epoch, here]).encode())
        return here

    def _answer_the_roll(self, nonce: str) -> str | None:
        """Return the epoch once this rank and all others have answered to it."""
        roll = self._store.read([f"{self._name}/roll"])
        if roll is None:
            return None
        epoch, here = json.loads(roll[0])
        if here[self.rank : self.rank + 1] != [nonce]:
            return None  # of an earlier start
        self._epoch = f"{self._name}/{epoch}"
        self._store.put(f"{self._epoch}/here/{self.rank}", b"1")
        is_complete = self._store.read([f"{self._epoch}/here/{rank}" for rank in range(self.size)]) is not None
        return str(epoch) if is_complete else None

    def enter(self, space: str) -> None:
        """Begin something that all ranks do together; gives signs of life from now on."""
        self.leave()
        self._space = f"{self._epoch}/{space}"
        self._watch = Watch(
            self._connection, space=self._space, rank=self.rank, size=self.size, dealings=self._dealings
        )
        self._watch.work(f"what follows {space!r}")

    def leave(self) -> None:
        """End it, for this rank. Raises nothing."""
        if self._watch is not None:
            self._is_gone = self._is_gone or self._watch.lost() is not None
            self._watch.close()
            self._watch = None

    def gather(
        self, step: str, content: bytes, *, limit_s: float, has_ended: bool, is_vital: bool
    ) -> tuple[bytes, ...]:
        """Return what every rank passed at this step, in their order, once all have. Raises RankFailed."""
        watch = self._watched()
        watch.rest()
        keys = [f"{self._space}/{step}/{rank}" for rank in range(self.size)]
        self._pass(keys[self.rank], content)
        begun, pause_s, looked = time.monotonic(), _PAUSE_MIN_S, 0.0
        while (found := self._store.read(keys)) is None:
            waited_s = time.monotonic() - begun
            if not has_ended:
                self._stop_if_ended()
            if watch.lost() is not None or waited_s - looked > _LOOK_S:
                looked = waited_s
                self._stop_if_gone(watch, step)
            if waited_s > limit_s:
                missing = self._missing(keys)
                # Who takes longer than that for what all have begun has ended itself by now.
                self._is_gone = self._is_gone or is_vital
                self._raise(missing[0] if missing else None, f"not heard from at {step!r} within {limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max(_PAUSE_MAX_S, waited_s / 20), _LOOK_S)
        watch.work(f"what follows {step!r}", passed=step)
        return tuple(found)

    def _pass(self, key: str, content: bytes) -> None:
        self._store.put(key, content)

    def _stop_if_ended(self) -> None:
        """Raise RankFailed if a rank has ended what all are about."""
        word = self._store.read([f"{self._space}/register"])
        ended = None if word is None else self._dealings.ended(word[0])
        if ended is not None:
            raise ended

    def _stop_if_gone(self, watch: Watch, step: str) -> None:
        """Raise RankFailed if one that is waited for is gone; what it passed before it went counts."""
        lost = watch.lost()
        self._is_gone = self._is_gone or lost is not None
        for rank in self._missing([f"{self._space}/{step}/{rank}" for rank in range(self.size)]):
            if rank == lost:
                self._raise(lost, f"no sign of life at {step!r} for {self._dealings.silence_s:g} s")
            ways = (f"{self._space}/left/{rank}", f"{self._epoch}/parted/{rank}")
            gone = next((found for way in ways if (found := self._store.read([way])) is not None), None)
            # It may have passed its part since, and left then.
            if gone is not None and self._store.read([f"{self._space}/{step}/{rank}"]) is None:
                self._raise(rank, f"it has left before {step!r} ({gone[0].decode()})")

    @staticmethod
    def _raise(rank: int | None, problem: str) -> None:
        raise RankFailed(rank=rank, problem=problem, pinned=False)

    def decide(self, word: bytes) -> bytes:
        """Write the register of what was entered if nobody has, and return what it holds. Raises RankFailed."""
        return self._store.put_once(f"{self._space}/register", word)

    def decided(self, space: str) -> bytes | None:
        """Return what the register of a space holds, None if nothing. Raises RankFailed."""
        found = self._store.read([f"{self._epoch}/{space}/register"])
        return None if found is None else found[0]

    @contextmanager
    def working(self, what: str, *, limit_s: float, with_peers: bool) -> Iterator[None]:
        """Enter around what this rank does alone, or in its pipeline with others; what outlasts it ends the process."""
        watch = self._watched()
        watch.work(what, limit_s=limit_s, with_peers=with_peers)
        try:
            yield
        finally:
            watch.work(f"what follows {what}")

    def say_trouble(self, step: str) -> None:
        """Tell ranks that are still in this step's request that it failed here. Raises nothing."""
        try:
            self._store.put(f"{self._space}/trouble", step.encode())
        except RankFailed:
            return  # `failure` now says it

    def part(self, why: str) -> None:
        """Tell the others that this rank takes part in nothing more. Raises nothing."""
        with suppress(RankFailed):
            self._store.put(f"{self._epoch}/parted/{self.rank}", why.encode())

    def close(self) -> None:
        """Let go of everything. Raises nothing."""
        self.leave()
        self._store.close()

    def _watched(self) -> Watch:
        assert self._watch is not None, "nothing was entered"
        return self._watch

    def _missing(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if self._store.read([key]) is None]


def refuse_to_join(facts: GroupFacts, name: str, why: str, *, answer_s: float) -> None:
    """Tell those who wait for this rank's start that it does not come. Raises nothing."""
    store = LimitedStore(_connection(facts.store), answer_s=answer_s)
    with suppress(RankFailed):
        store.put(f"{name}/refused/{facts.rank}", why.encode())
    store.close()


def _connection(store: Any) -> Any:
    """Return a connection of its own to a store: one that waits for an answer keeps every other caller waiting."""
    return store.clone() if hasattr(store, "clone") else store
