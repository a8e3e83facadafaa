"""The process of one mode: it does what a job file says and writes what it measures, stage by stage, as it goes."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers.utils.logging
import torch
import transformers.utils.logging

from benchmarks.request_time_host import give_back_heap, host_reading, reset_peak
from benchmarks.request_time_link import busy_figures, copy_speeds, layer_speed
from benchmarks.request_time_peers import prepare_peer
from benchmarks.request_time_rows import Row, run_job
from benchmarks.request_time_shards import RESIDENT, WEIGHTS, Job
from benchmarks.request_time_timeline import profile_request
from benchmarks.request_time_weights import load_pipeline, make_weights
from residency.demo_pipeline import SIZES, request
from residency.demo_size import DemoSize
from residency.effects.place import order_effects
from residency.effects.spec import EffectSpec
from residency.errors import describe
from residency.gpu.adapters import components_of
from residency.gpu.device import Device
from residency.gpu.layers import find_layer_groups
from residency.gpu.measure import measure_request
from residency.gpu.output import flatten_output, output_digest
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT as RESIDENT_COMPONENT
from residency.gpu.records import RequestKind
from residency.gpu.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from residency.gpu.placement import Placement
    from residency.gpu.records import RequestRecord

NS_PER_S = 1e9
RECORDS = 2  # of all-resident; the faster one is what is planned by
REQUESTS_MIN = 2
BUSY_REQUESTS = 2


@dataclass(slots=True, kw_only=True)
class Subject:
    """A loaded pipeline, and how one request to it is served."""

    job: Job
    size: DemoSize
    shape: Workload
    device: Device
    pipeline: Any
    managed: ManagedPipeline | None = None
    output: object = field(default=None, repr=False)

    def serve(self) -> object:
        """Serve one request on the pipeline as it is now; does not wait for the device."""
        with self.managed.request() if self.managed is not None else nullcontext():
            return request(self.pipeline, self.size, self.shape, device=self.device.torch_device)

    def timed(self) -> float:
        """Serve one request and return its seconds by the device's clock; its output is kept until the next one."""
        self.output = None
        self.device.synchronize()
        started_ns = self.device.now_ns()
        self.output = self.serve()
        self.device.synchronize()
        return (self.device.now_ns() - started_ns) / NS_PER_S

    @property
    def is_cuda(self) -> bool:
        """Whether its figures are measurements, not a model's."""
        return self.device.torch_device.type == "cuda"


def measure(job: Job, device: Device, row: Row) -> None:
    """Do a job: make the weights, or measure a mode of serving requests."""
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    if device.torch_device.type == "cpu":
        torch.set_num_threads(1)
    if job.mode.kind == WEIGHTS:
        folders = [Path(folder) for folder in job.weights.split(os.pathsep)]
        row.add(weights=make_weights(SIZES[job.settings.pipeline], folders, device=device.torch_device))
    else:
        _measure(job, device, row)


def _measure(job: Job, device: Device, row: Row) -> None:
    subject = _load(job, device, row)
    row.add(stage="setup")
    if job.settings.compiled and not job.mode.is_peer:
        _compile_blocks(subject.pipeline)
    started = time.perf_counter()
    _prepare(subject)
    device.synchronize()
    row.add(setup_s=time.perf_counter() - started, setup_peaks=device.memory(), stage="cold request")
    if job.settings.compiled and job.mode.is_peer:
        _compile_blocks(subject.pipeline)
    device.reset_peaks()
    row.add(cold_s=subject.timed(), cold_peaks=device.memory(), cold_digest=output_digest(subject.output))
    row.add(stage="requests", compiled_cold=_compiled(job))
    _steady(subject, row)
    give_back_heap()
    row.add(stage="more", host=host_reading(), context_bytes=_context_bytes(device), compiled=_compiled(job))
    if subject.managed is not None:
        row.add(record=_record(subject))
    if job.mode.kind == RESIDENT:
        _more_of_resident(subject, row)
    if job.timeline and subject.is_cuda:
        _try(row, "timeline", lambda: profile_request(device, _layers(subject), subject.serve))


def _load(job: Job, device: Device, row: Row) -> Subject:
    size = SIZES[job.settings.pipeline]
    shape = size.workload
    steps = job.settings.steps or shape.steps
    shape = Workload(width=shape.width, height=shape.height, frames=shape.frames, steps=steps, batch=shape.batch)
    row.add(stage="load", host_before=host_reading())
    started = time.perf_counter()
    pipeline = load_pipeline(size, Path(job.weights))
    gc.collect()
    row.add(load_s=time.perf_counter() - started, host_loaded=host_reading(), workload=shape)
    reset_peak()
    return Subject(job=job, size=size, shape=shape, device=device, pipeline=pipeline)


def _prepare(subject: Subject) -> None:
    """From weights in host memory to where the first request may start."""
    job, device = subject.job, subject.device
    if job.mode.is_peer:
        if not subject.is_cuda:
            raise RuntimeError("peers need a CUDA device")
        prepare_peer(job.mode.kind, subject.pipeline, device.torch_device)
        return
    if subject.is_cuda and job.mode.kind == RESIDENT:
        subject.pipeline.to(device.torch_device)
    modules, owner = components_of(subject.pipeline)
    # All-resident it installs nothing, so that what is timed is the plain pipeline.
    subject.managed = ManagedPipeline(modules, device=device, owner=owner, minimal=job.mode.kind == RESIDENT)
    _place(subject.managed, job.placement)


def _place(managed: ManagedPipeline, placement: Placement | None) -> None:
    """Apply a placement as if it had been configured; None: everything resident."""
    before = managed.placement.components
    after = placement.components if placement is not None else dict.fromkeys(before, RESIDENT_COMPONENT)
    effects = [EffectSpec(index=0, component=name, before=before[name], after=after[name]) for name in before]
    for effect in order_effects(effects, managed):
        managed.place(effect.component, effect.after)
    managed.commit()


def _steady(subject: Subject, row: Row) -> None:
    """Time requests after the first one, with the peaks, the retries and the bytes moved of just these."""
    device, settings = subject.device, subject.job.settings
    device.synchronize()
    device.reset_peaks()
    retries, moved = _alloc_retries(subject), device.moved_bytes()
    samples: list[float] = []
    while len(samples) < settings.requests and (len(samples) < REQUESTS_MIN or sum(samples) < settings.requests_s):
        samples.append(subject.timed())
        row.add(samples_s=samples, median_s=statistics.median(samples), min_s=min(samples))
    retries_after, num = _alloc_retries(subject), len(samples)
    to_device, to_host = (now - then for now, then in zip(device.moved_bytes(), moved, strict=True))
    is_ours = subject.managed is not None
    row.add(
        num_requests=num,
        peaks=device.memory(),
        alloc_retries=None if retries_after is None or retries is None else retries_after - retries,
        to_device_bytes=to_device // num if is_ours else None,
        to_host_bytes=to_host // num if is_ours else None,
        digest=output_digest(subject.output),
        is_finite=all(bool(torch.isfinite(one).all()) for one in flatten_output(subject.output)),
    )
    subject.output = None


def _more_of_resident(subject: Subject, row: Row) -> None:
    """What placements are planned and judged by: sizes, the link at these sizes, and compute beside a busy link."""
    assert subject.managed is not None
    specs = subject.managed.specs
    sizes = [size for spec in specs for group in spec.groups for size in group.layer_bytes]
    speeds = copy_speeds(subject.device, sorted(set(sizes))) if sizes else {}
    row.add(
        specs=specs,
        total_bytes=sum(spec.total_bytes for spec in specs),
        layer_link=speeds,
        layer_link_bytes_per_s=layer_speed(speeds, sizes) if sizes else None,
    )
    if subject.is_cuda:
        components = components_of(subject.pipeline)[0]
        _try(row, "busy", lambda: busy_figures(subject.device, components, subject.serve, num=BUSY_REQUESTS))


def _try(row: Row, name: str, measure: Callable[[], dict[str, Any]]) -> None:
    """Add what is no part of the figures; a driver that forbids profiling, say, must not make them an error."""
    try:
        row.add(**{name: measure()})
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        row.add(**{f"{name}_error": describe(error)})


def _record(subject: Subject) -> RequestRecord:
    assert subject.managed is not None
    records = [
        measure_request(
            subject.managed,
            subject.serve,
            kind=RequestKind.BASELINE,
            workload=subject.shape,
            target_steps=subject.shape.steps,
        )[0]
        for _ in range(RECORDS if subject.job.mode.kind == RESIDENT else 1)
    ]
    return min(records, key=lambda record: record.duration_ns)


def _layers(subject: Subject) -> dict[str, nn.Module]:
    """Return every layer of every layer group by a short name: 'transformer.blocks.3'; none if they are compiled.

    A hook on a compiled layer would have it compiled anew.
    """
    assert subject.managed is not None
    if subject.job.settings.compiled:
        return {}
    modules = components_of(subject.pipeline)[0]
    return {
        f"{spec.name}.{group.name}.{index}": modules[spec.name].get_submodule(f"{group.name}.{index}")
        for spec in subject.managed.specs
        for group in spec.groups
        for index in range(len(group.layer_bytes))
    }


def _compile_blocks(pipeline: Any) -> None:
    """Compile every repeated block of the transformer on its own, as diffusers advises."""
    for layers in find_layer_groups(pipeline.transformer).values():
        for layer in layers:
            layer.compile()


def _compiled(job: Job) -> dict[str, dict[str, int]] | None:
    """Return Dynamo's counters of frames and graphs, for a compiled run."""
    # Compiling has loaded it; importing it only to find nothing would cost every process two seconds.
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if not job.settings.compiled or dynamo is None:
        return None
    return {name: dict(dynamo.counters[name]) for name in ("frames", "stats") if name in dynamo.counters}


def _alloc_retries(subject: Subject) -> int | None:
    if not subject.is_cuda:
        return None
    return int(torch.cuda.memory_stats(subject.device.torch_device).get("num_alloc_retries", 0))


def _context_bytes(device: Device) -> int | None:
    """Return what the CUDA context and its libraries take of the device, outside every cap."""
    if device.torch_device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device.torch_device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device.torch_device)


if __name__ == "__main__":
    run_job(sys.argv[1:], measure)
