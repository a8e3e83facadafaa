"""What a start decides: alone or with the other ranks, by which rounds, and how that is told."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from residency.epoch_facts import gate_facts
from residency.errors import EffectFailed, JournalError, PlacementInfeasible, RankFailed, WarmupFailed
from residency.gpu.placement import Placement
from residency.gpu.records import RequestRecord
from residency.journal.events import EventType
from residency.report import Decision
from residency.sources import calibration, first_source
from residency.statemachine.gate import Gate, GateReason, check_gate
from residency.statemachine.source import RoundResult, Source, SourceKind
from residency.statemachine.states import State
from residency.together import Start, agree_on_start, is_the_same_everywhere

if TYPE_CHECKING:
    from residency.epoch import Epoch
    from residency.statemachine.recovery import Decision as Recovery

log = logging.getLogger(__name__)


class FirstRounds:
    """The rounds of a start, for one epoch. results: of those that were run, in their order."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self.results: list[RoundResult] = []

    def decide(self) -> tuple[Decision, str, str | None]:
        """Return what was decided, in a word and in a line, and the error behind it."""
        epoch = self._epoch
        switch = epoch.setup.switch()
        found = gate_facts(
            epoch.setup,
            problem=epoch.problem,
            recovery=epoch.recovery,
            rank_problem=epoch.rank_problem,
        )
        own = None if switch is not None else check_gate(found)
        start = self._agree(own, pinned=switch is not None)
        if switch is not None:
            epoch.pin()
            return Decision.PINNED, f"the kill switch {switch.by} is on ({switch.value!r})", None
        if start.pinned_by is not None:
            epoch.pin()
            return Decision.PINNED, f"a kill switch of rank {start.pinned_by} is on", None
        epoch.gate, epoch.recovery = start.gate, start.recovery
        if epoch.gate is not None:
            return self._gated(epoch.gate)
        assert epoch.recovery is not None
        return self._run(epoch.recovery)

    def _run(self, recovery: Recovery) -> tuple[Decision, str, str | None]:
        epoch = self._epoch
        assert epoch.journal is not None
        initial = epoch.setup.initial.digest
        try:
            source = first_source(epoch.journal, recovery, initial=initial)
            if not is_the_same_everywhere(epoch.setup, source):
                source = calibration(recovery, initial=initial)
            result = self._first_round(source)
            is_back = source.kind is SourceKind.JOURNAL and result.state is State.ROLLED_BACK
            if self._goes_on("after a restore", is_back):
                log.warning("the restore was rolled back (%s); calibrating", result.reason)
                result = self._first_round(calibration(recovery, initial=initial, after=result))
            if self._goes_on("without pins", _pin_was_refused(result)):
                log.warning("the host refuses to page-lock what was planned (%s); planning without", result.reason)
                epoch.setup.worker.refuse_pins()
                result = self._first_round(calibration(recovery, initial=initial))
            result = self._until_something_runs(result, recovery)
        except JournalError as error:
            # Before the round's first step: nothing has moved.
            epoch.lose_journal(error)
            return self._gated_without_journal()
        except RankFailed as error:
            if not self.results:
                found = gate_facts(epoch.setup, problem=None, recovery=recovery, rank_problem=str(error))
                epoch.gate = check_gate(found)
                assert epoch.gate is not None
                return self._gated(epoch.gate)
            result = self.results[-1]
        return self._told(result, recovery)

    def _agree(self, gate: Gate | None, *, pinned: bool) -> Start:
        """Return what all ranks do at this start."""
        epoch = self._epoch
        if epoch.rank_problem is not None:
            return Start(gate=gate, pinned_by=None, recovery=epoch.recovery)
        try:
            return agree_on_start(
                epoch.setup,
                pinned=pinned,
                gate=gate,
                recovery=epoch.recovery,
                view=epoch.view,
                journal=epoch.journal,
            )
        except JournalError as error:
            # The others are told, and have none to wait for.
            epoch.lose_journal(error)
            lost = check_gate(gate_facts(epoch.setup, problem=error, recovery=None))
            return Start(gate=lost, pinned_by=None, recovery=None)

    def _goes_on(self, why: str, wanted: bool) -> bool:
        """Return whether another round follows: wanted on one rank, and possible on all. Raises RankFailed."""
        epoch = self._epoch
        found = epoch.ranks.consult(why, [wanted, epoch.log is not None and epoch.pinned is None])
        return any(one[0] for one in found) and all(one[1] for one in found)

    def _until_something_runs(self, result: RoundResult, recovery: Recovery) -> RoundResult:
        """Where not even the initial placement can serve, try what else may fit, a few times; else no start.

        Raises PlacementInfeasible, also from the planner once nothing is left.
        """
        epoch = self._epoch
        tried: list[str] = []
        learned = _Failed()
        while self._goes_on("cannot serve", _cannot_serve(result)):
            if result.target is None or len(tried) >= epoch.setup.policy.replans_max:
                peak = max((record.reserved_peak_bytes for record in result.records), default=0)
                cap_bytes = epoch.setup.worker.device().cap_bytes
                raise PlacementInfeasible(
                    needed_bytes=max(peak, cap_bytes + 1),
                    cap_bytes=cap_bytes,
                    bound_by=f"every placement that was tried ({len(tried) + 1}) ran out of memory; the last one",
                )
            tried.append(result.target)
            learned = learned.with_round(result)
            log.warning(
                "placement %s ran out of memory, and so did the initial one; trying another (%s)",
                result.target[:12],
                result.reason,
            )
            source = replace(
                calibration(recovery, initial=epoch.setup.initial.digest),
                records=learned.records,
                placements=learned.placements,
            )
            result = self._first_round(replace(source, excluded=tuple(sorted({*source.excluded, *tried}))))
        return result

    def _first_round(self, source: Source) -> RoundResult:
        result = self._epoch.run_round(source)
        self.results.append(result)
        return result

    def _told(self, result: RoundResult, recovery: Recovery) -> tuple[Decision, str, str | None]:
        epoch = self._epoch
        error = None if result.error is None else str(result.error)
        if epoch.pinned is not None:
            return (
                Decision.PINNED,
                f"{result.reason}: {epoch.pinned.by} is on ({epoch.pinned.value!r})",
                error,
            )
        if result.state is State.COMMITTED:
            restored = result.source is SourceKind.JOURNAL
            decision = Decision.KEPT if result.kept else Decision.RESTORED if restored else Decision.COMMITTED
            why = f"{recovery.reason}; {result.reason}" if restored else result.reason
            return decision, why, error
        if epoch.log is None:
            return Decision.WITHOUT_JOURNAL, f"rolled back, {epoch.problem}", str(epoch.problem)
        if isinstance(result.error, WarmupFailed) and result.plan is None:
            epoch.gate = check_gate(gate_facts(epoch.setup, problem=None, recovery=recovery, failed=result.error))
            assert epoch.gate is not None
            return (*self._gated(epoch.gate)[:2], error)
        return Decision.ROLLED_BACK, result.reason, error

    def _gated(self, gate: Gate) -> tuple[Decision, str, str | None]:
        epoch = self._epoch
        if gate.reason in (GateReason.JOURNAL_NEWER, GateReason.JOURNAL_UNUSABLE) and epoch.problem is not None:
            return self._gated_without_journal()
        epoch.note(EventType.GATED, {"reason": gate.reason.value, "detail": gate.detail})
        return Decision.GATED, gate.text, None if epoch.problem is None else str(epoch.problem)

    def _gated_without_journal(self) -> tuple[Decision, str, str | None]:
        return Decision.WITHOUT_JOURNAL, str(self._epoch.problem), str(self._epoch.problem)


@dataclass(frozen=True, slots=True)
class _Failed:
    """What ran out of memory under placements that were tried: how much the next one has to leave free."""

    records: tuple[RequestRecord, ...] = ()
    placements: tuple[Placement, ...] = ()

    def with_round(self, result: RoundResult) -> _Failed:
        """Return this, and what a round's own placement failed with."""
        if result.plan is None:
            return self
        placement = result.plan.placement
        own = [one for one in result.records if one.placement_digest == placement.digest and one.out_of_memory]
        return _Failed((*self.records, *own), (*self.placements, placement))


def _cannot_serve(result: RoundResult) -> bool:
    """Whether a round was rolled back and no request of it succeeded, under whatever placement."""
    is_memory = bool(result.records) and all(record.out_of_memory for record in result.records)
    return result.state is State.ROLLED_BACK and is_memory


def _pin_was_refused(result: RoundResult) -> bool:
    return isinstance(result.error, EffectFailed) and isinstance(result.error.__cause__, MemoryError)
