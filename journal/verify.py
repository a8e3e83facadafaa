"""Checks a journal against itself and against its head witness: what it says was written, was written as it stands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from residency.errors import JournalCorrupt
from residency.journal.events import Event, EventType
from residency.journal.hashing import ZERO_HASH, blob_digest, hash_event
from residency.journal.head import Head, HeadUnreadable, contradictions, heads_set_aside, read_head
from residency.journal.location import head_path
from residency.journal.reader import JournalReader
from residency.journal.schema import TABLES, TRIGGERS, normal_sql

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class FindingKind(Enum):
    """What is wrong. The value is its spelling in output."""

    CHAIN = "chain"  # an event is not what was written, or does not follow the one before
    VERSION = "version"  # a stream's numbers are not 1, 2, 3, ...
    GAP = "gap"  # positions are missing
    PAYLOAD = "payload"  # no JSON object
    OUTCOME = "outcome"  # an outcome without its intent, or a second one
    BLOB = "blob"  # a blob is damaged, or missing
    SCHEMA = "schema"  # a table or a trigger is not as it was made
    INTEGRITY = "integrity"  # SQLite finds the file damaged
    UNREADABLE = "unreadable"  # reading ended there
    HEAD = "head"  # the head witness contradicts the journal
    HEAD_MISSING = "head-missing"  # a note: nothing was witnessed


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that verify has to say. position, stream: where, if it is somewhere."""

    kind: FindingKind
    text: str
    position: int | None = None
    stream: str | None = None

    @property
    def is_note(self) -> bool:
        """Whether it is worth saying, but nothing is wrong."""
        return self.kind is FindingKind.HEAD_MISSING


def verify(reader: JournalReader) -> tuple[Finding, ...]:
    """Return everything wrong with a journal, and notes; empty if there is nothing to say. Read-only.

    A live journal can be verified: what is written meanwhile may or may not be looked at.
    A part that cannot be read is a finding; the parts after it are still looked at.

    Raises:
        JournalError: the reader is closed, or was carried over a fork.
    """
    checks = _Checks(reader)
    # The witness first: the journal only grows, so that everything it knows must be in what is read after it.
    head = checks.read_head()
    for check in (checks.integrity, checks.schema, checks.events, checks.sequence, checks.blobs):
        checks.attempt(check)
    if head is not None:
        known = head
        checks.attempt(lambda: checks.agrees(known))
    elif checks.has_witnessed:
        checks.note_missing_head()
    return tuple(checks.findings)


@dataclass(slots=True)
class _Tail:
    """The last event of a stream that was looked at."""

    version: int = 0
    hash: bytes = ZERO_HASH


_DIGEST = re.compile("[0-9a-f]{64}")

# The first events to name a placement are written together with it: (type, trigger) -> the field that names it.
_NAMES_A_BLOB = {
    (EventType.EPOCH_STARTED.value, None): "initial_placement",
    (EventType.TRANSITION.value, "plan"): "placement",
}

# (type, to_state) of the events that workers write together with the witness: before these there is none yet.
_WITNESSED = {
    (EventType.EFFECT_INTENT.value, None),
    (EventType.TRANSITION.value, "committed"),
    (EventType.TRANSITION.value, "rolled-back"),
}

# More would say nothing new about a damaged file.
_PROBLEMS_MAX = 20

_BLOBS_PER_PAGE = 100


@dataclass(slots=True)
class _Checks:
    reader: JournalReader
    findings: list[Finding] = field(default_factory=list)
    # Names of blobs that events speak of, and the first position that does.
    named: dict[str, int] = field(default_factory=dict)
    last_position: int = 0
    # Whether there is an event that is never written without a witness.
    has_witnessed: bool = False
    is_head_unreadable: bool = False

    def say(self, kind: FindingKind, text: str, *, event: Event | None = None, position: int | None = None) -> None:
        where = event.position if event is not None else position
        stream = event.stream if event is not None else None
        self.findings.append(Finding(kind=kind, text=text, position=where, stream=stream))

    def attempt(self, check: Callable[[], None]) -> None:
        try:
            check()
        except JournalCorrupt as error:
            self.say(FindingKind.UNREADABLE, str(error), position=self.last_position or None)

    def read_head(self) -> Head | None:
        for kept in heads_set_aside(self.reader.path):
            self.say(FindingKind.HEAD, f"an earlier head witness contradicted this journal; it is kept as {kept}")
        try:
            return read_head(self.reader.path)
        except HeadUnreadable as error:
            self.say(FindingKind.HEAD, f"the head witness {head_path(self.reader.path)} cannot be read: {error}")
            self.is_head_unreadable = True
            return None

    def note_missing_head(self) -> None:
        if not self.is_head_unreadable:
            self.say(
                FindingKind.HEAD_MISSING,
                f"there is no head witness {head_path(self.reader.path)}, so a lost tail would not be noticed",
            )

    def integrity(self) -> None:
        for row in self.reader.query(f"PRAGMA integrity_check({_PROBLEMS_MAX})"):
            if row[0] != "ok":
                self.say(FindingKind.INTEGRITY, f"SQLite finds the file damaged: {row[0]!s}")

    def schema(self) -> None:
        rows = self.reader.query("SELECT type, name, sql FROM sqlite_schema WHERE type IN ('table', 'trigger')")
        found = {(str(kind), str(name)): normal_sql(str(sql)) for kind, name, sql in rows}
        expected = {("table", name): normal_sql(sql) for name, sql in TABLES.items()}
        expected |= {("trigger", name): normal_sql(sql) for name, sql in TRIGGERS.items()}
        for (kind, name), sql in expected.items():
            if (kind, name) not in found:
                self.say(FindingKind.SCHEMA, f"{kind} {name} is missing")
            elif found[kind, name] != sql:
                self.say(FindingKind.SCHEMA, f"{kind} {name} is not as it was made")
        for kind, name in found:
            if kind == "trigger" and (kind, name) not in expected:
                self.say(FindingKind.SCHEMA, f"trigger {name} is not one of ours")

    def events(self) -> None:
        tails: dict[str, _Tail] = {}
        # Outcomes seen of every intent, by the intent's event_id.
        outcomes: dict[str, int] = {}
        for event in self.reader.events():
            if event.position != self.last_position + 1:
                missing = f"{self.last_position + 1} to {event.position - 1}"
                self.say(FindingKind.GAP, f"positions {missing} are missing", position=event.position)
            self.last_position = event.position
            self.has_witnessed = self.has_witnessed or (event.type, event.to_state) in _WITNESSED
            self._links(event, tails.setdefault(event.stream, _Tail()))
            self._pairs(event, outcomes)
            self._names(event)

    def sequence(self) -> None:
        row = self.reader.query(
            "SELECT (SELECT seq FROM sqlite_sequence WHERE name = 'events'), (SELECT max(position) FROM events)"
        )[0]
        written, there = int(row[0] or 0), int(row[1] or 0)
        if written > there:
            self.say(FindingKind.GAP, f"positions {there + 1} to {written} were written and are gone", position=there)

    def blobs(self) -> None:
        for digest, is_whole in self._blob_states():
            self.named.pop(digest, None)
            if not is_whole:
                self.say(FindingKind.BLOB, f"blob {digest} is damaged")
        for digest, position in self.named.items():
            self.say(FindingKind.BLOB, f"blob {digest} is missing", position=position)

    def agrees(self, head: Head) -> None:
        ids = self.reader.query("SELECT value FROM meta WHERE key = 'journal_id'")

        def hash_at(stream: str, version: int) -> bytes | None:
            rows = self.reader.query(
                "SELECT hash FROM events WHERE stream = ? AND stream_version = ?", (stream, version)
            )
            return rows[0][0] if rows and isinstance(rows[0][0], bytes) else None

        for text in contradictions(head, journal_id=str(ids[0][0]) if ids else "", hash_at=hash_at):
            self.say(FindingKind.HEAD, text)

    def _links(self, event: Event, tail: _Tail) -> None:
        if event.stream_version != tail.version + 1:
            self.say(
                FindingKind.VERSION,
                f"event {event.stream_version} of the stream comes after event {tail.version}",
                event=event,
            )
        if event.previous_hash != tail.hash:
            self.say(FindingKind.CHAIN, "the event does not follow the one before it in its stream", event=event)
        if hash_event(event) != event.hash:
            self.say(FindingKind.CHAIN, "the event is not what was written: its hash differs", event=event)
        tail.version, tail.hash = event.stream_version, event.hash

    def _pairs(self, event: Event, outcomes: dict[str, int]) -> None:
        if event.type == EventType.EFFECT_INTENT.value:
            outcomes[event.event_id] = 0
        elif event.type == EventType.EFFECT_OUTCOME.value:
            if event.causation not in outcomes:
                self.say(
                    FindingKind.OUTCOME, f"there is no intent {event.causation!r} before this outcome", event=event
                )
                return
            outcomes[event.causation] += 1
            if outcomes[event.causation] > 1:
                self.say(FindingKind.OUTCOME, f"intent {event.causation!r} has another outcome before", event=event)

    def _names(self, event: Event) -> None:
        try:
            content = msgspec.json.decode(event.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            content = error
        if not isinstance(content, dict):
            self.say(FindingKind.PAYLOAD, f"the payload is not a JSON object ({content})", event=event)
            return
        key = _NAMES_A_BLOB.get((event.type, event.trigger))
        digest = content.get(key) if key is not None else None
        if isinstance(digest, str) and _DIGEST.fullmatch(digest):
            self.named.setdefault(digest, event.position)

    def _blob_states(self) -> Iterator[tuple[str, bool]]:
        last = ""
        while True:
            rows = self.reader.query(
                "SELECT digest, content FROM blobs WHERE digest > ? ORDER BY digest LIMIT ?", (last, _BLOBS_PER_PAGE)
            )
            for digest, content in rows:
                yield str(digest), isinstance(content, bytes) and blob_digest(content) == digest
            if len(rows) < _BLOBS_PER_PAGE:
                return
            last = str(rows[-1][0])
