"""Checks a journal against itself and against its head witness: what it says was written, was written as it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from residency.errors import JournalCorrupt
from residency.journal import file_checks
from residency.journal.chain import Chains, Positions, at
from residency.journal.events import Event, EventType, named_blob
from residency.journal.findings import Finding, FindingKind
from residency.journal.hashing import blob_digest
from residency.journal.head import Head, HeadUnreadable, contradictions, heads_set_aside, look_at_head
from residency.journal.location import head_path
from residency.journal.reader import JournalReader

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Finding", "FindingKind", "verify"]

# Of a live journal that is pruned while it is read.
_TRIES_MAX = 3


def verify(reader: JournalReader) -> tuple[Finding, ...]:
    """Return everything wrong with a journal, and notes; empty if there is nothing to say. Read-only.

    A live journal can be verified: what is written meanwhile is not looked at.
    A part that cannot be read is a finding; the parts after it are still looked at.

    Raises:
        JournalError: the reader is closed, or was carried over a fork, or cannot be read at all.
    """
    checks = _Checks(reader)
    checks.run()
    for _ in range(_TRIES_MAX - 1):
        if not checks.was_pruned_meanwhile():
            break
        checks = _Checks(reader)
        checks.run()
    return tuple(checks.findings)


# (type, to_state) of the events that workers write together with the witness: before these there is none yet.
_WITNESSED = {
    (EventType.EFFECT_INTENT.value, None),
    (EventType.TRANSITION.value, "committed"),
    (EventType.TRANSITION.value, "rolled-back"),
}


@dataclass(slots=True)
class _Checks:
    reader: JournalReader
    findings: list[Finding] = field(default_factory=list)
    # Names of blobs that events speak of, and the first position that does.
    named: dict[str, int] = field(default_factory=dict)
    last_position: int = 0
    # The last position that was given when this began.
    until: int = 0
    # Whether there is an event that is never written without a witness.
    has_witnessed: bool = False
    is_head_unreadable: bool = False

    def run(self) -> None:
        # The witness first: the journal only grows, so that everything it knows must be in what is read after it.
        head = self.read_head()
        for check in self.reader.own_checks or file_checks.CHECKS:
            self.attempt(lambda check=check: self.findings.extend(check(self.reader)))  # type: ignore[misc]
        self.attempt(self.events)
        self.attempt(self.blobs)
        if head is not None:
            self.attempt(lambda: self.agrees(head))
        elif self.has_witnessed and not self.is_head_unreadable and self.reader.witness_path is not None:
            where = head_path(self.reader.witness_path)
            text = f"there is no head witness {where}, so a lost tail would not be noticed"
            self.say(FindingKind.HEAD_MISSING, text)

    def was_pruned_meanwhile(self) -> bool:
        """Whether what was found may be due to that."""
        try:
            later = self.reader.events(after=self.until) if self.findings else ()
            return any(event.type == EventType.PRUNED.value for event in later)
        except JournalCorrupt:
            return False

    def say(self, kind: FindingKind, text: str, *, position: int | None = None) -> None:
        self.findings.append(Finding(kind=kind, text=text, position=position))

    def attempt(self, check: Callable[[], None]) -> None:
        try:
            check()
        except JournalCorrupt as error:
            self.say(FindingKind.UNREADABLE, str(error), position=self.last_position or None)

    def read_head(self) -> Head | None:
        path = self.reader.witness_path
        if path is None:
            return None
        for kept in heads_set_aside(path):
            self.say(FindingKind.HEAD, f"an earlier head witness contradicted this journal; it is kept as {kept}")
        try:
            head, is_damaged = look_at_head(path)
        except HeadUnreadable as error:
            self.say(FindingKind.HEAD, f"the head witness {head_path(path)} cannot be read: {error}")
            self.is_head_unreadable = True
            return None
        if is_damaged:
            text = f"one of the two copies in {head_path(path)} is damaged; the other one counts, and may be older"
            self.say(FindingKind.HEAD_DAMAGED, text)
        return head

    def events(self) -> None:
        self.until = self.reader.last_position()
        is_partial = any(finding.kind is FindingKind.PARTIAL for finding in self.findings)
        chains, positions = Chains(), Positions()
        # Outcomes seen of every intent, by the intent's event_id.
        outcomes: dict[str, int] = {}
        for event in self.reader.events(before=self.until + 1):
            positions.add(event.position)
            self.last_position = event.position
            self.has_witnessed = self.has_witnessed or (event.type, event.to_state) in _WITNESSED
            self.findings += chains.add(event)
            self._pairs(event, outcomes)
            self._names(event)
        self.findings += chains.finish()
        if not is_partial:
            self.findings += positions.finish(chains.pruned(), last_position=self.until)

    def blobs(self) -> None:
        for digest, content in self.reader.blobs():
            self.named.pop(digest, None)
            if blob_digest(content) != digest:
                self.say(FindingKind.BLOB, f"blob {digest} is damaged")
        for digest, position in self.named.items():
            self.say(FindingKind.BLOB, f"blob {digest} is missing", position=position)

    def agrees(self, head: Head) -> None:
        def hash_at(stream: str, version: int) -> bytes | None:
            rows = self.reader.query(
                "SELECT hash FROM events WHERE stream = ? AND stream_version = ?", (stream, version)
            )
            return rows[0][0] if rows and isinstance(rows[0][0], bytes) else None

        journal_id = self.reader.meta().get("journal_id", "")
        for text in contradictions(head, journal_id=journal_id, hash_at=hash_at, was_pruned=self.reader.was_pruned):
            self.say(FindingKind.HEAD, text)

    def _pairs(self, event: Event, outcomes: dict[str, int]) -> None:
        if event.type == EventType.EFFECT_INTENT.value:
            outcomes[event.event_id] = 0
        elif event.type == EventType.EFFECT_OUTCOME.value:
            if event.causation not in outcomes:
                text = f"there is no intent {event.causation!r} before this outcome"
                self.findings.append(at(FindingKind.OUTCOME, text, event))
                return
            outcomes[event.causation] += 1
            if outcomes[event.causation] > 1:
                text = f"intent {event.causation!r} has another outcome before"
                self.findings.append(at(FindingKind.OUTCOME, text, event))

    def _names(self, event: Event) -> None:
        try:
            content = msgspec.json.decode(event.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            content = error
        if not isinstance(content, dict):
            text = f"the payload is not a JSON object ({content})"
            self.findings.append(at(FindingKind.PAYLOAD, text, event, column="payload"))
            return
        digest = named_blob(event, content)
        if digest is not None:
            self.named.setdefault(digest, event.position)
