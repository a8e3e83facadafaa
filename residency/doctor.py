"""What `residency doctor` looks at: host, libraries, device, journal and kill switch. It changes nothing."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import stat
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from residency.errors import ResidencyError
from residency.journal import sqlite
from residency.journal.location import is_server, shown_location
from residency.journal.reader import JournalReader
from residency.rendering import size
from residency.settings import allocator_settings, journal_location, kill_switch, sentinel_path, sqlite_path

if TYPE_CHECKING:
    from collections.abc import Iterator

# Under this, a full disk is near enough to say so: a round of a large pipeline writes well under 1 MiB.
FREE_DISK_BYTES_MIN = 64 * 2**20
# WAL needs memory shared between processes, which file systems over a network do not give.
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "fuse.sshfs", "afs"})


class Health(Enum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at: what was found, and what to do about it if it is not well."""

    subject: str
    health: Health
    found: str
    remedy: str | None = None


def examine(journal: str | None) -> list[Check]:
    """Look at everything, in the order a worker meets it. Read-only; imports torch."""
    location = journal_location(journal)
    return [*_software(), *_host(), *_device(), *_kill_switch(location), *_journal(location)]


def _ok(subject: str, found: str) -> Check:
    return Check(subject=subject, health=Health.OK, found=found)


def _warning(subject: str, found: str, remedy: str) -> Check:
    return Check(subject=subject, health=Health.WARNING, found=found, remedy=remedy)


def _problem(subject: str, found: str, remedy: str) -> Check:
    return Check(subject=subject, health=Health.PROBLEM, found=found, remedy=remedy)


def _software() -> Iterator[Check]:
    yield _ok("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield _ok("residency", importlib.metadata.version("residency"))
    for name, purpose in (("torch", None), ("diffusers", "adapters for diffusers pipelines"), ("transformers", None)):
        try:
            yield _ok(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            if name == "torch":
                yield _problem(name, "not installed", "pip install torch")
            elif purpose:
                yield _warning(name, "not installed", f"pip install 'residency[diffusers]' for {purpose}")


def _host() -> Iterator[Check]:
    try:
        reading = importlib.import_module("residency.gpu.host_memory").read_host()
    except (ImportError, OSError) as error:
        yield _problem("host memory", f"unreadable: {error}", "install torch, and mount /proc and /sys")
        return
    cap = "no cgroup cap" if reading.cgroup_cap_bytes is None else f"cgroup cap {size(reading.cgroup_cap_bytes)}"
    found = f"{size(reading.available_bytes)} available, {cap}, {size(reading.pin_budget_bytes)} may be pinned"
    if reading.pin_budget_bytes == 0:
        yield _warning("host memory", found, "host copies stay pageable, which is slower; free some memory")
    else:
        yield _ok("host memory", found)


def _device() -> Iterator[Check]:
    try:
        torch = importlib.import_module("torch")
        available = torch.cuda.is_available()
    except (ImportError, RuntimeError, OSError) as error:
        yield _problem("device", f"torch cannot be used: {error}", "install a torch that matches the driver")
        return
    if not available:
        yield _warning("device", "no CUDA device", "the emulated device is used: for tests and for the demo only")
    for index in range(torch.cuda.device_count() if available else 0):
        properties = torch.cuda.get_device_properties(index)
        yield _ok(f"device {index}", f"{properties.name}, {size(properties.total_memory)}")
    yield _ok("allocator settings", allocator_settings() or "torch's defaults")


def _kill_switch(location: str) -> Iterator[Check]:
    thrown = kill_switch(sentinel_path(location))
    if thrown is None:
        yield _ok("kill switch", "off")
    else:
        remedy = f"remove {thrown.value}" if thrown.by == "sentinel" else f"unset {thrown.by}"
        yield _warning("kill switch", f"on by {thrown.by}={thrown.value}", f"{remedy} to let workers calibrate")


def _journal(location: str) -> Iterator[Check]:
    if is_server(location):
        yield from _server(location)
        return
    yield from _sqlite_library()
    path = sqlite_path(location)
    if path is None:
        yield _problem("journal", f"{shown_location(location)} is no journal", "give a path or a sqlite:/// URL")
        return
    yield from _file_system(path)
    if not path.exists():
        yield _ok("journal", f"none at {path} yet; a worker makes it")
        return
    try:
        with closing(JournalReader.open(location)) as reader:
            streams = reader.streams()
            last = next((event.position for event in reader.events(limit=1, newest_first=True)), 0)
    except ResidencyError as error:
        yield _problem("journal", str(error), "see 'residency verify'")
        return
    yield _ok("journal", f"{path}: {size(path.stat().st_size)}, events: {last}, streams: {len(streams)}")
    if mode := stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield _warning("journal's mode", f"others may use it ({mode:03o})", f"chmod 600 {path}")


def _server(location: str) -> Iterator[Check]:
    shown = shown_location(location)
    try:
        with closing(JournalReader.open(location)) as reader:
            streams = reader.streams()
            last = reader.last_position()
            (row,) = reader.query(_SERVER_SETTINGS)
    except ResidencyError as error:
        yield _problem("journal", str(error), "see the section on PostgreSQL in docs/operations.md")
        return
    yield _ok("journal", f"{shown}: events: {last}, streams: {len(streams)}")
    version, fsync, commits = map(str, row)
    found = f"PostgreSQL {version}, fsync {fsync}, synchronous_commit {commits} (workers set it on)"
    if fsync == "on":
        yield _ok("server", found)
    else:
        yield _problem("server", found, "turn fsync on: workers refuse a server that does not write durably")


_SERVER_SETTINGS = """
SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit')
"""


def _sqlite_library() -> Iterator[Check]:
    found = f"{sqlite.driver.__name__.partition('.')[0]}, SQLite {'.'.join(map(str, sqlite.VERSION))}"
    if sqlite.is_safe(sqlite.VERSION):
        yield _ok("sqlite", found)
    else:
        yield _warning("sqlite", f"{found} can lose rows when checkpoints race", "pip install pysqlite3")


def _file_system(path: Path) -> Iterator[Check]:
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    kind = _file_system_type(folder)
    free = shutil.disk_usage(folder).free
    found = f"{kind or 'unknown type'}, {size(free)} free at {folder}"
    if kind in NETWORK_FILE_SYSTEMS:
        yield _problem("file system", found, "put the journal on a local disk: WAL does not work over a network")
    elif free < FREE_DISK_BYTES_MIN:
        yield _warning("file system", found, "free some space: a journal that cannot be written stops rounds")
    else:
        yield _ok("file system", found)


def _file_system_type(folder: Path) -> str | None:
    """Return the type of the file system a folder is on, None where the host does not tell."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return None
    rows = [line.split(" ") for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    resolved = str(folder.resolve())
    points = [(row[1].replace("\\040", " "), row[2]) for row in rows if len(row) > 2]
    over = [
        (point, kind) for point, kind in points if resolved == point or resolved.startswith(point.rstrip("/") + "/")
    ]
    # The last mount of the longest path covers the earlier ones.
    return max(enumerate(over), key=lambda item: (len(item[1][0]), item[0]))[1][1] if over else None
