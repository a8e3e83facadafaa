"""Folded streams, for the verbs that need states: `log` does not, and does not wait for what folds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.cli.common import choose_stream, say
from residency.journal.fold import fold_stream

if TYPE_CHECKING:
    from residency.journal.reader import JournalReader
    from residency.journal.views import EpochView, RoundView, StreamView


def read_view(reader: JournalReader, wanted: str | None, *, before: int | None = None) -> StreamView | None:
    """Return the chosen stream, folded (up to an exclusive position); None, with a message, if it has no event."""
    stream = choose_stream(reader, wanted)
    view = fold_stream(reader.events(stream, before=before), stream) if stream is not None else None
    if view is None or not view.epochs:
        say("the journal has no events yet" if before is None else "the journal has no events up to there")
        return None
    return view


def find_round(view: StreamView, number: int) -> tuple[EpochView, RoundView] | None:
    """Return the newest round of that number with its epoch; None, with a message, if there is none."""
    found = [(epoch, one) for epoch in view.epochs for one in epoch.rounds if one.number == number]
    if not found:
        gone = f", of which those up to {view.pruned.highest_round} were pruned" if view.pruned is not None else ""
        say(f"stream {view.stream!r} has no round {number}; its rounds are 1 to {view.highest_round}{gone}")
        return None
    return found[-1]
