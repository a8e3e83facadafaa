"""The modelled clock of the emulated device: time that depends on what was done, never on the machine that did it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledSpeeds:
    """What the emulated device is assumed to do; no figure of it is a measurement.

    launch_ns: fixed cost of every kernel. All others are in bytes/s: of the device's memory, and of the link
    by direction and by whether the host side is page-locked. The defaults keep the proportions of a
    data-centre card on PCIe 5: the link is far slower than the memory, pageable copies far slower than pinned ones.
    """

    launch_ns: int = 5_000
    memory: int = 1_000 * 2**30
    to_device_pinned: int = 50 * 2**30
    to_device_pageable: int = 8 * 2**30
    to_host_pinned: int = 50 * 2**30
    to_host_pageable: int = 14 * 2**30


class ModelledClock:
    """Adds up modelled durations in ns. Thread-safe; the sum of the same work is the same in any order."""

    def __init__(self, speeds: ModelledSpeeds) -> None:
        self.speeds = speeds
        self._now_ns = 0
        self._link_free_ns = 0
        self._lock = threading.Lock()

    def now_ns(self) -> int:
        """Return the modelled ns since the clock was made. Read-only."""
        return self._now_ns

    def add_kernel(self, num_bytes: int) -> None:
        """Let a kernel's time pass: a launch, and its operands and results over the memory speed."""
        duration_ns = self.speeds.launch_ns + num_bytes * NS_PER_S // self.speeds.memory
        with self._lock:
            self._now_ns += duration_ns

    def add_copy(self, num_bytes: int, *, bytes_per_s: int) -> None:
        """Let the time of a copy over the link pass, behind those that are queued."""
        with self._lock:
            self._now_ns = max(self._now_ns, self._link_free_ns) + num_bytes * NS_PER_S // bytes_per_s
            self._link_free_ns = self._now_ns

    def queue_copy(self, num_bytes: int, *, bytes_per_s: int, after_ns: int) -> int:
        """Queue a copy behind those on the link, beginning no sooner than now and `after_ns`; returns when it ends."""
        with self._lock:
            start_ns = max(self._now_ns, self._link_free_ns, after_ns)
            self._link_free_ns = start_ns + num_bytes * NS_PER_S // bytes_per_s
            return self._link_free_ns

    def wait_until(self, time_ns: int) -> None:
        """Let time pass until a point, if that is still to come."""
        with self._lock:
            self._now_ns = max(self._now_ns, time_ns)
