"""Host memory: how much there is for host copies, exact mappings to hold them, and what the kernel counts."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import torch

from residency.gpu.records import HostReading, HostUsage

if TYPE_CHECKING:
    from collections.abc import Iterator

# What the rest of the host keeps when weights are pinned: pinned pages can be neither swapped nor reclaimed.
RESERVE_FRACTION = 0.05
RESERVE_BYTES_MIN = 2 * 2**30
# cgroup v1 writes "no limit" as the largest page-aligned 63-bit number; nothing near it is a limit.
NO_LIMIT_BYTES = 2**60
HUGE_PAGE_BYTES = 2 * 2**20  # of x86-64, and of Arm with 4 KiB pages; a shorter mapping cannot hold one


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


def read_host(root: Path = Path("/"), *, host_ram_bytes: int | None = None, num_local_ranks: int = 1) -> HostReading:
    """Return what the host and every cgroup above this process leave. Read-only; never negative.

    host_ram_bytes: what the user grants to host copies; it replaces the reserve, and never exceeds what there is.
    num_local_ranks: processes of this host that share the budget, also a granted one, in equal parts. All of them must
    read before any of them pins: what one has pinned is no longer there to be shared.
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
        available_bytes=available_bytes,
        cgroup_cap_bytes=cap_bytes,
        pin_budget_bytes=max(0, budget_bytes) // num_local_ranks,
    )


def allocate(nbytes: int, *, huge_pages: bool = True) -> torch.UntypedStorage:
    """Return a host storage of exactly that many bytes on its own private mapping, zero and not yet touched.

    The mapping ends with the storage. torch's own pinned allocator would round up to a power of two and keep it.
    huge_pages: ask the kernel for them; it may refuse. Raises MemoryError if the host refuses.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the host refuses a mapping of {nbytes} bytes: {error}") from error
    if huge_pages:
        _advise_huge_pages(mapping)
    return torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()


def copy_into(target: torch.UntypedStorage, source: torch.UntypedStorage, *, offset_bytes: int = 0) -> None:
    """Copy a whole host storage to an offset of another, on this thread alone and without the interpreter's lock.

    Page faults of either side happen here, too. Neither operators nor torch's own threads are involved, of which
    every calling thread would get a set of its own. Raises ValueError if it does not fit or is not host memory.
    """
    nbytes = source.nbytes()
    if target.device.type != "cpu" or source.device.type != "cpu":
        raise ValueError(f"a copy from {source.device} to {target.device} is not one within host memory")
    if offset_bytes < 0 or offset_bytes + nbytes > target.nbytes():
        raise ValueError(f"{nbytes} bytes at {offset_bytes} do not fit into a storage of {target.nbytes()} bytes")
    if nbytes:
        ctypes.memmove(target.data_ptr() + offset_bytes, source.data_ptr(), nbytes)


def trim() -> bool:
    """Give memory that was freed, but kept by the C library's heap, back to the host; whether there was any.

    Worth a call after much was freed; it takes time in proportion to the heap. False, and nothing done, without glibc.
    """
    # Only the heap: torch's cache of pinned memory is left alone. Our host copies are mappings of our own that never
    # go through that cache, so that emptying it would free nothing of ours; it would only take the pages that others
    # recycle in every request, and page-locking those anew costs them seconds.
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return malloc_trim is not None and bool(malloc_trim(0))


def locked_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of this process that the kernel counts as locked or pinned; 0 if it does not tell. Read-only.

    A lower bound: the NVIDIA driver locks pages without telling the kernel's counters, so that what `cudaHostRegister`
    has page-locked may be in neither. The device's own books are what tells how much that is.
    """
    status = _read_table(root / "proc/self/status", scale=1024)
    return status.get("VmLck:", 0) + status.get("VmPin:", 0)


def booked_against_kernel(booked_bytes: int, root: Path = Path("/")) -> HostUsage:
    """Return the bytes of host copies that the caller has booked beside what the kernel counts. Read-only and cheap.

    The kernel's figures are those of the whole process, weights or not, and may lag by some MiB; those that it does
    not tell are 0. For locked memory see `locked_bytes`.
    """
    # Not from smaps_rollup: it would walk every page of the process, about 10 ms a GiB.
    status = _read_table(root / "proc/self/status", scale=1024)
    return HostUsage(
        booked_bytes=booked_bytes,
        anonymous_bytes=status.get("RssAnon:", 0),
        shared_bytes=status.get("RssShmem:", 0),
        file_bytes=status.get("RssFile:", 0),
        swapped_bytes=status.get("VmSwap:", 0),
        locked_bytes=locked_bytes(root),
    )


def _advise_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for huge pages: faulting in, page-locking and freeing gigabytes is several times faster with them."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and len(mapping) >= HUGE_PAGE_BYTES:
        with suppress(OSError):  # A kernel without them; small pages do as well, only slower.
            mapping.madvise(advice)


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
