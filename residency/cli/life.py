"""One life of a worker at one moment: what it was then, and what became of it, without reading a whole journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from residency.cli.tally import pruned_in, rows
from residency.journal.events import Event, EventType
from residency.journal.fold import fold_stream
from residency.journal.views import EpochView

if TYPE_CHECKING:
    from residency.journal.reader import JournalReader

_STARTED = EventType.EPOCH_STARTED.value
# What a start writes about the lives before it, before it writes about itself.
_CLOSING = frozenset({EventType.RECOVERED.value, EventType.EFFECT_OUTCOME.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The newest epoch of a stream at a position.

    then: folded up to there. now: with everything that is known of it. last: the event at the position, or the last one
    before it. following: the first event after it. next_start: the one that began the next epoch. closed: the lives
    before it that its start found dead, folded, oldest first. num_pruned: events between last and following that are
    gone, so that it may not be the newest epoch there.
    """

    then: EpochView
    now: EpochView
    last: Event
    following: Event | None
    next_start: Event | None
    closed: tuple[EpochView, ...]
    num_pruned: int = 0


def life_at(reader: JournalReader, stream: str, position: int) -> Life | None:
    """Return a stream's newest epoch at a position (inclusive); None if the stream has no event up to there.

    Reads that epoch only. Raises JournalError.
    """
    earlier, closers = _back_to_start(reader, stream, position)
    if not earlier:
        return None
    epoch = earlier[0].epoch
    later: list[Event] = []
    following = next_start = None
    for event in reader.events(stream, after=position):
        following = following or event
        if event.type == _STARTED:
            next_start = event
            break
        later.append(event)
    own = [event for event in earlier if event.epoch == epoch]
    (then,) = fold_stream(own, stream).epochs
    (now,) = fold_stream([*own, *(event for event in later if event.epoch == epoch)], stream).epochs
    closed = fold_stream(closers, stream).epochs
    return Life(
        then=then,
        now=now,
        last=earlier[-1],
        following=following,
        next_start=next_start,
        closed=closed,
        num_pruned=pruned_after(reader, stream, earlier[-1].position),
    )


def pruned_after(reader: JournalReader, stream: str, position: int) -> int:
    """Return how many events of a stream are gone between a position and the next event that is still there."""
    said = [row for row in rows(reader, stream, kind=EventType.PRUNED) if row.position > position]
    pruned = pruned_in(said[-1]) if said else None
    if pruned is None:
        return 0
    following = next((event.position for event in reader.events(stream, after=position, limit=1)), said[-1].position)
    gone = (one for one in pruned.removed if position < one.first_position < following)
    return sum(one.num_events for one in gone)


def _back_to_start(reader: JournalReader, stream: str, position: int) -> tuple[list[Event], list[Event]]:
    """Return the events since the last start up to a position, and those before it by which that start closed others.

    Both oldest first. Of a journal whose beginning is gone, all that is left counts as one life.
    """
    found: list[Event] = []
    closers: list[Event] = []
    is_past_start = False
    for event in reader.events(stream, before=position + 1, newest_first=True):
        if not is_past_start:
            found.append(event)
            is_past_start = event.type == _STARTED
        elif event.type in _CLOSING:
            closers.append(event)
        else:
            break
    return found[::-1], closers[::-1]
