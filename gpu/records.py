"""What was measured, as values: one record per measured request, readings of device, link and host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from residency.gpu.workload import Workload


class RequestKind(Enum):
    """Why a request was run. Warmup peaks and serving peaks are never mixed."""

    BOUNDED = "bounded"  # the first, cold one; kept small
    PROBE = "probe"  # at the default shape, shrunk until it fits
    BASELINE = "baseline"  # timing samples of the placement before the round
    VALIDATION = "validation"  # under the proposed placement
    REWARM = "rewarm"  # after a rollback


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """One memory phase of a request; phases with one key are merged (peaks: max, durations: sum).

    key: 'use:NAMES' while components run, 'whole:NAMES' while some are whole on the device for a change of their
    weights, 'after:NAME' between uses, 'before' until the first use.
    active: components that run. lingering: the one used last, if none runs.
    num_occurrences: how many intervals were merged. Durations are in ns of the device's clock.
    wait_ns: of the duration, how long computing waited for weights. whole: components that were whole on the device,
    whatever their placement, and the window with them not there at all.
    """

    key: str
    active: tuple[str, ...]
    lingering: str | None
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    duration_ns: int
    num_occurrences: int
    wait_ns: int = 0
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One measured request under one placement. A failed forward leaves a record, too.

    workload: the shape that ran. target_steps: of the default workload, to scale repeated phases.
    uses: component entries in order, consecutive ones of one component merged: (component, count).
    layer_uses: component -> layer group -> how often each layer ran.
    layer_ns: component -> layer group -> what each layer computes, in ns of the device: median over its uses, without
    waiting for weights; 0 for one that did not run. layer_order: component -> its layers in the order they first ran.
    baseline_*_bytes: the allocator's figures just before the request.
    error: the exception's text if it failed. output_digest: SHA-256 of the output, in hex.
    """

    kind: RequestKind
    workload: Workload
    target_steps: int
    placement_digest: str
    succeeded: bool
    out_of_memory: bool
    error: str | None
    baseline_allocated_bytes: int
    baseline_reserved_bytes: int
    phases: tuple[PhaseRecord, ...]
    uses: tuple[tuple[str, int], ...]
    layer_uses: Mapping[str, Mapping[str, tuple[int, ...]]]
    duration_ns: int
    to_device_bytes: int
    to_host_bytes: int
    output_digest: str | None
    layer_ns: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    layer_order: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)

    @property
    def allocated_peak_bytes(self) -> int:
        """Largest allocated peak over all phases."""
        return max((phase.allocated_peak_bytes for phase in self.phases), default=self.baseline_allocated_bytes)

    @property
    def reserved_peak_bytes(self) -> int:
        """Largest reserved peak over all phases."""
        return max((phase.reserved_peak_bytes for phase in self.phases), default=self.baseline_reserved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReading:
    """Speed of the host-device link in bytes/s, measured once per machine by real copies."""

    to_device_pinned: float
    to_device_pageable: float
    to_host_pinned: float
    to_host_pageable: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """What a device is. `total_bytes` is the memory of the whole device, `cap_bytes` the limit in force.

    Without a limit `cap_bytes` is what this process could take when the device was opened: on CUDA what was free or
    already its own, in whole GiB (less than 2 GiB: exactly), so that it is the same at every start under the same
    conditions; on the emulated device everything.
    """

    kind: str
    name: str
    index: int
    total_bytes: int
    cap_bytes: int
    driver: str
    torch_version: str
    allocator_settings: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """Host memory: available now, the cgroup's cap (None: no cap), and what pinned host copies may take."""

    available_bytes: int
    cgroup_cap_bytes: int | None
    pin_budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUsage:
    """What is booked as this process's host copies, beside what the kernel counts as this process's memory.

    anonymous, shared and file bytes are resident; swapped is what was swapped out. locked_bytes: what the kernel knows
    to be locked; memory that a driver has page-locked need not be in it.
    """

    booked_bytes: int
    anonymous_bytes: int
    shared_bytes: int
    file_bytes: int
    swapped_bytes: int
    locked_bytes: int

    @property
    def held_bytes(self) -> int:
        """Memory that only this process's end, or its giving back, makes free: all but clean file pages."""
        return self.anonymous_bytes + self.shared_bytes + self.swapped_bytes

    @property
    def unbooked_bytes(self) -> int:
        """Held beside what is booked: the interpreter, libraries, copies that nobody has booked. Never negative."""
        return max(0, self.held_bytes - self.booked_bytes)

    @property
    def missing_bytes(self) -> int:
        """Booked, yet not held: never touched, in file mappings, or booked twice. Never negative."""
        return max(0, self.booked_bytes - self.held_bytes)
