"""What a placement costs in time: measured compute scaled to the workload, and transfers that stay exposed."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from residency.gpu.placement import HostTier, Mode
from residency.gpu.records import RequestKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from residency.gpu.placement import ComponentPlacement
    from residency.gpu.records import LinkReading, PhaseRecord, RequestRecord
    from residency.gpu.specs import ComponentSpec
    from residency.gpu.workload import Workload
    from residency.statemachine.plan import PlanInputs

# Cold requests hold one-time costs, and a probe leaves the allocator as no serving request finds it.
_STEADINESS = {
    RequestKind.BOUNDED: 0,
    RequestKind.PROBE: 1,
    RequestKind.REWARM: 2,
    RequestKind.VALIDATION: 2,
    RequestKind.BASELINE: 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How a component is used by one request of the workload: loads if it leaves after use, and runs of each layer."""

    loads: int
    layer_uses: dict[str, tuple[int, ...]]


def timing_record(records: Iterable[RequestRecord], workload: Workload) -> RequestRecord | None:
    """Return the record that time is read from: a success, as large as the workload, steady, of median duration."""
    successes = [record for record in records if record.succeeded]
    if not successes:
        return None

    def rank(record: RequestRecord) -> tuple[int, int]:
        return min(record.workload.units, workload.units), _STEADINESS[record.kind]

    best = max(rank(record) for record in successes)
    found = [record for record in successes if rank(record) == best]
    middle = median_low(record.duration_ns for record in found)
    return next(record for record in found if record.duration_ns == middle)


def usage(spec: ComponentSpec, record: RequestRecord | None, workload: Workload) -> Usage:
    """Return how the workload uses a component, as far as the record shows.

    One that was never reached counts as loaded once and run at every step: a short probe may miss a second stage.
    """
    runs = _num_runs(record, spec.name)
    entries = _num_entries(record, spec.name)
    if record is None or not entries:
        unseen = {group.name: (workload.steps,) * len(group.layer_bytes) for group in spec.groups}
        return Usage(loads=1, layer_uses=unseen)
    seen = record.layer_uses.get(spec.name, {})
    layer_uses = {
        group.name: tuple(
            _scaled(count, record=record, workload=workload) if entries >= record.workload.steps else count
            for count in _padded(seen.get(group.name, ()), len(group.layer_bytes), default=entries)
        )
        for group in spec.groups
    }
    repeated = runs >= record.workload.steps
    loads = _scaled(runs, record=record, workload=workload) if repeated else runs
    return Usage(loads=loads, layer_uses=layer_uses)


def exposed_transfer_ns(spec: ComponentSpec, placement: ComponentPlacement, use: Usage, link: LinkReading) -> int:
    """Return the time that one request waits for a component's weights, in ns.

    The present engine loads on demand and overlaps nothing, so all of it is exposed; overlap comes in here.
    """
    if placement.mode is Mode.RESIDENT:
        return 0
    speed = link.to_device_pinned if placement.tier is HostTier.PINNED else link.to_device_pageable
    if placement.mode is Mode.COMPONENT_OFFLOAD:
        moved = spec.total_bytes * use.loads
    else:
        sizes = {group.name: group.layer_bytes for group in spec.groups}
        moved = sum(
            sizes[name][index] * use.layer_uses[name][index]
            for name, indices in spec.streamed_layers(placement).items()
            for index in indices
        )
    return round(moved * 1e9 / speed)


def compute_ns(inputs: PlanInputs, record: RequestRecord | None) -> int:
    """Return what one request of the workload takes beside transfers, in ns; 0 if no request succeeded."""
    if record is None:
        return 0
    scaled = sum(_phase_ns(phase, record, inputs.workload) for phase in record.phases)
    untracked = max(0, record.duration_ns - sum(phase.duration_ns for phase in record.phases))
    measured_under = inputs.measured_placements()[record.placement_digest]
    transfers = sum(
        exposed_transfer_ns(
            spec,
            measured_under.components[spec.name],
            usage(spec, record, inputs.workload),
            inputs.link,
        )
        for spec in inputs.specs
        if _num_entries(record, spec.name)
    )
    ratio = max(1.0, inputs.workload.units / record.workload.units)
    return round(max(0, scaled + untracked - transfers) * ratio)


def _phase_ns(phase: PhaseRecord, record: RequestRecord, workload: Workload) -> int:
    users = phase.active or ((phase.lingering,) if phase.lingering else ())
    entries = [_num_entries(record, name) for name in users]
    if entries and min(entries) >= record.workload.steps:
        return _scaled(phase.duration_ns, record=record, workload=workload)
    return phase.duration_ns


def _scaled(value: int, *, record: RequestRecord, workload: Workload) -> int:
    # Rounded up: half a use is a use.
    return -(-value * workload.steps // record.workload.steps)


def _num_runs(record: RequestRecord | None, component: str) -> int:
    return sum(1 for name, _ in record.uses if name == component) if record else 0


def _num_entries(record: RequestRecord | None, component: str) -> int:
    return sum(count for name, count in record.uses if name == component) if record else 0


def _padded(counts: tuple[int, ...], length: int, *, default: int) -> tuple[int, ...]:
    # No counts at all: the layers were not observed, only the component; each then ran whenever it did.
    return counts[:length] + (0 if counts else default,) * (length - len(counts))
