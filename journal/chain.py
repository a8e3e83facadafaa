"""Follows the hash chains of a journal: what is there was written, in this order, and continues what is not there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from residency.errors import JournalCorrupt
from residency.journal.events import Event, EventType, payload
from residency.journal.findings import Finding, FindingKind
from residency.journal.hashing import ZERO_HASH, hash_event
from residency.journal.locate import altered_column
from residency.journal.pruned import Pruned, read_pruned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_PRUNED = EventType.PRUNED.value

# Each takes up to a second; of a file that is damaged all over, nobody asks about every column.
_LOCATED_MAX = 10


@dataclass(frozen=True, slots=True)
class _Hole:
    """Events of a stream that are not there: the numbers, the hashes on both sides, and the event that comes next."""

    first_version: int
    last_version: int
    previous_hash: str
    hash: str
    before: Event


@dataclass(slots=True)
class _Stream:
    version: int = 0
    hash: bytes = ZERO_HASH
    # What the last event hashes to, which is what the next one must name if only the hash itself was altered.
    computed: bytes = ZERO_HASH
    last: Event | None = None
    holes: list[_Hole] = field(default_factory=list)
    pruned: Pruned | None = None
    pruned_at: int = 0


def at(kind: FindingKind, text: str, event: Event, *, column: str | None = None) -> Finding:
    """Return a finding about an event."""
    return Finding(kind=kind, text=text, position=event.position, stream=event.stream, column=column)


class Chains:
    """The chains of all streams of one journal. Events come by position, from the first one on.

    Whether a hole in a stream was pruned is known only at the end: the event that says so comes after it.
    """

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._num_located = 0

    def add(self, event: Event) -> list[Finding]:
        """Follow the chain by one event, and return what is wrong with it."""
        stream = self._streams.get(event.stream)
        if stream is None:
            stream = self._streams[event.stream] = _Stream()
        found: list[Finding] = []
        if event.stream_version == stream.version + 1:
            if event.previous_hash not in (stream.hash, stream.computed):
                found.append(at(FindingKind.CHAIN, _NOT_NEXT, event))
        elif event.stream_version > stream.version:
            stream.holes.append(
                _Hole(
                    stream.version + 1,
                    event.stream_version - 1,
                    _hex(stream.hash),
                    _hex(event.previous_hash),
                    event,
                )
            )
        else:
            found += self._out_of_order(event, stream)
        computed = hash_event(event)
        if computed != event.hash:
            text = "the event is not what was written: its hash differs"
            found.append(at(FindingKind.CHAIN, text, event, column=self._locate(event, stream)))
        if event.type == _PRUNED:
            found += self._note_pruned(event, stream)
        stream.version, stream.hash, stream.computed, stream.last = event.stream_version, event.hash, computed, event
        return found

    def finish(self) -> list[Finding]:
        """Return which holes were not pruned, and what was pruned and is there all the same."""
        found: list[Finding] = []
        for name, stream in self._streams.items():
            claims = (
                {}
                if stream.pruned is None
                else {(one.first_version, one.last_version): one for one in stream.pruned.removed}
            )
            for hole in stream.holes:
                claim = claims.pop((hole.first_version, hole.last_version), None)
                if claim is None:
                    found += [
                        at(FindingKind.VERSION, _jump(hole.before.stream_version, hole.first_version - 1), hole.before),
                        at(FindingKind.CHAIN, _NOT_NEXT, hole.before),
                    ]
                elif (claim.previous_hash, claim.hash) != (hole.previous_hash, hole.hash):
                    text = "the event does not continue what was pruned before it"
                    found.append(at(FindingKind.CHAIN, text, hole.before))
            found += [
                Finding(
                    kind=FindingKind.VERSION,
                    text=f"events {first} to {last} of the stream were pruned, and are not what is missing",
                    position=stream.pruned_at,
                    stream=name,
                )
                for first, last in claims
            ]
        return found

    def pruned(self) -> tuple[Pruned, ...]:
        """Return what was pruned from each stream that was."""
        return tuple(stream.pruned for stream in self._streams.values() if stream.pruned is not None)

    def heads(self) -> dict[str, tuple[int, bytes]]:
        """Return stream -> number and hash of its last event."""
        return {name: (stream.version, stream.hash) for name, stream in self._streams.items()}

    def _locate(self, event: Event, stream: _Stream) -> str | None:
        self._num_located += 1
        if self._num_located > _LOCATED_MAX:
            return None
        return altered_column(event, before=stream.last, previous_hash=stream.hash)

    def _out_of_order(self, event: Event, stream: _Stream) -> list[Finding]:
        found = [at(FindingKind.VERSION, _jump(event.stream_version, stream.version), event)]
        if event.previous_hash != stream.hash:
            found.append(at(FindingKind.CHAIN, _NOT_NEXT, event))
        return found

    def _note_pruned(self, event: Event, stream: _Stream) -> list[Finding]:
        try:
            stream.pruned, stream.pruned_at = read_pruned(payload(event)), event.position
        except (ValueError, JournalCorrupt) as error:
            text = f"the payload does not say what was pruned: {error}"
            return [at(FindingKind.PAYLOAD, text, event, column="payload")]
        return []


class Positions:
    """The positions of one journal, in their order: which are missing, and whether pruning accounts for them."""

    def __init__(self) -> None:
        self.last = 0
        self._missing: list[tuple[int, int]] = []

    def add(self, position: int) -> None:
        """Take the next position that is there."""
        if position > self.last + 1:
            self._missing.append((self.last + 1, position - 1))
        self.last = max(self.last, position)

    def finish(self, pruned: Sequence[Pruned], *, last_position: int) -> list[Finding]:
        """Return the gaps that pruning does not account for. last_position: the last one that was ever given."""
        spans = sorted((one.first_position, one.last_position) for each in pruned for one in each.removed)
        found = [_gap(first, last) for gap in self._missing for first, last in _outside(gap, spans)]
        if last_position > self.last:
            text = f"positions {self.last + 1} to {last_position} were written and are gone"
            found.append(Finding(kind=FindingKind.GAP, text=text, position=self.last))
        num_missing = sum(last - first + 1 for first, last in self._missing)
        num_pruned = sum(each.num_events for each in pruned)
        if not found and num_missing != num_pruned:
            text = f"{num_missing} positions are missing, and {num_pruned} were pruned"
            found.append(Finding(kind=FindingKind.GAP, text=text))
        return found


def _gap(first: int, last: int) -> Finding:
    return Finding(kind=FindingKind.GAP, text=f"positions {first} to {last} are missing", position=last + 1)


def _outside(gap: tuple[int, int], spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the parts of a gap that lie in none of the spans, which are sorted by their beginnings."""
    first, last = gap
    for begin, end in spans:
        if begin > last:
            break
        if end >= first:
            if begin > first:
                yield first, begin - 1
            first = end + 1
    if first <= last:
        yield first, last


def _hex(value: object) -> str:
    # In a damaged file a hash may be of another type.
    return value.hex() if isinstance(value, bytes) else repr(value)


_NOT_NEXT = "the event does not follow the one before it in its stream"


def _jump(version: int, after: int) -> str:
    return f"event {version} of the stream comes after event {after}"
