"""What can be wrong with a journal, and how it is said: kind, place and words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FindingKind(Enum):
    """What is wrong. The value is its spelling in output."""

    CHAIN = "chain"  # an event is not what was written, or does not follow the one before
    VERSION = "version"  # a stream's numbers are not 1, 2, 3, ..., and nothing was pruned there
    GAP = "gap"  # positions are missing that were not pruned
    PAYLOAD = "payload"  # no JSON object, or not one that its type of event must have
    OUTCOME = "outcome"  # an outcome without its intent, or a second one
    BLOB = "blob"  # a blob is damaged, or missing
    META = "meta"  # what the journal says about itself is not what was written
    SCHEMA = "schema"  # a table, an index or a trigger is not as it was made, or is not ours
    INTEGRITY = "integrity"  # SQLite finds the file damaged
    WAL = "wal"  # the write-ahead log holds transactions that SQLite cannot reach
    UNREADABLE = "unreadable"  # reading ended there
    HEAD = "head"  # the head witness contradicts the journal
    HEAD_MISSING = "head-missing"  # a note: nothing was witnessed
    HEAD_DAMAGED = "head-damaged"  # a note: one of the witness's two copies is, as a power loss may leave it
    PARTIAL = "partial"  # a note: it was imported from some streams of a journal


NOTES = frozenset({FindingKind.HEAD_MISSING, FindingKind.HEAD_DAMAGED, FindingKind.PARTIAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that verify has to say.

    position, stream: where, if it is somewhere. column: of the event, if it is known which.
    """

    kind: FindingKind
    text: str
    position: int | None = None
    stream: str | None = None
    column: str | None = None

    @property
    def is_note(self) -> bool:
        """Whether it is worth saying, but nothing is wrong."""
        return self.kind in NOTES
