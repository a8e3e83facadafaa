"""What the ranks of a worker agree on at a start: the newest round that is committed for all, or to calibrate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from residency.journal.events import Event, EventType, payload
from residency.statemachine.deaths import digest_of
from residency.statemachine.gate import Gate, GateReason
from residency.statemachine.history import History
from residency.statemachine.ranks import PREPARED
from residency.statemachine.recovery import Decision, DecisionKind
from residency.statemachine.states import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from residency.journal.views import RoundView, StreamView
    from residency.statemachine.policy import Policy

ROUNDS_MAX = 50  # of each rank that are looked through for a common one

RoundKey = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class JointRound:
    """A round that a rank has prepared; epoch and number name it on every rank.

    digest: over the placements of all ranks. committed: as this rank's journal says.
    """

    number: int
    epoch: str
    digest: str
    committed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """What one rank brings to a start, or what kept it from that.

    alike: digest of what must be equal on all ranks. kind: what it would do alone, from_round: on which journaled round
    that rests. rounds: prepared under its fingerprint, and in use. gate: (reason, detail) if it is closed.
    """

    alike: str
    pinned: bool = False
    gate: tuple[str, str] | None = None
    kind: str = DecisionKind.CALIBRATE.value
    from_round: RoundKey | None = None
    rounds: tuple[JointRound, ...] = ()
    reserve_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks do. restore: the round; replan: each from its records of the same round. gate: closed for all.

    pinned_by: the first rank whose kill switch is on.
    """

    restore: JointRound | None = None
    replan: bool = False
    reserve_factor: float = 1.0
    gate: Gate | None = None
    pinned_by: int | None = None


def agree(reports: Sequence[StartReport]) -> Agreement:
    """Return what follows from the reports of all ranks, in their order. Pure, so that every rank finds the same."""
    pinned_by = next((rank for rank, one in enumerate(reports) if one.pinned), None)
    if pinned_by is not None:
        return Agreement(pinned_by=pinned_by)
    gate = _gate(reports)
    if gate is not None:
        return Agreement(gate=gate)
    factor = max(one.reserve_factor for one in reports)
    kinds, rounds = {one.kind for one in reports}, {one.from_round for one in reports}
    is_replan = kinds == {DecisionKind.REPLAN.value} and len(rounds) == 1
    return Agreement(restore=newest_common(reports), replan=is_replan, reserve_factor=factor)


def newest_common(reports: Sequence[StartReport]) -> JointRound | None:
    """Return the newest round that every rank prepared with one digest, and that at least one committed.

    A commit anywhere says that all had voted for it: that it is decided for all. Where no rank has written its commit
    nobody has served it, and it never was.
    """
    prepared = [{replace(one, committed=False) for one in report.rounds} for report in reports]
    decided = {replace(one, committed=False) for report in reports for one in report.rounds if one.committed}
    return max(set.intersection(*prepared) & decided, default=None)


def _gate(reports: Sequence[StartReport]) -> Gate | None:
    others = sorted({one.alike for one in reports})
    if len(others) > 1:
        differing = next(rank for rank, one in enumerate(reports) if one.alike != reports[0].alike)
        detail = f"rank {differing} was attached with another workload, policy or version than rank 0"
        return Gate(reason=GateReason.RANKS_DIFFER, detail=detail, remedy="attach all ranks alike")
    closed = [(rank, GateReason(one.gate[0]), one.gate[1]) for rank, one in enumerate(reports) if one.gate is not None]
    # A rank with nothing to decide takes part, and keeps what it has.
    nothing = [one for one in closed if one[1] is GateReason.NOTHING_TO_DECIDE]
    if len(nothing) < len(reports):
        closed = [one for one in closed if one not in nothing]
    if not closed:
        return None
    rank, reason, detail = closed[0]
    return Gate(reason=reason, detail=f"rank {rank}: {detail}", remedy=f"see the journal of rank {rank}")


def prepared_facts(events: Iterable[Event]) -> dict[RoundKey, Mapping[str, Any]]:
    """Return what a stream's rank wrote before its votes, by round."""
    found: dict[RoundKey, Mapping[str, Any]] = {}
    for event in events:
        if event.type == EventType.RANKS.value:
            content = payload(event)
            if content.get("what") == PREPARED and isinstance(content.get("digest"), str):
                found[event.epoch, event.round] = content
    return found


def usable_rounds(
    view: StreamView, facts: Mapping[RoundKey, Mapping[str, Any]], *, fingerprint_digest: str, policy: Policy
) -> tuple[JointRound, ...]:
    """Return the rounds that a rank could go back to, the newest first: prepared or committed, and not given up."""
    out_of_use = History.of(view, fingerprint_digest=fingerprint_digest).out_of_use(policy)
    found = [
        JointRound(
            number=one.number,
            epoch=one.epoch,
            digest=str(facts[one.epoch, one.number]["digest"]),
            committed=one.state == State.COMMITTED.value,
        )
        for epoch in view.epochs
        if digest_of(epoch) == fingerprint_digest
        for one in epoch.rounds
        if (one.epoch, one.number) in facts
        and one.state != State.ROLLED_BACK.value
        and one.placement is not None
        and one.placement not in out_of_use
    ]
    return tuple(sorted(found, reverse=True)[:ROUNDS_MAX])


def decision_of(
    agreement: Agreement, own: Decision, view: StreamView, facts: Mapping[RoundKey, Mapping[str, Any]]
) -> Decision:
    """Return what this rank does of what all agreed on. own: what it would have done alone."""
    if agreement.restore is not None:
        one = _round(view, agreement.restore)
        known = facts[one.epoch, one.number]
        outcome = one.outcome if one.state == State.COMMITTED.value else known
        expected = (outcome or {}).get("output_digest")
        return Decision(
            kind=DecisionKind.RESTORE,
            reason=f"round {one.number} is the newest that all ranks committed",
            placement=one.placement,
            round=replace(one, outcome=outcome),
            excluded=own.excluded,
            expected_output=expected if isinstance(expected, str) else None,
        )
    if agreement.replan:
        return replace(own, reserve_factor=agreement.reserve_factor)
    reason = own.reason
    if own.kind is DecisionKind.RESTORE:
        reason = "the ranks have no committed round in common"
    elif own.kind is DecisionKind.REPLAN:
        reason += "; other ranks have no records of it"
    return Decision(
        kind=DecisionKind.CALIBRATE,
        reason=reason,
        excluded=own.excluded,
        reserve_factor=agreement.reserve_factor,
        differences=own.differences,
    )


def _round(view: StreamView, wanted: JointRound) -> RoundView:
    return next(one for one in view.rounds if (one.epoch, one.number) == (wanted.epoch, wanted.number))
