"""Appends to a file with the driver's own statements, so that of an append the disk is the slowest part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.journal.hashing import ZERO_HASH, blob_digest
from residency.journal.insert import make_events
from residency.journal.schema import EVENT_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine.interfaces import DBAPICursor
    from sqlalchemy.pool import PoolProxiedConnection

    from residency.journal.events import Event
    from residency.journal.insert import Prepared

_COLUMNS = ", ".join(f'"{name}"' for name in EVENT_COLUMNS)
_INSERT = f"INSERT INTO events ({_COLUMNS}) VALUES ({', '.join('?' * len(EVENT_COLUMNS))})"

# The sequence remembers rows that were cut off the end, so that their positions stay a gap.
_TAIL = """
SELECT (SELECT seq FROM sqlite_sequence WHERE name = 'events'), (SELECT max(position) FROM events), stream_version, hash
FROM (SELECT 1) LEFT JOIN (
    SELECT stream_version, hash FROM events WHERE stream = ? ORDER BY stream_version DESC LIMIT 1
)
"""


def append_events(
    connection: PoolProxiedConnection,
    prepared: Sequence[Prepared],
    *,
    stream: str,
    epoch: str,
    rank: int,
    clock_ns: Callable[[], int],
) -> tuple[Event, ...]:
    """Append the events in one transaction and return them. Blocks until they are on disk.

    After an error the connection is to be closed, which undoes what was begun.

    Raises:
        driver.Error: whatever SQLite says.
    """
    cursor = connection.cursor()
    try:
        cursor.execute("BEGIN IMMEDIATE")
        _insert_blobs(cursor, prepared)
        cursor.execute(_TAIL, (stream,))
        sequence, highest, version, previous = cursor.fetchone() or (None, None, None, None)
        events = make_events(
            prepared,
            after=max(sequence or 0, highest or 0),
            tail=(version or 0, previous or ZERO_HASH),
            stream=stream,
            epoch=epoch,
            rank=rank,
            clock_ns=clock_ns,
        )
        cursor.executemany(_INSERT, events)
        cursor.execute("COMMIT")
    finally:
        cursor.close()
    return events


def _insert_blobs(cursor: DBAPICursor, prepared: Sequence[Prepared]) -> None:
    blobs = {blob_digest(content): content for one in prepared for content in one.draft.blobs}
    for digest, content in blobs.items():
        cursor.execute("SELECT 1 FROM blobs WHERE digest = ?", (digest,))
        if cursor.fetchone() is None:
            cursor.execute("INSERT INTO blobs (digest, content) VALUES (?, ?)", (digest, content))
