"""What happens to a rank, where it happens, and how long ranks wait for each other where it does.

A fault is {"rank", "what", "at", "number"}: `what` is kill, hang (its threads live on), stop (they do not), raise, lie,
oom or late; `at` is where it strikes, see `Faults`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import distributed as torch_distributed

import residency
from residency.gpu.collectives import StoreTransport
from residency.journal.store import Journal
from residency.settings import KILL_SWITCHES
from residency.statemachine.ranks_together import Together

# Its stores have no public type.
distributed: Any = torch_distributed
# A life that nothing happens to may be as slow as the machine is. What happens is waited for by these alone.
AMPLE = {"join_s": 60.0, "step_s": 60.0, "request_s": 60.0, "silence_s": 30.0, "grace_s": 10.0, "store_s": 30.0}
SHORT = {"step_s": 4.0, "request_s": 4.0, "grace_s": 0.7}
SHORT_OF = {
    # One that was killed before its first sign of life is missed by the limits of steps alone.
    "kill": {"join_s": 10.0, "silence_s": 1.5},
    "stop": {"silence_s": 1.5},
    # It ends by its own limit, and is silent from then on.
    "hang": {"silence_s": 2.0},
    "late": {"step_s": 60.0, "silence_s": 3.0},
}
LATE_S = 4.0


def limits_of(life: dict[str, Any], ranks: range) -> residency.RankLimits:
    """Return how long ranks wait for each other: short where one of them is struck, and in what it is struck by."""
    struck = [fault["what"] for fault in life.get("faults", []) if fault["rank"] in ranks]
    short = {name: value for what in struck for name, value in {**SHORT, **SHORT_OF.get(what, {})}.items()}
    return residency.RankLimits(**{**AMPLE, **short, **life.get("limits", {})})


class Staging:
    """The buffers of an all-to-all, which works only while all ranks hold them, made equally often.

    is_ours: dropped and rebuilt by the rounds; else by the rank itself, where it runs out of memory.
    """

    def __init__(self, *, is_ours: bool) -> None:
        self.is_ours = is_ours
        self.held: list[int] = [0]

    def drop(self) -> None:
        """Let go of them."""
        self.held.append(-1)

    def rebuild(self) -> None:
        """Make them anew, with the others."""
        distributed.barrier()
        self.held.append(max(self.held) + 1)

    def interrupt(self) -> None:
        """Nothing that could be interrupted."""

    def all_to_all(self) -> None:
        """Exchange, as a request does."""
        found: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, self.held[-1])
        if len(set(found)) > 1 or found[0] < 0:
            raise RuntimeError(f"variant access: ranks hold different buffers, {found}")


class Faults:
    """Strikes one rank where its life comes by: at an exchange, before or after it has passed its part (`before`,
    `after`), at an append to the journal that says so (`append`: before, `appended`: after), at the register (`decide`,
    `decided`), in a request (`request`), or before an effect (`effect`). The number counts from 1, in one life.
    """

    def __init__(self, faults: list[dict[str, Any]], rank: int) -> None:
        self.faults = [one for one in faults if one["rank"] == rank]
        self.seen: dict[str, int] = {}
        self.steps: list[str] = []
        self.staging: Staging | None = None
        self.group: Any = None

    def come_by(self, at: str, name: str = "") -> str | None:
        """Strike, if it is here; returns what the caller has to do itself."""
        self.seen[at] = self.seen.get(at, 0) + 1
        for fault in self.faults:
            is_named = fault.get("name") in (None, name, name.partition(".")[2])
            if fault["at"] == at and fault.get("number") in (None, self.seen[at]) and is_named:
                return self._strike(fault["what"])
        return None

    def _strike(self, what: str) -> str | None:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "hang":
            time.sleep(3600)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "raise":
            raise RuntimeError("struck")
        elif what == "interrupt":
            os.kill(os.getpid(), signal.SIGTERM)
        elif what == "switch":
            os.environ[KILL_SWITCHES[0]] = "1"
        elif what == "late":
            time.sleep(LATE_S)
        return what

    # Where it strikes.

    def install(self) -> None:
        """Have everything come by."""
        plain_append, plain_decide = Journal.append, StoreTransport.decide
        plain_gather, plain_put = StoreTransport.gather, StoreTransport._pass
        plain_agree = Together._agree

        def append(journal: Journal, drafts: Any, **options: Any) -> Any:
            names = {str(one.trigger or one.payload.get("what")) for one in drafts} & {"prepared", "commit", "keep"}
            for name in names:
                self.come_by("append", name)
            events = plain_append(journal, drafts, **options)
            for name in names:
                self.come_by("appended", name)
            return events

        def decide(transport: StoreTransport, word: bytes) -> bytes:
            self.come_by("decide")
            found = plain_decide(transport, word)
            self.come_by("decided")
            return found

        def gather(transport: StoreTransport, step: str, content: bytes, **options: Any) -> Any:
            self.steps.append(step)
            self.come_by("before", step)
            return plain_gather(transport, step, content, **options)

        def put(transport: StoreTransport, key: str, content: bytes) -> None:
            plain_put(transport, key, content)
            self.come_by("after", key.split("/")[-2])

        def agree(ranks: Together, digest: str) -> None:
            plain_agree(ranks, "0" * 64 if self.come_by("digest") == "lie" else digest)

        for kind, name, made in (
            (Journal, "append", append),
            (StoreTransport, "decide", decide),
            (StoreTransport, "gather", gather),
            (StoreTransport, "_pass", put),
            (Together, "_agree", agree),
        ):
            setattr(kind, name, made)

    def working(self, what: str) -> None:
        """Of the observer: nothing."""

    def leaving(self, state: str) -> None:
        """Of the observer: nothing."""

    def between_effects(self, index: int) -> None:
        """Of the observer."""
        self.come_by("effect")

    def in_request(self, shape: Any) -> None:
        """In the middle of a request: all ranks meet, as those of a real one do."""
        if self.come_by("request") == "oom":
            raise torch.OutOfMemoryError("struck: out of memory")
        if self.staging is not None:
            self.staging.all_to_all()
        elif distributed.is_initialized():
            distributed.barrier(self.group)
        if self.come_by("met") == "oom":
            if self.staging is not None and not self.staging.is_ours:
                self.staging.drop()
            raise torch.OutOfMemoryError("struck: out of memory after all have met")
