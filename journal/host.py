"""Which boot of which machine this process lives in."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine; `unknown` where the system has none. Containers share their host's."""
    try:
        return _BOOT_ID.read_text("ascii").strip() or "unknown"
    except (OSError, UnicodeDecodeError):
        return "unknown"
