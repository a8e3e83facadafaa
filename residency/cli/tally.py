"""Counts what a journal holds, in one pass over few columns: a hundred thousand events take about a second."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from residency.errors import JournalCorrupt
from residency.journal.events import EventType
from residency.journal.pruned import Pruned, read_pruned
from residency.statemachine.states import SETTLED, State, Trigger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.journal.reader import JournalReader

_PAGE = 2_000  # rows a read: few enough to keep no writer's log from being reset
_COLUMNS = 'position, stream, epoch, round, type, to_state, "trigger", recorded_at, payload'
_SETTLED = frozenset(state.value for state in SETTLED)

# Only what is counted: the rest of a payload is skipped, not made into objects. Every part may be missing.


class _Verdict(msgspec.Struct):
    blames: str | None = None
    reason: str | None = None


class _Transition(msgspec.Struct):
    placement: str | None = None
    source: str | None = None
    verdict: _Verdict | None = None


class _Shape(msgspec.Struct, frozen=True):
    width: int
    height: int
    frames: int
    steps: int
    batch: int


class _Record(msgspec.Struct):
    kind: str
    placement_digest: str
    succeeded: bool
    duration_ns: int
    workload: _Shape


class _Measured(msgspec.Struct):
    record: _Record | None = None


class _Death(msgspec.Struct):
    blames: str = "none"
    kind: str = ""


class _Said(msgspec.Struct):
    """What the other events say."""

    reason: str | None = None
    signal: str | None = None
    decision: str | None = None
    death: _Death | None = None
    outside: dict[str, int] = {}  # requests outside the envelope, by what was done about them


Found = TypeVar("Found", _Transition, _Measured, _Said)
_TRANSITION = msgspec.json.Decoder(_Transition)
_MEASURED = msgspec.json.Decoder(_Measured)
_SAID = msgspec.json.Decoder(_Said)


class Row(NamedTuple):
    """The columns of an event that are counted."""

    position: int
    stream: str
    epoch: str
    round: int
    type: str
    to_state: str | None
    trigger: str | None
    recorded_at: int
    payload: bytes


class Timed(NamedTuple):
    """Requests that are compared with each other: of one placement and one shape ('1024x1024x1, 28 steps, batch 1')."""

    placement: str
    shape: str


@dataclass(slots=True)
class _Epoch:
    ended: str | None = None
    is_over: bool = False


@dataclass(slots=True)
class _Round:
    state: str = State.MEASURING.value
    source: str | None = None
    outcome: str | None = None


@dataclass(slots=True)
class Tally:
    """What one stream holds. Times in ns since the Unix epoch; request times in ns."""

    stream: str
    num_events: int = 0
    first_at: int = 0
    last_at: int = 0
    types: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    gates: Counter[str] = field(default_factory=Counter)
    deaths: Counter[tuple[str, str]] = field(default_factory=Counter)
    requests: dict[Timed, list[int]] = field(default_factory=lambda: defaultdict(list))
    failed_requests: int = 0
    outside: Counter[str] = field(default_factory=Counter)
    pruned: Pruned | None = None
    _epochs: dict[str, _Epoch] = field(default_factory=dict)
    _rounds: dict[tuple[str, int], _Round] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Count one event. Raises JournalCorrupt if its payload is not a JSON object."""
        self.num_events += 1
        self.first_at = self.first_at or row.recorded_at
        self.last_at = row.recorded_at
        self.types[row.type] += 1
        epoch = self._epochs.get(row.epoch)
        if epoch is None:
            epoch = self._epochs[row.epoch] = _Epoch()
        if row.round > 0 and (row.epoch, row.round) not in self._rounds:
            self._rounds[row.epoch, row.round] = _Round()
        if row.type == EventType.MEASURED.value:
            self._measured(row)
        elif row.type == EventType.TRANSITION.value:
            self._transition(row)
        elif row.type in _ENDINGS:
            self._ended(epoch, row)
        elif row.type == EventType.SERVING.value:
            self.decisions[_decoded(_SAID, row, _Said()).decision or "-"] += 1
        elif row.type == EventType.GATED.value:
            self.gates[_decoded(_SAID, row, _Said()).reason or "-"] += 1
        elif row.type == EventType.PRUNED.value:
            self.pruned = pruned_in(row)

    @property
    def num_starts(self) -> int:
        """How many lives the worker had."""
        return len(self._epochs)

    @property
    def restarts(self) -> Counter[str]:
        """How the life before each restart had ended."""
        return Counter(one.ended or "without a word" for one in list(self._epochs.values())[:-1])

    @property
    def outcomes(self) -> Counter[str]:
        """How the rounds ended."""
        return Counter(self._outcome(epoch, one) for (epoch, _), one in self._rounds.items())

    @property
    def sources(self) -> Counter[tuple[str, str]]:
        """Where the plans came from, and how their rounds ended: (source, state)."""
        return Counter((one.source, one.state) for one in self._rounds.values() if one.source is not None)

    def _outcome(self, epoch: str, one: _Round) -> str:
        if one.outcome is not None:
            return one.outcome
        ended = self._epochs[epoch].ended
        return f"not settled: {ended}" if ended is not None else "in flight or died"

    def _measured(self, row: Row) -> None:
        record = _decoded(_MEASURED, row, _Measured()).record
        # The first request of a start is cold: its time says nothing about a placement.
        if record is None or record.kind == "bounded":
            return
        if not record.succeeded:
            self.failed_requests += 1
            return
        shape = record.workload
        text = f"{shape.width}x{shape.height}x{shape.frames}, {shape.steps} steps, batch {shape.batch}"
        self.requests[Timed(record.placement_digest, text)].append(record.duration_ns)

    def _transition(self, row: Row) -> None:
        one = self._rounds.get((row.epoch, row.round))
        # A round that has settled stays so: the measure that follows it belongs to what comes next.
        if one is None or row.to_state is None or one.state in _SETTLED:
            return
        said = _decoded(_TRANSITION, row, _Transition())
        one.state = row.to_state
        if row.trigger == Trigger.PLAN.value:
            one.source = said.source
        elif row.trigger == Trigger.KEEP.value:
            one.outcome = "kept"
        elif row.to_state == State.ROLLED_BACK.value:
            verdict = said.verdict or _Verdict()
            blamed = f", blames {verdict.blames}" if verdict.blames else ""
            one.outcome = f"rolled-back: {verdict.reason or '-'}{blamed}"
        elif row.to_state in _SETTLED:
            one.outcome = row.to_state

    def _ended(self, epoch: _Epoch, row: Row) -> None:
        said = _decoded(_SAID, row, _Said())
        self.outside.update({what: count for what, count in said.outside.items() if count > 0})
        if row.type == EventType.RECOVERED.value and said.death is not None:
            self.deaths[said.death.blames, said.death.kind] += 1
        if epoch.ended in _LASTING:
            return
        if row.type == EventType.STOPPED.value:
            epoch.ended = f"stopped ({said.signal or said.reason or '-'})"
        elif row.type == EventType.RECOVERED.value:
            death = said.death or _Death()
            epoch.ended = f"died ({death.kind or '-'}, blames {death.blames})"
        else:
            epoch.ended = _ENDINGS[row.type]


# Event -> how a life ended with it; one that had to end for something may still stop in an orderly way.
_ENDINGS = {
    EventType.STOPPED.value: "",
    EventType.RECOVERED.value: "",
    EventType.POISONED.value: "device lost",
    EventType.ROLLBACK_FAILED.value: "rollback failed",
}
_LASTING = frozenset({"device lost", "rollback failed"})


def tally(reader: JournalReader, stream: str | None = None) -> dict[str, Tally]:
    """Return what every stream holds, or one of them, by name. Read-only.

    Raises:
        JournalCorrupt: the journal is damaged where it is read.
        JournalError: it can no longer be read.
    """
    found: dict[str, Tally] = {}
    for row in rows(reader, stream):
        one = found.get(row.stream)
        if one is None:
            one = found[row.stream] = Tally(row.stream)
        one.add(row)
    return dict(sorted(found.items()))


def rows(reader: JournalReader, stream: str | None = None, *, kind: EventType | None = None) -> Iterator[Row]:
    """Yield the counted columns of events by position, of one stream and of one type if they are named."""
    named = [("stream = ?", stream), ("type = ?", None if kind is None else kind.value)]
    given = [(condition, value) for condition, value in named if value is not None]
    where = " AND ".join(("position > ?", *(condition for condition, _ in given)))
    last = 0
    while True:
        page = reader.query(
            f"SELECT {_COLUMNS} FROM events WHERE {where} ORDER BY position LIMIT ?",
            (last, *(value for _, value in given), _PAGE),
        )
        for one in page:
            row: Any = one
            yield Row(*row)
        if len(page) < _PAGE:
            return
        last = int(page[-1][0] or 0)


def pruned_in(row: Row) -> Pruned | None:
    """Return what an event of type `pruned` says was removed from its stream; None if it cannot be read."""
    try:
        return read_pruned(msgspec.json.decode(row.payload))
    except (ValueError, TypeError):
        return None


def _decoded(decoder: msgspec.json.Decoder[Found], row: Row, nothing: Found) -> Found:
    """Return what a payload says of what is counted; nothing where it is of another shape, as of another version."""
    try:
        return decoder.decode(row.payload)
    except msgspec.ValidationError:
        return nothing
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JournalCorrupt(
            journal=f"event {row.position}",
            problem=f"the payload is not a JSON object ({error})",
            remedy="see 'residency verify'",
        ) from error
