"""What the verbs share: their options and exit codes, opening the journal, choosing the stream, printing."""

from __future__ import annotations

import math
from contextlib import closing
from datetime import UTC
from typing import TYPE_CHECKING, Any, TypeVar

import click

from residency.errors import ResidencyError
from residency.journal.reader import JournalReader
from residency.rendering import json_line
from residency.settings import journal_location, state_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from click.shell_completion import CompletionItem

FC = TypeVar("FC", bound="Callable[..., Any]")

FINDING = 1  # exit code: a check found something, or there is nothing by the name that was asked for

USAGE = {
    0: "all is well",
    2: "usage: an option, an argument or a setting is wrong",
}
OPENING = {
    3: "the journal cannot be opened",
    4: "the journal is of a newer format than this program",
    5: "the journal is unreadable: corrupt, or not one of ours",
}
WORKER = {
    70: "a rollback failed, where the weights are is unknown",
    71: "the device is lost to the process: a sticky CUDA error, or a broken allocator",
    72: "no placement fits under the cap",
    73: "a rank cannot learn what all decided, or waits for one that is gone",
}


def exit_codes(own: dict[int, str] | None = None, *, journal: bool = True) -> str:
    """Return the end of a verb's help: its own exit codes, and those of every verb, or of every one with a journal."""
    return "\n".join(("\b", "Exit codes:", *code_lines(USAGE | (OPENING if journal else {}) | (own or {}))))


def code_lines(codes: dict[int, str]) -> list[str]:
    """Return exit codes and their meaning as lines of help."""
    return [f"  {code:<4} {text}" for code, text in sorted(codes.items())]


def _complete_streams(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str | CompletionItem]:
    """Return the streams of the journal that is named on the line; nothing if it cannot be read."""
    try:
        with open_reader(ctx.params.get("journal")) as reader:
            return [stream for stream in reader.streams() if stream.startswith(incomplete)]
    except ResidencyError:
        return []


journal_option = click.option(
    "--journal",
    metavar="PATH|URL",
    help="The journal; else RESIDENCY_JOURNAL, else the one in the user's state directory.",
)
stream_option = click.option(
    "--stream", metavar="NAME", help="Which worker, where several share the journal.", shell_complete=_complete_streams
)
json_option = click.option("--json", "as_json", is_flag=True, help="JSON Lines: one object a line, times in UTC.")
# Comes as `zone`: None for this machine's.
utc_option = click.option(
    "--utc",
    "zone",
    is_flag=True,
    callback=lambda ctx, param, value: UTC if value else None,
    help="Show times in UTC, and read times without a zone as UTC; else both are this machine's.",
)


def reading_options(command: FC) -> FC:
    """Add --journal, --stream and --json to a verb."""
    return journal_option(stream_option(json_option(command)))


POSITION_MAX = 2**63 - 1  # of an event: SQLite's largest integer


class Seconds(click.FloatRange):
    """A time that ends: neither "nan", which no comparison refuses, nor for ever."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return it in seconds. Raises BadParameter, like every type of an option."""
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is no number of seconds; leave it out to wait as long as the verb does", param, ctx)
        return seconds


def open_reader(journal: str | None) -> closing[JournalReader]:
    """Open the journal for reading only; raises JournalError where there is none."""
    return closing(JournalReader.open(journal_location(journal), state_folder=state_directory()))


def choose_stream(reader: JournalReader, wanted: str | None) -> str | None:
    """Return the stream to read, None in a journal without any. Raises UsageError that lists them if unclear."""
    streams = reader.streams()
    if wanted is not None and wanted not in streams:
        raise click.UsageError(f"the journal has no stream {wanted!r}; it has {', '.join(streams) or 'none'}")
    if wanted is None and len(streams) > 1:
        raise click.UsageError(f"the journal has {len(streams)} streams, name one with --stream: {', '.join(streams)}")
    return wanted or (streams[0] if streams else None)


def each_stream(reader: JournalReader, wanted: str | None) -> tuple[str, ...]:
    """Return the streams to read one by one: the one named, else all. Raises UsageError if there is no such one."""
    chosen = choose_stream(reader, wanted) if wanted is not None else None
    return reader.streams() if chosen is None else (chosen,)


def end_of(reader: JournalReader, stream: str | None = None) -> int:
    """Return the position of the newest event, of one stream or of all; 0 without any."""
    return next((event.position for event in reader.events(stream, limit=1, newest_first=True)), 0)


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
