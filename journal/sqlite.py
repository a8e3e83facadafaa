"""The SQLite library: which one is used, how a file is opened with it, and what its errors mean."""

from __future__ import annotations

import ctypes
import logging
import os
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from residency.errors import JournalCorrupt, JournalError

if TYPE_CHECKING:
    import sqlite3 as driver
    from pathlib import Path
else:
    # One library per process: two of them on one file break each other's POSIX locks.
    try:
        from pysqlite3 import dbapi2 as driver
    except ImportError:
        import sqlite3 as driver

__all__ = ["FAILURES", "VERSION", "abandon", "cannot_open", "connect", "driver", "explain", "is_safe", "warn_if_unsafe"]

log = logging.getLogger(__name__)

VERSION: tuple[int, ...] = tuple(driver.sqlite_version_info)

# STRICT tables came with 3.37.
_VERSION_MIN = (3, 37, 0)

_warned = False


def is_safe(version: tuple[int, ...]) -> bool:
    """Whether a SQLite of this version keeps committed rows when a checkpoint and a commit of two processes meet.

    The WAL-reset defect: 3.7.0 to 3.51.2, fixed in 3.51.3 and 3.53.0, and in 3.50.7 and 3.44.6 of older lines.
    """
    fixed_since = {(3, 44): 6, (3, 50): 7, (3, 51): 3}
    line = (version[0], version[1])
    return line >= (3, 53) or (line in fixed_since and version[2] >= fixed_since[line])


def warn_if_unsafe() -> None:
    """Log, once per process, that this SQLite has the WAL-reset defect.

    Raises:
        JournalError: the library is too old for the journal's tables.
    """
    global _warned
    shown = ".".join(map(str, VERSION))
    if VERSION < _VERSION_MIN:
        raise JournalError(
            journal="library", problem=f"SQLite {shown} is older than 3.37", remedy="install the package pysqlite3"
        )
    if not _warned and not is_safe(VERSION):
        _warned = True
        log.warning(
            "SQLite %s can lose committed rows when two processes checkpoint at once (fixed in 3.51.3); "
            "the journal's lock file keeps its own writers apart; install the package pysqlite3 to be safe",
            shown,
        )


def connect(path: Path, *, mode: Literal["ro", "rw", "immutable"], wait_s: float) -> driver.Connection:
    """Open the file with the driver; it must exist. Transactions are only those that the caller begins.

    Raises:
        driver.Error: whatever SQLite says; see explain().
    """
    how = "mode=ro&immutable=1" if mode == "immutable" else f"mode={mode}"
    uri = f"file:{quote(os.fsencode(path))}?{how}"
    # Threads are kept apart by the lock of whoever owns the connection.
    connection = driver.connect(uri, uri=True, timeout=wait_s, isolation_level=None, check_same_thread=False)
    try:
        for pragma in (
            "trusted_schema = OFF",  # nothing in the file may call functions
            "cell_size_check = ON",  # damage is noticed where it is read
            "mmap_size = 0",  # an I/O error must be an error, not SIGBUS
            *(() if mode == "rw" else ("query_only = ON",)),
        ):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def lenient_text(content: bytes) -> str:
    """Decode text that may be damaged; what cannot be decoded is replaced, so that its hash no longer fits."""
    return content.decode("utf-8", "replace")


def abandon(connection: object) -> None:
    """Keep a connection that came over a fork from ever being closed, even at exit.

    Closing it in the child would roll back, or clean up, what the parent is in the middle of.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def cannot_open(error: BaseException) -> bool:
    """Whether SQLite could not open the file, or would have to write to read it."""
    said = str(error).lower()
    return "unable to open" in said or "readonly" in said


# (what SQLite says, what it means, what to do). First match wins.
_MEANINGS = (
    ("locked", "another writer has kept it locked for longer than {wait_s:g} s", "end that process, then try again"),
    ("busy", "another writer has kept it locked for longer than {wait_s:g} s", "end that process, then try again"),
    ("disk is full", "the disk is full", "free some space, then try again"),
    ("readonly", "it is read-only", "make the file and its folder writable, or name another journal"),
    ("unable to open", "it cannot be opened", "check that the file and its folder can be read and written"),
    ("disk i/o error", "the disk reported an I/O error", "check the disk, or name a journal on another one"),
    ("out of memory", "there is no memory left to read it", "free some memory, then try again"),
)

# What a driver raises: damaged text is not decoded, not even in SQLite's own messages.
FAILURES = (driver.Error, UnicodeDecodeError)

_CORRUPT = ("malformed", "not a database", "corrupt", "unsupported file format", "no such table", "no such column")
# What SQLite's driver says of damaged text, where it does not raise UnicodeDecodeError.
UNDECODABLE = "could not decode to utf-8"


def explain(error: BaseException, *, journal: object, wait_s: float = 0.0) -> JournalError:
    """Return the journal error that a driver error means. JournalCorrupt if the file itself is damaged."""
    said = str(error)
    lowered = said.lower()
    if isinstance(error, UnicodeDecodeError) or any(word in lowered for word in (*_CORRUPT, UNDECODABLE)):
        return JournalCorrupt(
            journal=str(journal),
            problem=f"the file is damaged ({said})",
            remedy="keep it as evidence and name another journal, or restore a copy",
        )
    for word, meaning, remedy in _MEANINGS:
        if word in lowered:
            return JournalError(journal=str(journal), problem=meaning.format(wait_s=wait_s), remedy=remedy)
    return JournalError(journal=str(journal), problem=f"SQLite reports {said!r}", remedy="name another journal")
