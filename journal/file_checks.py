"""What verify looks at in a journal's file beside events: SQLite's own checks, schema, meta, numbers, the WAL."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from residency.journal.findings import Finding, FindingKind
from residency.journal.location import beside
from residency.journal.meta import DIGEST_KEY, STREAMS_KEY, meta_digest
from residency.journal.migrations import as_defined, definitions, known_format
from residency.journal.wal import unreachable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.journal.reader import JournalReader

# More would say nothing new about a damaged file.
_PROBLEMS_MAX = 20

# Between two looks at a WAL that seems damaged: one that is being written does not look the same twice.
_WAL_PAUSE_S = 0.05


def integrity(reader: JournalReader) -> Iterator[Finding]:
    """Yield what SQLite itself finds damaged. Raises JournalCorrupt."""
    for (said,) in reader.query(f"PRAGMA integrity_check({_PROBLEMS_MAX})"):
        if said != "ok":
            yield Finding(
                kind=FindingKind.INTEGRITY, text=f"SQLite finds the file damaged: {' '.join(str(said).split())}"
            )


def schema(reader: JournalReader) -> Iterator[Finding]:
    """Yield which tables, indexes and triggers are missing, altered, or not ours. Raises JournalCorrupt."""
    version = int(reader.query("PRAGMA user_version")[0][0] or 0)
    if not 1 <= version <= known_format():
        text = f"the file says that it is of format {version}, not {known_format()}"
        yield Finding(kind=FindingKind.SCHEMA, text=text)
        version = known_format()
    # Of an older format it is as it should be: the next writer brings it up to date.
    expected = definitions(version)
    rows = reader.query("SELECT type, name, tbl_name, sql, rootpage FROM sqlite_schema")
    for kind, name, _, _, root in rows:
        if kind == "trigger" and root != 0:
            yield Finding(kind=FindingKind.SCHEMA, text=f"trigger {name!s} has a page of its own")
    found = as_defined(row[:4] for row in rows)
    for (kind, name), made in expected.items():
        if (kind, name) not in found:
            yield Finding(kind=FindingKind.SCHEMA, text=f"{kind} {name} is missing")
        elif found[kind, name] != made:
            yield Finding(kind=FindingKind.SCHEMA, text=f"{kind} {name} is not as it was made")
    for kind, name in sorted(found.keys() - expected.keys()):
        yield Finding(kind=FindingKind.SCHEMA, text=f"{kind} {name} is not one of ours")


def meta(reader: JournalReader) -> Iterator[Finding]:
    """Yield what is wrong with what the journal says about itself. Raises JournalCorrupt."""
    found = reader.meta()
    if "journal_id" not in found:
        yield Finding(kind=FindingKind.META, text="the journal has no journal_id")
    if DIGEST_KEY in found and found[DIGEST_KEY] != meta_digest(found):
        yield Finding(kind=FindingKind.META, text="what the journal says about itself is not what was written")
    if STREAMS_KEY in found:
        text = f"it holds only some streams of the journal it was exported from: {found[STREAMS_KEY]}"
        yield Finding(kind=FindingKind.PARTIAL, text=text)


def sequence(reader: JournalReader) -> Iterator[Finding]:
    """Yield whether SQLite's count of positions fits the events. Raises JournalCorrupt."""
    rows = reader.query("SELECT (SELECT seq FROM sqlite_sequence WHERE name = 'events'), max(position) FROM events")
    counted, last = (int(value or 0) for value in rows[0])
    if counted < last:
        text = f"SQLite has counted {counted} positions, and there is an event at {last}"
        yield Finding(kind=FindingKind.SCHEMA, text=text, position=last)


def wal(reader: JournalReader) -> Iterator[Finding]:
    """Yield what the write-ahead log holds and SQLite does not read."""
    path = beside(reader.path, "-wal")
    try:
        found = unreachable(path)
        while found is not None:
            # Without a -shm nobody has it open.
            is_in_use = beside(reader.path, "-shm").exists()
            if is_in_use:
                time.sleep(_WAL_PAUSE_S)
            before, found = found, unreachable(path) if is_in_use else found
            if found is not None and found == before:
                yield Finding(kind=FindingKind.WAL, text=found.text)
                return
    except OSError as error:
        yield Finding(kind=FindingKind.UNREADABLE, text=f"the WAL cannot be read: {error}")


CHECKS = (integrity, schema, meta, sequence, wal)
