"""Speed of the link between host and device, by real copies that are timed."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from residency.gpu.host_memory import allocate
from residency.gpu.records import LinkReading

if TYPE_CHECKING:
    from collections.abc import Callable

    from residency.gpu.device import Device

LINK_COPY_BYTES = 256 * 2**20  # Long enough that the launch of a copy does not count.
LINK_COPY_BYTES_MIN = 2**20
LINK_COPIES = 3


def time_link(device: Device) -> LinkReading:
    """Return the speeds of both directions, pinned and pageable. Blocks until the copies have ended.

    The copies are smaller if the cap leaves little room. Raises torch.OutOfMemoryError if it leaves none.
    """
    on_device = _buffer(device)
    nbytes = on_device.numel()
    storage = allocate(nbytes)
    on_host = torch.empty(0, dtype=torch.uint8).set_(storage)
    on_host.fill_(1)  # Untouched pages would be faulted in by the copy that is timed.

    def speed(copy: Callable[[], object]) -> float:
        return _copy_speed(device, copy, nbytes)

    to_device_pageable = speed(lambda: on_device.copy_(on_host, non_blocking=False))
    to_host_pageable = speed(lambda: on_host.copy_(on_device, non_blocking=False))
    to_device_pinned, to_host_pinned = to_device_pageable, to_host_pageable
    if device.pin(storage):
        try:
            to_device_pinned = speed(lambda: on_device.copy_(on_host, non_blocking=True))
            to_host_pinned = speed(lambda: on_host.copy_(on_device, non_blocking=True))
        finally:
            device.unpin(storage)
    return LinkReading(
        to_device_pinned=to_device_pinned,
        to_device_pageable=to_device_pageable,
        to_host_pinned=to_host_pinned,
        to_host_pageable=to_host_pageable,
    )


def _buffer(device: Device) -> torch.Tensor:
    nbytes = LINK_COPY_BYTES
    while True:
        try:
            return device.allocate(nbytes)
        except torch.OutOfMemoryError:
            if nbytes <= LINK_COPY_BYTES_MIN:
                raise
            nbytes //= 2


def _copy_speed(device: Device, copy: Callable[[], object], nbytes: int) -> float:
    """Return the median speed in bytes/s, after one copy that does not count."""
    durations_ns = []
    for _ in range(LINK_COPIES + 1):
        device.synchronize()
        started_ns = time.perf_counter_ns()
        copy()
        device.synchronize()
        durations_ns.append(max(1, time.perf_counter_ns() - started_ns))
    return nbytes * 1e9 / statistics.median(durations_ns[1:])
