"""What a file is before SQLite opens it: missing, empty, a journal of ours, or somebody else's."""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

from residency.errors import JournalCorrupt, JournalError
from residency.journal.schema import APPLICATION_ID

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"SQLite format 3\x00"
_APPLICATION_ID_AT = slice(68, 72)
_HEADER_BYTES = 100
_PIECE_BYTES = 2**20

_lock = threading.Lock()
# (device, inode) of the files that this process has open through SQLite. Closing any other descriptor of such a file
# drops all of SQLite's POSIX locks on it, so its header is never read by hand.
_open_files: Counter[tuple[int, int]] = Counter()


class FileKind(Enum):
    """What lies at a journal's path."""

    MISSING = "missing"
    EMPTY = "empty"
    OURS = "ours"
    FOREIGN = "foreign"


def inspect(path: Path) -> FileKind:
    """Return what the file is. Read-only; never opens a file that this process has open through SQLite.

    Raises:
        JournalError: a directory, no regular file, or not readable.
    """
    try:
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            raise JournalError(journal=str(path), problem="is a directory", remedy="name a file in it")
        if not stat.S_ISREG(found.st_mode):
            raise JournalError(journal=str(path), problem="is not a regular file", remedy="name a file")
        with _lock:
            if _open_files[found.st_dev, found.st_ino] > 0:
                return FileKind.OURS
            if found.st_size == 0:
                return FileKind.EMPTY
            with open(path, "rb") as file:
                header = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        return FileKind.MISSING
    except OSError as error:
        raise unusable(path, error) from error
    ours = header.startswith(_MAGIC) and header[_APPLICATION_ID_AT] == APPLICATION_ID.to_bytes(4, "big")
    return FileKind.OURS if ours else FileKind.FOREIGN


def check_readable(path: Path) -> None:
    """Read a file that SQLite finds damaged, to tell damage from a disk that fails. Blocks; nothing if it is in use.

    Raises:
        JournalError: a part of it cannot be read.
    """
    with _lock:
        found = os.stat(path)
        # The journal that asks has noted itself.
        if _open_files[found.st_dev, found.st_ino] > 1:
            return
        try:
            with open(path, "rb") as file:
                while file.read(_PIECE_BYTES):
                    pass
        except OSError as error:
            raise unusable(path, error) from error


def num_open(path: Path) -> int:
    """Return how many connections of this process are noted as open on the file. Read-only."""
    found = os.stat(path)
    with _lock:
        return _open_files[found.st_dev, found.st_ino]


def note_open(path: Path) -> tuple[int, int]:
    """Note that SQLite is about to open the file; returns the key for note_closed()."""
    found = os.stat(path)
    key = (found.st_dev, found.st_ino)
    with _lock:
        _open_files[key] += 1
    return key


def note_closed(key: tuple[int, int]) -> None:
    """Note that a connection noted with note_open() is closed."""
    with _lock:
        _open_files[key] -= 1
        if _open_files[key] <= 0:
            del _open_files[key]


def foreign(path: Path) -> JournalCorrupt:
    """Return the error for a file that is not ours; such a file is never touched."""
    return JournalCorrupt(
        journal=str(path), problem="the file is not a residency journal", remedy="name another file; this one is left"
    )


def unusable(path: Path, error: OSError) -> JournalError:
    """Return the error for a path that the system does not let us use."""
    return JournalError(
        journal=str(path),
        problem=(error.strerror or str(error)).lower(),
        remedy="check the path and its permissions, or name another journal",
    )
