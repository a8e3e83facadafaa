"""Writes events into an open transaction: numbers them, chains them, and stores their blobs once."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sqlalchemy import column, func, select, table

from residency.journal.encode import canonical_json
from residency.journal.engine import BLOBS, EVENTS
from residency.journal.events import Draft, Event
from residency.journal.hashing import ZERO_HASH, blob_digest, hash_event
from residency.journal.host import boot_id
from residency.journal.schema import EVENT_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Connection

# Of an event's payload. A change of its meaning raises it, and the reader learns to read both.
EVENT_SCHEMA_VERSION = 1

_SEQUENCE = table("sqlite_sequence", column("name"), column("seq"))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A draft with its payload as bytes, so that the transaction does no work that could fail on a value."""

    draft: Draft
    payload: bytes

    @classmethod
    def of(cls, draft: Draft) -> Prepared:
        """Return the draft, ready to be written.

        Raises:
            JournalError: its payload is not JSON.
        """
        return cls(draft, canonical_json(draft.payload))


def insert_events(
    connection: Connection,
    prepared: Sequence[Prepared],
    *,
    stream: str,
    epoch: str,
    rank: int,
    clock_ns: Callable[[], int],
) -> tuple[Event, ...]:
    """Insert the events at the end of the journal and of their stream, and return them.

    Needs a transaction that has the write lock: the numbers and the hash before are read in it.

    Raises:
        sqlalchemy.exc.DBAPIError: whatever SQLite says.
    """
    _insert_blobs(connection, prepared)
    position = _last_position(connection)
    last = connection.execute(
        select(EVENTS.c.stream_version, EVENTS.c.hash)
        .where(EVENTS.c.stream == stream)
        .order_by(EVENTS.c.stream_version.desc())
        .limit(1)
    ).one_or_none()
    version, previous = (int(last[0]), bytes(last[1])) if last is not None else (0, ZERO_HASH)
    events: list[Event] = []
    for offset, one in enumerate(prepared, start=1):
        event = _make_event(
            one,
            position=position + offset,
            stream=stream,
            stream_version=version + offset,
            epoch=epoch,
            rank=rank,
            recorded_at=clock_ns(),
            previous_hash=previous,
        )
        previous = event.hash
        events.append(event)
    connection.execute(EVENTS.insert(), [{name: getattr(event, name) for name in EVENT_COLUMNS} for event in events])
    return tuple(events)


def _last_position(connection: Connection) -> int:
    # The sequence remembers rows that were cut off the end, so that their positions stay a gap.
    highest = connection.execute(select(func.max(EVENTS.c.position))).scalar_one()
    sequence = connection.execute(select(_SEQUENCE.c.seq).where(_SEQUENCE.c.name == "events")).scalar_one_or_none()
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
    unhashed = Event(
        position=position,
        stream=stream,
        stream_version=stream_version,
        event_id=str(uuid.uuid4()),
        epoch=epoch,
        round=draft.round,
        rank=rank,
        type=draft.type.value,
        schema_version=EVENT_SCHEMA_VERSION,
        from_state=draft.from_state,
        to_state=draft.to_state,
        trigger=draft.trigger,
        recorded_at=recorded_at,
        boot_id=boot_id(),
        pid=os.getpid(),
        causation=draft.causation,
        payload=one.payload,
        previous_hash=previous_hash,
        hash=b"",
    )
    return replace(unhashed, hash=hash_event(unhashed))
