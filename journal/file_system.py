"""Which kind of file system a path is on: some let several hosts use one file, and there a WAL loses events."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")

# A WAL's index is memory that all processes share, which those of several hosts do not have. A file system of FUSE may
# be anything, a network's most of all.
_SHARED = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"),
        *("ocfs2", "orangefs", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs"),
    }
)
# What is FUSE and surely on this host.
_LOCAL_FUSE = frozenset({"fuseblk", "fuse.ntfs-3g", "fuse.exfat", "fuse.fuse-overlayfs"})

_ESCAPED = re.compile(r"\\([0-7]{3})")


def shared_file_system(path: Path, *, mounts: str | None = None) -> str | None:
    """Return the kind of file system that a file is on if several hosts may share it; None if not, or not known.

    mounts: the system's table of mounts, read from the system if it is not given.
    """
    kind = file_system(path, mounts=mounts)
    if kind is None or kind in _LOCAL_FUSE:
        return None
    return kind if kind in _SHARED or kind == "fuse" or kind.startswith("fuse.") else None


def file_system(path: Path, *, mounts: str | None = None) -> str | None:
    """Return the kind of file system that a path is on, as the system calls it; None where that is not known."""
    try:
        table = _MOUNTS.read_text("utf-8", errors="surrogateescape") if mounts is None else mounts
    except OSError:
        return None  # no Linux, or no /proc
    real = os.path.realpath(path)
    found: tuple[int, str] | None = None
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])
        is_above = real == point or real.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later hides the other.
        if is_above and (found is None or len(point) >= found[0]):
            found = len(point), after.split(" ")[0]
    return None if found is None else found[1]
