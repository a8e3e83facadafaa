"""Reads a journal with the driver alone: starts fast, and never changes what it reads."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Self

from residency.errors import JournalCorrupt, JournalError, JournalNewer
from residency.journal.events import Event
from residency.journal.hashing import Column, blob_digest
from residency.journal.header import FileKind, foreign, inspect, note_closed, note_open
from residency.journal.location import SQLITE_SUFFIXES, beside, journal_path
from residency.journal.schema import APPLICATION_ID, EVENT_COLUMNS, FORMAT
from residency.journal.sqlite import FAILURES, abandon, cannot_open, connect, driver, explain, lenient_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

# Rows per read transaction: a long one keeps the WAL from being reset.
_PAGE = 500

# Appends do not block readers in WAL mode; only recovery after a crash does, for a moment.
_WAIT_S = 5.0

_COLUMNS = ", ".join(f'"{column}"' for column in EVENT_COLUMNS)

# One index look-up per stream instead of a walk over every event.
_STREAMS = """
WITH RECURSIVE found(stream) AS (
    SELECT min(stream) FROM events
    UNION ALL
    SELECT (SELECT min(stream) FROM events WHERE stream > found.stream) FROM found WHERE found.stream IS NOT NULL
)
SELECT stream FROM found WHERE stream IS NOT NULL
"""

Row = tuple[Column, ...]

_readers: weakref.WeakSet[JournalReader] = weakref.WeakSet()


class JournalReader:
    """A read-only view of a journal. Safe to use from several threads; not across fork.

    Every page is read in a transaction of its own, so that a writer is never held up.
    """

    def __init__(self, path: Path, connection: driver.Connection, key: tuple[int, int], copy: str | None) -> None:
        self.path = path
        self._connection: driver.Connection | None = connection
        self._key = key
        self._copy = copy
        self._lock = threading.Lock()
        self._pid = os.getpid()
        _readers.add(self)

    @classmethod
    def open(cls, url: str | os.PathLike[str]) -> Self:
        """Open an existing journal for reading. A crashed one, too: its -wal is read and left as it is.

        Raises:
            JournalNewer: written by a newer program.
            JournalCorrupt: damaged, or not a journal of ours.
            JournalError: missing, a directory, not readable, or locked.
        """
        path = journal_path(url)
        kind = inspect(path)
        if kind is FileKind.MISSING:
            raise JournalError(
                journal=str(path), problem="does not exist", remedy="start a worker with it, or name another journal"
            )
        if kind in (FileKind.FOREIGN, FileKind.EMPTY):
            raise foreign(path)
        key = note_open(path)
        copy: str | None = None
        try:
            try:
                connection = _connected(path, "ro")
            except FAILURES as error:
                if not cannot_open(error):
                    raise
                # A folder that cannot be written has no room for the -shm that SQLite wants to make.
                copy, connection = _connected_aside(path)
            reader = cls(path, connection, key, copy)
        except FAILURES as error:
            _drop(key, copy)
            raise explain(error, journal=path, wait_s=_WAIT_S) from error
        except BaseException:
            _drop(key, copy)
            raise
        try:
            reader._check_format()
        except BaseException:
            reader.close()
            raise
        return reader

    def streams(self) -> tuple[str, ...]:
        """Return the names of all streams, sorted. Read-only."""
        return tuple(str(row[0]) for row in self.query(_STREAMS))

    def events(
        self,
        stream: str | None = None,
        after: int = 0,
        before: int | None = None,
        since_ns: int | None = None,
        until_ns: int | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> Iterator[Event]:
        """Yield events by position, oldest first unless told otherwise. Read-only.

        after, before: positions, both exclusive. since_ns, until_ns: bounds of recorded_at, both inclusive; the clock
        may have stepped back between two events. limit: how many at most.

        Raises:
            JournalCorrupt: the file is damaged where it is read.
            JournalError: it can no longer be read.
        """
        lower, upper, left = after, before, limit
        while left is None or left > 0:
            count = _PAGE if left is None else min(_PAGE, left)
            rows = self._page(stream, lower, upper, since_ns, until_ns, count, newest_first)
            for row in rows:
                yield _event(row)
            if len(rows) < count:
                return
            position = int(rows[-1][0] or 0)
            lower, upper = (lower, position) if newest_first else (position, upper)
            left = None if left is None else left - len(rows)

    def blob(self, digest: str) -> bytes:
        """Return the blob of this digest, checked against it. Read-only.

        Raises:
            JournalError: the journal has no such blob.
            JournalCorrupt: the blob is damaged.
        """
        rows = self.query("SELECT content FROM blobs WHERE digest = ?", (digest,))
        if not rows:
            raise JournalError(
                journal=str(self.path), problem=f"has no blob {digest!r}", remedy="see 'residency verify'"
            )
        content = rows[0][0]
        if not isinstance(content, bytes) or blob_digest(content) != digest:
            raise JournalCorrupt(
                journal=str(self.path), problem=f"blob {digest!r} is damaged", remedy="see 'residency verify'"
            )
        return content

    def query(self, sql: str, parameters: Sequence[Column] = ()) -> list[Row]:
        """Return all rows of one reading statement. Read-only.

        Raises:
            JournalCorrupt: the file is damaged where it is read.
            JournalError: the reader is closed, was carried over a fork, or the file can no longer be read.
        """
        if os.getpid() != self._pid:
            raise JournalError(
                journal=str(self.path),
                problem=f"was opened by process {self._pid} and is used by its child {os.getpid()}",
                remedy="open the journal in the child",
            )
        with self._lock:
            if self._connection is None:
                raise JournalError(journal=str(self.path), problem="is closed", remedy="open it again")
            try:
                try:
                    return self._connection.execute(sql, tuple(parameters)).fetchall()
                except UnicodeDecodeError:
                    # Damaged text. Decoded leniently from now on: slower, and verify can say which event it is.
                    self._connection.text_factory = lenient_text
                    return self._connection.execute(sql, tuple(parameters)).fetchall()
            except FAILURES as error:
                raise explain(error, journal=self.path, wait_s=_WAIT_S) from error

    def close(self) -> None:
        """Close it. A second call is a no-op, and so is one in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            _drop(self._key, self._copy)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _abandon(self) -> None:
        if self._connection is not None:
            abandon(self._connection)

    def _check_format(self) -> None:
        if self.query("PRAGMA application_id")[0][0] != APPLICATION_ID:
            raise foreign(self.path)
        found = int(self.query("PRAGMA user_version")[0][0] or 0)
        if found > FORMAT:
            raise JournalNewer(journal=str(self.path), found=found, known=FORMAT)
        self.query("SELECT max(position) FROM events")

    def _page(
        self,
        stream: str | None,
        lower: int,
        upper: int | None,
        since_ns: int | None,
        until_ns: int | None,
        count: int,
        newest_first: bool,
    ) -> list[Row]:
        bounds: tuple[tuple[str, Column], ...] = (
            ("position > ?", lower),
            ("position < ?", upper),
            ("stream = ?", stream),
            ("recorded_at >= ?", since_ns),
            ("recorded_at <= ?", until_ns),
        )
        given = [(condition, value) for condition, value in bounds if value is not None]
        where = " AND ".join(condition for condition, _ in given)
        order = "DESC" if newest_first else "ASC"
        return self.query(
            f"SELECT {_COLUMNS} FROM events WHERE {where} ORDER BY position {order} LIMIT ?",
            (*(value for _, value in given), count),
        )


def _event(row: Row) -> Event:
    # SQLite checks the column types (the tables are STRICT), so that the row is an event's fields in order.
    return Event(**dict(zip(EVENT_COLUMNS, row, strict=True)))  # type: ignore[arg-type]


def _connected(path: Path, mode: str) -> driver.Connection:
    connection = connect(path, mode="ro" if mode == "ro" else "immutable", wait_s=_WAIT_S)
    try:
        # SQLite opens lazily; what is wrong shows at the first read.
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _connected_aside(path: Path) -> tuple[str | None, driver.Connection]:
    """Open a journal whose folder cannot be written: as it is without a WAL, else a copy of both in a temporary folder.

    `immutable` ignores the WAL, so it is right only where there is none.
    """
    wal = beside(path, "-wal")
    if not wal.exists() or wal.stat().st_size == 0:
        return None, _connected(path, "immutable")
    folder = tempfile.mkdtemp(prefix="residency-journal-")
    try:
        for source in (path, *(beside(path, suffix) for suffix in SQLITE_SUFFIXES if suffix != "-shm")):
            if source.exists():
                shutil.copyfile(source, Path(folder) / source.name)
        return folder, _connected(Path(folder) / path.name, "ro")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _drop(key: tuple[int, int], copy: str | None) -> None:
    note_closed(key)
    if copy is not None:
        shutil.rmtree(copy, ignore_errors=True)


def _abandon_in_child() -> None:
    for reader in list(_readers):
        reader._abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
