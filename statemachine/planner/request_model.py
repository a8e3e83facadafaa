"""One request of the workload as the planner sees it: who computes when and for how long, and what lies beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from residency.gpu.placement import HostTier
from residency.gpu.specs import ComponentSpec
from residency.statemachine.planner.observed import time_phases
from residency.statemachine.planner.time_phase import ComponentUse, LayerUse, TimePhase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from residency.gpu.placement import Placement
    from residency.gpu.records import LinkReading, RequestRecord
    from residency.gpu.workload import Workload

__all__ = ["ComponentUse", "LayerUse", "MemoryLimit", "RequestModel", "TimePhase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """What weights and window together may take on the device while exactly the components `active` run.

    lingering: the one that ran last, if none runs. While none runs the window is complete. whole: components that are
    whole on the device meanwhile, whatever their placement; then the window is not there at all.
    """

    key: str
    active: tuple[str, ...]
    lingering: str | None
    limit_bytes: int
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestModel:
    """Back-to-back requests of one workload on one device.

    phases: of one request, in order. *_bytes_per_s: of the link to the device. reserve_bytes: of cap_bytes, to stay
    free in every phase. limits: of device memory, instead of those that the phases imply; memory_limits: the ones that
    count. num_entries: component -> how often it is entered in each phase after another one, or at the start of a
    request. busy_slowdown: by which fraction computing is slower while a copy runs beside it.
    Raises ValueError if a phase names a component or layer that the specs do not have, or if a number is
    absurd.
    """

    specs: tuple[ComponentSpec, ...]
    phases: tuple[TimePhase, ...]
    pinned_bytes_per_s: int
    pageable_bytes_per_s: int
    cap_bytes: int
    reserve_bytes: int = 0
    limits: tuple[MemoryLimit, ...] = ()
    busy_slowdown: float = 0.0
    memory_limits: tuple[MemoryLimit, ...] = field(init=False, repr=False, compare=False)
    num_entries: Mapping[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if min(self.pinned_bytes_per_s, self.pageable_bytes_per_s) < 1:
            raise ValueError("a link that moves less than a byte a second is absurd")
        if not 0 <= self.busy_slowdown < 1:
            raise ValueError(f"computing that is slower by {self.busy_slowdown!r} while a copy runs is absurd")
        sizes = {(s.name, g.name): len(g.layer_bytes) for s in self.specs for g in s.groups}
        names = {spec.name for spec in self.specs}
        for phase in self.phases:
            _check_phase(phase, names, sizes)
        object.__setattr__(self, "num_entries", _num_entries(self.phases, sorted(names)))
        object.__setattr__(self, "memory_limits", self.limits or tuple(self._implied_limits()))

    @classmethod
    def from_records(
        cls,
        specs: Sequence[ComponentSpec],
        records: Sequence[RequestRecord],
        workload: Workload,
        link: LinkReading,
        cap_bytes: int,
        *,
        placements: Iterable[Placement],
        reserve_bytes: int = 0,
        limits: tuple[MemoryLimit, ...] = (),
        busy_slowdown: float = 0.0,
    ) -> RequestModel:
        """Return the model of one request of a workload, as measured; `placements`: those the records were taken under.

        Steps that repeat are scaled to those of the workload. limits: of device memory, instead of those that the peaks
        imply. Raises ValueError if a record was taken under a placement that is not given.
        """
        return cls(
            specs=tuple(specs),
            phases=time_phases(specs, records, workload, link, {one.digest: one for one in placements}),
            pinned_bytes_per_s=int(link.to_device_pinned),
            pageable_bytes_per_s=int(link.to_device_pageable),
            cap_bytes=cap_bytes,
            reserve_bytes=reserve_bytes,
            limits=limits,
            busy_slowdown=busy_slowdown,
        )

    @property
    def compute_ns(self) -> int:
        """What one request computes, in ns, if it never waits for weights."""
        return sum(phase.compute_ns for phase in self.phases)

    def spec(self, component: str) -> ComponentSpec:
        """Return the spec of a component; raises StopIteration for a stranger."""
        return next(spec for spec in self.specs if spec.name == component)

    def link_ns(self, num_bytes: int, tier: HostTier | None) -> int:
        """Return how long the link needs for some bytes of a host tier, in ns, rounded up."""
        speed = self.pinned_bytes_per_s if tier is HostTier.PINNED else self.pageable_bytes_per_s
        return -(-num_bytes * 10**9 // speed)

    def _implied_limits(self) -> Iterator[MemoryLimit]:
        room = self.cap_bytes - self.reserve_bytes
        for phase in self.phases:
            for name in phase.components:
                running, idle = room - phase.beside_bytes, room - phase.between_bytes
                yield MemoryLimit(key=f"use:{name}", active=(name,), lingering=None, limit_bytes=running)
                yield MemoryLimit(key=f"after:{name}", active=(), lingering=name, limit_bytes=idle)


def _check_phase(phase: TimePhase, names: set[str], sizes: Mapping[tuple[str, str], int]) -> None:
    if phase.passes < 1 or min(phase.beside_bytes, phase.between_bytes) < 0:
        raise ValueError(f"time phase {phase.name!r} has {phase.passes} passes, or less than no bytes")
    for use in phase.uses:
        if use.component not in names:
            raise ValueError(f"time phase {phase.name!r} runs {use.component!r}, which is no component")
        for layer in use.layers:
            if not 0 <= layer.index < sizes.get((use.component, layer.group), 0):
                raise ValueError(f"{use.component!r} has no layer {layer.index} in a group {layer.group!r}")
            if layer.compute_ns < 0 or layer.num_runs < 0:
                raise ValueError(f"layer {layer.index} of {layer.group!r} computes for less than no time")
        if use.compute_ns < 0:
            raise ValueError(f"{use.component!r} computes for {use.compute_ns} ns")


def _num_entries(phases: Sequence[TimePhase], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    found = {name: [0] * len(phases) for name in names}
    before: str | None = None
    for number, phase in enumerate(phases):
        for times in (1, phase.passes - 1):
            # The second pass shows what all later ones do.
            for use in phase.uses if times else ():
                if use.component != before:
                    found[use.component][number] += times
                before = use.component
    return {name: tuple(counts) for name, counts in found.items()}
