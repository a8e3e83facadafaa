"""From what a worker passes to `attach` to everything an epoch needs; checks all of it and moves nothing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from residency.errors import ModeUnavailable, SettingsError, UnknownComponent, describe
from residency.gpu.adapters import components_of
from residency.gpu.device import Device
from residency.gpu.devices import open_device
from residency.gpu.host_memory import read_host
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import ComponentPlacement, Mode, Placement
from residency.gpu.ranks import num_ranks
from residency.gpu.workload import Workload
from residency.ranks import Place, Ranks, find_place, open_ranks
from residency.settings import (
    KillSwitch,
    allocator_settings,
    journal_location,
    kill_switch,
    num_local_ranks,
    parse_size,
    sentinel_path,
    worker_name,
)
from residency.statemachine.fingerprint import fingerprint, fingerprint_digest
from residency.statemachine.initial import configured_placements, initial_placement
from residency.statemachine.planner.envelope import Outside
from residency.statemachine.policy import Policy
from residency.statemachine.ranks import Alone
from residency.worker import PipelineWorker

if TYPE_CHECKING:
    from residency.gpu.specs import ComponentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a worker passes to `attach`, as it was passed."""

    journal: str | os.PathLike[str] | None = field(repr=False)  # a URL may hold a password
    workload: Workload | None
    warmup: Callable[[Workload], object] | None
    modes: Mapping[str, str | Mode]
    vram: str | None
    host_ram: str | None
    name: str | None
    device: str | Device
    placement: str | os.PathLike[str] | None
    identity: Mapping[str, str] | None
    tolerance: float | None
    policy: Policy
    ranks: Ranks | None = None
    workloads: Sequence[Workload] = ()
    outside: str | Outside = Outside.ALLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything an epoch needs that does not change during it.

    configured: component -> why residency never touches it. is_identified: the weights' content is known.
    num_ranks: of the process group, if nobody said which of them run this pipeline together; ranks: they, if somebody
    did. switch: the kill switch that is on now, or None.
    """

    worker: PipelineWorker
    journal: str = field(repr=False)  # a URL may hold a password
    stream: str
    version: str
    initial: Placement
    configured: Mapping[str, str]
    fingerprint: Mapping[str, Any]
    fingerprint_digest: str
    workload: Workload | None
    policy: Policy
    has_warmup: bool
    is_identified: bool
    num_ranks: int
    ranks: Alone
    switch: Callable[[], KillSwitch | None]
    workloads: tuple[Workload, ...] = ()  # beside the default one


def prepare(pipe: object, options: Options) -> Setup:
    """Check everything and describe the pipeline; moves nothing. Raises SettingsError and PlacementInfeasible."""
    place = find_place(options.ranks)
    try:
        return _prepare(pipe, options, place)
    except BaseException as error:
        if place is not None:
            # The others wait for this rank.
            place.refuse(describe(error))
        raise


def _prepare(pipe: object, options: Options, place: Place | None) -> Setup:
    _check_types(options)
    journal = journal_location(options.journal)
    switch = partial(kill_switch, sentinel_path(journal))
    host_ram = None if options.host_ram is None else parse_size(options.host_ram, name="host_ram")
    cap = None if options.vram is None else parse_size(options.vram, name="vram")
    modules, owner = components_of(pipe)
    for name in (*modules, *([options.name] if options.name is not None else [])):
        _check_name(name)
    device = _device(options.device, cap)
    device.guard()
    # Under a kill switch nothing is hooked that the initial placement does not need.
    pipeline = ManagedPipeline(modules, device=device, owner=owner, minimal=switch() is not None)
    try:
        return _describe(pipeline, options, journal=journal, switch=switch, host_ram_bytes=host_ram, place=place)
    except BaseException:
        pipeline.detach()
        raise


def _device(given: str | Device, cap_bytes: int | None) -> Device:
    if isinstance(given, str):
        return open_device(given, cap_bytes=cap_bytes, allocator_settings=allocator_settings())
    if cap_bytes is not None:
        given.limit(cap_bytes)
    return given


def _describe(
    pipeline: ManagedPipeline,
    options: Options,
    *,
    journal: str,
    switch: Callable[[], KillSwitch | None],
    host_ram_bytes: int | None,
    place: Place | None,
) -> Setup:
    policy = options.policy
    workload, *others = (*(() if options.workload is None else (options.workload,)), *options.workloads) or (None,)
    workloads = tuple(one for one in dict.fromkeys(others) if one is not None and one != workload)
    # A plan for all ranks divides a host's memory itself; what is left to divide beforehand is among such groups.
    size = 1 if place is None else place.facts.size
    num_local = max(1, num_local_ranks() // size)
    worker = PipelineWorker(
        pipeline,
        warmup=options.warmup,
        target_steps=1 if workload is None else workload.steps,
        host_ram_bytes=host_ram_bytes,
        num_local_ranks=num_local,
        tolerance=options.tolerance,
    )
    reading = worker.device()
    chosen = configured_placements(worker.specs, options.modes, num_slots=policy.num_slots)
    if options.placement is not None:
        chosen = {**read_placement(options.placement, worker.specs, pipeline), **chosen}
    initial = initial_placement(worker.specs, chosen, reading.cap_bytes, policy)
    identity = _identity(options, worker.specs)
    parts = fingerprint(
        specs=worker.specs,
        device=reading,
        host=read_host(host_ram_bytes=host_ram_bytes, num_local_ranks=num_local),
        workload=workload,
        configured=chosen,
        content=identity,
        num_ranks=num_ranks() if place is None else size,
        rank=None if place is None else place.facts.rank,
        host_ram_bytes=host_ram_bytes,
        workloads=workloads,
    )
    reasons = {spec.name: spec.fixed_reason for spec in worker.specs if spec.fixed_reason is not None}
    return Setup(
        worker=worker,
        journal=journal,
        stream=_stream(options, worker.specs, reading.index, place),
        version=importlib.metadata.version("residency"),
        initial=initial,
        configured={**dict.fromkeys(chosen, "configured by the worker"), **reasons},
        fingerprint=parts,
        fingerprint_digest=fingerprint_digest(parts),
        workload=workload,
        workloads=workloads,
        policy=policy,
        has_warmup=options.warmup is not None,
        is_identified=set(identity) == {spec.name for spec in worker.specs},
        num_ranks=num_ranks() if place is None else 1,
        ranks=open_ranks(place),
        switch=switch,
    )


def _identity(options: Options, specs: Sequence[ComponentSpec]) -> dict[str, str]:
    identity = dict(options.identity or {})
    names = tuple(spec.name for spec in specs)
    for name in identity:
        if name not in names:
            raise UnknownComponent(component=name, known=names)
    return identity


def read_placement(
    path: str | os.PathLike[str], specs: Sequence[ComponentSpec], pipeline: ManagedPipeline
) -> dict[str, ComponentPlacement]:
    """Return the placement that `Manager.export_placement` wrote, for every component that can be moved.

    Raises SettingsError for a file that is none, or another pipeline's.
    """
    try:
        placement = Placement.from_bytes(Path(path).read_bytes())
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise SettingsError(
            f"placement file {str(path)!r} cannot be used: {error}; write one with export_placement()", path=str(path)
        ) from error
    by_name = {spec.name: spec for spec in specs}
    if placement.components.keys() != by_name.keys():
        raise SettingsError(
            f"placement file {str(path)!r} is another pipeline's: it places {', '.join(sorted(placement.components))}, "
            f"this one has {', '.join(sorted(by_name))}; write one with export_placement()",
            path=str(path),
        )
    movable = {name: one for name, one in placement.components.items() if by_name[name].fixed_reason is None}
    for name, one in movable.items():
        try:
            pipeline.check(name, one)
        except ModeUnavailable as error:
            raise SettingsError(f"placement file {str(path)!r}: {error}", path=str(path)) from error
    return movable


def _stream(options: Options, specs: Sequence[ComponentSpec], device_index: int, place: Place | None) -> str:
    """Return the name of this worker's events; every rank of one has its own."""
    name = worker_name(options.name)
    if place is None:
        return name or _derived_name(specs, device_index)
    return f"{name or _derived_name(specs, 0)}.rank{place.facts.rank}"


def _derived_name(specs: Sequence[ComponentSpec], device_index: int) -> str:
    """Return a name that is the same at every start of this pipeline on this device."""
    parts = [sorted((spec.name, spec.class_name) for spec in specs), device_index]
    return "worker-" + hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:12]


def _check_types(options: Options) -> None:
    """Raise SettingsError for what a worker without a type checker may have passed by mistake."""
    warmup, workload = options.warmup, options.workload
    if warmup is not None and not callable(warmup):
        raise SettingsError(
            f"warmup is a {type(warmup).__name__}, not a function; pass one that takes a Workload and runs one request"
        )
    if workload is not None and not isinstance(workload, Workload):
        raise SettingsError(
            f"workload is a {type(workload).__name__}, not a Workload; "
            "pass residency.Workload(width=..., height=..., frames=..., steps=..., batch=...)"
        )
    workloads: object = options.workloads
    if not isinstance(workloads, Sequence) or not all(isinstance(one, Workload) for one in workloads):
        raise SettingsError(f"workloads is {workloads!r}; pass a list of residency.Workload")
    policy: object = options.policy
    if not isinstance(policy, Policy):
        raise SettingsError(f"policy is {policy!r}; pass a residency.Policy, or leave it out")
    if not isinstance(options.device, str) and not callable(getattr(options.device, "limit", None)):
        raise SettingsError(f"device is {options.device!r}; pass 'auto', 'cuda', 'cpu', or a Device")
    tolerance: object = options.tolerance
    is_part = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool) and 0 <= tolerance < math.inf
    if tolerance is not None and not is_part:
        raise SettingsError(
            f"tolerance is {tolerance!r}; pass a part of the largest value, from 0, such as 0.001, or leave it out"
        )
    if options.outside not in {*Outside, *(one.value for one in Outside)}:
        words = ", ".join(one.value for one in Outside)
        raise SettingsError(f"outside is {options.outside!r}; pass one of {words}")
    for name, value in (("modes", options.modes), ("identity", options.identity or {})):
        if not isinstance(value, Mapping):
            raise SettingsError(
                f"{name} is a {type(value).__name__}, {value!r}; pass a mapping of component to {_OF[name]}"
            )
    for component, content in (options.identity or {}).items():
        if not isinstance(content, str) or not content:
            raise SettingsError(
                f"identity of {component!r} is {content!r}; pass text that changes when the weights do, a revision, say"
            )


def _check_name(name: object) -> None:
    """Raise SettingsError for a name that no journal could hold."""
    try:
        is_text = isinstance(name, str) and bool(name) and name.encode() is not None
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise SettingsError(f"the name {name!r} is no text; name workers and components with Unicode text")
    text = str(name)
    if len(text) > _NAME_MAX or not text.isprintable():
        raise SettingsError(
            f"the name {text[:40]!r} has {len(text)} characters; names are one line of at most {_NAME_MAX}, without "
            "control characters"
        )


_NAME_MAX = 256  # characters; every line of the log of a worker names it
_OF = {"modes": "mode", "identity": "what identifies its weights"}
