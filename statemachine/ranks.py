"""What a round asks of the other ranks of its worker, and what a rank answers that has none."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from residency.errors import RoundUndecided, describe
from residency.statemachine.planner.make_plan import make_plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from residency.gpu.workload import Workload
    from residency.statemachine.epoch_log import EpochLog
    from residency.statemachine.planner.plan import Plan, PlanInputs
    from residency.statemachine.validation import Verdict


PREPARED = "prepared"  # what an event of type `ranks` says before its rank votes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimits:
    """How long ranks wait for each other, in seconds. Raises ValueError for what could not have been meant.

    join_s: from the first rank that starts to the last. step_s: for a step without a request: planning, moving weights,
    writing the journal. request_s: for one measured request, compiling included. silence_s: without a sign of life.
    grace_s: for a request to come back by itself, once another rank of it has failed. store_s: for one answer of the
    group's store.
    """

    join_s: float = 900.0  # loading a large model from a cold disk
    step_s: float = 300.0  # page-locking a hundred GiB took about one minute
    request_s: float = 900.0  # a first request may compile everything
    silence_s: float = 30.0  # a process may be kept off its cores, or hold Python's lock, for seconds
    grace_s: float = 60.0  # longer than most requests take
    store_s: float = 30.0  # torch's answers nobody while it looks up a name: two tries of 5 s for each connection

    def __post_init__(self) -> None:
        for name in ("join_s", "step_s", "request_s", "silence_s", "grace_s", "store_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"limit {name} is {getattr(self, name)!r}; it must be a number of seconds above 0")


class Transport(Protocol):
    """Carries bytes between the ranks of one group, within limits; one thread of each rank uses it.

    Everything that waits raises RankFailed once its limit is over, a rank gives no sign of life, one has ended what
    they are about, or the store cannot be reached.
    """

    @property
    def rank(self) -> int:
        """The number of this rank in its group, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether a rank is gone, or the store: nothing can be agreed on in this life any more."""
        ...

    def join(self, epoch: str, *, limit_s: float) -> str:
        """Wait for all ranks of this start and return the epoch that rank 0 proposed."""
        ...

    def enter(self, space: str) -> None:
        """Begin something that all ranks do together, under a name that is used once; gives signs of life from now."""
        ...

    def leave(self) -> None:
        """End it, for this rank. Raises nothing."""
        ...

    def gather(
        self, step: str, content: bytes, *, limit_s: float, has_ended: bool, is_vital: bool
    ) -> tuple[bytes, ...]:
        """Return what every rank passed at this step, in their order, once all have.

        has_ended: what they are about has ended, and is waited for all the same. is_vital: one that is not there in
        time counts as gone from then on.
        """
        ...

    def decide(self, word: bytes) -> bytes:
        """Write the register of what was entered if nobody has, and return what it holds: the same to everybody."""
        ...

    def decided(self, space: str) -> bytes | None:
        """Return what the register of a space holds, None if nothing."""
        ...

    def working(self, what: str, *, limit_s: float, with_peers: bool) -> AbstractContextManager[None]:
        """Enter around what this rank does alone, or in its pipeline with_peers; one that outlasts it ends the process.

        With peers, one of whom fails or ends, it is interrupted after a grace, and ends the process after another.
        """
        ...

    def say_trouble(self, step: str) -> None:
        """Tell ranks that are still in this step's request that it failed here. Raises nothing."""
        ...

    def part(self, why: str) -> None:
        """Tell the others that this rank takes part in nothing more. Raises nothing."""
        ...

    def close(self) -> None:
        """Let go of everything. Raises nothing."""
        ...


class Workspaces(Protocol):
    """What a worker's ranks build together and a measurement drops: staging buffers, communication workspaces.

    All ranks call each method at the same step, in the same order, whatever happened on any of them.
    """

    def drop(self) -> None:
        """Let go of them, so that what they held is measured as free."""
        ...

    def rebuild(self) -> None:
        """Make them again; may communicate."""
        ...

    def interrupt(self) -> None:
        """Make a request that waits for a failed rank raise, if that can be done: called on another thread."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """How one measured request ended on this rank. problem: what was raised, None if nothing."""

    succeeded: bool
    out_of_memory: bool = False
    problem: str | None = None


class Alone:
    """A rank without others: nothing is asked, nothing is waited for, nothing more is journaled."""

    rank = 0
    size = 1
    # Another rank ended the round because of its kill switch.
    is_pinned = False

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be agreed on in this life any more."""
        return False

    @contextmanager
    def round(self, number: int, *, about: str, log: EpochLog) -> Iterator[int]:
        """Enter around a round and get its number: one above the highest that any rank knows.

        about: what the round is; must be the same on all ranks. Raises RankFailed with nothing changed.
        """
        yield number

    def all_of(self, what: str, value: bool) -> bool:
        """Return whether it holds on every rank. Raises RankFailed."""
        return value

    def most_shrunk(self, shape: Workload) -> Workload:
        """Return the smallest of the shapes that the ranks would try. Raises RankFailed."""
        return shape

    def begin_request(self, what: str) -> None:
        """Wait until every rank is about to run the same request. Raises RankFailed."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Enter around one measured request, which all ranks run."""
        yield

    def request_ended(self, end: RequestEnd) -> RequestEnd:
        """Return how a request ended on all ranks together. Raises RankFailed if one cannot go on."""
        return end

    def renew_workspaces(self) -> None:
        """Drop what a measurement drops and build it again, on all ranks in the same order. Raises RankFailed."""

    def plan(self, inputs: PlanInputs) -> tuple[PlanInputs, Plan]:
        """Return this rank's part of the one plan for all, and what it was made from.

        Raises PlacementInfeasible on every rank if nothing fits on one, and RankFailed.
        """
        return inputs, make_plan(inputs)

    def agree_target(self, placement: str) -> None:
        """Exchange the digests of placements that are gone back to. Raises RankFailed."""

    def consult(self, what: str, content: Any) -> list[Any]:
        """Exchange something between two rounds. Raises RankFailed."""
        return [content]

    def joint_payload(self) -> dict[str, object]:
        """Return what the events of a plan and of its commit say about the other ranks."""
        return {}

    def applied(self) -> None:
        """Wait until every rank has moved its weights. Raises RankFailed."""

    def verdict(self, own: Verdict) -> Verdict:
        """Return the verdict of all ranks: what fails on one, fails. Raises RankFailed."""
        return own

    def decide(self, outcome: Mapping[str, Any]) -> bool:
        """Return whether it is decided, for all ranks, to commit; False if there are no others to decide with.

        outcome: what the commit will say, which a later start needs if only another rank gets to write it.
        Raises RankFailed if it is decided that nobody commits, RoundUndecided, after which the process must end, and
        JournalError with nothing decided.
        """
        return False

    def undecided(self, error: BaseException) -> RoundUndecided:
        """Return what a commit means that was decided and cannot be written."""
        return RoundUndecided(round_number=0, problem=describe(error))

    def abort(self, why: str, *, pinned: bool, error: BaseException | None = None) -> None:
        """End the round on all ranks; error: that ended it here. Raises RoundUndecided if it is too late for that."""

    def rolled_back(self, rewarm: Workload | None) -> Workload | None:
        """Return the shape of the request by which all ranks are warmed again, None for none. Raises nothing."""
        return rewarm

    def settled(self) -> None:
        """Wait until all have committed. Raises nothing."""

    def join(self, epoch: str) -> str:
        """Wait for all ranks of this start and return the epoch that they share. Raises RankFailed."""
        return epoch

    def part(self, why: str) -> None:
        """Tell the others that this rank takes part in nothing more. Raises nothing."""

    def close(self) -> None:
        """Let go of the others. Raises nothing."""
