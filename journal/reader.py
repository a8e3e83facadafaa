"""Reads a journal with the driver alone: starts fast, and never changes what it reads."""

from __future__ import annotations

import os
import threading
import time
import weakref
from importlib import import_module
from typing import TYPE_CHECKING, Self, TypeVar

from residency.errors import JournalCorrupt, JournalError, JournalNewer
from residency.journal.hashing import Column, blob_digest
from residency.journal.header import FileKind, foreign, inspect, note_closed, note_open, num_open, unusable
from residency.journal.location import driver_missing, is_server, journal_path, shown_location
from residency.journal.migrations import known_format
from residency.journal.rows import Hashes, Row, Types, event_of_row
from residency.journal.schema import APPLICATION_ID, EVENT_COLUMNS
from residency.journal.source import WAIT_S, Source, open_source
from residency.journal.sqlite import FAILURES, UNDECODABLE, abandon, driver, explain, lenient_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from residency.journal.events import Event
    from residency.journal.findings import Finding
    from residency.journal.head import StreamHead

# Rows per read transaction: a long one keeps the WAL from being reset.
_PAGE = 500
_BLOBS_PER_PAGE = 100

# Of a copy, between two looks at the clock: 16 MiB. SQLite waits so long for a lock on what is copied.
_PAGES_PER_STEP = 4096
_STEP_WAIT_S = 0.01

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

Result = TypeVar("Result")

# A journal that changes faster than it can be opened again is in use by someone whose locks we cannot take.
_REOPENS_MAX = 10


_readers: weakref.WeakSet[JournalReader] = weakref.WeakSet()


class JournalReader:
    """A read-only view of a journal. Safe to use from several threads; not across fork.

    Every page is read in a transaction of its own, so that a writer is never held up. It writes nothing beside the
    journal: where SQLite would have to, it reads the file as it stands, or a copy of it in a temporary folder, for as
    long as nothing changes.
    """

    # What verify looks at beside events, of a journal that is no file.
    own_checks: tuple[Callable[[JournalReader], Iterable[Finding]], ...] = ()

    # Where the head witness lies beside; None if it has none.
    witness_path: Path | None

    def __init__(self, path: Path, source: Source, key: tuple[int, int]) -> None:
        self.path = self.witness_path = path
        self.location = str(path)
        self._source: Source | None = source
        self._key = key
        self._lock = threading.Lock()
        self._pid = os.getpid()
        _readers.add(self)

    @classmethod
    def open(cls, url: str | os.PathLike[str], *, state_folder: Path | None = None) -> JournalReader:
        """Open an existing journal for reading. A crashed one, too: its -wal is read and left as it is.

        state_folder: where the head witness of a journal on a server is kept on this host.

        Raises:
            JournalNewer: written by a newer program.
            JournalCorrupt: damaged, or not a journal of ours.
            JournalError: missing, a directory, not readable, or locked; a server that cannot be reached or refuses.
        """
        if is_server(url):
            return _server_reader(os.fspath(url), state_folder)
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
            reader = cls(path, open_source(path, is_shared=is_shared), key)
        except FAILURES as error:
            note_closed(key)
            raise explain(error, journal=path, wait_s=WAIT_S) from error
        except OSError as error:
            note_closed(key)
            raise unusable(path, error) from error
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
        *,
        check: bool = False,
    ) -> Iterator[Event]:
        """Yield events by position, oldest first unless told otherwise. Read-only.

        after, before: positions, both exclusive. since_ns, until_ns: bounds of recorded_at, both inclusive; the clock
        may have stepped back between two events. limit: how many at most. check: see to it that each event is what was
        written, and follows the one that was read before it in its stream; `verify` looks at much more.

        Raises:
            JournalCorrupt: the file is damaged where it is read.
            JournalError: it can no longer be read.
        """
        lower, upper, left = after, before, limit
        look = Hashes(self.location) if check else Types(self.location)
        while left is None or left > 0:
            count = _PAGE if left is None else min(_PAGE, left)
            rows = self._page(stream, lower, upper, since_ns, until_ns, count, newest_first)
            for row in rows:
                look(row)
                yield event_of_row(row)
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
                journal=self.location, problem=f"has no blob {digest!r}", remedy="see 'residency verify'"
            )
        content = rows[0][0]
        if not isinstance(content, bytes) or blob_digest(content) != digest:
            raise JournalCorrupt(
                journal=self.location, problem=f"blob {digest!r} is damaged", remedy="see 'residency verify'"
            )
        return content

    def blobs(self) -> Iterator[tuple[str, bytes]]:
        """Yield the digest and the content of every blob, by digest, as they stand: unchecked. Read-only.

        Raises:
            JournalCorrupt: the file is damaged where it is read.
            JournalError: it can no longer be read.
        """
        last = ""
        while True:
            rows = self.query(
                "SELECT digest, content FROM blobs WHERE digest > ? ORDER BY digest LIMIT ?", (last, _BLOBS_PER_PAGE)
            )
            for digest, content in rows:
                yield str(digest), content if isinstance(content, bytes) else str(content).encode()
            if len(rows) < _BLOBS_PER_PAGE:
                return
            last = str(rows[-1][0])

    def meta(self) -> dict[str, str]:
        """Return what the journal says about itself. Read-only; raises like `query`."""
        return {str(key): str(value) for key, value in self.query("SELECT key, value FROM meta ORDER BY key")}

    def was_pruned(self, stream: str, known: StreamHead) -> bool:
        """Whether a prune removed a witnessed event and could not move the witness on. Never of a file. Read-only."""
        del stream, known
        return False

    def last_position(self) -> int:
        """Return the last position that was ever given, 0 if none. Read-only; raises like `query`."""
        row = self.query(
            "SELECT (SELECT seq FROM sqlite_sequence WHERE name = 'events'), (SELECT max(position) FROM events)"
        )[0]
        return max(int(row[0] or 0), int(row[1] or 0))

    def copy_into(self, target: driver.Connection, *, name: str, limit_s: float) -> None:
        """Copy the journal as it is at one moment into an empty database, of this name. Read-only; holds up no writer.

        Raises:
            JournalCorrupt: the file is damaged where it is read.
            JournalError: it took longer than limit_s seconds, or like `query`.
        """
        deadline = time.monotonic() + limit_s

        def check(_status: int, _remaining: int, _total: int) -> None:
            if time.monotonic() > deadline:
                raise JournalError(
                    journal=str(self.path),
                    problem=f"copying it took longer than {limit_s:g} s",
                    remedy="give it more time, or name a faster disk",
                )

        self._read(lambda connection: _copy(connection, target, check), what=f"{self.path}, copied to {name}")

    def query(self, sql: str, parameters: Sequence[Column] = ()) -> list[Row]:
        """Return all rows of one reading statement. Read-only.

        Raises:
            JournalCorrupt: the file is damaged where it is read.
            JournalError: the reader is closed, was carried over a fork, or the file can no longer be read.
        """
        return self._read(lambda connection: _rows(connection, sql, tuple(parameters)))

    def _read(self, read: Callable[[driver.Connection], Result], *, what: str | None = None) -> Result:
        """Read until nobody wrote in between, where it is read without SQLite's locks."""
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
                    result = read(self._source.connection)
                except FAILURES as error:
                    if not self._source.is_outdated(self.path):
                        raise explain(error, journal=what or self.path, wait_s=WAIT_S) from error
                else:
                    if not self._source.is_outdated(self.path):
                        return result
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
            self._source = open_source(self.path, is_shared=num_open(self.path) > 1)
        except (*FAILURES, OSError) as error:
            note_closed(self._key)
            raise explain(error, journal=self.path, wait_s=WAIT_S) from error

    def _abandon(self) -> None:
        if self._source is not None:
            abandon(self._source.connection)

    def _check_format(self) -> None:
        if self.query("PRAGMA application_id")[0][0] != APPLICATION_ID:
            raise foreign(self.path)
        found = int(self.query("PRAGMA user_version")[0][0] or 0)
        if found > known_format():
            raise JournalNewer(journal=str(self.path), found=found, known=known_format())
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


def _server_reader(url: str, state_folder: Path | None) -> JournalReader:
    try:
        # Only who has a server pays for its driver, or needs it.
        opened = import_module("residency.journal.pg_reader").PostgresReader.connect
    except ImportError as error:
        raise driver_missing(shown_location(url), error) from error
    reader: JournalReader = opened(url, state_folder=state_folder)
    return reader


def _copy(source: driver.Connection, target: driver.Connection, check: Callable[[int, int, int], None]) -> None:
    # Inside a read transaction the source stays as it was when it began, however many steps the copy takes.
    source.execute("BEGIN")
    try:
        source.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        source.backup(target, pages=_PAGES_PER_STEP, progress=check, sleep=_STEP_WAIT_S)
    finally:
        source.execute("ROLLBACK")


def _rows(connection: driver.Connection, sql: str, parameters: tuple[Column, ...]) -> list[Row]:
    try:
        return connection.execute(sql, parameters).fetchall()
    except FAILURES as error:
        if not isinstance(error, UnicodeDecodeError) and UNDECODABLE not in str(error).lower():
            raise
        # Damaged text. Decoded leniently from now on: slower, and verify can say which event it is.
        connection.text_factory = lenient_text
        return connection.execute(sql, parameters).fetchall()


def _abandon_in_child() -> None:
    for reader in list(_readers):
        reader._abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
