"""One measured request: peaks and durations by memory phase, uses of components and layers, and its output."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from residency.errors import ResidencyError, WarmupFailed, describe
from residency.gpu.device import Device, Mark, is_out_of_memory
from residency.gpu.layer_times import LayerRecorder
from residency.gpu.output import output_digest
from residency.gpu.records import PhaseRecord, RequestKind, RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from residency.gpu.pipeline import ManagedPipeline
    from residency.gpu.workload import Workload


def measure_request(
    pipeline: ManagedPipeline,
    run: Callable[[], object],
    *,
    kind: RequestKind,
    workload: Workload,
    target_steps: int,
) -> tuple[RequestRecord, object]:
    """Run one request and return its record and its output; out of memory gives a failed record and None.

    Blocks until the device is done. Every hook that measuring needs is gone when it returns. Raises WarmupFailed if
    the request raises anything but out of memory, or returns nothing or what cannot be read (`fields["record"]` is
    its failed record); other errors of residency itself and interrupts pass through.
    """
    device = pipeline.device
    device.synchronize()
    device.empty_cache()
    device.reset_peaks()
    before, moved, started_ns = device.memory(), device.moved_bytes(), device.now_ns()
    recorder = _PhaseRecorder(device)
    output, failure = _run_observed(pipeline, run, recorder)
    device.synchronize()
    duration_ns = device.now_ns() - started_ns
    to_device_bytes, to_host_bytes = (now - then for now, then in zip(device.moved_bytes(), moved, strict=True))
    digest = None
    if failure is None:
        # Only now: reading the output is no part of what the request takes.
        digest, failure = _digest(output)
    record = RequestRecord(
        kind=kind,
        workload=workload,
        target_steps=target_steps,
        placement_digest=pipeline.placement.digest,
        succeeded=failure is None,
        out_of_memory=failure is not None and is_out_of_memory(failure),
        error=None if failure is None else describe(failure),
        baseline_allocated_bytes=before.allocated_bytes,
        baseline_reserved_bytes=before.reserved_bytes,
        phases=recorder.phases(),
        uses=tuple(recorder.uses),
        layer_uses=recorder.layers.uses(),
        duration_ns=duration_ns,
        to_device_bytes=to_device_bytes,
        to_host_bytes=to_host_bytes,
        output_digest=digest,
        layer_ns=recorder.layers.compute_ns(),
        layer_order=recorder.layers.order(),
    )
    if failure is not None:
        _give_up(failure, record)
        failure = output = None
        gc.collect()  # The failed forward's activations may hang on cycles through its traceback.
        device.empty_cache()
    return record, output


def _run_observed(
    pipeline: ManagedPipeline, run: Callable[[], object], recorder: _PhaseRecorder
) -> tuple[object, Exception | None]:
    """Run the request under observation: its output or what it raised."""
    output: object = None
    failure: Exception | None = None
    components = [pipeline.component(name) for name in pipeline.placement.components]
    with ExitStack() as stack:
        for component in components:
            groups = stack.enter_context(component.observing_layers(recorder.layers))
            recorder.layers.expect(component.name, groups)
        stack.enter_context(pipeline.observing(recorder))
        try:
            with pipeline.request():
                output = run()
        except Exception as error:  # noqa: BLE001 - a failed forward is a record
            failure = error
        recorder.close()
    return output, failure


def _digest(output: object) -> tuple[str | None, Exception | None]:
    """Return the digest of an output, or what a request means that has no readable one."""
    try:
        return output_digest(output), None
    except Exception as error:  # noqa: BLE001 - an output that cannot be read is a record
        if isinstance(error, ResidencyError) or is_out_of_memory(error):
            return None, error
        problem = f"returned an output that cannot be read ({describe(error)})"
        failure = WarmupFailed(problem=problem)
        failure.__cause__ = error
        return None, failure


def _give_up(failure: Exception, record: RequestRecord) -> None:
    """Raise what a failed request means, or only let go of its frames if it ran out of memory."""
    if record.out_of_memory:
        failure.__traceback__ = None
        return
    if isinstance(failure, WarmupFailed):
        failure.fields.setdefault("record", record)
    if isinstance(failure, ResidencyError):
        raise failure
    error = WarmupFailed(problem=f"raised {record.error}")
    error.fields["record"] = record
    raise error from failure


@dataclass(slots=True)
class _Phase:
    active: tuple[str, ...]
    lingering: str | None
    whole: tuple[str, ...] = ()
    allocated_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    spans: list[tuple[Mark, Mark]] = field(default_factory=list)
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)


class _PhaseRecorder:
    """Closes a memory phase whenever the set of running components changes.

    Boundaries are marks on the device, read when the request is over, and peaks are the allocator's own: nothing waits
    for the device in between, so that a measured request runs as any other does.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._phases: dict[str, _Phase] = {}
        self._active: list[str] = []
        self._whole: list[str] = []
        self._lingering: str | None = None
        self._started = device.mark(timed=True)
        self._entered: Mark | None = None
        self._waits: list[tuple[Mark, Mark]] = []
        self.layers = LayerRecorder(device, on_wait=self._waits.append)
        self.uses: list[tuple[str, int]] = []

    def entered(self, component: str) -> None:
        """Close the phase before, and count the use."""
        self.close()
        self._active.append(component)
        if self.uses and self.uses[-1][0] == component:
            self.uses[-1] = (component, self.uses[-1][1] + 1)
        else:
            self.uses.append((component, 1))
        self._entered = self._started

    def loaded(self, component: str) -> None:
        """Book how long it took to bring it as a whole."""
        if self._entered is not None:
            self._waits.append((self._entered, self._device.mark(timed=True)))
            self._entered = None

    def left(self, component: str) -> None:
        """Close the phase in which it ran."""
        self.close()
        self._active.remove(component)
        self._lingering = component

    def made_whole(self, component: str) -> None:
        """Close the phase before a component is brought whole."""
        self.close()
        self._whole.append(component)

    def was_whole(self, component: str) -> None:
        """Close the phase in which it was whole."""
        self.close()
        self._whole.remove(component)

    def close(self) -> None:
        """Book the span and the peaks since the last boundary."""
        now, memory = self._device.mark(timed=True), self._device.memory()
        phase = self._phases.setdefault(self._key(), _Phase(*self._who(), whole=tuple(sorted(self._whole))))
        phase.allocated_peak_bytes = max(phase.allocated_peak_bytes, memory.allocated_peak_bytes)
        phase.reserved_peak_bytes = max(phase.reserved_peak_bytes, memory.reserved_peak_bytes)
        phase.spans.append((self._started, now))
        phase.waits += self._waits
        self._waits.clear()
        self._started = now
        self._device.reset_peaks()

    def phases(self) -> tuple[PhaseRecord, ...]:
        """Return what was booked, in order of first occurrence. The device must be idle."""
        return tuple(self._phase_record(key, phase) for key, phase in self._phases.items())

    def _phase_record(self, key: str, phase: _Phase) -> PhaseRecord:
        duration_ns = sum(self._device.elapsed_ns(*span) for span in phase.spans)
        return PhaseRecord(
            key=key,
            active=phase.active,
            lingering=phase.lingering,
            allocated_peak_bytes=phase.allocated_peak_bytes,
            reserved_peak_bytes=phase.reserved_peak_bytes,
            duration_ns=duration_ns,
            wait_ns=min(duration_ns, sum(self._device.elapsed_ns(*wait) for wait in phase.waits)),
            num_occurrences=len(phase.spans),
            whole=phase.whole,
        )

    def _who(self) -> tuple[tuple[str, ...], str | None]:
        active = tuple(sorted(self._active))
        return active, None if active else self._lingering

    def _key(self) -> str:
        active, lingering = self._who()
        if self._whole:
            return "+".join([f"whole:{'+'.join(sorted(self._whole))}", *active])
        if active:
            return f"use:{'+'.join(active)}"
        return "before" if lingering is None else f"after:{lingering}"
