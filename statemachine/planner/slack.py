"""What the allocator keeps beside what is allocated: how much of it each memory phase needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from residency.gpu.records import PhaseRecord, RequestRecord


def slack_bytes(record: RequestRecord) -> tuple[tuple[PhaseRecord, int], ...]:
    """Return every memory phase of a record with the bytes it needs reserved beyond its allocated peak.

    An allocator keeps what it once reserved: after a decode that took 3 GiB beside the weights as much is reserved,
    free for whoever comes next. So a phase in which nothing more was reserved needs no more slack than the last one
    that did; what it had beyond that is memory that other phases left.
    """
    found = []
    reserved = record.baseline_reserved_bytes
    slack = max(0, record.baseline_reserved_bytes - record.baseline_allocated_bytes)
    for phase in record.phases:
        own = max(0, phase.reserved_peak_bytes - phase.allocated_peak_bytes)
        slack = own if phase.reserved_peak_bytes > reserved else min(own, slack)
        reserved = max(reserved, phase.reserved_peak_bytes)
        found.append((phase, slack))
    return tuple(found)
