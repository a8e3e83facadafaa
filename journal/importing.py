"""Makes a journal again from an export: checked line by line, and written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from residency.errors import JournalCorrupt, JournalError, JournalNewer
from residency.journal.chain import Chains, Positions
from residency.journal.events import EventType, named_blob, payload
from residency.journal.hashing import blob_digest
from residency.journal.lines import FORMAT_NAME, VERSION, Blob, End, Header, Row, blob_content, decode_line, event_of
from residency.journal.meta import STREAMS_KEY, with_digest
from residency.journal.migrations import known_format

if TYPE_CHECKING:
    from collections.abc import Iterable

    from residency.journal.events import Event
    from residency.journal.findings import Finding
    from residency.journal.rewrite import Rewrite
    from residency.journal.store import Journal

# Rows a statement: more take no less time, and much more memory.
_BATCH = 500


def import_lines(lines: Iterable[bytes | str], journal: Journal, *, verify: bool = True) -> int:
    """Make an empty journal the one that was exported, and return how many events it has. Blocks.

    It gets the exported journal's id, positions and hashes; its own export is the same bytes again. All in one
    transaction: after an error or a crash it is as empty as before. The head witness is written at the end.
    verify: check every hash, chain and blob, and that no line is missing or changed. Without it only the form is
    checked, so that what a damaged journal still holds can be looked at.

    Raises:
        JournalNewer: the export is of a newer format.
        JournalCorrupt: a line is wrong; the error says which and why.
        JournalError: the journal is not empty, or cannot be written.
    """
    with journal.rewriting() as rewrite:
        if not rewrite.is_empty():
            raise JournalError(journal=journal.location, problem="is not empty", remedy="import into a new journal")
        importing = _Importing(rewrite, verify=verify)
        with rewrite.lifted():
            number = 0
            for number, line in enumerate(lines, start=1):
                importing.take(number, line)
            importing.finish(number)
        rewrite.witnesses += importing.last.values()
    return importing.num_events


class _Importing:
    """One import: what has been read so far, and what it must be followed by. last: the last event of each stream."""

    def __init__(self, rewrite: Rewrite, *, verify: bool) -> None:
        self._rewrite, self._verify = rewrite, verify
        self._header: Header | None = None
        self._end: End | None = None
        self._seen = hashlib.sha256()
        self._chains = Chains()
        self._positions = Positions()
        self._digests: set[str] = set()
        self._last_digest = ""
        self._last_position = 0
        self._rows: list[Event] = []
        # Position -> line, of the events that findings at the end can be about.
        self._lines: dict[int, int] = {}
        self.last: dict[str, Event] = {}
        self.num_events = 0

    def take(self, number: int, line: bytes | str) -> None:
        """Read one line. Raises JournalCorrupt, JournalNewer."""
        content = line.encode() if isinstance(line, str) else line
        try:
            found = decode_line(content)
            if self._end is not None:
                raise ValueError("comes after the end")
            if (self._header is None) != isinstance(found, Header):
                raise ValueError("the header comes first, and once")
            if isinstance(found, Header):
                self._begin(found)
            elif isinstance(found, Blob):
                self._add_blob(found)
            elif isinstance(found, Row):
                self._add_event(found, number)
            else:
                self._close(found)
        except ValueError as error:
            raise wrong(number, str(error)) from error
        # Without its newline, so that a file and its lines are one.
        self._seen.update(content.rstrip(b"\r\n") + b"\n")

    def finish(self, number: int) -> None:
        """Check what is known only at the end, and write the last rows. Raises JournalCorrupt."""
        if self._end is None:
            raise wrong(number + 1, "the export was cut short: it has no end")
        if self._verify:
            findings = self._chains.finish()
            if self._header is not None and self._header.streams is None:
                findings += self._positions.finish(self._chains.pruned(), last_position=self._end.last_position)
            for finding in findings:
                raise wrong(self._lines.get(finding.position or 0, number), _text(finding))
        self._flush()
        # The next event follows the last one that the exported journal ever had, even if that is gone.
        self._rewrite.set_last_position(self._end.last_position)

    def _begin(self, header: Header) -> None:
        if header.format != FORMAT_NAME:
            raise ValueError(f"is of format {header.format!r}, not {FORMAT_NAME!r}")
        known_journal = known_format()
        for name, found, known in (
            ("export", header.version, VERSION),
            ("journal", header.journal_format, known_journal),
        ):
            if found > known:
                raise JournalNewer(journal=f"of the export, {name}", found=found, known=known)
        if "journal_id" not in header.meta:
            raise ValueError("the header names no journal_id")
        meta = dict(header.meta)
        if header.streams is not None:
            meta[STREAMS_KEY] = json.dumps(header.streams, ensure_ascii=False)
        self._header = header
        self._rewrite.replace_meta(with_digest(meta))

    def _add_blob(self, blob: Blob) -> None:
        content = blob_content(blob)
        if self.num_events:
            raise ValueError("blobs come before events")
        if blob.digest <= self._last_digest:
            raise ValueError(f"blob {blob.digest} comes after {self._last_digest}; they are sorted, each comes once")
        if self._verify and blob_digest(content) != blob.digest:
            raise ValueError(f"blob {blob.digest} is not what was written: its digest is {blob_digest(content)}")
        self._last_digest = blob.digest
        self._digests.add(blob.digest)
        self._rewrite.insert_blobs({blob.digest: content})

    def _add_event(self, row: Row, number: int) -> None:
        event = event_of(row)
        if event.position <= self._last_position:
            raise ValueError(f"position {event.position} comes after {self._last_position}")
        if self._verify:
            self._check(event)
        before = self.last.get(event.stream)
        if before is None or event.stream_version != before.stream_version + 1 or event.type == EventType.PRUNED.value:
            self._lines[event.position] = number
        self._last_position = event.position
        self.last[event.stream] = event
        self.num_events += 1
        self._rows.append(event)
        if len(self._rows) >= _BATCH:
            self._flush()

    def _check(self, event: Event) -> None:
        assert self._header is not None
        if self._header.streams is not None and event.stream not in self._header.streams:
            raise ValueError(f"stream {event.stream!r} is not one of those that the header names")
        self._positions.add(event.position)
        for finding in self._chains.add(event):
            raise ValueError(_text(finding))
        try:
            digest = named_blob(event, payload(event))
        except JournalCorrupt as error:
            raise ValueError(str(error.fields["problem"])) from error
        if digest is not None and digest not in self._digests:
            raise ValueError(f"position {event.position}, stream {event.stream!r}: blob {digest} is missing")

    def _close(self, end: End) -> None:
        self._end = end
        if not self._verify:
            return
        for name, told, found in (
            ("events", end.events, self.num_events),
            ("blobs", end.blobs, len(self._digests)),
        ):
            if told != found:
                raise ValueError(f"the export had {told} {name}, here are {found}")
        if end.last_position < self._last_position:
            raise ValueError(f"last_position is {end.last_position}, after an event at {self._last_position}")
        if end.sha256 != self._seen.hexdigest():
            raise ValueError("a line before this one is not what was written: their SHA-256 differs")

    def _flush(self) -> None:
        self._rewrite.insert_events(self._rows)
        self._rows = []


def wrong(number: int, problem: str) -> JournalCorrupt:
    """Return the error for a line of an export."""
    return JournalCorrupt(
        journal=f"of the export, line {number}", problem=problem, remedy="export again, or import without verifying"
    )


def _text(finding: Finding) -> str:
    where = f"position {finding.position}" if finding.position is not None else "the end"
    column = f", column {finding.column}" if finding.column is not None else ""
    return f"{where}, stream {finding.stream!r}{column}: {finding.text}"
