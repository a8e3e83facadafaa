"""Removes old epochs whole from a journal, and leaves in it the proof that what is left continues what was removed."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from residency.errors import JournalCorrupt, JournalError
from residency.journal.events import Draft, EventType
from residency.journal.fold import fold_stream
from residency.journal.hashing import hash_event
from residency.journal.head import HeadUnreadable, head_of, read_head, write_head
from residency.journal.header import unusable
from residency.journal.location import head_path, is_server
from residency.journal.pruned import Pruned, Range, joined
from residency.journal.retention import Retention, removable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.journal.events import Event
    from residency.journal.rewrite import Rewrite
    from residency.journal.store import Journal
    from residency.journal.views import EpochView, StreamView

log = logging.getLogger(__name__)

DEFAULT = Retention()

# Removed in one transaction at most: about a second, for which other writers wait.
EVENTS_MAX = 100_000

# On a server: there, a second takes fewer.
EVENTS_MAX_ON_SERVER = 20_000

# At a start: a tenth of a second, and not for the sake of less than this many epochs.
EVENTS_MAX_AT_START = 10_000
EPOCHS_MIN_AT_START = 10

# Looked through for names of blobs at a start, or on a server, while other writers wait: in a larger journal they stay,
# until an operator prunes it if it is a file.
LOOKED_THROUGH_MAX = 50_000

_DIGEST = re.compile(rb'"([0-9a-f]{64})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What was removed from a stream, or would be: how many epochs, events and rounds; and blobs that nothing names.

    kept_epochs: those left. first_position, last_position: of what was removed.
    """

    stream: str
    num_epochs: int
    num_events: int
    num_rounds: int
    num_blobs: int
    kept_epochs: int
    first_position: int
    last_position: int


def prune(
    journal: Journal,
    *,
    keep_since_ns: int | None = None,
    keep_epochs: int = DEFAULT.epochs,
    now_ns: int,
    stream: str | None = None,
    dry_run: bool = False,
) -> tuple[Removal, ...]:
    """Remove what is older than both bounds from every stream, or from one; returns what went, one a stream.

    keep_since_ns: epochs whose last event is as young stay; None: only their number counts. keep_epochs: so many of
    the last epochs of a stream stay. now_ns: the time now. Times are ns since the Unix epoch. Epochs that a start can
    still need stay, too (see `retention.needed`), and live ones, also those of other processes.
    Everything goes in transactions of whole epochs, each with one event `pruned` that proves what is left; a crash
    leaves each of them done or not begun. dry_run: only say what would go; blobs are not counted then.

    Raises:
        ValueError: a bound that is none.
        JournalCorrupt: what would be removed, a trigger, or the head witness is not as it was written.
        JournalError: the journal cannot be written, its head witness included; on a server, the role does not own it.
    """
    if keep_epochs < 1 or (keep_since_ns is not None and keep_since_ns > now_ns):
        raise ValueError(f"keep_epochs is {keep_epochs}, keep_since_ns {keep_since_ns} at {now_ns}; keep something")
    on_server = is_server(journal.location)
    events_max = EVENTS_MAX_ON_SERVER if on_server else EVENTS_MAX
    looked_through_max = LOOKED_THROUGH_MAX if on_server else None
    found: list[Removal] = []
    for name in journal.streams() if stream is None else (stream,):
        parts: list[Removal] = []
        more = True
        while more:
            view = fold_stream(journal.events(stream=name), name)
            old = removable(view, since_ns=keep_since_ns, num_kept=keep_epochs)
            some = old if dry_run else _first(old, events_max)
            more = len(some) < len(old)
            if some:
                planned = dry_run and _planned(view, some)
                parts.append(planned or _remove(journal, view, some, looked_through_max=looked_through_max))
        if parts:
            found.append(_together(parts))
    return tuple(found)


def retain(journal: Journal, view: StreamView, *, now_ns: int, retention: Retention | None = DEFAULT) -> Removal | None:
    """Apply a retention to the stream of a worker that starts; what is more than a moment's work is left for later.

    view: the stream, folded. now_ns: ns since the Unix epoch. retention: None keeps everything. Returns what was
    removed, None if nothing. Call it outside of requests. Nothing is worth a start that fails: raises nothing, and
    warns of what goes wrong.
    """
    if retention is None or is_server(journal.location):
        return None
    old = removable(view, since_ns=retention.since_ns(now_ns), num_kept=retention.epochs)
    if len(old) < EPOCHS_MIN_AT_START:
        return None
    try:
        some = _first(old, EVENTS_MAX_AT_START)
        return _remove(journal, view, some, looked_through_max=LOOKED_THROUGH_MAX)
    except JournalError as error:
        log.warning("old epochs of stream %r stay: %s", view.stream, error)
        return None


def _first(epochs: Sequence[EpochView], events_max: int) -> tuple[EpochView, ...]:
    """Return as many of the oldest as have at most so many events, but at least one."""
    some: list[EpochView] = []
    for epoch in epochs:
        events_max -= epoch.num_events
        if some and events_max < 0:
            break
        some.append(epoch)
    return tuple(some)


def _planned(view: StreamView, epochs: Sequence[EpochView], *, num_blobs: int = 0) -> Removal:
    return Removal(
        stream=view.stream,
        num_epochs=len(epochs),
        num_events=sum(epoch.num_events for epoch in epochs),
        num_rounds=sum(len(epoch.rounds) for epoch in epochs),
        num_blobs=num_blobs,
        kept_epochs=len(view.epochs) - len(epochs),
        first_position=min(epoch.first_position for epoch in epochs),
        last_position=max(epoch.last_position for epoch in epochs),
    )


def _together(parts: Sequence[Removal]) -> Removal:
    return Removal(
        stream=parts[0].stream,
        num_epochs=sum(one.num_epochs for one in parts),
        num_events=sum(one.num_events for one in parts),
        num_rounds=sum(one.num_rounds for one in parts),
        num_blobs=sum(one.num_blobs for one in parts),
        kept_epochs=parts[-1].kept_epochs,
        first_position=min(one.first_position for one in parts),
        last_position=max(one.last_position for one in parts),
    )


def _remove(
    journal: Journal, view: StreamView, epochs: Sequence[EpochView], *, looked_through_max: int | None = None
) -> Removal:
    """Remove these epochs of a stream in one transaction."""
    planned = _planned(view, epochs)
    with journal.rewriting() as rewrite, rewrite.lifted():
        # Both before anything goes: the last statement may be among what does.
        newest, before = rewrite.newest(view.stream), rewrite.last_pruned(view.stream)
        gone = _Gone(journal.location, {epoch.epoch for epoch in epochs})
        for event in rewrite.events(view.stream, first=planned.first_position, last=planned.last_position):
            gone.add(event)
        if newest is None or gone.num_events != planned.num_events:
            raise JournalError(
                journal=journal.location,
                problem=f"stream {view.stream!r} changed while it was looked at",
                remedy="try again",
            )
        _keep_witness_right(rewrite, newest, gone.ranges)
        for one in gone.ranges:
            rewrite.delete_events(view.stream, first_version=one.first_version, last_version=one.last_version)
        draft = Draft(type=EventType.PRUNED, round=0, payload=_payload(before, gone, epochs))
        event = rewrite.append(draft, stream=view.stream, epoch=newest.epoch, rank=newest.rank)
        rewrite.witnesses.append(event)
        num_blobs = _remove_blobs(rewrite, looked_through_max)
    return _planned(view, epochs, num_blobs=num_blobs)


class _Gone:
    """The events that go, by their versions: checked for the last time, and joined to ranges."""

    def __init__(self, location: str, epochs: set[str]) -> None:
        self.num_events = 0
        self.first_at = self.last_at = 0
        self.ranges: list[Range] = []
        self._location, self._epochs = location, epochs

    def add(self, event: Event) -> None:
        """Take the next event of the stream. Raises JournalCorrupt if it is not what was written."""
        if event.epoch not in self._epochs:
            return
        one = Range(
            first_version=event.stream_version,
            last_version=event.stream_version,
            first_position=event.position,
            last_position=event.position,
            previous_hash=event.previous_hash.hex(),
            hash=event.hash.hex(),
        )
        whole = self.ranges[-1].joined(one) if self.ranges else None
        is_next = bool(self.ranges) and self.ranges[-1].last_version + 1 == event.stream_version
        if hash_event(event) != event.hash or (is_next and whole is None):
            raise JournalCorrupt(
                journal=self._location,
                problem=f"event {event.position} is not what was written, and is not removed",
                remedy="see 'residency verify'",
            )
        self.ranges[-1:] = [whole] if whole is not None else [*self.ranges[-1:], one]
        self.first_at = event.recorded_at if self.num_events == 0 else self.first_at
        self.last_at = event.recorded_at
        self.num_events += 1


def _payload(before: Pruned | None, gone: _Gone, epochs: Sequence[EpochView]) -> dict[str, object]:
    """Return all that is gone from the stream by now: one event of this type says everything."""
    rounds = [one.number for epoch in epochs for one in epoch.rounds]
    earlier = before or Pruned(
        removed=(), num_epochs=0, num_rounds=0, highest_round=0, first_at=gone.first_at, last_at=gone.last_at
    )
    found = Pruned(
        removed=joined([*earlier.removed, *gone.ranges]),
        num_epochs=earlier.num_epochs + len(epochs),
        num_rounds=earlier.num_rounds + len(rounds),
        highest_round=max((earlier.highest_round, *rounds)),
        first_at=min(earlier.first_at, gone.first_at),
        last_at=max(earlier.last_at, gone.last_at),
    )
    plain: dict[str, object] = msgspec.to_builtins(found)
    return plain


def _remove_blobs(rewrite: Rewrite, looked_through_max: int | None) -> int:
    """Remove what no event names any more; nothing if more events than that would have to be looked through."""
    if looked_through_max is not None and rewrite.num_payloads() > looked_through_max:
        return 0
    named: set[bytes] = set()
    for content in rewrite.payloads():
        named.update(_DIGEST.findall(content))
    return rewrite.delete_blobs([digest for digest in rewrite.digests() if digest.encode() not in named])


def _keep_witness_right(rewrite: Rewrite, newest: Event, ranges: Sequence[Range]) -> None:
    """Have the head witness name an event that stays, before the one that it names is gone."""
    path = rewrite.witness_path
    if path is None:
        # Each host of a server's workers has its own, which accepts that its event was pruned.
        return
    try:
        head = read_head(path)
    except HeadUnreadable as error:
        raise JournalCorrupt(
            journal=rewrite.location,
            problem=f"the head witness cannot be read ({error})",
            remedy="see 'residency verify'",
        ) from error
    known = None if head is None else head.streams.get(newest.stream)
    if head is None or known is None:
        return
    if any(one.first_version <= known.stream_version <= one.last_version for one in ranges):
        streams = {**head.streams, newest.stream: head_of(newest)}
        try:
            write_head(path, msgspec.structs.replace(head, position=newest.position, streams=streams))
        except OSError as error:
            raise unusable(head_path(path), error) from error
