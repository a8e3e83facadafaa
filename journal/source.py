"""How a journal's file is opened for reading so that nothing is written beside it, and how staleness is noticed."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from residency.journal.location import SQLITE_SUFFIXES, beside
from residency.journal.sqlite import FAILURES, cannot_open, connect, driver

if TYPE_CHECKING:
    from typing import Literal

# Appends do not block readers in WAL mode; only recovery after a crash does, for a moment.
WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class _State:
    """What tells that somebody wrote to a journal: to the file itself, or to its WAL."""

    inode: int
    num_bytes: int
    changed_ns: int
    wal_bytes: int


def _state_of(path: Path) -> _State:
    found = os.stat(path)
    try:
        wal_bytes = os.stat(beside(path, "-wal")).st_size
    except FileNotFoundError:
        wal_bytes = 0
    return _State(found.st_ino, found.st_size, found.st_mtime_ns, wal_bytes)


@dataclass(frozen=True, slots=True)
class Source:
    """What is read. state: what it must still be, where it is read without SQLite's locks. copy: a temporary folder."""

    connection: driver.Connection
    state: _State | None = None
    copy: str | None = None

    def is_outdated(self, path: Path) -> bool:
        """Whether what was read may be mixed, or old."""
        try:
            return self.state is not None and _state_of(path) != self.state
        except OSError:
            return False  # it was moved away: what is open is all there is

    def close(self) -> None:
        """Close it, and remove the copy if it reads one."""
        self.connection.close()
        if self.copy is not None:
            shutil.rmtree(self.copy, ignore_errors=True)


def open_source(path: Path, *, is_shared: bool) -> Source:
    """Open a journal so that nothing is written beside it. is_shared: this process has it open already.

    Where -wal and -shm lie beside it, it is in use, or was when its worker died: SQLite reads both, and takes its locks
    in the -shm. Without them SQLite would make them.

    Raises:
        OSError, driver.Error: it cannot be read.
    """
    state = _state_of(path)
    # Two connections of one process must share SQLite's locks, or one that closes drops those of the other.
    if is_shared or (beside(path, "-wal").exists() and beside(path, "-shm").exists()):
        try:
            return Source(_connected(path, "ro"))
        except FAILURES as error:
            # Where this process has it open, a copy is out of the question: to close the file drops SQLite's locks.
            if is_shared or not cannot_open(error):
                raise
            # The -shm of another user, or a folder that cannot be written.
    if not state.wal_bytes:
        # `immutable` ignores the WAL, so it is right only where there is none.
        return Source(_connected(path, "immutable"), state=state)
    folder = tempfile.mkdtemp(prefix="residency-journal-")
    try:
        for name in (path, *(beside(path, suffix) for suffix in SQLITE_SUFFIXES if suffix != "-shm")):
            if name.exists():
                shutil.copyfile(name, Path(folder) / name.name)
        return Source(_connected(Path(folder) / path.name, "ro"), state=state, copy=folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _connected(path: Path, mode: Literal["ro", "immutable"]) -> driver.Connection:
    connection = connect(path, mode=mode, wait_s=WAIT_S)
    try:
        # SQLite opens lazily; what is wrong shows at the first read.
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection
