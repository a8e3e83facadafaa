"""Which record time is read from, and what transfers cost in records that do not tell them from computing."""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING

from residency.gpu.placement import HostTier, Mode
from residency.gpu.records import RequestKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from residency.gpu.placement import ComponentPlacement
    from residency.gpu.records import LinkReading, RequestRecord
    from residency.gpu.specs import ComponentSpec
    from residency.gpu.workload import Workload

# Cold requests hold one-time costs, and a probe leaves the allocator as no serving request finds it.
_STEADINESS = {
    RequestKind.BOUNDED: 0,
    RequestKind.PROBE: 1,
    RequestKind.REWARM: 2,
    RequestKind.VALIDATION: 2,
    RequestKind.BASELINE: 2,
}


def timing_record(records: Iterable[RequestRecord], workload: Workload) -> RequestRecord | None:
    """Return the record that time is read from: a success, as large as the workload, steady, of median duration."""
    successes = [record for record in records if record.succeeded]
    if not successes:
        return None

    def rank(record: RequestRecord) -> tuple[int, int, int]:
        # Of larger ones, which others that must fit have left, the one that is nearest.
        return min(record.workload.units, workload.units), _STEADINESS[record.kind], -record.workload.units

    best = max(rank(record) for record in successes)
    found = [record for record in successes if rank(record) == best]
    middle = median_low(record.duration_ns for record in found)
    return next(record for record in found if record.duration_ns == middle)


def waits_known(record: RequestRecord) -> bool:
    """Say whether a record tells waiting from computing; older ones do not."""
    return bool(record.layer_ns) or any(phase.wait_ns for phase in record.phases)


def transfer_ns(spec: ComponentSpec, placement: ComponentPlacement, record: RequestRecord, link: LinkReading) -> int:
    """Return how long a recorded request waited for a component's weights if nothing overlapped, as it was once."""
    if placement.mode is Mode.RESIDENT:
        return 0
    speed = link.to_device_pinned if placement.tier is HostTier.PINNED else link.to_device_pageable
    if placement.mode is Mode.COMPONENT_OFFLOAD:
        # It stays until another one is entered.
        moved = spec.total_bytes * sum(1 for name, _ in record.uses if name == spec.name)
    else:
        entries = sum(count for name, count in record.uses if name == spec.name)
        seen = record.layer_uses.get(spec.name, {})
        moved = 0
        for group in spec.groups:
            counts = seen.get(group.name, ())
            # No counts at all: the layers were not observed, only the component; each then ran whenever it did.
            default = 0 if counts else entries
            for index in spec.streamed_layers(placement)[group.name]:
                moved += group.layer_bytes[index] * (counts[index] if index < len(counts) else default)
    return round(moved * 1e9 / speed)
