"""The verb `export`: a journal, or some of its streams, as JSON Lines that another journal can be made from."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from residency.cli.common import choose_stream, exit_codes, journal_option, open_reader, say, stream_option
from residency.errors import SettingsError
from residency.journal.export import export as write_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

MODE = 0o600  # that of a journal: it says what a worker is and does


@click.command(epilog=exit_codes())
@journal_option
@stream_option
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A new file, whole or not there; else the standard output.",
)
def export(*, journal: str | None, stream: str | None, output: Path | None) -> None:
    """Write a journal as JSON Lines, with everything that is needed to check it and to make it again.

    'residency import' makes a journal of it, with the same positions and hashes. Without --stream all of them.
    """
    with open_reader(journal) as reader:
        chosen = choose_stream(reader, stream) if stream is not None else None
        with _opened(output) as out:
            num_events = write_lines(reader, out, streams=None if chosen is None else (chosen,))
            out.flush()
    say(f"exported {num_events} events{f' of stream {chosen!r}' if chosen is not None else ''}")


@contextmanager
def _opened(output: Path | None) -> Iterator[IO[bytes]]:
    """Yield what to write to. A file gets its name when it is whole, and replaces none."""
    if output is None:
        yield sys.stdout.buffer
        return
    if os.path.lexists(output):
        raise SettingsError(f"{str(output)!r} is there already; name a new file", file=str(output))
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE), "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.link(temporary, output)
    except OSError as error:
        raise SettingsError(
            f"{str(output)!r} cannot be written: {(error.strerror or str(error)).lower()}", file=str(output)
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
