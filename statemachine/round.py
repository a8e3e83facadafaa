"""One round: measure, plan, apply, validate, then commit or roll back; journal before and after everything."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from residency.effects.transaction import Transaction
from residency.errors import (
    JournalError,
    PlacementInfeasible,
    ProcessPoisoned,
    RollbackFailed,
    RoundUndecided,
    TransitionRefused,
    WarmupFailed,
    describe,
)
from residency.gpu.records import RequestKind
from residency.journal.events import Draft, EventType
from residency.statemachine.blame import verdict_of
from residency.statemachine.measuring import Measuring
from residency.statemachine.planning import plan_payload, plan_round
from residency.statemachine.source import RoundResult
from residency.statemachine.states import SETTLED, Trigger
from residency.statemachine.validating import Baseline, compare
from residency.statemachine.validation import Blame, Reason, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.effects.spec import EffectSpec
    from residency.gpu.placement import Placement
    from residency.gpu.records import RequestRecord
    from residency.gpu.workload import Workload
    from residency.statemachine.context import RoundContext
    from residency.statemachine.machine import RoundMachine
    from residency.statemachine.planner.plan import Plan
    from residency.statemachine.source import Source
    from residency.statemachine.states import State


class Round:
    """One pass through the states for one proposed placement. The caller holds the pipeline exclusively.

    `run` always leaves the machine settled, or pinned in its initial state, with the placement that the journal
    names in force. Only RollbackFailed, ProcessPoisoned and RoundUndecided leave it where it is: then the process must
    exit.
    """

    def __init__(self, context: RoundContext, *, number: int, machine: RoundMachine, source: Source) -> None:
        self.context, self.number, self.machine, self.source = context, number, machine, source
        self.before = context.worker.placement
        self.ranks = context.ranks
        self.plan: Plan | None = None
        self.target: Placement | None = source.target
        self.measuring = Measuring(
            worker=context.worker,
            target=context.workload,
            policy=context.policy,
            observer=context.observer,
            clock=context.clock,
            on_record=self._journal_record,
            before_run=self._check_switch,
            ranks=context.ranks,
            others=context.workloads,
        )
        self._transaction: Transaction | None = None
        self._last_intent: str | None = None

    def run(self) -> RoundResult:
        """Go through the round. Raises RollbackFailed, PlacementInfeasible, and whatever interrupts the process.

        Raises ProcessPoisoned, with nothing moved back, once the device is lost to this process, and RoundUndecided
        once what the ranks decided cannot be learned. Everything else that goes wrong is rolled back and told in the
        result.
        """
        with self._last_words():
            try:
                return self._pass()
            except (RollbackFailed, ProcessPoisoned, RoundUndecided):
                raise
            except BaseException as error:  # noqa: BLE001 - an interrupt must be rolled back, too
                self._stop_if_poisoned(error)
                return self._end_early(error)

    def take_back(self) -> RoundResult:
        """Measuring -> rolled-back -> measuring, by the effects that lead to the source's target.

        What a kill switch does to a serving worker. Raises RollbackFailed, ProcessPoisoned, EffectFailed, JournalError.
        """
        with self._last_words():
            return self._take_back()

    def _take_back(self) -> RoundResult:
        assert self.target is not None
        verdict = Verdict(
            ok=False, blames=Blame.INFRASTRUCTURE, reason=Reason.INTERRUPTED, detail="the kill switch is on", figures={}
        )
        with self.context.interrupts.deferred():
            self._transaction_to(self.target).apply()
            payload = {"placement": self.target.digest, "verdict": msgspec.to_builtins(verdict)}
            self._transition(Trigger.ROLL_BACK, payload, self.target)
            self.context.worker.commit()
            self._transition(Trigger.MEASURE, {"placement": self.target.digest})
        return self._result("the kill switch took it back to the initial placement", pinned=True)

    def _pass(self) -> RoundResult:
        baseline = self._measure_and_plan()
        if self.source.is_measured and self.plan is not None and self.ranks.all_of("keep", self.plan.keep):
            return self._keep()
        self._apply()
        verdict = self._validate(baseline)
        return self._commit(verdict) if verdict.ok else self._roll_back(verdict)

    def _measure_and_plan(self) -> Baseline:
        """Measuring -> planned."""
        self._check_switch()
        baseline = self._measure() if self.source.is_measured else Baseline.journaled(self.source)
        if self.target is None:
            self.context.observer.working("planning")
            inputs, self.plan = plan_round(self.context, self.source, self.measuring.records, self.before, baseline)
            self.target = self.plan.placement
        else:
            inputs = None
            self.ranks.agree_target(self.target.digest)
        payload = plan_payload(self.source, self.plan, inputs, target=self.target, previous=self.before)
        payload |= self.ranks.joint_payload()
        self._transition(Trigger.PLAN, payload, self.target, self.before)
        return baseline

    def _measure(self) -> Baseline:
        shape = self.measuring.calibrate()
        num_max = self.context.policy.samples_max
        samples = () if shape is None else self.measuring.samples(RequestKind.BASELINE, shape, num_max=num_max)
        return Baseline.measured(samples, self.measuring.records, shape)

    def _keep(self) -> RoundResult:
        """Planned -> committed: there is nothing to change."""
        self._settle(Trigger.KEEP, {"placement": self.before.digest, **self._validated_by(None)})
        self.ranks.settled()
        return self._result("the plan is the placement in force", kept=True)

    def _apply(self) -> None:
        """Planned -> applied: every effect between its intent and its outcome."""
        assert self.target is not None
        self._transaction = self._transaction_to(self.target)
        num_effects = self._transaction.num_effects
        self.context.observer.working(f"moving {num_effects} components" if num_effects else "nothing to move")
        with self.context.interrupts.deferred():
            self._transaction.apply()
        self._transition(Trigger.APPLY, {"placement": self.target.digest, "num_effects": num_effects})
        self.ranks.applied()

    def _transaction_to(self, target: Placement) -> Transaction:
        worker = self.context.worker
        return Transaction(
            worker.effects(target),
            on_intent=self._intent,
            on_outcome=self._outcome,
            find_poison=worker.find_poison,
        )

    def _validate(self, baseline: Baseline) -> Verdict:
        """Applied -> validating: run under the new placement, and compare."""
        self._transition(Trigger.VALIDATE, {})
        return self.ranks.verdict(compare(self.context, self.source, self.measuring, baseline))

    def _commit(self, verdict: Verdict) -> RoundResult:
        """Validating -> committed; afterwards host copies that nobody needs are released."""
        assert self.target is not None
        payload = {"placement": self.target.digest, **self._validated_by(verdict)}
        self._settle(Trigger.COMMIT, payload)
        with self.context.interrupts.deferred():
            self.context.worker.commit()
        self.ranks.settled()
        return self._result(verdict.detail, verdict=verdict)

    def _settle(self, trigger: Trigger, payload: dict[str, Any]) -> None:
        """Commit with the other ranks, or raise RankFailed with nothing changed; what is decided is written."""
        self.context.observer.leaving(self.machine.state.value)
        # Nothing may come between the decision and what says so here: others commit on it.
        with self.context.interrupts.deferred():
            if self.ranks.size > 1:
                self._check_switch()
            is_decided = self.ranks.decide(payload)
            payload |= self.ranks.joint_payload()
            try:
                self._write_transition(trigger, payload, self.machine.state, (), is_decided=is_decided)
            except Exception as error:
                if is_decided:
                    raise self.ranks.undecided(error) from error
                raise

    def _roll_back(self, verdict: Verdict, *, error: Exception | None = None, rewarm: bool = True) -> RoundResult:
        """Any unsettled state -> rolled-back: undo, say so, and warm the restored placement again."""
        was_moved = self._transaction is not None
        switch = self.context.switch()
        self.ranks.abort(verdict.detail, pinned=switch is not None, error=error)
        with self.context.interrupts.deferred():
            if self._transaction is not None:
                self._transaction.revert()
            payload = {"placement": self.before.digest, "verdict": msgspec.to_builtins(verdict)}
            try:
                self._transition(Trigger.ROLL_BACK, payload)
            except JournalError:
                # The weights are back; the next start closes the round that the journal could not.
                self.machine.fire(Trigger.ROLL_BACK)
        if self.context.switch() is not None or self.ranks.is_pinned:
            return self._pin()
        shape = self.ranks.rolled_back(self._rewarm_shape(rewarm, was_moved=was_moved))
        if shape is not None:
            error = self._rewarm(shape) or error
        return self._result(f"{verdict.reason.value}: {verdict.detail}", verdict=verdict, error=error)

    def _rewarm_shape(self, rewarm: bool, *, was_moved: bool) -> Workload | None:
        shapes = [one.workload for one in self.measuring.records if one.succeeded]
        # With other ranks it is they, too, who have to be warmed again.
        is_wanted = rewarm and (was_moved or self.ranks.size > 1) and self.context.log.usable
        return (shapes[-1] if shapes else self.measuring.small) if is_wanted else None

    def _rewarm(self, shape: Workload) -> Exception | None:
        try:
            self.measuring.run(RequestKind.REWARM, shape)
        except Exception as error:  # noqa: BLE001 - the placement is restored; a warmup that fails is only told
            self._stop_if_poisoned(error)
            return error
        return None

    def _pin(self) -> RoundResult:
        """Rolled-back -> measuring: where a kill switch holds the machine."""
        try:
            self._transition(Trigger.MEASURE, {"placement": self.before.digest})
        except JournalError:
            self.machine.fire(Trigger.MEASURE, pinned=True)
        return self._result("the kill switch was thrown in mid-round", pinned=True)

    def _end_early(self, error: BaseException) -> RoundResult:
        """Roll back after an exception; raise it again if it is not the round's own business."""
        if self.machine.state in SETTLED:
            if isinstance(error, Exception):
                # What is settled stays so: a host copy that could not be released costs memory, not correctness.
                return self._result(f"{self.machine.state.value}; afterwards: {error}", error=error)
            raise error
        is_broken = isinstance(error, (WarmupFailed, PlacementInfeasible)) or not isinstance(error, Exception)
        result = self._roll_back(
            verdict_of(error),
            error=error if isinstance(error, Exception) else None,
            rewarm=not is_broken,
        )
        if not isinstance(error, Exception) or (isinstance(error, PlacementInfeasible) and not result.pinned):
            raise error
        return result

    @contextmanager
    def _last_words(self) -> Iterator[None]:
        """Journal what leaves a round where it is, and give the error this round's number."""
        try:
            yield
        except RollbackFailed as failure:
            self.ranks.abort(str(failure), pinned=False)
            raise self._failed(failure) from failure
        except RoundUndecided as failure:
            payload = {"what": "undecided", "why": str(failure)}
            self.context.log.note(EventType.RANKS, round_number=self.number, payload=payload)
            raise
        except ProcessPoisoned as failure:
            problem = str(failure.fields["problem"])
            self.ranks.abort(problem, pinned=False)
            payload = {"problem": problem, "state": self.machine.state.value}
            self.context.log.note(EventType.POISONED, round_number=self.number, payload=payload)
            raise ProcessPoisoned(round_number=self.number, problem=problem) from failure

    def _stop_if_poisoned(self, error: BaseException) -> None:
        """Raise ProcessPoisoned if an exception says that the device is lost to this process."""
        problem = self.context.worker.find_poison(error)
        if problem is not None:
            raise ProcessPoisoned(round_number=0, problem=problem) from error

    def _failed(self, failure: RollbackFailed) -> RollbackFailed:
        """Journal that a rollback failed, and return the error with this round's number."""
        problems = tuple(str(problem) for problem in failure.fields["problems"])
        payload = {"problems": list(problems)}
        self.context.log.note(EventType.ROLLBACK_FAILED, round_number=self.number, payload=payload)
        return RollbackFailed(round_number=self.number, problems=problems)

    def _check_switch(self) -> None:
        """Raise TransitionRefused if the kill switch is on: before any cost is paid, and between two requests."""
        if self.context.switch() is not None:
            raise TransitionRefused(
                round_number=self.number,
                state=self.machine.state.value,
                trigger="any but roll_back and measure",
                reason="the kill switch is on",
            )

    # What is written, and when.

    def _transition(self, trigger: Trigger, payload: dict[str, Any], *blobs: Placement) -> None:
        """Guard, then write, then change the state. Raises TransitionRefused or JournalError with nothing changed."""
        source = self.machine.state
        self.context.observer.leaving(source.value)
        # A signal between the durable event and the state would leave two truths.
        with self.context.interrupts.deferred():
            self._write_transition(trigger, payload, source, blobs)

    def _write_transition(
        self,
        trigger: Trigger,
        payload: dict[str, Any],
        source: State,
        blobs: tuple[Placement, ...],
        *,
        is_decided: bool = False,
    ) -> None:
        # What all ranks have decided, a kill switch comes too late for; it acts before the next request.
        pinned = self.context.switch() is not None and not is_decided
        target = self.machine.check(trigger, pinned=pinned)
        self.context.log.append(
            Draft(
                type=EventType.TRANSITION,
                round=self.number,
                payload=payload,
                from_state=source.value,
                to_state=target.value,
                trigger=trigger.value,
                blobs=tuple(placement.to_bytes() for placement in blobs),
            ),
            witness=target in SETTLED,
        )
        self.machine.fire(trigger, pinned=pinned)

    def _intent(self, spec: EffectSpec, undo: bool) -> None:
        if not undo:
            self.context.interrupts.check()
        payload = {**msgspec.to_builtins(spec), "undo": undo}
        (event,) = self.context.log.append(
            Draft(type=EventType.EFFECT_INTENT, round=self.number, payload=payload), witness=True
        )
        self._last_intent = event.event_id
        if not undo:
            self.context.observer.between_effects(spec.index)

    def _outcome(self, spec: EffectSpec, result: str, error: BaseException | None, duration_ns: int) -> None:
        payload = {
            "index": spec.index,
            "component": spec.component,
            "result": result,
            "error": None if error is None else describe(error),
            "duration_ns": duration_ns,
        }
        draft = Draft(type=EventType.EFFECT_OUTCOME, round=self.number, payload=payload, causation=self._last_intent)
        self.context.log.hold(draft)

    def _journal_record(self, record: RequestRecord) -> None:
        payload = {"record": msgspec.to_builtins(record)}
        with self.context.interrupts.deferred():
            self.context.log.append(Draft(type=EventType.MEASURED, round=self.number, payload=payload))

    def _validated_by(self, verdict: Verdict | None) -> dict[str, Any]:
        """Return what a later start needs to restore and to validate this placement."""
        kinds = {RequestKind.VALIDATION} if verdict is not None else {RequestKind.BASELINE, RequestKind.PROBE}
        records = [one for one in self.measuring.records if one.kind in kinds and one.succeeded]
        largest = max(records, key=lambda one: one.workload.units, default=None)
        return {
            "verdict": None if verdict is None else msgspec.to_builtins(verdict),
            "output_digest": None if largest is None else largest.output_digest,
            "workload": None if largest is None else msgspec.to_builtins(largest.workload),
            "fingerprint": self.context.fingerprint_digest,
        }

    def _result(self, reason: str, **fields: Any) -> RoundResult:
        return RoundResult(
            number=self.number,
            source=self.source.kind,
            state=self.machine.state,
            reason=reason,
            plan=self.plan,
            target=None if self.target is None else self.target.digest,
            records=tuple(self.measuring.records),
            **fields,
        )
