"""Where the next round's plan comes from: the journal, an earlier round's records, or measuring anew."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from residency.errors import JournalCorrupt, JournalError
from residency.gpu.placement import Placement
from residency.gpu.workload import Workload
from residency.journal.fold import fold_stream
from residency.statemachine.recovery import DecisionKind
from residency.statemachine.source import RoundResult, Source, SourceKind
from residency.statemachine.states import State
from residency.statemachine.validation import Blame

if TYPE_CHECKING:
    from residency.journal.store import Journal
    from residency.journal.views import RoundView
    from residency.statemachine.recovery import Decision as Recovery
    from residency.worker_setup import Setup

log = logging.getLogger(__name__)


def first_source(journal: Journal, recovery: Recovery, *, initial: str) -> Source:
    """Return what a start's first round plans from. What the journal holds but cannot be read is measured anew."""
    if recovery.kind is DecisionKind.RESTORE and recovery.round is not None:
        try:
            return committed_source(journal, recovery.round, SourceKind.JOURNAL)
        except JournalError as error:
            log.warning("round %d cannot be restored, calibrating: %s", recovery.round.number, error)
    elif recovery.kind is DecisionKind.REPLAN and recovery.inputs is not None and recovery.round is not None:
        known = recovery.inputs
        return Source(
            kind=SourceKind.SUSPECT,
            records=known.records,
            placements=(known.current, known.initial, *known.placements),
            reserve_factor=recovery.reserve_factor,
            excluded=recovery.excluded,
            from_round=recovery.round.number,
        )
    return calibration(recovery, initial=initial)


def calibration(recovery: Recovery, *, initial: str, after: RoundResult | None = None) -> Source:
    """Return a plan to be measured; what a restore has just been found wanting with is not chosen again."""
    blamed = after is not None and after.verdict is not None and after.verdict.blames is Blame.PLAN
    failed = {recovery.placement} if blamed and recovery.placement is not None else set()
    return Source(
        kind=SourceKind.CALIBRATION,
        excluded=tuple(sorted({*recovery.excluded, *failed} - {initial})),
        reserve_factor=recovery.reserve_factor,
    )


def committed_source(journal: Journal, one: RoundView, kind: SourceKind) -> Source:
    """Return the plan that goes back to a committed round's placement. Raises JournalError if it cannot be read."""
    assert one.placement is not None
    outcome = one.outcome or {}
    shape = outcome.get("workload")
    try:
        return Source(
            kind=kind,
            target=Placement.from_bytes(journal.blob(one.placement)),
            expected_output=outcome.get("output_digest"),
            shape=None if shape is None else msgspec.convert(shape, Workload),
            from_round=one.number,
        )
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise JournalCorrupt(
            journal=journal.location,
            problem=f"the placement of round {one.number} is not one this program knows ({error})",
            remedy="calibrate again",
        ) from error


def remembered(journal: Journal, setup: Setup, *, excluded: tuple[str, ...]) -> tuple[RoundView, ...]:
    """Return the committed rounds under this fingerprint that are not excluded, oldest first. Reads the journal."""
    view = fold_stream(journal.events(stream=setup.stream), setup.stream)
    return tuple(
        one
        for epoch in view.epochs
        if epoch.started.get("fingerprint_digest") == setup.fingerprint_digest
        for one in epoch.rounds
        if one.state == State.COMMITTED.value and one.placement is not None and one.placement not in excluded
    )
