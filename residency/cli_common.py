"""What the reading verbs share: their options, opening the journal, choosing the stream, printing."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

import click

from residency.journal.fold import fold_stream
from residency.journal.reader import JournalReader
from residency.rendering import json_line
from residency.settings import journal_location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from residency.journal.views import EpochView, RoundView, StreamView

FC = TypeVar("FC", bound="Callable[..., Any]")

FINDING = 1  # exit code: a check found something, or there is nothing by the name that was asked for

journal_option = click.option(
    "--journal",
    metavar="PATH|URL",
    help="The journal; else RESIDENCY_JOURNAL, else the one in the user's state directory.",
)
stream_option = click.option("--stream", metavar="NAME", help="Which worker, where several share the journal.")
json_option = click.option("--json", "as_json", is_flag=True, help="JSON Lines: one object a line.")


def reading_options(command: FC) -> FC:
    """Add --journal, --stream and --json to a verb."""
    return journal_option(stream_option(json_option(command)))


def open_reader(journal: str | None) -> closing[JournalReader]:
    """Open the journal for reading only; raises JournalError where there is none."""
    return closing(JournalReader.open(journal_location(journal)))


def choose_stream(reader: JournalReader, wanted: str | None) -> str | None:
    """Return the stream to read, None in a journal without any. Raises UsageError that lists them if unclear."""
    streams = reader.streams()
    if wanted is not None and wanted not in streams:
        raise click.UsageError(f"the journal has no stream {wanted!r}; it has {', '.join(streams) or 'none'}")
    if wanted is None and len(streams) > 1:
        raise click.UsageError(f"the journal has {len(streams)} streams, name one with --stream: {', '.join(streams)}")
    return wanted or (streams[0] if streams else None)


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
        say(f"stream {view.stream!r} has no round {number}; its rounds are 1 to {view.highest_round}")
        return None
    return found[-1]


def say(message: str) -> None:
    """Tell a person something that is not data."""
    click.echo(message, err=True)


def show_lines(lines: Iterable[str]) -> None:
    """Print lines of a table or a text."""
    for line in lines:
        click.echo(line)


def show_json(values: Iterable[object]) -> None:
    """Print one line of JSON for each value."""
    for value in values:
        click.echo(json_line(value))
