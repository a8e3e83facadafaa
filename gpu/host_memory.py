"""Host memory: how much there is for host copies of weights, and exact mappings to hold them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import torch

from residency.gpu.records import HostReading

if TYPE_CHECKING:
    from collections.abc import Iterator

# What the rest of the host keeps when weights are pinned: pinned pages can be neither swapped nor reclaimed.
RESERVE_FRACTION = 0.05
RESERVE_BYTES_MIN = 2 * 2**30
# cgroup v1 writes "no limit" as the largest page-aligned 63-bit number; nothing near it is a limit.
NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hierarchy:
    """Where one version of cgroups keeps its figures, below the root of the file system."""

    mount: str
    caps: tuple[str, ...]
    usage: str
    reclaimable: str


_V1 = _Hierarchy(
    mount="sys/fs/cgroup/memory",
    caps=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
_V2 = _Hierarchy(
    mount="sys/fs/cgroup", caps=("memory.max", "memory.high"), usage="memory.current", reclaimable="inactive_file"
)
_HYBRID = replace(_V2, mount="sys/fs/cgroup/unified")


def read_host(root: Path = Path("/"), *, host_ram_bytes: int | None = None) -> HostReading:
    """Return what the host and every cgroup above this process leave. Read-only; never negative.

    host_ram_bytes: what the user grants to host copies; it replaces the reserve, and never exceeds what there is.
    Files that are missing or hold nonsense count as no limit; without /proc/meminfo nothing may be pinned.
    """
    meminfo = _read_table(root / "proc/meminfo", scale=1024)
    total_bytes = meminfo.get("MemTotal:", 0)
    available_bytes = meminfo.get("MemAvailable:", meminfo.get("MemFree:", 0))
    cap_bytes: int | None = None
    room_bytes = available_bytes
    for cap, room in _cgroup_limits(root):
        if total_bytes and cap >= total_bytes:
            continue
        cap_bytes = cap if cap_bytes is None else min(cap_bytes, cap)
        room_bytes = min(room_bytes, room)
    memory_bytes = total_bytes if cap_bytes is None else cap_bytes
    reserve_bytes = max(int(memory_bytes * RESERVE_FRACTION), RESERVE_BYTES_MIN)
    budget_bytes = room_bytes - reserve_bytes if host_ram_bytes is None else min(host_ram_bytes, room_bytes)
    return HostReading(
        available_bytes=available_bytes, cgroup_cap_bytes=cap_bytes, pin_budget_bytes=max(0, budget_bytes)
    )


def allocate(nbytes: int) -> torch.UntypedStorage:
    """Return a host storage of exactly that many bytes on its own private mapping, zero and not yet touched.

    The mapping ends with the storage. torch's own pinned allocator would round up to a power of two and keep it.
    Raises MemoryError if the host refuses.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the host refuses a mapping of {nbytes} bytes: {error}") from error
    return torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (cap, room) of every memory cgroup from this process's own up to the root of its mount."""
    for hierarchy, path in _memberships(root):
        mount = root / hierarchy.mount
        for level in (path, *path.parents):
            folder = mount / level
            caps = [cap for name in hierarchy.caps if (cap := _read_limit(folder / name)) is not None]
            if caps:
                stat = _read_table(folder / "memory.stat", scale=1)
                usage_bytes = _read_limit(folder / hierarchy.usage) or 0
                # Clean file pages count as used, yet the kernel gives them back when asked.
                in_use_bytes = max(0, usage_bytes - stat.get(hierarchy.reclaimable, 0))
                yield min(caps), max(0, min(caps) - in_use_bytes)
            # In a container the levels above are hidden, but v1 still tells the least limit of them all.
            inherited = _read_table(folder / "memory.stat", scale=1).get("hierarchical_memory_limit")
            if inherited is not None and inherited < NO_LIMIT_BYTES:
                yield inherited, inherited


def _memberships(root: Path) -> Iterator[tuple[_Hierarchy, PurePosixPath]]:
    """Yield the memory hierarchies this process is in, with its path below the mount."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        relative = PurePosixPath(path.lstrip("/") or ".")
        if ".." in relative.parts:
            # Outside the namespace's root: only what is visible at the mount can be read.
            relative = PurePosixPath(".")
        if number == "0" and not controllers:
            yield _V2, relative
            yield _HYBRID, relative
        elif "memory" in controllers.split(","):
            yield _V1, relative


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_limit(path: Path) -> int | None:
    text = _read_text(path).strip()
    if not text.isdecimal() or int(text) >= NO_LIMIT_BYTES:
        return None
    return int(text)


def _read_table(path: Path, *, scale: int) -> dict[str, int]:
    table = {}
    for line in _read_text(path).splitlines():
        key, *values = line.split()[:2] or [""]
        if values and values[0].isdecimal():
            table[key] = int(values[0]) * scale
    return table
