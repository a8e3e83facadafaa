"""A round over several ranks: everything is exchanged, and one register per round holds what was decided."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from residency.errors import PlacementInfeasible, RankFailed, RoundUndecided, describe
from residency.gpu.workload import Workload
from residency.journal.events import Draft, EventType
from residency.statemachine.planner.joint import make_joint_plan
from residency.statemachine.planner.plan import Plan, PlanInputs
from residency.statemachine.ranks import PREPARED, Alone, RequestEnd
from residency.statemachine.ranks_words import ABORT, COMMIT, Word, abort_word, commit_word, read_word
from residency.statemachine.validation import Blame, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from residency.statemachine.epoch_log import EpochLog
    from residency.statemachine.ranks import RankLimits, Transport, Workspaces

GONE = "a rank of the group, or its store, is gone"
_ENTRIES_MAX = 10_000  # rounds that others ended while this rank did not take part
_BLAMES = (Blame.PLAN, Blame.REQUEST, Blame.INFRASTRUCTURE)  # of several the first is told


class Together(Alone):
    """This rank among others. For one thread at a time; the round holds the pipeline.

    Until this rank votes, it may end the round, for all. Between its vote and the register's answer nobody may guess:
    if the store is lost then, RoundUndecided says so.
    """

    def __init__(self, transport: Transport, *, host: str, limits: RankLimits, workspaces: Workspaces | None) -> None:
        self._transport, self._host, self._limits, self._workspaces = transport, host, limits, workspaces
        self.rank, self.size = transport.rank, transport.size
        self.is_pinned = False
        self._entries = 0
        self._steps = 0
        self._number = 0
        self._log: EpochLog | None = None
        self._joint: str | None = None
        self._has_voted = False
        self._has_ended = False
        self._is_over = False

    def on_fatal(self, why: str) -> None:
        """Write this rank's last words, on another thread than the round's. Raises nothing."""
        self._tell({"what": "ends", "why": why})
        if self._log is not None:
            payload = {"reason": "rank-failed", "signal": None}
            self._log.note(EventType.STOPPED, round_number=self._number, payload=payload)

    @property
    def is_broken(self) -> bool:
        """Whether a rank or the store is gone: nothing can be agreed on in this life any more."""
        return self._transport.is_broken

    # Before the first round.

    def join(self, epoch: str) -> str:
        """Wait for all ranks of this start; returns rank 0's epoch. Raises RankFailed."""
        found = self._transport.join(epoch, limit_s=self._limits.join_s)
        self._transport.enter("start")
        return found

    def exchange(self, what: str, content: Any, *, limit_s: float | None = None, is_vital: bool = True) -> list[Any]:
        """Return what every rank passed, JSON values in the order of the ranks. Raises RankFailed."""
        self._steps += 1
        # A little longer than a rank is given for the step, so that it is the one to say what took so long.
        limit_s = self._limits.step_s + self._limits.grace_s if limit_s is None else limit_s
        step, encoded = f"{self._steps:03}.{what}", msgspec.json.encode(content)
        found = self._transport.gather(step, encoded, limit_s=limit_s, has_ended=self._is_over, is_vital=is_vital)
        return [msgspec.json.decode(one) for one in found]

    def exchange_start(self, report: Any) -> list[Any]:
        """Return what all ranks bring to a start; they may still be placing their weights. Raises RankFailed."""
        return self.exchange("start", report, limit_s=self._limits.join_s)

    def begun(self) -> None:
        """The start's exchanges are over. Raises nothing."""
        self._transport.leave()

    # A round.

    @contextmanager
    def round(self, number: int, *, about: str, log: EpochLog) -> Iterator[int]:
        """Enter around a round and get its number; see `Alone`."""
        if self.is_broken:
            raise RankFailed(rank=None, problem=GONE, pinned=False)
        self._enter()
        self._log = log
        try:
            found = self._begin(number, about)
            self._number = found
            yield found
        finally:
            self._log = None
            self._transport.leave()

    def _enter(self) -> None:
        """Go on to the first entry that nobody has ended yet."""
        for _ in range(_ENTRIES_MAX):
            self._entries += 1
            word = self._transport.decided(f"round {self._entries}")
            if word is None or read_word(word).word != ABORT:
                break
        self._steps, self._number, self._joint, self.is_pinned = 0, 0, None, False
        self._has_voted = self._has_ended = self._is_over = False
        self._transport.enter(f"round {self._entries}")

    def _begin(self, number: int, about: str) -> int:
        try:
            # A rank that nobody asked for this round is none the worse for it.
            found = self.exchange("begin", [number, about], is_vital=False)
            others = sorted({str(one[1]) for one in found} - {about})
            if others:
                raise RankFailed(rank=None, problem=f"another rank wants {others[0]}, not {about}", pinned=False)
        except RankFailed as error:
            self.abort("", pinned=False, error=error)
            raise
        return max(int(one[0]) for one in found)

    def all_of(self, what: str, value: bool) -> bool:
        """Return whether it holds on every rank. Raises RankFailed."""
        return all(self.exchange(what, value))

    def most_shrunk(self, shape: Workload) -> Workload:
        """Return the smallest of the shapes that the ranks would try. Raises RankFailed."""
        return _smallest(msgspec.convert(one, Workload) for one in self.exchange("shape", shape))

    def begin_request(self, what: str) -> None:
        """Wait until every rank is about to run the same request. Raises RankFailed."""
        for rank, one in enumerate(self.exchange("ready", what)):
            if one != what:
                raise RankFailed(rank=rank, problem=f"it would run a {one}, rank {self.rank} a {what}", pinned=False)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Enter around one measured request, which all ranks run."""
        with self._transport.working("a measured request", limit_s=self._limits.request_s, with_peers=True):
            yield

    def request_ended(self, end: RequestEnd) -> RequestEnd:
        """Return how a request ended on all ranks together.

        Raises RankFailed if it failed on another one only, for another reason than memory.
        """
        if not end.succeeded:
            self._transport.say_trouble(f"{self._steps + 1:03}.request")
        limit_s = self._limits.request_s + 2 * self._limits.grace_s
        found = [msgspec.convert(one, RequestEnd) for one in self.exchange("request", end, limit_s=limit_s)]
        failed = [rank for rank, one in enumerate(found) if not one.succeeded]
        if not failed:
            return end
        if any(one.out_of_memory for one in found):
            # What else failed is only what that did to the others.
            return RequestEnd(succeeded=False, out_of_memory=True)
        if end.succeeded:
            raise RankFailed(rank=failed[0], problem=str(found[failed[0]].problem), pinned=False)
        return end

    def renew_workspaces(self) -> None:
        """Drop what a measurement drops and build it again, on all ranks in the same order. Raises RankFailed."""
        if self._workspaces is None:
            return
        # Nobody drops what another rank's request may still use, and nobody builds what others have not dropped.
        self.exchange("before dropping", None)
        with self._transport.working("dropping workspaces", limit_s=self._limits.step_s, with_peers=False):
            self._workspaces.drop()
        self._tell({"what": "workspaces dropped"})
        self.exchange("dropped", None)
        with self._transport.working("building workspaces", limit_s=self._limits.step_s, with_peers=True):
            self._workspaces.rebuild()
        self._tell({"what": "workspaces built"})
        self.exchange("built", None)

    def plan(self, inputs: PlanInputs) -> tuple[PlanInputs, Plan]:
        """Return this rank's part of the one plan for all; see `Alone`."""
        asked = self.exchange("plan inputs", {"host": self._host, "inputs": inputs})
        made = _solve(asked) if self.rank == 0 else None
        limit_s = 2 * self._limits.step_s + self._limits.grace_s
        answer = self.exchange("plan", made, limit_s=limit_s)[0]
        if "infeasible" in answer:
            raise PlacementInfeasible(**answer["infeasible"])
        if "problem" in answer:
            raise RankFailed(rank=0, problem=str(answer["problem"]), pinned=False)
        plans = msgspec.convert(answer["plans"], list[Plan])
        own = msgspec.convert(answer["inputs"][self.rank], PlanInputs)
        # What is compared is what this rank would apply, not what it was told its digest is.
        self._agree(_digest([msgspec.json.encode(one, order="sorted") for one in plans]))
        return own, plans[self.rank]

    def agree_target(self, placement: str) -> None:
        """Exchange the digests of placements that are gone back to. Raises RankFailed."""
        self._agree(_digest([str(one).encode() for one in self.exchange("target", placement)]))

    def _agree(self, digest: str) -> None:
        found = self.exchange("digest", digest)
        for rank, one in enumerate(found):
            if one != digest:
                detail = f"its plan for all has the digest {str(one)[:12]}, rank {self.rank}'s {digest[:12]}"
                raise RankFailed(rank=rank, problem=detail, pinned=False)
        self._joint = digest

    def joint_payload(self) -> dict[str, object]:
        """Return what the events of a plan and of its commit say about the other ranks."""
        return {"ranks": {"rank": self.rank, "size": self.size, "digest": self._joint}}

    def applied(self) -> None:
        """Wait until every rank has moved its weights. Raises RankFailed."""
        self.exchange("applied", None)

    def verdict(self, own: Verdict) -> Verdict:
        """Return the verdict of all ranks: what fails on one, fails. A rank's own failure is what it journals."""
        found = [msgspec.convert(one, Verdict) for one in self.exchange("verdict", own)]
        failed = [rank for rank, one in enumerate(found) if not one.ok]
        if not failed or not own.ok:
            return own
        rank = min(failed, key=lambda one: _BLAMES.index(found[one].blames or Blame.INFRASTRUCTURE))
        # This rank's own part of the plan is not to blame, and may be chosen again.
        return replace(found[rank], blames=Blame.INFRASTRUCTURE, detail=f"rank {rank}: {found[rank].detail}")

    # The decision.

    def decide(self, outcome: Mapping[str, Any]) -> bool:
        """Prepare durably, vote, and take what the register says; see `Alone`."""
        assert self._joint is not None
        self._tell({"what": PREPARED, "digest": self._joint, "size": self.size, **outcome}, must=True)
        self._has_voted = True
        try:
            word = self._vote()
        except RankFailed as error:
            word = self._ask(self._abort_word("", error, pinned=False), error)
        self._has_ended = True
        if word.word != COMMIT:
            raise RankFailed(rank=word.rank, problem=word.why, pinned=word.pinned)
        return True

    def _vote(self) -> Word:
        found = self.exchange("vote", self._joint)
        for rank, one in enumerate(found):
            if one != self._joint:
                raise RankFailed(rank=rank, problem=f"it votes for another plan ({str(one)[:12]})", pinned=False)
        return self._ask(commit_word(self.rank), None)

    def _abort_word(self, why: str, error: BaseException | None, *, pinned: bool) -> bytes:
        """Return the word that ends it, in the name of the rank that did, as far as that is known."""
        if not isinstance(error, RankFailed):
            return abort_word(self.rank, why, pinned=pinned)
        rank = error.fields["rank"]
        return abort_word(rank, str(error.fields["problem"]), pinned=pinned or bool(error.fields["pinned"]))

    def _ask(self, word: bytes, error: RankFailed | None) -> Word:
        """Return what the register holds. Raises RoundUndecided if nobody can tell."""
        try:
            return read_word(self._transport.decide(word))
        except RankFailed as lost:
            raise RoundUndecided(round_number=self._number, problem=str(error or lost)) from lost

    def undecided(self, error: BaseException) -> RoundUndecided:
        """Return what a commit means that was decided and cannot be written: others have committed it."""
        return RoundUndecided(round_number=self._number, problem=f"the commit cannot be written: {describe(error)}")

    def abort(self, why: str, *, pinned: bool, error: BaseException | None = None) -> None:
        """End the round on all ranks; a no-op once it has ended. Raises RoundUndecided after a vote without answer."""
        if self._has_ended:
            return
        try:
            word = read_word(self._transport.decide(self._abort_word(why, error, pinned=pinned)))
        except RankFailed as lost:
            if self._has_voted:
                raise RoundUndecided(round_number=self._number, problem=str(lost)) from lost
            return  # without this rank's vote nobody can commit
        self._has_ended = True
        if word.word == COMMIT:
            raise RoundUndecided(round_number=self._number, problem="the others have committed")
        self.is_pinned = self.is_pinned or word.pinned

    def rolled_back(self, rewarm: Workload | None) -> Workload | None:
        """Exchange, once, that all are back, and agree on the request that warms them again. Raises nothing."""
        if self.is_broken or not self._number:
            return None
        # Wherever the round ended on each, and whatever failed: from here all take the same steps.
        self._steps, self._is_over = 900, True
        limit_s = self._limits.request_s + self._limits.step_s + 2 * self._limits.grace_s
        try:
            found = self.exchange("rolled back", rewarm, limit_s=limit_s)
            if any(one is None for one in found):
                return None
            self.renew_workspaces()
        except Exception as error:  # noqa: BLE001 - what is restored stays so
            self._tell({"what": "parted", "why": describe(error)})
            return None
        return _smallest(msgspec.convert(one, Workload) for one in found)

    def settled(self) -> None:
        """Wait until all have settled, too; a rank that does not is journaled. Raises nothing."""
        self._steps = 950
        try:
            self.exchange("settled", None)
        except RankFailed as error:
            self._tell({"what": "parted", "why": str(error)})

    def consult(self, what: str, content: Any) -> list[Any]:
        """Exchange something between two rounds. Raises RankFailed."""
        if self.is_broken:
            raise RankFailed(rank=None, problem=GONE, pinned=False)
        self._transport.enter(f"after {self._entries}.{what}")
        try:
            return self.exchange(what, content)
        except RankFailed as error:
            with suppress(RankFailed):
                self._transport.decide(self._abort_word("", error, pinned=False))
            raise
        finally:
            self._transport.leave()

    def part(self, why: str) -> None:
        """Tell the others that this rank takes part in nothing more. Raises nothing."""
        self._transport.part(why)

    def close(self) -> None:
        """Let go of the others. Raises nothing."""
        self._transport.part("its life has ended")
        self._transport.close()

    def _tell(self, payload: dict[str, Any], *, must: bool = False) -> None:
        """Journal it. Raises JournalError if it must be there."""
        if self._log is None:
            return
        draft = Draft(type=EventType.RANKS, round=self._number, payload=payload)
        if must:
            self._log.append(draft, witness=True)
        else:
            self._log.note(draft.type, round_number=draft.round, payload=payload)


def _solve(asked: Sequence[Any]) -> dict[str, Any]:
    """Return the one plan of all ranks, or why there is none; never raises, for the others wait."""
    try:
        inputs = [msgspec.convert(one["inputs"], PlanInputs) for one in asked]
        joint = make_joint_plan(inputs, [str(one["host"]) for one in asked])
    except PlacementInfeasible as error:
        return {"infeasible": error.fields}
    except Exception as error:  # noqa: BLE001 - the others wait for an answer
        return {"problem": describe(error)}
    return {"plans": msgspec.to_builtins(joint.plans), "inputs": msgspec.to_builtins(joint.inputs)}


def _digest(parts: Sequence[bytes]) -> str:
    """Return one digest of parts of all ranks, in their order."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


def _smallest(shapes: Iterator[Workload]) -> Workload:
    return min(shapes, key=lambda one: (one.units, one.frames, one.width, one.height, one.batch, one.steps))
