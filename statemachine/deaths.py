"""Closing what dead epochs left open, and deciding whom each death blames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from residency.journal.events import Draft, EventType
from residency.statemachine.policy import Policy
from residency.statemachine.states import SETTLED, State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residency.journal.views import EpochView, RoundView, StreamView

_DEFAULT = Policy()
_SETTLED_VALUES = frozenset(state.value for state in SETTLED)
# In these the placement of the plan is in force, whether or not anything had to be moved for it.
_TRIED_VALUES = frozenset({State.APPLIED.value, State.VALIDATING.value})

EARLY = "early"  # the kind of a death soon after serving began
SURVIVED = "survived"  # of a death so long after it that the placement has proven itself


class Closing(NamedTuple):
    """The events that close one dead epoch; they are appended to it in one transaction."""

    epoch: str
    rank: int
    drafts: tuple[Draft, ...]


class Death(NamedTuple):
    """How an epoch ended. kind: 'round', EARLY, SURVIVED, 'reboot', 'idle' or 'stopped'; blames as in the journal."""

    blames: str
    kind: str
    why: str
    placement: str | None
    fingerprint: str

    @classmethod
    def of(cls, epoch: EpochView) -> Death | None:
        """Return the death that a later start journaled, or None."""
        found = (epoch.recovered or {}).get("death")
        if not isinstance(found, dict):
            return None
        placement = found.get("placement")
        return cls(
            blames=str(found.get("blames", "none")),
            kind=str(found.get("kind", "")),
            why=str(found.get("why", "")),
            placement=placement if isinstance(placement, str) else None,
            fingerprint=str(found.get("fingerprint", "")),
        )


def closing(view: StreamView, *, boot_id: str, now_ns: int, by_epoch: str, policy: Policy = _DEFAULT) -> list[Closing]:
    """Return what closes every epoch that ended without saying so, oldest first; by_epoch is the living one.

    Every intent in doubt gets exactly one outcome, 'lost', and every such epoch one 'recovered'. After they are
    written this returns nothing. The caller holds the stream, so that no other epoch can be alive.
    """
    found: list[Closing] = []
    # The deaths up to here without a life in between that ended well: they make "three times in a row".
    row: list[Death] = []
    for index, epoch in enumerate(view.epochs):
        if epoch.epoch == by_epoch:
            continue
        later = (one.started_at for one in view.epochs[index + 1 :])
        death = Death.of(epoch)
        if _is_open(epoch):
            drafts = _lost(epoch)
            if death is None:
                death = _death(epoch, row, boot_id=boot_id, gone_ns=next(later, now_ns), policy=policy)
                drafts.append(_recovered(epoch, death, by_epoch=by_epoch, num_in_doubt=len(drafts)))
            found.append(Closing(epoch.epoch, epoch.rank, tuple(drafts)))
        row = [*row, death] if death is not None and death.kind == EARLY else []
        row = [one for one in row if not _is_forgiven(one, epoch)]
    return found


def digest_of(epoch: EpochView) -> str:
    """Return the digest of the fingerprint that an epoch started with."""
    return str(epoch.started.get("fingerprint_digest", ""))


def _is_forgiven(death: Death, epoch: EpochView) -> bool:
    return any(one.covers(placement=death.placement, fingerprint=death.fingerprint) for one in epoch.clearings)


def _is_open(epoch: EpochView) -> bool:
    if any(one.open_intents for one in epoch.rounds):
        return True
    if epoch.recovered is not None:
        return False
    # A worker whose device is lost may still end in an orderly way.
    return epoch.stopped is None or epoch.poisoned is not None or _moving(epoch) is not None


def _moving(epoch: EpochView) -> RoundView | None:
    """Return the round that had begun to move weights, or lost the device under its plan, and never settled."""
    tried = _TRIED_VALUES if epoch.poisoned is not None else frozenset[str]()
    return next(
        (r for r in epoch.rounds if (r.num_intents or r.state in tried) and r.state not in _SETTLED_VALUES), None
    )


def _lost(epoch: EpochView) -> list[Draft]:
    return [
        Draft(
            type=EventType.EFFECT_OUTCOME,
            round=one.number,
            causation=intent.event_id,
            payload={
                "index": intent.index,
                "component": intent.component,
                "result": "lost",
                "error": None,
                "duration_ns": 0,
            },
        )
        for one in epoch.rounds
        for intent in one.open_intents
    ]


def _recovered(epoch: EpochView, death: Death, *, by_epoch: str, num_in_doubt: int) -> Draft:
    payload: dict[str, Any] = {
        "by_epoch": by_epoch,
        "round": epoch.round,
        "state": epoch.state,
        "in_doubt": num_in_doubt,
        "death": death._asdict(),
    }
    return Draft(type=EventType.RECOVERED, round=epoch.round, payload=payload)


def _death(epoch: EpochView, row: Sequence[Death], *, boot_id: str, gone_ns: int, policy: Policy) -> Death:
    """Judge a death; everything that is not surely the plan's doing blames the infrastructure."""
    moving = _moving(epoch)
    if moving is not None:
        return _round_death(epoch, moving, boot_id=boot_id)
    is_poisoned = epoch.poisoned is not None
    how = f"the device was lost to it ({_problem(epoch)})" if is_poisoned else "it died"
    if epoch.stopped is not None and not is_poisoned:
        return _ended(epoch, "none", "stopped", "it stopped in an orderly way", epoch.placement)
    if epoch.serving is None or epoch.serving_at is None:
        why = f"{how} before {'' if is_poisoned else 'weights moved or '}requests came"
        return _ended(epoch, "infrastructure", "idle", why, epoch.placement)
    placement = _text(epoch.serving, "placement") or epoch.placement
    if epoch.boot_id != boot_id and not is_poisoned:
        return _ended(epoch, "infrastructure", "reboot", "the machine was started anew", placement)
    # When it died is not known; it was gone when the next one began.
    served_s = ((epoch.poisoned_at or gone_ns) - epoch.serving_at) / 1e9
    if not 0 <= served_s <= policy.serving_death_window_s:
        why = f"{how} after {served_s:.0f} s" if is_poisoned else f"it may have served for {served_s:.0f} s"
        return _ended(epoch, "infrastructure", SURVIVED, why, placement)
    if placement == epoch.started.get("initial_placement"):
        why = f"{how} within {served_s:.0f} s of serving, under its initial placement, which is nobody's plan"
        return _ended(epoch, "infrastructure", "idle", why, placement)
    same = 1
    for earlier in reversed(row):
        if (earlier.placement, earlier.fingerprint) != (placement, digest_of(epoch)):
            break
        same += 1
    if same < policy.serving_deaths_in_a_row:
        why = f"{how} within {served_s:.0f} s of serving, {same} in a row under this placement"
        return _ended(epoch, "infrastructure", EARLY, why, placement)
    why = f"{same} lives in a row died within {policy.serving_death_window_s:.0f} s of serving under this placement"
    return _ended(epoch, "plan", EARLY, why, placement)


def _round_death(epoch: EpochView, moving: RoundView, *, boot_id: str) -> Death:
    where = f"round {moving.number}, {moving.state}"
    if epoch.poisoned is not None:
        # Going back to what the worker started with, or trying that, is nobody's plan.
        is_plan = moving.placement not in (None, epoch.started.get("initial_placement"))
        why = f"the device was lost to it in {where} ({_problem(epoch)})"
        return _ended(epoch, "plan" if is_plan else "infrastructure", "round", why, moving.placement)
    if epoch.rollback_failed is not None:
        return _ended(epoch, "plan", "round", f"a rollback failed in {where}", moving.placement)
    if epoch.boot_id != boot_id:
        return _ended(epoch, "infrastructure", "round", f"the machine was started anew in {where}", moving.placement)
    if epoch.stopped is not None:
        how = _text(epoch.stopped, "signal") or _text(epoch.stopped, "reason") or "an orderly stop"
        return _ended(epoch, "infrastructure", "round", f"{how} came in {where}", moving.placement)
    why = f"it died between the first effect and the commit, in {where}"
    return _ended(epoch, "plan", "round", why, moving.placement)


def _ended(epoch: EpochView, blames: str, kind: str, why: str, placement: str | None) -> Death:
    return Death(blames=blames, kind=kind, why=why, placement=placement, fingerprint=digest_of(epoch))


def _problem(epoch: EpochView) -> str:
    return _text(epoch.poisoned or {}, "problem") or "no reason was given"


def _text(payload: Mapping[str, Any], name: str) -> str | None:
    value = payload.get(name)
    return value if isinstance(value, str) else None
