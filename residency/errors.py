"""Every error residency raises: one root, typed fields, a message of fact, values and remedy.

ResidencyError                      exit code of a worker that ends with it
|-- SettingsError                   2   a setting, argument or file the user wrote is unusable
|   |-- SizeError                   2   a size without a unit, or not a size
|   |-- WorkloadError               2   a workload that does not say its size
|   |-- UnknownComponent            2   a name that the pipeline does not have
|   |-- NotAModule                  2   a component that is no torch.nn.Module
|   `-- ModeUnavailable             2   a mode that the component cannot take
|-- JournalError                    3   the journal cannot be opened or written
|   |-- StreamInUse                 3   another live epoch holds the stream
|   |-- JournalNewer                4   written by a newer program
|   `-- JournalCorrupt              5   unreadable, or not a journal of ours
|-- TransitionRefused               1   the state machine refuses the trigger
|-- PipelineBusy                    1   requests in flight outlasted the wait
|-- CaptureRefused                  1   a component that moves is run while a CUDA graph is captured
|-- StaleRequest                    1   a control request about another epoch or an older round
|-- EffectFailed                    1   a GPU effect did not apply; everything was undone
|-- RollbackFailed                  70  the placement is unknown; the process must exit
|-- ProcessPoisoned                 71  this process can never use the device again; it must exit
|-- PlacementInfeasible             72  no placement fits, or the cap is too small
|-- RoundUndecided                  73  what the ranks decided cannot be known here; the process must exit
|-- RankFailed                      1   another rank failed, was silent, or disagreed
|-- OutsideEnvelope                 1   a request is larger than the placement in force holds for, and refused
|-- MeasurementRefused              1   what was measured is absurd or contradicts itself; nothing is planned from it
`-- WarmupFailed                    1   the worker's warmup raised, or returned nothing
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self


class ResidencyError(Exception):
    """Root of every error raised by residency; `exit_code` is what a process that ends with it returns."""

    exit_code: ClassVar[int] = 1
    fields: dict[str, Any]

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields

    def __reduce__(self) -> tuple[object, ...]:
        # Workers send errors across processes; pickle would otherwise call __init__ with the message alone.
        return _rebuild, (type(self), str(self), self.fields)

    @classmethod
    def _restore(cls, message: str, fields: dict[str, Any]) -> Self:
        error = cls.__new__(cls)
        ResidencyError.__init__(error, message, **fields)
        return error


def _rebuild(kind: type[ResidencyError], message: str, fields: dict[str, Any]) -> ResidencyError:
    return kind._restore(message, fields)


class SettingsError(ResidencyError):
    """Raised when something the user wrote (an argument, a variable, a file) cannot be used."""

    exit_code = 2


class SizeError(SettingsError):
    """Raised when a size has no unit, is negative, or is not a size."""

    def __init__(self, *, name: str, value: object) -> None:
        super().__init__(
            f"{name} is {value!r}; write a size with its unit, such as '24GiB', '512MiB' or '8000000B'",
            name=name,
            value=repr(value),
        )


class WorkloadError(SettingsError):
    """Raised when a workload does not say its size: every field is a whole number of at least 1."""

    def __init__(self, *, field: str, value: object) -> None:
        super().__init__(
            f"workload {field} is {value!r}; "
            "give width, height, frames, steps and batch as whole numbers of at least 1",
            field=field,
            value=repr(value),
        )


class UnknownComponent(SettingsError):
    """Raised when a component is named that the pipeline does not have."""

    def __init__(self, *, component: str, known: tuple[str, ...]) -> None:
        super().__init__(
            f"the pipeline has no component {component!r}; it has {', '.join(known) or 'none'}",
            component=component,
            known=known,
        )


class NotAModule(SettingsError):
    """Raised when something offered as a component is no torch.nn.Module."""

    def __init__(self, *, component: str, found: str) -> None:
        super().__init__(
            f"component {component!r} is a {found}, not a torch.nn.Module; leave it out of the components",
            component=component,
            found=found,
        )


class ModeUnavailable(SettingsError):
    """Raised when a component is asked for a mode it cannot take, before anything moves."""

    def __init__(self, *, component: str, mode: str, reason: str, possible: tuple[str, ...]) -> None:
        super().__init__(
            f"component {component!r} cannot be {mode}: {reason}; it can be {', '.join(possible) or 'left as it is'}",
            component=component,
            mode=mode,
            reason=reason,
            possible=possible,
        )


class JournalError(ResidencyError):
    """Raised when the journal cannot be opened, read or written."""

    exit_code = 3

    def __init__(self, *, journal: str, problem: str, remedy: str) -> None:
        super().__init__(f"journal {journal}: {problem}; {remedy}", journal=journal, problem=problem, remedy=remedy)


class StreamInUse(JournalError):
    """Raised when another live epoch holds the stream of this worker identity."""

    def __init__(self, *, journal: str, stream: str, holder: str) -> None:
        super().__init__(
            journal=journal,
            problem=f"stream {stream!r} is in use by {holder}",
            remedy="give each worker its own name (attach(name=...) or RESIDENCY_NAME)",
        )
        self.fields |= {"stream": stream, "holder": holder}


class JournalNewer(JournalError):
    """Raised when the journal's format is newer than this program."""

    exit_code = 4

    def __init__(self, *, journal: str, found: int, known: int) -> None:
        super().__init__(
            journal=journal,
            problem=f"format {found} is newer than this program's {known}",
            remedy="upgrade residency, or name another journal",
        )


class JournalCorrupt(JournalError):
    """Raised when the journal is not readable as one of ours."""

    exit_code = 5


class TransitionRefused(ResidencyError):
    """Raised when the state machine refuses a trigger."""

    def __init__(self, *, round_number: int, state: str, trigger: str, reason: str) -> None:
        super().__init__(
            f"round {round_number}: trigger {trigger!r} is refused in state {state!r}: {reason}",
            round_number=round_number,
            state=state,
            trigger=trigger,
            reason=reason,
        )


class PipelineBusy(ResidencyError):
    """Raised when the pipeline stayed in use for longer than the caller was willing to wait."""

    def __init__(self, *, holder: str, waited_s: float) -> None:
        super().__init__(
            f"the pipeline is busy with {holder} after waiting {waited_s:.3g} s; try again later",
            holder=holder,
            waited_s=waited_s,
        )


class CaptureRefused(ResidencyError):
    """Raised when a component whose weights come and go is run while a CUDA graph is being captured."""

    def __init__(self, *, component: str) -> None:
        super().__init__(
            f"component {component!r} is run under CUDA graph capture, but its weights come and go: a replay would "
            "read addresses that hold something else by then; capture it while it is resident, or do not capture it",
            component=component,
        )


class StaleRequest(ResidencyError):
    """Raised when a control request speaks of another epoch or of an older round."""

    def __init__(self, *, epoch: str, round_number: int, current_epoch: str, current_round: int) -> None:
        super().__init__(
            f"the request is about epoch {epoch!r} round {round_number}, the worker is in epoch "
            f"{current_epoch!r} round {current_round}; ask for its status first",
            epoch=epoch,
            round_number=round_number,
            current_epoch=current_epoch,
            current_round=current_round,
        )


class EffectFailed(ResidencyError):
    """Raised when an effect failed and every effect before it was undone."""

    def __init__(self, *, component: str, action: str, problem: str) -> None:
        super().__init__(
            f"{action} of component {component!r} failed: {problem}; the placement before it is in force again",
            component=component,
            action=action,
            problem=problem,
        )


class RollbackFailed(ResidencyError):
    """Raised when weights could not be brought back; where they are is unknown and the process must exit."""

    exit_code = 70

    def __init__(self, *, round_number: int, problems: tuple[str, ...]) -> None:
        super().__init__(
            f"round {round_number}: rollback failed ({'; '.join(problems)}); "
            "end this process, the next start recovers from the journal",
            round_number=round_number,
            problems=problems,
        )


class ProcessPoisoned(ResidencyError):
    """Raised when this process can never use the device again; nothing was moved back, and it must exit.

    round_number: 0 outside of rounds. problem: what the device, or the allocator, said.
    """

    exit_code = 71

    def __init__(self, *, round_number: int, problem: str) -> None:
        super().__init__(
            f"{f'round {round_number}: ' if round_number else ''}the device is lost to this process ({problem}), and "
            "nothing was moved back; end this process, the next start takes the last safe placement",
            round_number=round_number,
            problem=problem,
        )


class PlacementInfeasible(ResidencyError):
    """Raised when no placement fits under the cap."""

    exit_code = 72

    def __init__(self, *, needed_bytes: int, cap_bytes: int, bound_by: str) -> None:
        # Rounded up: a byte too many is not "needs 40.0 MiB, the cap is 40.0 MiB".
        needed = math.ceil(needed_bytes / 2**20 * 10) / 10
        super().__init__(
            f"no placement fits: {bound_by} needs at least {needed:.1f} MiB, the cap is {cap_bytes / 2**20:.1f} MiB; "
            "raise the cap (vram=), or make the workload smaller",
            needed_bytes=needed_bytes,
            cap_bytes=cap_bytes,
            bound_by=bound_by,
        )


class OutsideEnvelope(ResidencyError):
    """Raised for a request that is larger than the placement in force was made for, if the worker refuses those."""

    def __init__(self, *, units: int, units_max: int) -> None:
        super().__init__(
            f"a request of {units} pixels (all frames and samples together) is over the {units_max} that the placement "
            "in force holds for; make it smaller, or attach with that shape in workloads=",
            units=units,
            units_max=units_max,
        )


class RankFailed(ResidencyError):
    """Raised when another rank of the group failed, was silent, or disagreed: nobody commits.

    rank: which one; None if that cannot be told. pinned: because of a kill switch there.
    """

    def __init__(self, *, rank: int | None, problem: str, pinned: bool) -> None:
        who = "the ranks did not get through it together" if rank is None else f"rank {rank} ended it"
        super().__init__(
            f"{who}: {problem}; if one of them is gone, restart all",
            rank=rank,
            problem=problem,
            pinned=pinned,
        )


class RoundUndecided(ResidencyError):
    """Raised when this rank has voted and cannot learn what was decided; others may have committed.

    The process must exit: which placement the others serve is unknown here. The next start finds out.
    """

    exit_code = 73

    def __init__(self, *, round_number: int, problem: str) -> None:
        super().__init__(
            f"round {round_number}: this rank has voted, and cannot learn what was decided ({problem}); "
            "end this process and restart all ranks, which then agree on what their journals say",
            round_number=round_number,
            problem=problem,
        )


class MeasurementRefused(ResidencyError):
    """Raised when what was measured is absurd or contradicts itself: no plan rests on that."""

    def __init__(self, *, subject: str, problem: str) -> None:
        super().__init__(
            f"nothing can be planned from {subject}: {problem}; measure again, and report it if it comes again",
            subject=subject,
            problem=problem,
        )


def describe(error: BaseException) -> str:
    """Return 'Type: message' in one line of at most 500 characters; never raises, whatever the exception does."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - a user's exception may do anything
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}"[:500]


class WarmupFailed(ResidencyError):
    """Raised when the worker's warmup raised something other than out of memory, or returned nothing."""

    def __init__(self, *, problem: str) -> None:
        super().__init__(
            f"the warmup {problem}; it must run one request of the shape it is given and return its output",
            problem=problem,
        )
