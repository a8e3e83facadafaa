"""Rows of the table of events: made into events as fast as Python can, and looked at on the way."""

from __future__ import annotations

from itertools import product
from typing import get_type_hints

from residency.errors import JournalCorrupt
from residency.journal.events import Event
from residency.journal.hashing import Column, hash_row
from residency.journal.schema import EVENT_COLUMNS

Row = tuple[Column, ...]

# The types that the columns of an event can have.
_NULLABLE = frozenset({"from_state", "to_state", "trigger", "causation"})
_TYPE_OF = get_type_hints(Event)
_TYPES = frozenset(product(*((str, type(None)) if name in _NULLABLE else (_TYPE_OF[name],) for name in EVENT_COLUMNS)))


class Types:
    """Raises JournalCorrupt for a row with a column of another type than it can have: damage, in a STRICT table."""

    def __init__(self, journal: str) -> None:
        self.journal = journal

    def __call__(self, row: Row) -> None:
        """Look at a row."""
        if tuple(map(type, row)) not in _TYPES:
            raise self.damaged(row)

    def damaged(self, row: Row) -> JournalCorrupt:
        """Return the error for an event that is not what was written."""
        return JournalCorrupt(
            journal=self.journal,
            problem=f"event {row[0]!r} is not what was written",
            remedy="see 'residency verify', and restore a copy or name another journal",
        )


class Hashes(Types):
    """Raises JournalCorrupt for a row that is not what was written, or does not follow the one before it."""

    def __init__(self, journal: str) -> None:
        super().__init__(journal)
        self._tails: dict[Column, tuple[Column, Column]] = {}

    def __call__(self, row: Row) -> None:
        """Look at a row. Rows come by position, oldest first."""
        # A hash covers the types of all columns, too.
        digest = row[18]
        if hash_row(row) != digest:
            raise self.damaged(row)
        stream, version = row[1:3]
        before = self._tails.get(stream)
        if before is not None and version == before[0] + 1 and row[17] != before[1]:  # type: ignore[operator]
            raise self.damaged(row)
        self._tails[stream] = version, digest


def event_of_row(row: Row) -> Event:
    """Return the event of a row, whose columns are in the order of the table."""
    return Event._make(row)
