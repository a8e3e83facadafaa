"""What a process takes of the host's memory, as the kernel and torch tell it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path
from typing import Any

import torch

_STATUS = {
    "VmHWM": "peak_bytes",
    "VmRSS": "rss_bytes",
    "VmLck": "locked_bytes",
    "VmPin": "pinned_bytes",
    "RssAnon": "anonymous_bytes",
    "RssFile": "file_bytes",
    "RssShmem": "shared_bytes",
}
_ROLLUP = {
    "Pss": "rollup_pss_bytes",
    "Anonymous": "rollup_anonymous_bytes",
    "Locked": "rollup_locked_bytes",
    "Shared_Clean": "rollup_shared_clean_bytes",
    "Private_Dirty": "rollup_private_dirty_bytes",
}
_MEMINFO = {"MemAvailable": "machine_available_bytes", "MemTotal": "machine_total_bytes"}
# What torch's own allocator of page-locked memory holds: it is mapped from the driver, so that the kernel's figures
# of anonymous memory may not have it.
_TORCH = {"allocated_bytes.current": "torch_pinned_bytes", "allocated_bytes.peak": "torch_pinned_peak_bytes"}


def host_reading(proc: Path = Path("/proc")) -> dict[str, int]:
    """Return the process's host memory in bytes; what the machine does not tell is left out. Read-only."""
    reading = {
        **_read(proc / "self/status", _STATUS),
        **_read(proc / "self/smaps_rollup", _ROLLUP),
        **_read(proc / "meminfo", _MEMINFO),
    }
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        stats = cuda.host_memory_stats()
        reading |= {name: int(stats[key]) for key, name in _TORCH.items() if key in stats}
    return reading


def give_back_heap() -> None:
    """Let the C library return freed memory to the kernel, so that nothing counts that nobody holds."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak(proc: Path = Path("/proc")) -> None:
    """Let the kernel's peak of resident memory begin anew, where it can."""
    with contextlib.suppress(OSError):
        (proc / "self/clear_refs").write_text("5", encoding="ascii")


def _read(path: Path, wanted: dict[str, str]) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        key, _, value = line.partition(":")
        number = value.split()[0] if value.split() else ""
        if key in wanted and number.isdecimal():
            found[wanted[key]] = int(number) * 1024
    return found
