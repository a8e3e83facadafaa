"""Control requests: status, calibrate, validate, roll_back, each done once however often it is asked for."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from residency.control_past import what_became
from residency.errors import (
    EffectFailed,
    JournalError,
    PipelineBusy,
    PlacementInfeasible,
    ProcessPoisoned,
    RankFailed,
    ResidencyError,
    RollbackFailed,
    SettingsError,
    StaleRequest,
)
from residency.interrupts import Terminated
from residency.journal.events import EventType
from residency.statemachine.source import RoundResult, Source, SourceKind
from residency.statemachine.states import State

if TYPE_CHECKING:
    from residency.epoch import Epoch


OUTCOMES_MAX = 1_000  # a caller repeats its last request, not one of a thousand requests ago
EPOCH_CHARACTERS_MAX = 200  # an epoch is a UUID of 36
FATAL_EXIT_CODE_MIN = 70  # of the errors for which a worker must end; those below are answers
ARGS_DEPTH_MAX = 8  # no verb takes any yet; they are journaled, and a journal has to be readable for ever
ARGS_BYTES_MAX = 4 * 1024
_WHOLE_MAX = 2**63 - 1  # what a journal's columns and other languages' JSON can hold

_FIELD = re.compile(r"\$\.(verb|epoch|round|attempt|args)\b|missing required field `(verb)`")


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
    UNKNOWN = "unknown"
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

    def __post_init__(self) -> None:
        if len(self.epoch) > EPOCH_CHARACTERS_MAX:
            raise ValueError(f"epoch has {len(self.epoch)} characters, over {EPOCH_CHARACTERS_MAX}")
        if max(abs(self.round), abs(self.attempt)) > _WHOLE_MAX:
            raise ValueError(f"round or attempt is beyond {_WHOLE_MAX}")
        if len(msgspec.json.encode(self.args)) > ARGS_BYTES_MAX or not _is_flat(self.args, ARGS_DEPTH_MAX):
            raise ValueError(f"args are over {ARGS_BYTES_MAX} bytes, or nested deeper than {ARGS_DEPTH_MAX}")

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What makes two requests the same one."""
        return self.verb.value, self.epoch, self.round, self.attempt

    @property
    def four(self) -> dict[str, Any]:
        """The same as JSON values, by name."""
        return dict(zip(("verb", "epoch", "round", "attempt"), self.key, strict=True))


# Of the errors that end the process. After any other one it is not known what was done.
_FATAL: Mapping[type[ResidencyError], Outcome] = {
    RollbackFailed: Outcome.ROLLBACK_FAILED,
    ProcessPoisoned: Outcome.POISONED,
}


class _Served(NamedTuple):
    """The request that is being served. since_s: on the monotonic clock."""

    asked: ControlRequest
    since_s: float
    thread: int


class Control:
    """Serves control requests, one at a time; a repetition gets the journaled outcome again."""

    def __init__(self, epoch: Epoch, *, run: Callable[[Callable[[], RoundResult]], RoundResult]) -> None:
        self._epoch, self._run = epoch, run
        self._lock = threading.Lock()
        self._outcomes: dict[tuple[str, str, int, int], dict[str, Any]] = {}
        self._served: _Served | None = None
        self._last: dict[str, Any] | None = None

    def handle(self, request: Mapping[str, Any], *, ready: bool, decision: str | None) -> dict[str, Any]:
        """Serve one request and return its outcome as JSON values. Blocks while a round runs, except for status.

        The same request again, while it is being served, waits for its outcome.
        Raises SettingsError for what is no request, RollbackFailed and ProcessPoisoned after journaling them.
        """
        asked = read_request(request)
        if asked.verb is Verb.STATUS:
            told = {"verb": asked.verb.value, "ready": ready, "decision": decision, "control": self._going_on()}
            return {**self._now(), **told}
        if decision is None:
            return self._answer(asked, Outcome.REFUSED, "busy: start() has not returned")
        wait_s = self._epoch.setup.policy.busy_wait_s
        while not self._lock.acquire(timeout=wait_s):
            if not self._is_repeated(asked):
                reason = f"busy: another request has been served for over {wait_s:g} s"
                return self._answer(asked, Outcome.REFUSED, reason)
        try:
            known = self._outcomes.get(asked.key)
            if known is not None:
                return {**known, "repeated": True}
            self._served = _Served(asked, time.monotonic(), threading.get_ident())
            return self._serve(asked)
        finally:
            self._served = None
            self._lock.release()

    def _is_repeated(self, asked: ControlRequest) -> bool:
        """Whether just this request is being served, so that its outcome is worth waiting for: a round has an end."""
        served = self._served
        # A warmup that asks its own round would wait for itself.
        return served is not None and served.asked.key == asked.key and served.thread != threading.get_ident()

    def _going_on(self) -> dict[str, Any]:
        """Return which request is being served and for how long, and what the last one came to; None for none."""
        served = self._served
        running = None
        if served is not None:
            running = {**served.asked.four, "elapsed_s": round(time.monotonic() - served.since_s, 3)}
        return {"running": running, "last": self._last}

    def _serve(self, asked: ControlRequest) -> dict[str, Any]:
        number = self._epoch.round_number
        try:
            self._check_fresh(asked)
            outcome, reason = self._perform(asked.verb)
        # Neither is remembered: the same request may be served once the reason is gone.
        except StaleRequest as error:
            return {**self._answer(asked, Outcome.REFUSED, f"stale: {error}"), "became": self._became(asked)}
        except PipelineBusy as error:
            return self._answer(asked, Outcome.REFUSED, f"busy: {error}")
        except (EffectFailed, JournalError, PlacementInfeasible, RankFailed) as error:
            outcome, reason = Outcome.REFUSED, str(error)
        except ResidencyError as error:
            if is_fatal(error):
                self._keep(asked, self._answer(asked, _FATAL.get(type(error), Outcome.UNKNOWN), str(error)))
            raise
        except Terminated as error:
            is_back = self._epoch.machine.state is State.ROLLED_BACK and asked.verb is not Verb.ROLL_BACK
            ended = Outcome.ROLLED_BACK if is_back else Outcome.REFUSED
            self._keep(asked, self._answer(asked, ended, f"interrupted by {error}, and the process ends"))
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

    def _became(self, asked: ControlRequest) -> dict[str, Any] | None:
        """Return what became of a request that is stale by now, as far as the journal knows."""
        journal = self._epoch.journal
        if journal is None or not asked.epoch:
            return None
        return what_became(journal, stream=self._epoch.setup.stream, request=asked.four)

    def _keep(self, asked: ControlRequest, answer: dict[str, Any]) -> None:
        self._outcomes[asked.key] = self._last = answer
        while len(self._outcomes) > OUTCOMES_MAX:
            del self._outcomes[next(iter(self._outcomes))]
        if self._epoch.log is not None:
            self._epoch.log.note(
                EventType.CONTROL,
                round_number=self._epoch.round_number,
                payload={"request": msgspec.to_builtins(asked), "outcome": answer},
            )

    def _answer(self, asked: ControlRequest, outcome: Outcome, reason: str) -> dict[str, Any]:
        told = {"verb": asked.verb.value, "outcome": outcome.value, "reason": reason}
        # The four come back, so that an answer cannot be taken for one to another request.
        return {**self._now(), **told, "request": asked.four}

    def _now(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch.id,
            "round": self._epoch.round_number,
            "state": self._epoch.machine.state.value,
            "placement": self._epoch.setup.worker.placement.digest,
        }


def _is_flat(value: object, depth_max: int) -> bool:
    """Whether a JSON value is nested no deeper than that."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not inner or (depth_max > 0 and all(_is_flat(one, depth_max - 1) for one in inner))


def is_fatal(error: ResidencyError) -> bool:
    """Whether the process must end with the error's exit code, so that nobody asks it anything again."""
    return error.exit_code >= FATAL_EXIT_CODE_MIN


def read_request(request: object) -> ControlRequest:
    """Return the request that was sent. Raises SettingsError for anything that is none, or is no JSON.

    The error's field `field` names the part that is wrong, None for the whole.
    """
    try:
        # Through JSON, which is what is journaled with the outcome: what cannot be written is refused before a round.
        return msgspec.json.decode(msgspec.json.encode(request), type=ControlRequest)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        found = _FIELD.search(str(error))
        raise SettingsError(
            f"control request {request!r} is none: {error}; "
            "send {verb, epoch, round, attempt, args} with verb status, calibrate, validate or roll_back",
            field=next(filter(None, found.groups())) if found else None,
        ) from error
