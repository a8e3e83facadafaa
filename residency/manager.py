"""The worker's side of residency: attach, start, serve, control, detach."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from residency.admission import Admission
from residency.control import Control
from residency.epoch import Epoch
from residency.errors import (
    EffectFailed,
    JournalError,
    PipelineBusy,
    PlacementInfeasible,
    ProcessPoisoned,
    RollbackFailed,
    RoundUndecided,
    SettingsError,
)
from residency.gpu.devices import limit_device as limit
from residency.health import HealthApp
from residency.interrupts import Interrupts, StopNotice, Terminated, deliver
from residency.settings import parse_size
from residency.statemachine.planner.envelope import Outside
from residency.statemachine.policy import Policy
from residency.statemachine.worker import Silent
from residency.worker_setup import Options, prepare

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from residency.gpu.device import Device
    from residency.gpu.hazards import Hazard
    from residency.gpu.placement import Mode, Placement
    from residency.gpu.workload import Workload
    from residency.ranks import Ranks
    from residency.report import Report
    from residency.statemachine.planner.hint import Hint
    from residency.statemachine.source import RoundResult
    from residency.statemachine.worker import Observer
    from residency.worker_setup import Setup

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# A container is killed thirty seconds after it is asked to stop; the journal's last word must come before.
STOP_WAIT_S = 20.0


def limit_device(size: str, *, device: str = "auto") -> None:
    """Cap the device memory this process may take, such as '24GiB'. Call it before anything is loaded.

    device: 'cuda', 'cpu' (the emulated device) or 'auto'. Raises SizeError without a unit, SettingsError if absurd.
    """
    limit(device, cap_bytes=parse_size(size, name="vram"))


def attach(
    pipe: object,
    *,
    journal: str | os.PathLike[str] | None = None,
    workload: Workload | None = None,
    warmup: Callable[[Workload], object] | None = None,
    modes: Mapping[str, str | Mode] | None = None,
    vram: str | None = None,
    host_ram: str | None = None,
    name: str | None = None,
    device: str | Device = "auto",
    placement: str | os.PathLike[str] | None = None,
    identity: Mapping[str, str] | None = None,
    tolerance: float | None = None,
    policy: Policy | None = None,
    observer: Observer | None = None,
    ranks: Ranks | None = None,
    workloads: Sequence[Workload] = (),
    outside: str | Outside = Outside.ALLOW,
) -> Manager:
    """Describe a pipeline and check everything that was asked for; moves nothing until `start`.

    pipe: a diffusers pipeline, or a mapping of names to modules. journal: a path, or a sqlite:/// or
    postgresql+psycopg:// URL.
    workload: the default request shape. warmup: runs one request of the shape it is given and returns its output.
    modes: component -> mode, which residency then never touches. vram, host_ram: sizes such as '24GiB', bounds on
    device memory and on pinned host memory. device: 'auto', 'cuda', 'cpu' (emulated), or a Device. name: of this
    worker, the same at every start. placement: a file that `export_placement` wrote, taken as configured.
    identity: component -> what identifies its weights' content (a revision, a digest); a restore compares outputs
    only if every component has one. tolerance: largest difference between outputs, as a part of the largest value,
    that still counts as the same, if bit for bit is too strict. workloads: further default shapes (the first of all is
    the one whose time counts; all of them must fit in memory). outside: what is done about a request that is larger
    than what the placement holds for: 'allow', 'refuse' with OutsideEnvelope, or 'recalibrate' for it first.
    ranks: the processes that run this pipeline together, each attaching its part.

    Raises SettingsError and its kin (exit code 2) for what cannot be used, PlacementInfeasible (72) if even the
    smallest form of a component is over the cap.
    """
    options = Options(
        journal=journal,
        workload=workload,
        warmup=warmup,
        modes=modes or {},
        vram=vram,
        host_ram=host_ram,
        name=name,
        device=device,
        placement=placement,
        identity=identity,
        tolerance=tolerance,
        policy=policy or Policy(),
        ranks=ranks,
        workloads=workloads,
        outside=outside,
    )
    return Manager(prepare(pipe, options), observer=observer or Silent(), outside=Outside(outside))


class Manager:
    """One attached pipeline. `start` decides where the weights live; afterwards the worker is ready."""

    def __init__(self, setup: Setup, *, observer: Observer, outside: Outside = Outside.ALLOW) -> None:
        self._setup = setup
        self._pipeline = setup.worker.pipeline
        self._pipeline.request_wait_s = setup.policy.request_wait_s
        self._interrupts = Interrupts()
        self._status = _Status(observer)
        self._epoch = Epoch(setup, interrupts=self._interrupts, observer=self._status)
        self._control = Control(self._epoch, run=self._exclusively)
        self._admission = Admission(self._epoch, outside, run=self._recalibrate)
        self._stop_notice = StopNotice(self._stopped_by)
        self._starting = threading.Lock()
        self._report: Report | None = None
        self._is_ended = False
        self._failure: RollbackFailed | ProcessPoisoned | RoundUndecided | None = None
        self._gave_up = False

    @property
    def ready(self) -> bool:
        """Whether `start` has returned, no round is running, and nothing came for which the process must end."""
        is_up = self._report is not None and not self._is_ended and self._failure is None
        return is_up and self._status.round_since is None

    @property
    def report(self) -> Report | None:
        """What `start` decided; None before."""
        return self._report

    @property
    def placement(self) -> Placement:
        """Where every component lives now."""
        return self._setup.worker.placement

    @property
    def hazards(self) -> tuple[Hazard, ...]:
        """What was found about the components: why some are never moved, and what to know about others."""
        return self._pipeline.hazards

    @property
    def epoch(self) -> str:
        """This life's UUID, which control requests name."""
        return self._epoch.id

    def start(self) -> Report:
        """Place the weights, restore or calibrate, and return what was decided; the worker is ready then.

        A second call returns the same report. Blocks for as long as the warmups take.
        Raises RollbackFailed (70), ProcessPoisoned (71) and RoundUndecided (73), after which the process must end,
        PlacementInfeasible (72), PipelineBusy; SIGTERM and SIGINT in mid-round roll back first and then end the process
        as they would have.
        """
        self._refuse_inside_a_round("start()")
        with self._starting:
            if self._report is None:
                if self._is_ended:
                    raise SettingsError(
                        "start() after detach(), or after a start that failed; attach the pipeline again"
                    )
                try:
                    self._report = self._exclusively(self._epoch.start)
                except BaseException:
                    self._end("error")
                    raise
                self._pipeline.before_request = self._between_requests
                self._pipeline.on_lost = self._lose
                self._stop_notice.install()
                atexit.register(self._at_exit)
            return self._report

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Serve a control request: {verb, epoch, round, attempt, args}, verb status, calibrate, validate, roll_back.

        Idempotent: the same four return the same outcome. Until start() has returned only status is served.
        Raises SettingsError for what is no request, RollbackFailed and ProcessPoisoned (end the process).
        """
        decision = None if self._report is None else self._report.decision.value
        return self._control.handle(request, ready=self.ready, decision=decision)

    def health(self) -> HealthApp:
        """Return an ASGI app with /health/live and /health/ready."""
        return HealthApp(self.status)

    def status(self) -> dict[str, Any]:
        """Return what health tells: ready, state, epoch, round, decision, what is going on, and for how long."""
        return {
            "ready": self.ready,
            "state": self._epoch.machine.state.value,
            "epoch": self._epoch.id,
            "round": self._epoch.round_number,
            "decision": None if self._report is None else self._report.decision.value,
            "working": "ended" if self._is_ended else self._status.what,
            "elapsed_s": round(time.monotonic() - self._status.since, 3),
            "outside": self._admission.status(),
        }

    def hint(self, shape: Workload) -> Hint:
        """Return how placements rank for a request shape, estimated; nothing is moved for it, and nothing promised.

        Raises SettingsError if the placement in force was not planned from measurements.
        """
        return self._admission.hint(shape)

    @contextmanager
    def request(self, shape: Workload | None = None) -> Iterator[None]:
        """Enter around one request of a pipeline that is no diffusers pipeline; theirs bracket themselves.

        shape: what it asks for; without it nobody can tell whether the placement holds for it. Raises OutsideEnvelope
        for a shape that is refused.
        Raises ProcessPoisoned in place of an error by which the device was lost to this process; end it then.
        """
        with self._pipeline.request(shape):
            try:
                yield
            except Exception as error:
                # Inside a round that is the round's own business.
                if self._status.round_thread != threading.get_ident():
                    self._stop_if_fatal(error)
                raise

    def whole(self, component: str) -> AbstractContextManager[Any]:
        """Have a component whole on the device, whatever its placement, to change its weights there; yields the module.

        What is changed in place inside (an adapter that is merged, a weight update) is kept, and its placement is in
        force again afterwards. Raises UnknownComponent, PipelineBusy while somebody else has the pipeline, and
        torch.OutOfMemoryError, with everything as it was, if it does not fit.
        """
        return self._pipeline.whole(component)

    def export_placement(self, path: str | os.PathLike[str]) -> None:
        """Write the placement in force to a file that `attach(placement=...)` takes. Raises OSError."""
        Path(path).write_bytes(self.placement.to_bytes())

    def detach(self) -> None:
        """Put every module back exactly as before, and end this life in the journal. A second call is a no-op.

        Blocks until no request runs, at most `request_wait_s`; then raises PipelineBusy, and nothing has changed.
        Raises ProcessPoisoned in place of an error by which the device was lost to this process; end it then.
        """
        self._refuse_inside_a_round("detach()")
        try:
            self._pipeline.detach()
        except Exception as error:
            # Called in a `finally`, it must not hide what the process has to end with.
            self._stop_if_fatal(error)
            raise
        self._pipeline.before_request = self._pipeline.on_lost = None
        self._end("detach")

    def _refuse_inside_a_round(self, call: str) -> None:
        """Raise PipelineBusy in a warmup that calls back: it would wait for itself."""
        if self._status.round_thread == threading.get_ident():
            raise PipelineBusy(holder=f"the round whose warmup calls {call}", waited_s=0.0)

    def _exclusively(self, run: Callable[[], Result], *, wait_s: float | None = None) -> Result:
        """Run with the pipeline to ourselves, termination signals held where weights move."""
        wait_s = self._setup.policy.busy_wait_s if wait_s is None else wait_s
        try:
            with self._interrupts, self._pipeline.exclusive("a round", wait_s), self._status.in_round():
                result = run()
                self._admission.look()
                return result
        except Exception as error:
            self._stop_if_fatal(error)
            raise
        except Terminated as terminated:
            # On another thread the main one has the signal in hand, and waits for this.
            if threading.current_thread() is threading.main_thread():
                self._end("signal", signal=terminated.signal_name)
                deliver(terminated.signum)
            raise

    def _stop_if_fatal(self, error: Exception) -> None:
        """Serve nobody any more after an error for which the process must end; raise it, in its own words."""
        if isinstance(error, (RollbackFailed, RoundUndecided)) or (
            isinstance(error, ProcessPoisoned) and error.fields["round_number"]
        ):
            self._failure = error  # journaled by the round that it ended
        else:
            self._lose(error)
            if isinstance(self._failure, ProcessPoisoned):
                raise self._failure from error

    def _lose(self, error: Exception) -> None:
        """Journal an error that lost the device, once, and serve nobody any more; any other is passed over."""
        problem = self._setup.worker.find_poison(error)
        if problem is not None and self._failure is None:
            self._failure = self._epoch.poisoned(problem)

    def _between_requests(self) -> None:
        """Take a serving worker back if the kill switch was thrown since the last request.

        Raises RollbackFailed once a rollback has failed, for nobody may compute with weights that are nowhere for sure,
        and ProcessPoisoned once the device is lost.
        """
        if self._failure is not None:
            raise self._failure
        if self._gave_up or self._epoch.pinned is not None or self._setup.switch() is None:
            self._admission.admit(self._pipeline.asked)
            return
        try:
            # The request would wait as long for its turn.
            self._exclusively(self._take_back, wait_s=self._setup.policy.request_wait_s)
        except (EffectFailed, JournalError, PlacementInfeasible) as error:
            self._gave_up = True
            log.error("the kill switch is on, but going back failed, and is not tried again: %s; restart", error)

    def _recalibrate(self, run: Callable[[], RoundResult]) -> RoundResult:
        # The request would wait as long for its turn.
        return self._exclusively(run, wait_s=self._setup.policy.request_wait_s)

    def _take_back(self) -> None:
        # Another thread may have done it while this one waited.
        if self._epoch.pinned is None:
            self._epoch.take_back()

    def _stopped_by(self, signum: int) -> None:
        """Let a round on another thread roll back first, within a bound; then say what ended this life."""
        deadline = time.monotonic() + STOP_WAIT_S
        while self._status.round_since is not None and time.monotonic() < deadline:
            self._interrupts.interrupt(signum)
            time.sleep(0.01)
        self._end("signal", signal=signal.Signals(signum).name)

    def _at_exit(self) -> None:
        self._end("exit")

    def _end(self, reason: str, *, signal: str | None = None) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._stop_notice.remove()
            atexit.unregister(self._at_exit)
            self._epoch.end(reason=reason, signal=signal, figures=self._admission.counts)


class _Status:
    """What is going on, for health; passes everything on to the worker's own observer."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.what = "attached"
        self.since = time.monotonic()
        self.round_since: float | None = None
        self.round_thread: int | None = None

    @contextmanager
    def in_round(self) -> Iterator[None]:
        self.round_since = self.since = time.monotonic()
        self.round_thread = threading.get_ident()
        try:
            yield
        finally:
            self.what, self.since, self.round_since = "serving", time.monotonic(), None
            self.round_thread = None

    def working(self, what: str) -> None:
        self.what = what
        self._observer.working(what)

    def leaving(self, state: str) -> None:
        self._observer.leaving(state)

    def between_effects(self, index: int) -> None:
        self._observer.between_effects(index)
