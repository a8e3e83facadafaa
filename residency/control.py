"""Control requests: status, calibrate, validate, roll_back, each done once however often it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from residency.errors import (
    EffectFailed,
    JournalError,
    PipelineBusy,
    PlacementInfeasible,
    ProcessPoisoned,
    RankFailed,
    RollbackFailed,
    SettingsError,
    StaleRequest,
)
from residency.journal.events import EventType
from residency.statemachine.source import RoundResult, Source, SourceKind
from residency.statemachine.states import State

if TYPE_CHECKING:
    from residency.epoch import Epoch


OUTCOMES_MAX = 1_000  # a caller repeats its last request, not one of a thousand requests ago


class Verb(Enum):
    """What may be asked for. The value is the request's spelling."""

    STATUS = "status"
    CALIBRATE = "calibrate"
    VALIDATE = "validate"
    ROLL_BACK = "roll_back"


class Outcome(Enum):
    """How a request ended. The value is the answer's spelling."""

    ROLLBACK_FAILED = "rollback-failed"
    POISONED = "poisoned"
    REFUSED = "refused"
    ROLLED_BACK = "rolled-back"
    COMMITTED = "committed"
    KEPT = "kept"
    PINNED = "pinned"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRequest:
    """One control request. round: the last one the caller saw, 0 for none. attempt: tells repetitions apart."""

    verb: Verb
    epoch: str = ""
    round: int = 0
    attempt: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What makes two requests the same one."""
        return self.verb.value, self.epoch, self.round, self.attempt


class Control:
    """Serves control requests, one at a time; a repetition gets the journaled outcome again."""

    def __init__(self, epoch: Epoch, *, run: Callable[[Callable[[], RoundResult]], RoundResult]) -> None:
        self._epoch, self._run = epoch, run
        self._lock = threading.Lock()
        self._outcomes: dict[tuple[str, str, int, int], dict[str, Any]] = {}

    def handle(self, request: Mapping[str, Any], *, ready: bool, decision: str | None) -> dict[str, Any]:
        """Serve one request and return its outcome as JSON values. Blocks while a round runs, except for status.

        Raises SettingsError for what is no request, RollbackFailed and ProcessPoisoned after journaling them.
        """
        asked = _read(request)
        if asked.verb is Verb.STATUS:
            return {**self._now(), "verb": asked.verb.value, "ready": ready, "decision": decision}
        if decision is None:
            return self._answer(asked, Outcome.REFUSED, "busy: start() has not returned")
        wait_s = self._epoch.setup.policy.busy_wait_s
        if not self._lock.acquire(timeout=wait_s):
            return self._answer(asked, Outcome.REFUSED, f"busy: another request has been served for over {wait_s:g} s")
        try:
            known = self._outcomes.get(asked.key)
            return self._serve(asked) if known is None else {**known, "repeated": True}
        finally:
            self._lock.release()

    def _serve(self, asked: ControlRequest) -> dict[str, Any]:
        number = self._epoch.round_number
        try:
            self._check_fresh(asked)
            outcome, reason = self._perform(asked.verb)
        except (StaleRequest, PipelineBusy) as error:
            # Not remembered: the same request may be served once the reason is gone.
            word = "stale" if isinstance(error, StaleRequest) else "busy"
            return self._answer(asked, Outcome.REFUSED, f"{word}: {error}")
        except (EffectFailed, JournalError, PlacementInfeasible, RankFailed) as error:
            outcome, reason = Outcome.REFUSED, str(error)
        except (RollbackFailed, ProcessPoisoned) as error:
            failed = Outcome.ROLLBACK_FAILED if isinstance(error, RollbackFailed) else Outcome.POISONED
            self._keep(asked, self._answer(asked, failed, str(error)))
            raise
        answer = self._answer(asked, outcome, reason)
        if self._epoch.round_number != number or outcome is not Outcome.REFUSED:
            self._keep(asked, answer)
        return answer

    def _perform(self, verb: Verb) -> tuple[Outcome, str]:
        epoch = self._epoch
        if epoch.pinned is not None or epoch.setup.switch() is not None:
            return Outcome.PINNED, "the kill switch is on"
        if epoch.gate is not None:
            return Outcome.SKIPPED, epoch.gate.text
        if epoch.log is None or not epoch.log.usable:
            return Outcome.SKIPPED, "there is no journal to write to"
        source = self._source(verb)
        result = self._run(lambda: epoch.run_round(source))
        if result.pinned:
            return Outcome.PINNED, result.reason
        if result.kept:
            return Outcome.KEPT, result.reason
        if result.state is not State.COMMITTED:
            # A request to go back that was itself taken back has not been served.
            failed = Outcome.REFUSED if verb is Verb.ROLL_BACK else Outcome.ROLLED_BACK
            return failed, result.reason
        return (Outcome.ROLLED_BACK if verb is Verb.ROLL_BACK else Outcome.COMMITTED), result.reason

    def _source(self, verb: Verb) -> Source:
        epoch = self._epoch
        current = epoch.setup.worker.placement
        if verb is Verb.CALIBRATE:
            excluded = epoch.recovery.excluded if epoch.recovery is not None else ()
            return Source(kind=SourceKind.CALIBRATION, excluded=excluded)
        remembered = epoch.remembered()
        if verb is Verb.VALIDATE:
            same = [one for one in remembered if one.placement == current.digest]
            return (
                epoch.source_of(same[-1], SourceKind.CURRENT)
                if same
                else Source(kind=SourceKind.CURRENT, target=current)
            )
        earlier = [one for one in remembered if one.placement != current.digest]
        if earlier:
            return epoch.source_of(earlier[-1], SourceKind.PREVIOUS)
        return Source(kind=SourceKind.INITIAL, target=epoch.setup.initial)

    def _check_fresh(self, asked: ControlRequest) -> None:
        epoch, current = self._epoch.id, self._epoch.round_number
        if asked.epoch != epoch or (asked.round and asked.round < current) or asked.round > current:
            raise StaleRequest(epoch=asked.epoch, round_number=asked.round, current_epoch=epoch, current_round=current)

    def _keep(self, asked: ControlRequest, answer: dict[str, Any]) -> None:
        self._outcomes[asked.key] = answer
        while len(self._outcomes) > OUTCOMES_MAX:
            del self._outcomes[next(iter(self._outcomes))]
        if self._epoch.log is not None:
            self._epoch.log.note(
                EventType.CONTROL,
                round_number=self._epoch.round_number,
                payload={"request": msgspec.to_builtins(asked), "outcome": answer},
            )

    def _answer(self, asked: ControlRequest, outcome: Outcome, reason: str) -> dict[str, Any]:
        return {**self._now(), "verb": asked.verb.value, "outcome": outcome.value, "reason": reason}

    def _now(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch.id,
            "round": self._epoch.round_number,
            "state": self._epoch.machine.state.value,
            "placement": self._epoch.setup.worker.placement.digest,
        }


def _read(request: object) -> ControlRequest:
    """Return the request that was sent. Raises SettingsError for anything that is none, or is no JSON."""
    try:
        # Through JSON, which is what is journaled with the outcome: what cannot be written is refused before a round.
        return msgspec.json.decode(msgspec.json.encode(request), type=ControlRequest)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"control request {request!r} is none: {error}; "
            "send {verb, epoch, round, attempt, args} with verb status, calibrate, validate or roll_back"
        ) from error
