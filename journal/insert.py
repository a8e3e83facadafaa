"""Writes events into an open transaction: numbers them, chains them, and stores their blobs once."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import select

from residency.journal.encode import canonical_json
from residency.journal.engine import BLOBS, EVENTS
from residency.journal.events import Draft, Event
from residency.journal.hashing import ZERO_HASH, blob_digest, hash_row
from residency.journal.host import boot_id
from residency.journal.schema import EVENT_COLUMNS
from residency.journal.upcast import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Connection

# Text, not built from parts: to build a statement, and to look it up, takes as long as the disk does.
_COLUMNS = ", ".join(f'"{name}"' for name in EVENT_COLUMNS)
_INSERT = f"INSERT INTO events ({_COLUMNS}) VALUES "
_ROW = f"({', '.join('?' * len(EVENT_COLUMNS))})"
_TAIL = "SELECT stream_version, hash FROM events WHERE stream = ? ORDER BY stream_version DESC LIMIT 1"
_HIGHEST = "SELECT (SELECT seq FROM sqlite_sequence WHERE name = 'events'), (SELECT max(position) FROM events)"

# A server takes 65,535 values in one statement.
_ROWS_MAX = 500

# Of a stream: number and hash of its last event.
Tail = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A draft with its payload as bytes, so that the transaction does no work that could fail on a value.

    event_id: drawn once, so that it can be looked up after a commit whose outcome is unknown.
    """

    draft: Draft
    payload: bytes
    event_id: str

    @classmethod
    def of(cls, draft: Draft) -> Prepared:
        """Return the draft, ready to be written.

        Raises:
            JournalError: its payload is not JSON.
        """
        return cls(draft, canonical_json(draft.payload), str(uuid.uuid4()))


def insert_events(
    connection: Connection,
    prepared: Sequence[Prepared],
    *,
    after: int,
    stream: str,
    epoch: str,
    rank: int,
    clock_ns: Callable[[], int],
    tail: Tail | None = None,
) -> tuple[Event, ...]:
    """Insert the events at the end of the journal and of their stream, and return them.

    after: the last position that was given. tail: of the stream, if it was read already. Needs a transaction that has
    the write lock: all of this is read in it.

    Raises:
        sqlalchemy.exc.DBAPIError: whatever the database says.
    """
    _insert_blobs(connection, prepared)
    events = make_events(
        prepared,
        after=after,
        tail=stream_tail(connection, stream) if tail is None else tail,
        stream=stream,
        epoch=epoch,
        rank=rank,
        clock_ns=clock_ns,
    )
    insert_rows(connection, events)
    return events


def make_events(
    prepared: Sequence[Prepared],
    *,
    after: int,
    tail: Tail,
    stream: str,
    epoch: str,
    rank: int,
    clock_ns: Callable[[], int],
) -> tuple[Event, ...]:
    """Return the events that come after a position, and continue their stream."""
    version, previous = tail
    events: list[Event] = []
    for offset, one in enumerate(prepared, start=1):
        event = _make_event(
            one,
            position=after + offset,
            stream=stream,
            stream_version=version + offset,
            epoch=epoch,
            rank=rank,
            recorded_at=clock_ns(),
            previous_hash=previous,
        )
        previous = event.hash
        events.append(event)
    return tuple(events)


def insert_rows(connection: Connection, events: Sequence[Event]) -> None:
    """Insert events as they are. Raises sqlalchemy.exc.DBAPIError: whatever the database says."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(_INSERT + _ROW, list(map(tuple, events)))
        return
    # Many rows in one statement; else the driver sends many, and logs a warning of its own when one is refused.
    for start in range(0, len(events), _ROWS_MAX):
        some = events[start : start + _ROWS_MAX]
        statement = (_INSERT + ", ".join([_ROW] * len(some))).replace("?", "%s")
        connection.exec_driver_sql(statement, tuple(value for event in some for value in event))


def stream_tail(connection: Connection, stream: str) -> Tail:
    """Return number and hash of a stream's last event; 0 and the zero hash before the first."""
    statement = _TAIL if connection.dialect.name == "sqlite" else _TAIL.replace("?", "%s")
    last = connection.exec_driver_sql(statement, (stream,)).one_or_none()
    return (int(last[0]), bytes(last[1])) if last is not None else (0, ZERO_HASH)


def hash_at(connection: Connection, stream: str, version: int) -> bytes | None:
    """Return the hash of a stream's event by its number, None if it is not there."""
    of_version = (EVENTS.c.stream == stream) & (EVENTS.c.stream_version == version)
    found = connection.execute(select(EVENTS.c.hash).where(of_version)).scalar_one_or_none()
    return None if found is None else bytes(found)


def highest_given(connection: Connection) -> int:
    """Return the last position that a SQLite journal has given, also to rows that were cut off its end since."""
    # Their positions stay a gap.
    sequence, highest = connection.exec_driver_sql(_HIGHEST).one()
    return max(int(highest or 0), int(sequence or 0))


def _insert_blobs(connection: Connection, prepared: Sequence[Prepared]) -> None:
    blobs = {blob_digest(content): content for one in prepared for content in one.draft.blobs}
    for digest, content in blobs.items():
        if connection.execute(select(BLOBS.c.digest).where(BLOBS.c.digest == digest)).first() is None:
            connection.execute(BLOBS.insert(), {"digest": digest, "content": content})


def _make_event(
    one: Prepared,
    *,
    position: int,
    stream: str,
    stream_version: int,
    epoch: str,
    rank: int,
    recorded_at: int,
    previous_hash: bytes,
) -> Event:
    draft = one.draft
    unhashed = (
        *(position, stream, stream_version, one.event_id, epoch, draft.round, rank, draft.type.value, SCHEMA_VERSION),
        *(draft.from_state, draft.to_state, draft.trigger, recorded_at, boot_id(), os.getpid(), draft.causation),
        *(one.payload, previous_hash),
    )
    return Event._make((*unhashed, hash_row((*unhashed, None))))
