"""Reads a journal with the driver alone: starts fast, and never changes what it reads."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from residency.errors import JournalCorrupt, JournalError, JournalNewer
from residency.journal.events import Event
from residency.journal.hashing import Column, blob_digest
from residency.journal.header import FileKind, foreign, inspect, note_closed, note_open, num_open
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

# A journal that changes faster than it can be opened again is in use by someone whose locks we cannot take.
_REOPENS_MAX = 10


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
class _Source:
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
        self.connection.close()
        if self.copy is not None:
            shutil.rmtree(self.copy, ignore_errors=True)


_readers: weakref.WeakSet[JournalReader] = weakref.WeakSet()


class JournalReader:
    """A read-only view of a journal. Safe to use from several threads; not across fork.

    Every page is read in a transaction of its own, so that a writer is never held up. It writes nothing beside the
    journal: where SQLite would have to, it reads the file as it stands, or a copy of it in a temporary folder, for as
    long as nothing changes.
    """

    def __init__(self, path: Path, source: _Source, key: tuple[int, int]) -> None:
        self.path = path
        self._source: _Source | None = source
        self._key = key
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
        is_shared = num_open(path) > 0
        key = note_open(path)
        try:
            reader = cls(path, _open_source(path, is_shared=is_shared), key)
        except FAILURES as error:
            note_closed(key)
            raise explain(error, journal=path, wait_s=_WAIT_S) from error
        except BaseException:
            note_closed(key)
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
            for _ in range(_REOPENS_MAX):
                if self._source is None:
                    raise JournalError(journal=str(self.path), problem="is closed", remedy="open it again")
                try:
                    rows = _rows(self._source.connection, sql, tuple(parameters))
                except FAILURES as error:
                    if not self._source.is_outdated(self.path):
                        raise explain(error, journal=self.path, wait_s=_WAIT_S) from error
                else:
                    if not self._source.is_outdated(self.path):
                        return rows
                self._reopen()
        raise JournalError(
            journal=str(self.path),
            problem=f"changed {_REOPENS_MAX} times while it was read without its locks",
            remedy="try again, or read it as a user who may write its folder",
        )

    def close(self) -> None:
        """Close it. A second call is a no-op, and so is one in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            source, self._source = self._source, None
        if source is not None:
            source.close()
            note_closed(self._key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reopen(self) -> None:
        """Read from now on what a writer has made of the journal since."""
        source, self._source = self._source, None
        if source is not None:
            source.close()
        try:
            self._source = _open_source(self.path, is_shared=num_open(self.path) > 1)
        except (*FAILURES, OSError) as error:
            note_closed(self._key)
            raise explain(error, journal=self.path, wait_s=_WAIT_S) from error

    def _abandon(self) -> None:
        if self._source is not None:
            abandon(self._source.connection)

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


def _open_source(path: Path, *, is_shared: bool) -> _Source:
    """Open a journal so that nothing is written beside it. is_shared: this process has it open already.

    Where -wal and -shm lie beside it, it is in use, or was when its worker died: SQLite reads both, and takes its locks
    in the -shm. Without them SQLite would make them.
    """
    state = _state_of(path)
    # Two connections of one process must share SQLite's locks, or one that closes drops those of the other.
    if is_shared or (beside(path, "-wal").exists() and beside(path, "-shm").exists()):
        try:
            return _Source(_connected(path, "ro"))
        except FAILURES as error:
            if not cannot_open(error):
                raise
            # The -shm of another user, or a folder that cannot be written.
    if not state.wal_bytes:
        # `immutable` ignores the WAL, so it is right only where there is none.
        return _Source(_connected(path, "immutable"), state=state)
    folder = tempfile.mkdtemp(prefix="residency-journal-")
    try:
        for name in (path, *(beside(path, suffix) for suffix in SQLITE_SUFFIXES if suffix != "-shm")):
            if name.exists():
                shutil.copyfile(name, Path(folder) / name.name)
        return _Source(_connected(Path(folder) / path.name, "ro"), state=state, copy=folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _rows(connection: driver.Connection, sql: str, parameters: tuple[Column, ...]) -> list[Row]:
    try:
        return connection.execute(sql, parameters).fetchall()
    except UnicodeDecodeError:
        # Damaged text. Decoded leniently from now on: slower, and verify can say which event it is.
        connection.text_factory = lenient_text
        return connection.execute(sql, parameters).fetchall()


def _abandon_in_child() -> None:
    for reader in list(_readers):
        reader._abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
