"""What a start does with what earlier lives left behind: close it, then restore, replan, calibrate or hold back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from residency.journal.views import RoundView
from residency.statemachine.deaths import Closing, closing, digest_of
from residency.statemachine.fingerprint import differences
from residency.statemachine.history import History
from residency.statemachine.planner.plan import PlanInputs
from residency.statemachine.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residency.journal.views import StreamView

__all__ = ["Closing", "Decision", "DecisionKind", "closing", "decide"]

_DEFAULT = Policy()


class DecisionKind(Enum):
    """What a start does next."""

    RESTORE = "restore"  # a round whose plan is the remembered placement
    REPLAN = "replan"  # a round from journaled records, with a larger reserve
    CALIBRATE = "calibrate"  # measure, from the initial placement
    QUARANTINED = "quarantined"  # no round: the gate of that name


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why.

    placement: digest to restore, or of the suspect. round: the journaled round that it rests on. excluded: digests
    that a plan must not choose. reserve_factor: for the planner. differences: the parts of the fingerprint that
    changed since the last life. inputs: a suspect's journaled inputs. expected_output: digest of the output that
    was committed with the placement, if any.
    """

    kind: DecisionKind
    reason: str
    placement: str | None = None
    round: RoundView | None = None
    excluded: tuple[str, ...] = ()
    reserve_factor: float = 1.0
    differences: tuple[str, ...] = ()
    inputs: PlanInputs | None = None
    expected_output: str | None = None


def decide(
    view: StreamView,
    *,
    fingerprint: Mapping[str, Any],
    fingerprint_digest: str,
    initial: str,
    policy: Policy = _DEFAULT,
) -> Decision:
    """Return what a start does, from a stream whose dead epochs have been closed. Pure.

    fingerprint, fingerprint_digest: of this start. initial: digest of its initial placement, which is never
    excluded. The kill switch and the gate come before this.
    """
    history = History.of(view, fingerprint_digest=fingerprint_digest)
    out_of_use = history.out_of_use(policy)
    excluded = tuple(sorted(out_of_use - {initial}))
    for one in reversed(history.commits):
        if one.placement is not None and one.placement not in out_of_use:
            return _restore(one, history.num_deaths(one.placement), excluded)
    num_suspect = history.num_suspect_deaths()
    if num_suspect >= policy.deaths_max:
        reason = f"{num_suspect} lives died in a round of a plan that was never committed, under this fingerprint"
        return Decision(kind=DecisionKind.QUARANTINED, reason=reason, excluded=excluded, round=history.last_plan)
    suspect = history.last_plan
    if suspect is not None and history.is_suspect(suspect):
        return _replan(suspect, excluded, policy)
    lived = [epoch for epoch in view.epochs if epoch.rounds or epoch.serving or epoch.ended]
    if lived and digest_of(lived[-1]) != fingerprint_digest:
        changed = differences(lived[-1].fingerprint, fingerprint)
        reason = f"the fingerprint differs in {', '.join(changed) or 'its digest'}"
        return Decision(kind=DecisionKind.CALIBRATE, reason=reason, differences=changed, excluded=excluded)
    reason = "no placement is remembered"
    if history.commits:
        reason = "every remembered placement is quarantined"
    elif history.last_plan is not None:
        reason = "no plan was committed yet"
    return Decision(kind=DecisionKind.CALIBRATE, reason=reason, excluded=excluded)


def _restore(one: RoundView, num_deaths: int, excluded: tuple[str, ...]) -> Decision:
    reason = f"round {one.number} committed it under the same fingerprint"
    if num_deaths:
        reason += f"; blamed for {num_deaths} death since"
    expected = (one.outcome or {}).get("output_digest")
    return Decision(
        kind=DecisionKind.RESTORE,
        reason=reason,
        placement=one.placement,
        round=one,
        excluded=excluded,
        expected_output=expected if isinstance(expected, str) else None,
    )


def _replan(suspect: RoundView, excluded: tuple[str, ...], policy: Policy) -> Decision:
    inputs: PlanInputs | None = None
    try:
        inputs = msgspec.convert((suspect.plan or {}).get("inputs"), PlanInputs)
    except (msgspec.ValidationError, ValueError):
        pass  # a plan without readable inputs (a restore, another version): measure anew, as carefully
    reason = f"round {suspect.number} died with a plan that was never committed; the reserve is raised"
    return Decision(
        kind=DecisionKind.CALIBRATE if inputs is None else DecisionKind.REPLAN,
        reason=reason,
        placement=suspect.placement,
        round=suspect,
        excluded=excluded,
        reserve_factor=policy.suspect_reserve_factor,
        inputs=inputs,
    )
