"""The demo: one start of a real worker on a real diffusers pipeline that does not fit its memory cap."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import click
import diffusers.utils.logging
import msgspec
import torch
import transformers.utils.logging

from residency.errors import PlacementInfeasible, ResidencyError, SettingsError
from residency.gpu.devices import open_device
from residency.gpu.output import output_digest
from residency.manager import attach
from residency.rendering import short
from residency.settings import allocator_settings, parse_size
from residency.statemachine.states import State

if TYPE_CHECKING:
    from residency.demo_size import DemoSize
    from residency.manager import Manager
    from residency.report import Report


class Crash:
    """Prints progress; kills the process with SIGKILL in the state it is told to, in `planned` between two effects."""

    def __init__(self, at: str | None, *, quiet: bool) -> None:
        self._at, self._quiet = at, quiet

    def working(self, what: str) -> None:
        """Print what begins."""
        if not self._quiet:
            click.echo(f"  .. {what}", err=True)

    def leaving(self, state: str) -> None:
        """Die here, if told to."""
        if state == self._at:
            self._die(state)

    def between_effects(self, index: int) -> None:
        """Die between the first effect and the second, if told to."""
        if index > 0 and self._at == State.PLANNED.value:
            self._die(State.PLANNED.value)

    def _die(self, state: str) -> None:
        click.echo(f"  !! SIGKILL in state {state!r}", err=True)
        os.kill(os.getpid(), signal.SIGKILL)


def run(
    *,
    device: str = "auto",
    vram: str | None = None,
    journal: str | None = None,
    crash_at: str | None = None,
    pipeline: str = "small",
    json: bool = False,
) -> int:
    """Start one worker, serve one request, print what was decided; returns the exit code of a worker."""
    try:
        return _run(device, vram, journal, crash_at, pipeline, json)
    except ResidencyError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except torch.OutOfMemoryError as error:
        # While building, or in the request that is served: residency's own measured requests expect it.
        problem = str(error).splitlines()[0].rstrip(".")
        click.echo(f"error: not even one request fits: {problem}; raise the cap (--vram)", err=True)
        return PlacementInfeasible.exit_code


def _run(device: str, vram: str | None, journal: str | None, crash_at: str | None, pipeline: str, json: bool) -> int:
    quieten()
    # Only now: it is while their classes are imported that the libraries say most.
    import residency.demo_pipeline as ours

    size = ours.SIZES.get(pipeline)
    if size is None:
        raise SettingsError(f"there is no demo pipeline {pipeline!r}; choose {' or '.join(ours.SIZES)}")
    cap = vram or size.cap
    # Whoever reads JSON may collect the standard error, too; only a person at a terminal wants to see progress there.
    crash = Crash(crash_at, quiet=json and not sys.stderr.isatty())
    # Before anything is loaded, so that loading is under the cap, too.
    target = open_device(
        device, cap_bytes=parse_size(cap, name="vram"), allocator_settings=allocator_settings()
    ).torch_device
    if target.type == "cpu":
        # Kernels this small gain nothing from a second thread, and lose much on a busy machine.
        torch.set_num_threads(1)
    crash.working(f"building the {size.name} pipeline")
    pipe = ours.build(size, device=target)
    manager = attach(
        pipe,
        journal=journal,
        workload=size.workload,
        warmup=lambda shape: ours.request(pipe, size, shape, device=target),
        name="demo",
        vram=cap,
        device=device,
        identity=ours.identity(size),
        policy=size.policy,
        observer=crash,
    )
    try:
        report = manager.start()
        with manager.request():
            image = ours.request(pipe, size, size.workload, device=target)
        answer = _answer(manager, report, size, image)
        click.echo(msgspec.json.encode(answer, order="sorted").decode() if json else _text(report, answer))
    finally:
        manager.detach()
    return 0


def _answer(manager: Manager, report: Report, size: DemoSize, image: torch.Tensor) -> dict[str, Any]:
    return {
        **report.to_json(),
        "pipeline": size.name,
        "output": {"shape": list(image.shape), "digest": output_digest(image)},
        "hazards": [f"{hazard.component}: {hazard.text}" for hazard in manager.hazards],
    }


def _text(report: Report, answer: dict[str, Any]) -> str:
    rows = [
        f"{name:<16} {one.mode.value}"
        + (f", host copy {one.tier.value}" if one.tier is not None else "")
        + (f", {sum(map(len, one.resident_layers.values()))} layers resident" if one.resident_layers else "")
        for name, one in sorted(report.placement.components.items())
    ]
    shape = "x".join(map(str, answer["output"]["shape"]))
    return "\n".join(
        [
            f"decision   {report.decision.value}: {report.reason}",
            f"placement  {short(answer['placement_digest'])}, round {report.round}, epoch {report.epoch}",
            *(f"           {row}" for row in rows),
            f"requests   {report.num_requests} measured, {report.num_probes} of them probes",
            f"time       ready after {report.ready_ms / 1e3:.2f} s, {report.journal_ms:.1f} ms of it in the journal",
            f"served     one request, output {shape}, digest {short(answer['output']['digest'])}",
            f"journal    {report.journal}",
        ]
    )


def quieten() -> None:
    """Silence what the libraries say about packages they miss, and about a pipeline made here and not loaded."""
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
