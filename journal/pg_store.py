"""A journal on a PostgreSQL server: appended to one after the other, in the session that also holds the streams."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Self

from residency.errors import JournalError, StreamInUse
from residency.journal.events import EventType
from residency.journal.hashing import ZERO_HASH
from residency.journal.insert import hash_at, insert_events, stream_tail
from residency.journal.locks import StreamLock
from residency.journal.pg_check import open_for_writing
from residency.journal.pg_location import ServerLocation
from residency.journal.pg_reader import PostgresReader
from residency.journal.pg_rewrite import REWRITE_S, ServerRewrite
from residency.journal.pg_schema import append_key, lock_key
from residency.journal.pg_session import Conflict, ConnectionLost, ServerSession
from residency.journal.pg_witness import ServerWitness
from residency.journal.postgresql import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sqlalchemy.engine import Connection

    from residency.journal.events import Event
    from residency.journal.hashing import Column
    from residency.journal.insert import Prepared, Tail
    from residency.journal.postgresql import Session
    from residency.journal.reader import JournalReader
    from residency.journal.rewrite import Rewrite
    from residency.journal.rows import Row

log = logging.getLogger(__name__)

# Of one append. Another transaction undoes ours only where people work on the tables by hand.
_ATTEMPTS = 3

_PAUSE_S = 0.05

# A server may need a moment to notice that the process which held a stream is dead.
_GRACE_S = 1.0

# Waits for the writers before; and says, in the same journey, whether a commit will be durable and, of a stream that is
# held, whether it is this very session that holds it. The lock ends after the commit has become visible.
_TAKE_TURN = """
SELECT pg_catalog.pg_advisory_xact_lock(%s),
    pg_catalog.current_setting('synchronous_commit'),
    EXISTS (
        SELECT 1 FROM pg_catalog.pg_locks
        WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND pid = pg_catalog.pg_backend_pid()
            AND classid = %s::oid AND objid = %s::oid
    )
"""

# The last position, and number and hash of the last event of a stream.
_TAILS = """
SELECT (SELECT max(position) FROM events), last.stream_version, last.hash
FROM (SELECT 1) AS one
LEFT JOIN (
    SELECT stream_version, hash FROM events WHERE stream = %s ORDER BY stream_version DESC LIMIT 1
) AS last ON true
"""

_SINCE = "SELECT type, previous_hash FROM events WHERE stream = %s AND stream_version > %s ORDER BY stream_version"

_TAKE_STREAM = "SELECT pg_catalog.pg_try_advisory_lock(%s)"
_LEAVE_STREAM = "SELECT pg_catalog.pg_advisory_unlock(%s)"

_HOLDER = """
SELECT a.application_name FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.database = a.datid
    AND l.classid = %s::oid AND l.objid = %s::oid
"""

_IS_THERE = "SELECT 1 FROM events WHERE event_id = %s"


class ServerStore:
    """The server behind a `Journal`, which sees to it that one thread at a time appends, in one process.

    One session does everything, so that an append can only succeed while this process holds its stream. A session that
    is lost takes the streams with it: the append that finds out is an error, and a later one first takes them again,
    which succeeds only if nobody else has taken or written to them.
    """

    set_aside: str | None = None

    def __init__(
        self, location: ServerLocation, *, clock_ns: Callable[[], int], wait_s: float, witness: ServerWitness | None
    ) -> None:
        self.location = str(location)
        self.created = False
        self._where = location
        self._clock_ns = clock_ns
        self._wait_s = wait_s
        self._witness = witness
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._journal_id: str | None = None
        self._session = ServerSession(location, wait_s=wait_s, make=self._make, welcome=self._regain)
        self._reader = PostgresReader(location, rows=self._rows, witness=None if witness is None else witness.path)
        # Stream -> its last event as far as this process knows, for the streams that it holds.
        self._holds: dict[str, Tail] = {}
        # Stream -> events whose commit was begun and never answered.
        self._doubts: dict[str, tuple[Event, ...]] = {}

    @classmethod
    def open(cls, url: str, *, clock_ns: Callable[[], int], wait_s: float, state_folder: Path | None) -> Self:
        """Open the journal for writing; make it if there is none. Raises what `Journal.open` raises."""
        location = ServerLocation.parse(url)
        witness = None if state_folder is None else ServerWitness(location, state_folder, clock_ns=clock_ns)
        store = cls(location, clock_ns=clock_ns, wait_s=wait_s, witness=witness)
        try:
            with store._session.using() as connection:
                if witness is not None:
                    assert store._journal_id is not None
                    witness.check(store._journal_id, partial(hash_at, connection), was_pruned=store._reader.was_pruned)
        except BaseException:
            store._session.close()
            raise
        return store

    def append(
        self, prepared: Sequence[Prepared], *, stream: str, epoch: str, rank: int, witness: bool
    ) -> tuple[Event, ...]:
        """Write the events in one transaction. Raises what `Journal.append` raises."""
        stream = _storable(stream)
        with self._lock:
            events = self._append_safely(prepared, stream=stream, epoch=epoch, rank=rank)
            if witness and self._witness is not None:
                assert self._journal_id is not None
                self._witness.write(self._journal_id, events[-1])
        return events

    def hold(self, stream: str) -> StreamLock:
        """Take the stream; waits only for the server to notice a death. Raises what `Journal.hold` raises."""
        stream = _storable(stream)
        with self._lock:
            if stream in self._holds:
                raise StreamInUse(journal=self.location, stream=stream, holder=f"process {self._pid}, by this journal")
            with self._session.using() as connection:
                self._take(connection, stream, patience_s=_GRACE_S)
                try:
                    self._holds[stream] = stream_tail(connection, stream)
                except BaseException:
                    # Else it would stay held, for nobody.
                    self._session.drop()
                    raise
        return StreamLock(stream, partial(self._leave, stream))

    def keep(self) -> None:
        """Make the session anew if it was lost, and take its streams again. Raises what `Journal.keep` raises."""
        with self._lock:
            try:
                self._look()
            except ConnectionLost:
                self._look()

    def reader(self) -> JournalReader:
        """Return a reader that uses the same session."""
        return self._reader

    @contextmanager
    def rewriting(self) -> Iterator[Rewrite]:
        """Yield what rewrites the journal in one transaction, for imports and prunes. Raises like an append."""
        with self._lock:
            with self._session.using(wait_s=REWRITE_S) as connection:
                # Of no stream: what is held is of no matter here.
                self._take_turn(connection, "")
                rewrite = ServerRewrite(connection, self._where, clock_ns=self._clock_ns)
                yield rewrite
                journal_id = rewrite.journal_id()
                connection.commit()
            self._journal_id = journal_id
            if self._witness is not None:
                for event in rewrite.witnesses:
                    self._witness.write(journal_id, event)

    def close(self) -> None:
        """End the session, and with it what it holds."""
        with self._lock:
            self._reader.close()
            self._holds.clear()
            self._session.close()
            if self._witness is not None:
                self._witness.close()

    def abandon(self) -> None:
        """Let go of it in a forked child, without a trace."""
        self._session.abandon()
        if self._witness is not None:
            self._witness.close()

    def _append_safely(self, prepared: Sequence[Prepared], *, stream: str, epoch: str, rank: int) -> tuple[Event, ...]:
        """Append; a few times, where the first try is known to have written nothing, or will be known to."""
        deadline = time.monotonic() + self._wait_s
        attempt = 1
        while True:
            try:
                return self._append_once(prepared, stream=stream, epoch=epoch, rank=rank)
            except (ConnectionLost, Conflict) as error:
                if isinstance(error, ConnectionLost) and stream in self._holds:
                    raise self._lost(stream, error) from error
                if attempt == _ATTEMPTS or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S * attempt)
            attempt += 1

    def _append_once(self, prepared: Sequence[Prepared], *, stream: str, epoch: str, rank: int) -> tuple[Event, ...]:
        with self._session.using() as connection:
            self._take_turn(connection, stream)
            if written := self._settle(connection, stream, prepared):
                return written
            position, version, previous = connection.exec_driver_sql(_TAILS, (stream,)).one()
            events = insert_events(
                connection,
                prepared,
                after=position or 0,
                tail=(version, previous) if version is not None else (0, ZERO_HASH),
                stream=stream,
                epoch=epoch,
                rank=rank,
                clock_ns=self._clock_ns,
            )
            self._doubts[stream] = events
            try:
                connection.commit()
            except Exception:
                # Whoever answers, if with an error, has not committed.
                if self._session.is_alive():
                    del self._doubts[stream]
                raise
            del self._doubts[stream]
            if stream in self._holds:
                self._holds[stream] = (events[-1].stream_version, events[-1].hash)
        return events

    def _take_turn(self, connection: Connection, stream: str) -> None:
        """Wait for the append lock, then check what an append relies on."""
        turn = (append_key(self._where.schema), *_halves(self._stream_key(stream)))
        _, commits, is_held = connection.exec_driver_sql(_TAKE_TURN, turn).one()
        if commits not in ("on", "remote_apply"):
            raise JournalError(
                journal=self.location,
                problem=f"commits are not durable there (synchronous_commit is {commits})",
                remedy="connect to the server itself, not through a pool of sessions",
            )
        if stream in self._holds and not is_held:
            self._session.drop()
            raise ConnectionLost(
                journal=self.location,
                problem="the session is another one",
                remedy="connect to the server itself, not through a pool of sessions",
            )

    def _settle(self, connection: Connection, stream: str, prepared: Sequence[Prepared]) -> tuple[Event, ...] | None:
        """Find out what became of a commit that was never answered. Returns the events if these are the ones.

        Needs the append lock: whoever committed held it, so that by now it is written or undone.
        """
        doubtful = self._doubts.pop(stream, None)
        if doubtful is None:
            return None
        if stream in self._holds:
            self._holds[stream] = stream_tail(connection, stream)
        if doubtful[0].event_id != prepared[0].event_id:
            return None
        found = connection.exec_driver_sql(_IS_THERE, (doubtful[0].event_id,)).first()
        return doubtful if found is not None else None

    def _take(self, connection: Connection, stream: str, *, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        key = self._stream_key(stream)
        while not connection.exec_driver_sql(_TAKE_STREAM, (key,)).scalar_one():
            if time.monotonic() > deadline:
                holder = connection.exec_driver_sql(_HOLDER, _halves(key)).scalars().first()
                name = str(holder or "another process").removeprefix("residency ")
                raise StreamInUse(journal=self.location, stream=stream, holder=name)
            time.sleep(_PAUSE_S)

    def _regain(self, connection: Connection) -> None:
        """On a new connection, take again what was held on the one before, if nobody has been there meanwhile."""
        for stream, tail in self._holds.items():
            # The server may still be busy with what the lost session had asked for.
            self._take(connection, stream, patience_s=self._wait_s)
            known = {tail, *((one.stream_version, one.hash) for one in self._doubts.pop(stream, ())[-1:])}
            found = stream_tail(connection, stream)
            if found not in known and not self._was_only_pruned(connection, stream, tail):
                raise JournalError(
                    journal=self.location,
                    problem=f"another process wrote to stream {stream!r} while the connection was lost",
                    remedy="give each worker its own name (attach(name=...) or RESIDENCY_NAME), and restart this one",
                )
            self._holds[stream] = found

    def _was_only_pruned(self, connection: Connection, stream: str, tail: Tail) -> bool:
        """Whether all that came after the last event that is known are prunes, which an operator makes meanwhile."""
        since = connection.exec_driver_sql(_SINCE, (stream, tail[0])).all()
        return bool(since) and bytes(since[0][1]) == tail[1] and {kind for kind, _ in since} == {EventType.PRUNED.value}

    def _leave(self, stream: str) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._holds.pop(stream, None) is None or not self._session.is_open:
                return
            try:
                with self._session.using() as connection:
                    connection.exec_driver_sql(_LEAVE_STREAM, (self._stream_key(stream),))
            except JournalError as error:
                # Whatever it is, the lock ends with the session.
                log.warning("%s", error)

    def _look(self) -> None:
        with self._session.using() as connection:
            for stream in self._holds:
                self._take_turn(connection, stream)
            connection.exec_driver_sql("SELECT 1")

    def _lost(self, stream: str, error: ConnectionLost) -> JournalError:
        return JournalError(
            journal=self.location,
            problem=f"the connection was lost, and with it the hold on stream {stream!r}: {error.fields['problem']}",
            remedy=str(error.fields["remedy"]),
        )

    def _rows(self, sql: str, parameters: Sequence[Column]) -> list[Row]:
        with self._lock:
            try:
                return self._read(sql, parameters)
            except ConnectionLost:
                # Reading twice does no harm.
                return self._read(sql, parameters)

    def _read(self, sql: str, parameters: Sequence[Column]) -> list[Row]:
        with self._session.using() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(sql, tuple(parameters))]

    def _make(self) -> Session:
        session = connect(self._where, wait_s=self._wait_s, patience_s=self._wait_s)
        try:
            is_first = self._journal_id is None
            opened = open_for_writing(session, self._where, now_ns=self._clock_ns if is_first else None)
            if not is_first and opened.journal_id != self._journal_id:
                raise JournalError(
                    journal=self.location,
                    problem="there is another journal now",
                    remedy="restart the worker to use the new one",
                )
        except BaseException:
            session.close()
            raise
        self._journal_id = opened.journal_id
        self.created = self.created or opened.created
        return session

    def _stream_key(self, stream: str) -> int:
        return lock_key(self._where.schema, "stream", stream)


def _halves(key: int) -> tuple[int, int]:
    """Return a lock's key as the two numbers that the server lists it under."""
    unsigned = key % 2**64
    return unsigned >> 32, unsigned % 2**32


def _storable(text: str) -> str:
    """Return a name as the server can hold it: its text knows no NUL."""
    return text.replace("\x00", "\\x00")
