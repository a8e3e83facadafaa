"""One life of a worker: close what came before, decide, run rounds, and say what is served."""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from residency.epoch_facts import started_payload
from residency.errors import (
    EffectFailed,
    JournalError,
    ProcessPoisoned,
    RankFailed,
    describe,
)
from residency.first_rounds import FirstRounds
from residency.gpu.records import RequestKind
from residency.journal.events import Draft, EventType
from residency.journal.fold import fold_stream
from residency.journal.host import boot_id
from residency.journal.location import shown_location
from residency.journal.store import Journal
from residency.report import Report
from residency.settings import KillSwitch, state_directory
from residency.sources import committed_source, remembered
from residency.statemachine.context import RoundContext
from residency.statemachine.epoch_log import EpochLog
from residency.statemachine.machine import RoundMachine
from residency.statemachine.recovery import closing, decide
from residency.statemachine.round import Round
from residency.statemachine.source import RoundResult, Source, SourceKind
from residency.statemachine.states import SETTLED, Trigger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residency.journal.views import RoundView, StreamView
    from residency.statemachine.gate import Gate
    from residency.statemachine.recovery import Decision as Recovery
    from residency.statemachine.worker import Interruptible, Observer
    from residency.worker_setup import Setup

log = logging.getLogger(__name__)


class Epoch:
    """One life of a worker. `start` once; then `run_round` as often as somebody asks; `end` once.

    The caller holds the pipeline exclusively during `start`, `run_round` and `take_back`.
    """

    def __init__(self, setup: Setup, *, interrupts: Interruptible, observer: Observer) -> None:
        self.setup, self.interrupts, self.observer = setup, interrupts, observer
        self.ranks = setup.ranks
        self.id = str(uuid.uuid4())
        self.journal: Journal | None = None
        self.log: EpochLog | None = None
        self.machine = RoundMachine(0)
        self.recovery: Recovery | None = None
        self.gate: Gate | None = None
        self.pinned: KillSwitch | None = None
        self._first_rounds = FirstRounds(self)
        self._stream_lock = ExitStack()
        self.problem: JournalError | None = None
        self.rank_problem: str | None = None
        self.view: StreamView | None = None
        self._is_begun = False

    @property
    def round_number(self) -> int:
        """The round that the machine is in, or ended in; 0 before the first."""
        return self.machine.round_number

    def start(self) -> Report:
        """Recover, decide, run what that asks for, and report; the worker may serve afterwards.

        Raises RollbackFailed, ProcessPoisoned, PlacementInfeasible, and what interrupts the process, after rolling
        back.
        """
        try:
            return self._start()
        except BaseException as error:
            # The others must not wait for what this one can no longer do.
            self.ranks.abort(describe(error), pinned=False, error=error)
            raise

    def _start(self) -> Report:
        begun = time.perf_counter()
        self._join()
        self._open()
        self._recover()
        self._begin()
        self.observer.working("placing the weights where they start from")
        self.setup.worker.place(self.setup.initial)
        decision, reason, error = self._first_rounds.decide()
        if self.pinned is not None:
            # Thrown after the pipeline was attached, it is hooked for rounds that will not come.
            self.setup.worker.pipeline.minimize()
        ready_ms = (time.perf_counter() - begun) * 1e3
        journal_ms = 0.0 if self.journal is None else self.journal.spent_ns / 1e6
        records = [record for result in self._first_rounds.results for record in result.records]
        report = Report(
            decision=decision,
            reason=reason,
            epoch=self.id,
            round=self.machine.round_number,
            placement=self.setup.worker.placement,
            journal=shown_location(self.setup.journal),
            num_probes=sum(record.kind is RequestKind.PROBE for record in records),
            num_requests=len(records),
            ready_ms=ready_ms,
            journal_ms=journal_ms,
            error=error,
        )
        figures = {"ready_ms": round(ready_ms, 3), "journal_ms": round(journal_ms, 3)}
        self.note(
            EventType.SERVING,
            {
                "placement": report.placement.digest,
                "decision": decision.value,
                "reason": reason,
                **figures,
                **self.setup.worker.memory_figures(),
            },
        )
        return report

    def end(self, *, reason: str, signal: str | None = None, figures: Mapping[str, int] | None = None) -> None:
        """Say that this life ended, and let go of journal and stream. A second call is a no-op.

        figures: of requests outside the envelope, by what was done about them.
        """
        try:
            outside = {"outside": dict(figures)} if figures and any(figures.values()) else {}
            self._say_stopped({"reason": reason, "signal": signal, **outside})
        finally:
            self.ranks.close()
            self._stream_lock.close()
            if self.journal is not None:
                self.journal.close()
            self.log = None

    def run_round(self, source: Source) -> RoundResult:
        """Run one round. Raises what `Round.run` raises; PlacementInfeasible too."""
        assert self.log is not None and self.journal is not None, "no round without a journal"
        self.journal.keep()
        about = f"{source.kind.value} from round {source.from_round}"
        with self.ranks.round(self._next_number(), about=about, log=self.log) as number:
            if self.machine.state in SETTLED:
                self._leave_settled(number)
            self.machine = RoundMachine(number, self.machine.state)
            result = Round(self._context(self.log), number=number, machine=self.machine, source=source).run()
        if self.log.failure is not None:
            self.lose_journal(self.log.failure)
        if result.pinned:
            # A round that somebody asked for went back to what was committed before it; a kill switch goes further.
            self.take_back()
        return result

    def take_back(self) -> RoundResult | None:
        """Go back to the initial placement because the kill switch was thrown, with or without a journal; stay there.

        None if there was nothing to journal. Raises RollbackFailed, EffectFailed, PlacementInfeasible.
        """
        result = None
        if self.setup.worker.placement != self.setup.initial:
            result = self._return_to_initial()
        self.pin()
        return result

    def _return_to_initial(self) -> RoundResult | None:
        if self.log is not None:
            try:
                number = self._next_number()
                if self.machine.state in SETTLED:
                    self._leave_settled(number)
                self.machine = RoundMachine(number, self.machine.state)
                source = Source(kind=SourceKind.INITIAL, target=self.setup.initial)
                return Round(self._context(self.log), number=number, machine=self.machine, source=source).take_back()
            except (EffectFailed, JournalError):
                if self.log.failure is None:
                    raise
                self.lose_journal(self.log.failure)
        # A switch that hung on a journal would fail just when things go wrong.
        self.setup.worker.place(self.setup.initial)
        self.machine = RoundMachine(self.machine.round_number)
        return None

    def poisoned(self, problem: str) -> ProcessPoisoned:
        """Journal that the device was lost to this process outside of rounds, and return the error that says so."""
        self.note(EventType.POISONED, {"problem": problem, "state": self.machine.state.value})
        return ProcessPoisoned(round_number=0, problem=problem)

    def remembered(self) -> tuple[RoundView, ...]:
        """Return the committed rounds under this fingerprint that are not excluded, oldest first. Reads the journal."""
        excluded = self.recovery.excluded if self.recovery is not None else ()
        return () if self.journal is None else remembered(self.journal, self.setup, excluded=excluded)

    def source_of(self, one: RoundView, kind: SourceKind) -> Source:
        """Return the plan that goes back to a committed round's placement. Raises JournalError."""
        assert self.journal is not None
        return committed_source(self.journal, one, kind)

    # Before the first round.

    def _join(self) -> None:
        """Wait for the other ranks, and take the epoch that they share; what goes wrong is remembered, never raised."""
        try:
            self.id = self.ranks.join(self.id)
        except RankFailed as error:
            log.warning("%s", error)
            self.rank_problem = str(error)

    def _open(self) -> None:
        """Open the journal and take the stream; what goes wrong is remembered, never raised."""
        try:
            wait_s = self.setup.policy.journal_wait_s
            self.journal = Journal.open(self.setup.journal, wait_s=wait_s, state_folder=state_directory())
            self._stream_lock.callback(self.journal.hold(self.setup.stream).release)
            self.log = EpochLog(self.journal, stream=self.setup.stream, epoch=self.id, rank=self.ranks.rank)
        except JournalError as error:
            log.warning("%s", error)
            self.problem = error

    def _recover(self) -> None:
        """Close what earlier epochs left open, and decide what to do about it."""
        if self.log is None or self.journal is None:
            return
        stream = self.setup.stream
        try:
            view = fold_stream(self.journal.events(stream=stream), stream)
            for one in closing(
                view, boot_id=boot_id(), now_ns=time.time_ns(), by_epoch=self.id, policy=self.setup.policy
            ):
                self.journal.append(one.drafts, stream=stream, epoch=one.epoch, rank=one.rank, witness=True)
            self.view = view = fold_stream(self.journal.events(stream=stream), stream)
        except JournalError as error:
            self.lose_journal(error)
            return
        self.recovery = decide(
            view,
            fingerprint=self.setup.fingerprint,
            fingerprint_digest=self.setup.fingerprint_digest,
            initial=self.setup.initial.digest,
            policy=self.setup.policy,
        )

    def _begin(self) -> None:
        payload = started_payload(self.setup, self.recovery)
        blobs = (self.setup.initial.to_bytes(),)
        if self.log is not None:
            try:
                self.log.append(Draft(type=EventType.EPOCH_STARTED, round=0, payload=payload, blobs=blobs))
                self._is_begun = True
            except JournalError as error:
                self.lose_journal(error)

    # Between rounds.

    def _next_number(self) -> int:
        if self.machine.round_number:
            return self.machine.round_number + 1
        assert self.journal is not None
        return fold_stream(self.journal.events(stream=self.setup.stream), self.setup.stream).highest_round + 1

    def _leave_settled(self, number: int) -> None:
        """Committed or rolled-back -> measuring, which begins the next round."""
        assert self.log is not None
        pinned = self.setup.switch() is not None
        target = self.machine.check(Trigger.MEASURE, pinned=pinned)
        self.log.append(
            Draft(
                type=EventType.TRANSITION,
                round=number,
                payload={"placement": self.setup.worker.placement.digest},
                from_state=self.machine.state.value,
                to_state=target.value,
                trigger=Trigger.MEASURE.value,
            )
        )
        self.machine.fire(Trigger.MEASURE, pinned=pinned)

    def _context(self, epoch_log: EpochLog) -> RoundContext:
        assert self.setup.workload is not None
        return RoundContext(
            worker=self.setup.worker,
            log=epoch_log,
            policy=self.setup.policy,
            workload=self.setup.workload,
            workloads=self.setup.workloads,
            initial=self.setup.initial,
            configured=self.setup.configured,
            fingerprint_digest=self.setup.fingerprint_digest,
            is_identified=self.setup.is_identified,
            switch=self.setup.switch,
            interrupts=self.interrupts,
            observer=self.observer,
            clock=time.monotonic_ns,
            ranks=self.ranks,
        )

    def pin(self) -> None:
        """Journal that a kill switch holds the machine from now on."""
        # Taken away again meanwhile, it has still ended this life's rounds.
        self.pinned = self.setup.switch() or KillSwitch(by="unknown", value="")
        payload = {"reason": "kill-switch", "by": self.pinned.by, "value": self.pinned.value}
        self.note(EventType.PINNED, payload)

    def lose_journal(self, error: JournalError) -> None:
        """Go on without a journal; the other ranks are told that this one takes part in no more rounds."""
        self.ranks.part(str(error))
        log.warning("%s", error)
        self.problem = error
        self.log = None

    def note(self, kind: EventType, payload: dict[str, Any]) -> None:
        """Journal an event that decides nothing."""
        if self.log is not None:
            self.log.note(kind, round_number=self.machine.round_number, payload=payload)
            if self.log.failure is not None:
                self.lose_journal(self.log.failure)

    def _say_stopped(self, payload: dict[str, Any]) -> None:
        """Say how this life ended, even if the journal failed in mid-round: else the next start blames the plan."""
        if self.log is not None:
            self.note(EventType.STOPPED, payload)
        elif self.journal is not None and self._is_begun:
            draft = Draft(type=EventType.STOPPED, round=self.machine.round_number, payload=payload)
            with suppress(JournalError):
                self.journal.append([draft], stream=self.setup.stream, epoch=self.id, rank=self.ranks.rank)
