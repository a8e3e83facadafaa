"""Whom an exception blames that ended a round."""

from __future__ import annotations

from residency.errors import (
    EffectFailed,
    PlacementInfeasible,
    RankFailed,
    ResidencyError,
    TransitionRefused,
    WarmupFailed,
    describe,
)
from residency.statemachine.validation import Blame, Reason, Verdict


def verdict_of(error: BaseException) -> Verdict:
    """Say whom an exception blames."""
    cause = error.__cause__ if isinstance(error, EffectFailed) else error
    # By name: out of memory is torch's own type, and nothing here may load torch. A MemoryError is the host's refusal
    # to page-lock, which says nothing about the plan on another day.
    is_memory = type(cause).__name__ == "OutOfMemoryError"
    blames, reason = Blame.INFRASTRUCTURE, Reason.INTERRUPTED
    if isinstance(error, PlacementInfeasible) or is_memory:
        blames, reason = Blame.PLAN, Reason.OUT_OF_MEMORY
    elif isinstance(error, WarmupFailed):
        blames, reason = Blame.REQUEST, Reason.REQUEST_FAILED
    elif isinstance(error, RankFailed):
        reason = Reason.OTHER_RANK
    if isinstance(error, TransitionRefused):
        return Verdict(ok=False, blames=blames, reason=reason, detail="the kill switch was thrown", figures={})
    detail = str(error) if isinstance(error, ResidencyError) else describe(error)
    return Verdict(ok=False, blames=blames, reason=reason, detail=detail, figures={})
