"""What is held against placements under one fingerprint: deaths and failed rounds, and what forgave them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from residency.journal.views import RoundView
from residency.statemachine.deaths import EARLY, SURVIVED, Death, digest_of
from residency.statemachine.states import State
from residency.statemachine.validation import Blame

if TYPE_CHECKING:
    from residency.journal.views import Clearing, EpochView, StreamView
    from residency.statemachine.policy import Policy

ROUND = "round"  # the kind of a death in the middle of a round
VERDICT = "verdict"  # of no death: a round was rolled back, and its verdict blames the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One thing held against a placement. kind: ROUND, EARLY or VERDICT; round: 0 outside of rounds.

    at_ns: when its worker wrote last, or when the round ended; since the Unix epoch.
    """

    kind: str
    epoch: str
    round: int
    why: str
    at_ns: int


class Standing(Enum):
    """What becomes of a placement that something is held against. The value is its spelling in output."""

    QUARANTINED = "quarantined"  # blamed for so many deaths that it is not tried again
    PLANNING_STOPPED = "planning-stopped"  # never committed; with others it stops planning for the fingerprint
    FAILED = "failed"  # a round with it was rolled back; no plan chooses it again
    BLAMED = "blamed"  # once more and it is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A placement that something is held against, oldest strike first. since_ns: when it came to this standing."""

    placement: str
    standing: Standing
    since_ns: int
    strikes: tuple[Strike, ...]


@dataclass(slots=True)
class History:
    """What happened to placements under one fingerprint; a commit forgives what came before it, and so does a clearing.

    commits: committed rounds, oldest first. Serving is proven by serving, not by a commit: every restart commits.
    """

    commits: list[RoundView] = field(default_factory=list)
    committed: set[str] = field(default_factory=set)
    in_round: dict[str, list[Strike]] = field(default_factory=dict)
    serving: dict[str, list[Strike]] = field(default_factory=dict)
    failed: dict[str, list[Strike]] = field(default_factory=dict)
    last_plan: RoundView | None = None
    deaths: dict[str, Death] = field(default_factory=dict)

    @classmethod
    def of(cls, view: StreamView, *, fingerprint_digest: str) -> History:
        """Return the history of a stream under one fingerprint. Pure."""
        history = cls()
        for epoch in view.epochs:
            if digest_of(epoch) == fingerprint_digest:
                history._add(epoch)
            for one in epoch.clearings:
                if one.fingerprint == fingerprint_digest:
                    history._forgive(one)
        return history

    def num_deaths(self, placement: str) -> int:
        """Return how many deaths a placement is blamed for since it was last forgiven."""
        return len(self.in_round.get(placement, ())) + len(self.serving.get(placement, ()))

    def out_of_use(self, policy: Policy) -> set[str]:
        """Return the placements that are not to be tried again: rolled back, or blamed for too many deaths."""
        blamed = {*self.in_round, *self.serving}
        return {*self.failed} | {one for one in blamed if self.num_deaths(one) >= policy.deaths_max}

    def num_suspect_deaths(self) -> int:
        """Return the deaths blamed on plans that were never committed."""
        return sum(len(strikes) for placement, strikes in self.in_round.items() if placement not in self.committed)

    def is_suspect(self, plan: RoundView) -> bool:
        """Whether a life died moving weights to a placement that was never committed."""
        death = self.deaths.get(plan.epoch)
        return (
            death is not None
            and death.blames == Blame.PLAN.value
            and death.kind == ROUND
            and death.placement == plan.placement
            and plan.placement not in self.committed
        )

    def held(self, policy: Policy) -> tuple[Held, ...]:
        """Return every placement that something is held against, the latest last."""
        names = {*self.in_round, *self.serving, *self.failed}
        return tuple(sorted((self._held(one, policy) for one in names), key=lambda one: (one.since_ns, one.placement)))

    def _held(self, placement: str, policy: Policy) -> Held:
        parts = (self.in_round, self.serving, self.failed)
        strikes = sorted((one for part in parts for one in part.get(placement, ())), key=lambda one: one.at_ns)
        deaths = [one.at_ns for one in strikes if one.kind != VERDICT]
        since_ns = strikes[-1].at_ns
        if len(deaths) >= policy.deaths_max:
            standing, since_ns = Standing.QUARANTINED, deaths[policy.deaths_max - 1]
        elif placement in self.failed:
            standing, since_ns = Standing.FAILED, self.failed[placement][0].at_ns
        elif placement not in self.committed and self.num_suspect_deaths() >= policy.deaths_max:
            standing = Standing.PLANNING_STOPPED
        else:
            standing = Standing.BLAMED
        return Held(placement=placement, standing=standing, since_ns=since_ns, strikes=tuple(strikes))

    def _add(self, epoch: EpochView) -> None:
        for one in epoch.rounds:
            self._add_round(one)
        death = Death.of(epoch)
        ended_well = epoch.stopped is not None and epoch.poisoned is None
        if epoch.serving is not None and (ended_well or (death is not None and death.kind == SURVIVED)):
            self.serving.pop(str(epoch.serving.get("placement", epoch.placement)), None)
        if death is not None:
            self.deaths[epoch.epoch] = death
        if death is not None and death.blames == Blame.PLAN.value and death.placement is not None:
            part = self.serving if death.kind == EARLY else self.in_round
            strike = Strike(kind=death.kind, epoch=epoch.epoch, round=epoch.round, why=death.why, at_ns=epoch.last_at)
            part.setdefault(death.placement, []).append(strike)

    def _add_round(self, one: RoundView) -> None:
        if one.placement is None:
            return
        self.last_plan = one
        if one.state == State.COMMITTED.value:
            self.commits.append(one)
            self.committed.add(one.placement)
            self.in_round.pop(one.placement, None)
            self.failed.pop(one.placement, None)
        elif one.state == State.ROLLED_BACK.value and (why := _blame_of_plan(one)) is not None:
            at_ns = one.ended_at or one.started_at
            strike = Strike(kind=VERDICT, epoch=one.epoch, round=one.number, why=why, at_ns=at_ns)
            self.failed.setdefault(one.placement, []).append(strike)

    def _forgive(self, clearing: Clearing) -> None:
        for part in (self.in_round, self.serving, self.failed):
            for placement in [one for one in part if clearing.placement in (None, one)]:
                del part[placement]
        self.deaths = {
            epoch: death for epoch, death in self.deaths.items() if clearing.placement not in (None, death.placement)
        }


def _blame_of_plan(one: RoundView) -> str | None:
    """Return why a round that was rolled back blames its plan, None if it does not."""
    verdict = (one.outcome or {}).get("verdict")
    if not isinstance(verdict, dict) or verdict.get("blames") != Blame.PLAN.value:
        return None
    return ": ".join(str(verdict[name]) for name in ("reason", "detail") if verdict.get(name))
