"""Whether a file is a whole journal, of a format this program knows: looked at before anything is written to it."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING

from residency.errors import JournalError, JournalNewer
from residency.journal.header import foreign
from residency.journal.migrations import definitions, known_format
from residency.journal.schema import APPLICATION_ID
from residency.journal.sqlite import FAILURES, cannot_open, connect, driver, explain

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)


# In what SQLite says of a page that it could not read: a result code, of which the last byte is the kind.
_CODE = re.compile(r"error code=(\d+)")
_CORRUPT = 11


def check_file(path: Path, *, wait_s: float) -> None:
    """Check that the file can be written, is ours, of a known format, and whole. Read-only.

    Raises:
        JournalNewer: written by a newer program.
        JournalCorrupt: damaged, or not a journal of ours.
        JournalError: read-only, locked, or not readable.
    """
    # SQLite would open it for reading only, without a word, and turn BEGIN IMMEDIATE into BEGIN.
    writable = os.access(path, os.W_OK)
    try:
        try:
            # A writing connection would fold the WAL of a damaged journal into it, and remove it.
            connection = connect(path, mode="ro", wait_s=wait_s)
            try:
                _check(connection, path)
            finally:
                connection.close()
        except FAILURES as error:
            # What a crash left has to be rolled back before it can be read: the writing connection does that.
            if not cannot_open(error):
                raise
    except FAILURES as error:
        raise explain(error, journal=path, wait_s=wait_s) from error
    if not writable:
        raise JournalError(
            journal=str(path),
            problem="it is read-only",
            remedy="make the file and its folder writable, or name another journal",
        )


def _check(connection: driver.Connection, path: Path) -> None:
    def value_of(sql: str) -> object:
        row = connection.execute(sql).fetchone()
        return None if row is None else row[0]

    if value_of("PRAGMA application_id") != APPLICATION_ID:
        raise foreign(path)
    found = value_of("PRAGMA user_version")
    if isinstance(found, int) and found > known_format():
        raise JournalNewer(journal=str(path), found=found, known=known_format())
    if not isinstance(found, int) or found < 1:
        raise explain(ValueError(f"malformed: it says that it is of format {found}"), journal=path)
    said = value_of("PRAGMA quick_check(1)")
    if said != "ok":
        code = _CODE.search(str(said))
        if code is not None and int(code[1]) & 0xFF != _CORRUPT:
            raise explain(ValueError(f"disk I/O error (SQLite's result code {code[1]})"), journal=path)
        raise explain(ValueError(f"malformed: {' '.join(str(said).split())}"), journal=path)
    rows = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall()
    expected = {name for kind, name in definitions(found) if kind == "trigger"}
    missing = sorted(expected - {str(row[0]) for row in rows})
    if missing:
        log.warning("journal %s: triggers are missing (%s); see 'residency verify'", path, ", ".join(missing))
