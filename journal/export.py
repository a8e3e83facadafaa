"""Writes a journal as JSON Lines: everything that is needed to check it again, and to make it again elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
from typing import IO, TYPE_CHECKING, Protocol

from residency.errors import JournalError
from residency.journal.events import EventType
from residency.journal.lines import FORMAT_NAME, VERSION, End, Header, Line, blob_line, encode_line, event_line
from residency.journal.meta import DIGEST_KEY, STREAMS_KEY
from residency.journal.migrations import known_format

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from residency.journal.events import Event

_DIGEST = re.compile(rb'"([0-9a-f]{64})"')


class Exportable(Protocol):
    """What is exported: a reader of a journal."""

    def meta(self) -> dict[str, str]:
        """Return what the journal says about itself."""
        ...

    def last_position(self) -> int:
        """Return the last position that was ever given."""
        ...

    def blobs(self) -> Iterator[tuple[str, bytes]]:
        """Yield every blob, by digest."""
        ...

    def events(self, stream: str | None = None, after: int = 0, before: int | None = None) -> Iterator[Event]:
        """Yield events by position, between two that are exclusive."""
        ...


def export(reader: Exportable, out: IO[bytes], *, streams: Sequence[str] | None = None) -> int:
    """Write the journal, or some of its streams, to `out`; returns how many events. Blocks; read-only.

    A line each: a header, the blobs by digest, the events by position, an end. Of some streams only the blobs that
    their events name. Nothing is checked on the way, so that a damaged journal can be exported as far as it is
    readable; `import_lines` checks. What is appended meanwhile is left out.

    Raises:
        JournalCorrupt: the journal is damaged where it is read.
        JournalError: it was pruned meanwhile, and what was written is not whole; or it can no longer be read.
        OSError: `out` takes no more.
    """
    last = reader.last_position()
    meta = reader.meta()
    chosen = None if streams is None else sorted(set(streams))
    if chosen is None and STREAMS_KEY in meta:
        chosen = sorted(map(str, json.loads(meta[STREAMS_KEY])))
    wanted = None if streams is None else frozenset(chosen or ())
    named = None if wanted is None else _named(reader, wanted, last)
    num_events = num_blobs = 0
    seen = hashlib.sha256()

    def write(line: Line) -> None:
        content = encode_line(line)
        seen.update(content)
        out.write(content)

    write(Line(header=_header(meta, chosen)))
    for digest, content in reader.blobs():
        if named is None or digest in named:
            write(blob_line(digest, content))
            num_blobs += 1
    for event in _events(reader, wanted, last):
        write(event_line(event))
        num_events += 1
    write(Line(end=End(events=num_events, blobs=num_blobs, last_position=last, sha256=seen.hexdigest())))
    if any(event.type == EventType.PRUNED.value for event in reader.events(after=last)):
        raise JournalError(
            journal=meta.get("journal_id", "?"), problem="it was pruned while it was exported", remedy="try again"
        )
    return num_events


def _header(meta: dict[str, str], streams: list[str] | None) -> Header:
    own = {key: value for key, value in sorted(meta.items()) if key not in (STREAMS_KEY, DIGEST_KEY)}
    return Header(format=FORMAT_NAME, version=VERSION, journal_format=known_format(), meta=own, streams=streams)


def _events(reader: Exportable, wanted: frozenset[str] | None, last: int) -> Iterator[Event]:
    events = reader.events(before=last + 1)
    return events if wanted is None else (event for event in events if event.stream in wanted)


def _named(reader: Exportable, wanted: frozenset[str], last: int) -> frozenset[str]:
    """Return the digests that the payloads of some streams hold, of blobs and of other things."""
    found: set[bytes] = set()
    for event in _events(reader, wanted, last):
        found.update(_DIGEST.findall(event.payload))
    return frozenset(digest.decode() for digest in found)
