"""Reads a journal on a PostgreSQL server, with a session of its own or with a writer's."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import msgspec

from residency.errors import JournalError
from residency.journal import file_checks
from residency.journal.events import EventType
from residency.journal.findings import Finding, FindingKind
from residency.journal.pg_check import open_for_reading
from residency.journal.pg_compare import schema_problems
from residency.journal.pg_location import ServerLocation
from residency.journal.postgresql import FAILURES, connect, explain, is_lost
from residency.journal.pruned import read_pruned
from residency.journal.reader import JournalReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from residency.journal.hashing import Column
    from residency.journal.head import StreamHead
    from residency.journal.postgresql import Session
    from residency.journal.rows import Row

    Rows = Callable[[str, Sequence[Column]], list[Row]]

_LAST_PRUNED = "SELECT position, payload FROM events WHERE stream = ? AND type = ? ORDER BY position DESC LIMIT 1"

# A page of a large journal on a busy server, by an index.
_WAIT_S = 30.0

# Of a connection: somebody is waiting at a terminal. Who follows a journal outlives a restart of the server.
_CONNECT_S = 5.0


def schema(reader: JournalReader) -> Iterator[Finding]:
    """Yield which tables, constraints and triggers are missing, altered, or not ours. Raises JournalError."""
    assert isinstance(reader, PostgresReader)
    for text in schema_problems(reader.rows, reader.schema):
        yield Finding(kind=FindingKind.SCHEMA, text=text)


class PostgresReader(JournalReader):
    """A read-only view of a journal on a server: the same questions, the same answers.

    rows: runs one reading statement, with '%s' for its parameters, and returns its rows.
    """

    own_checks = (schema, file_checks.meta)

    def __init__(
        self, location: ServerLocation, *, rows: Rows, witness: Path | None, close: Callable[[], None] | None = None
    ) -> None:
        self.location = str(location)
        self.schema = location.schema
        self.witness_path = witness
        self._rows: Rows | None = rows
        self._close = close
        self._pid = os.getpid()

    @property
    def path(self) -> Path:  # type: ignore[override]
        """Raise JournalError: what asks for it needs a file."""
        raise JournalError(
            journal=self.location,
            problem="is on a server, and this needs a journal in a file",
            remedy="use the server's own tools, or name a path or a sqlite:/// URL",
        )

    @classmethod
    def connect(cls, url: str, *, state_folder: Path | None) -> PostgresReader:
        """Open an existing journal for reading, with a session that cannot write.

        Raises:
            JournalNewer: written by a newer program.
            JournalCorrupt: damaged, or not a journal of ours.
            JournalError: there is none, or the server cannot be reached or refuses the role.
        """
        location = ServerLocation.parse(url)
        source = _Source(location)
        source.open(patience_s=0)
        witness = None if state_folder is None else location.witness_path(state_folder)
        return cls(location, rows=source.rows, witness=witness, close=source.close)

    def query(self, sql: str, parameters: Sequence[Column] = ()) -> list[Row]:
        """Return all rows of one reading statement, with '?' for its parameters. Read-only.

        Raises:
            JournalCorrupt: what is read is damaged.
            JournalError: the reader is closed, was carried over a fork, or the server can no longer be reached.
        """
        return self.rows(sql.replace("?", "%s"), parameters)

    def rows(self, sql: str, parameters: Sequence[Column]) -> list[Row]:
        """Return all rows of one reading statement, with '%s' for its parameters. Raises like `query`."""
        if os.getpid() != self._pid:
            raise JournalError(
                journal=self.location,
                problem=f"was opened by process {self._pid} and is used by its child {os.getpid()}",
                remedy="open the journal in the child",
            )
        if self._rows is None:
            raise JournalError(journal=self.location, problem="is closed", remedy="open it again")
        return self._rows(sql, parameters)

    def last_position(self) -> int:
        """Return the last position that was ever given, 0 if none. Read-only; raises like `query`."""
        return int(self.query("SELECT coalesce(max(position), 0) FROM events")[0][0] or 0)

    def was_pruned(self, stream: str, known: StreamHead) -> bool:
        """Whether a later prune removed a witnessed event. Read-only; raises like `query`.

        An older copy of the journal, or one that was cut short, has no such prune.
        """
        newest = self.query(_LAST_PRUNED, (stream, EventType.PRUNED.value))
        if not newest or int(newest[0][0] or 0) <= known.position:
            return False
        try:
            removed = read_pruned(msgspec.json.decode(newest[0][1])).removed  # type: ignore[arg-type]
        except ValueError:
            return False
        return any(
            one.first_version <= known.stream_version < one.last_version
            or (known.stream_version, known.hash) == (one.last_version, one.hash)
            for one in removed
        )

    def close(self) -> None:
        """Close it. A second call is a no-op, and so is one in a forked child."""
        if os.getpid() != self._pid:
            return
        close, self._close, self._rows = self._close, None, None
        if close is not None:
            close()


class _Source:
    """A session for reading, made anew once if it is lost in a statement: reading twice does no harm."""

    def __init__(self, location: ServerLocation) -> None:
        self._location = location
        self._session: Session | None = None
        self._lock = threading.Lock()

    def open(self, *, patience_s: float) -> None:
        try:
            session = connect(self._location, wait_s=_CONNECT_S, patience_s=patience_s, read_only=True)
            try:
                session.limit_s = _WAIT_S
                open_for_reading(session, self._location)
            except BaseException:
                session.close()
                raise
        except FAILURES as error:
            raise explain(error, location=self._location, wait_s=_CONNECT_S) from error
        self._session = session

    def rows(self, sql: str, parameters: Sequence[Column]) -> list[Row]:
        with self._lock:
            for is_last in (False, True):
                if self._session is None:
                    self.open(patience_s=_CONNECT_S)
                session = self._session
                assert session is not None
                try:
                    return session.rows(sql, parameters)
                except FAILURES as error:
                    if not is_lost(session) or is_last:
                        raise explain(error, location=self._location, wait_s=_WAIT_S) from error
                self._session = None
        raise AssertionError("a statement ends or fails")

    def close(self) -> None:
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()
