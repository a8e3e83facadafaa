"""What only an import and a prune do to a journal: write past its triggers, in one transaction."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import column, func, select, table

from residency.errors import JournalCorrupt
from residency.journal.engine import BLOBS, EVENTS, META
from residency.journal.events import Event, EventType
from residency.journal.fold import pruned_of
from residency.journal.insert import Prepared, highest_given, insert_events, insert_rows
from residency.journal.migrations import triggers
from residency.journal.schema import EVENT_COLUMNS, normal_sql

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from sqlalchemy import Row
    from sqlalchemy.engine import Connection

    from residency.journal.events import Draft
    from residency.journal.pruned import Pruned

_SEQUENCE = table("sqlite_sequence", column("name"), column("seq"))

_COLUMNS = [EVENTS.c[name] for name in EVENT_COLUMNS]

# Records speak of placements that their round's plan names.
_NAMES_BLOBS = EVENTS.c.type != EventType.MEASURED.value

# Values in one statement; SQLite takes some hundred in any build.
_BATCH = 500


class Rewrite:
    """One transaction on a journal, with the write lock held and the append-only triggers lifted.

    Others see all of it or nothing, and the triggers are back, and checked to be, before it ends. location: of the
    journal. witness_path: the file that the only head witness lies beside; None on a server, of which every host has
    its own. witnesses: the events that the head witness is to name afterwards, one a stream.
    """

    def __init__(
        self, connection: Connection, location: str, *, witness_path: Path | None, clock_ns: Callable[[], int]
    ) -> None:
        self.location = location
        self.witness_path = witness_path
        self.witnesses: list[Event] = []
        self._connection, self._clock_ns = connection, clock_ns

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Lift the triggers for the block.

        Raises:
            JournalCorrupt: one is missing, or not as it was made, before or after.
        """
        self._check_triggers()
        for name in triggers():
            self._connection.exec_driver_sql(f"DROP TRIGGER {name}")
        yield
        for sql in triggers().values():
            self._connection.exec_driver_sql(sql)
        self._check_triggers()

    def is_empty(self) -> bool:
        """Whether there is neither an event nor a blob."""
        counts = (select(func.count()).select_from(one) for one in (EVENTS, BLOBS))
        return not any(self._connection.execute(count).scalar_one() for count in counts)

    def journal_id(self) -> str:
        """Return the journal's id."""
        return str(self._connection.execute(select(META.c.value).where(META.c.key == "journal_id")).scalar_one())

    def replace_meta(self, meta: Mapping[str, str]) -> None:
        """Have the journal say this about itself."""
        self._connection.execute(META.delete())
        self._connection.execute(META.insert(), [{"key": key, "value": value} for key, value in meta.items()])

    def insert_blobs(self, blobs: Mapping[str, bytes]) -> None:
        """Insert blobs by their digests, unchecked."""
        if blobs:
            rows = [{"digest": digest, "content": content} for digest, content in blobs.items()]
            self._connection.execute(BLOBS.insert(), rows)

    def insert_events(self, events: Sequence[Event]) -> None:
        """Insert events as they are: positions, versions and hashes are not looked at."""
        if events:
            insert_rows(self._connection, events)

    def set_last_position(self, position: int) -> None:
        """Have the next event follow a position that may be behind the last event's.

        Raises:
            JournalError: the journal has nowhere to keep that number.
        """
        self._connection.execute(_SEQUENCE.delete().where(_SEQUENCE.c.name == "events"))
        self._connection.execute(_SEQUENCE.insert(), {"name": "events", "seq": position})

    def events(self, stream: str, *, first: int, last: int) -> Iterator[Event]:
        """Yield a stream's events between two positions, both inclusive, oldest first."""
        position = EVENTS.c.position
        of_range = (EVENTS.c.stream == stream) & (position >= first) & (position <= last)
        for row in self._connection.execute(select(*_COLUMNS).where(of_range).order_by(position)):
            yield _event(row)

    def newest(self, stream: str, *, kind: EventType | None = None) -> Event | None:
        """Return the last event of a stream, or the last of a kind; None if there is none."""
        wanted = EVENTS.c.stream == stream
        if kind is not None:
            wanted &= EVENTS.c.type == kind.value
        newest_first = select(*_COLUMNS).where(wanted).order_by(EVENTS.c.position.desc()).limit(1)
        row = self._connection.execute(newest_first).one_or_none()
        return None if row is None else _event(row)

    def last_pruned(self, stream: str) -> Pruned | None:
        """Return what was removed from a stream so far. Raises JournalCorrupt if that cannot be read."""
        event = self.newest(stream, kind=EventType.PRUNED)
        return None if event is None else pruned_of(event)

    def num_payloads(self) -> int:
        """Return how many payloads there are to look through."""
        counted = select(func.count()).select_from(EVENTS).where(_NAMES_BLOBS)
        return int(self._connection.execute(counted).scalar_one())

    def payloads(self) -> Iterator[bytes]:
        """Yield the payload of every event, of every stream, that may name a blob."""
        for (content,) in self._connection.execute(select(EVENTS.c.payload).where(_NAMES_BLOBS)):
            yield bytes(content)

    def digests(self) -> Iterator[str]:
        """Yield the digests of all blobs."""
        for (digest,) in self._connection.execute(select(BLOBS.c.digest)):
            yield str(digest)

    def delete_events(self, stream: str, *, first_version: int, last_version: int) -> int:
        """Delete a stream's events by their numbers, both inclusive; returns how many there were."""
        version = EVENTS.c.stream_version
        of_range = (EVENTS.c.stream == stream) & (version >= first_version) & (version <= last_version)
        return self._connection.execute(EVENTS.delete().where(of_range)).rowcount

    def delete_blobs(self, digests: Sequence[str]) -> int:
        """Delete blobs by their digests; returns how many there were."""
        num = 0
        for start in range(0, len(digests), _BATCH):
            some = BLOBS.c.digest.in_(digests[start : start + _BATCH])
            num += self._connection.execute(BLOBS.delete().where(some)).rowcount
        return num

    def append(self, draft: Draft, *, stream: str, epoch: str, rank: int) -> Event:
        """Append an event to a stream. Raises JournalError if its payload is not JSON."""
        (event,) = insert_events(
            self._connection,
            [Prepared.of(draft)],
            after=self._highest_given(),
            stream=stream,
            epoch=epoch,
            rank=rank,
            clock_ns=self._clock_ns,
        )
        return event

    def _highest_given(self) -> int:
        return highest_given(self._connection)

    def _check_triggers(self) -> None:
        rows = self._connection.exec_driver_sql("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").all()
        found = {str(name): normal_sql(str(sql)) for name, sql in rows}
        expected = triggers()
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        if wrong:
            raise self._altered(f"triggers are not as they were made ({', '.join(wrong)})")

    def _altered(self, problem: str) -> JournalCorrupt:
        return JournalCorrupt(journal=self.location, problem=problem, remedy="see 'residency verify'")


def _event(row: Row[Any]) -> Event:
    return Event(**dict(zip(EVENT_COLUMNS, row, strict=True)))
