"""The verb `prune`: removes old lives of workers from a journal, or says which it would remove."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

import click

from residency.cli.common import (
    choose_stream,
    exit_codes,
    journal_option,
    json_option,
    open_reader,
    say,
    show_json,
    show_lines,
    stream_option,
    utc_option,
)
from residency.journal.prune import prune as remove
from residency.journal.retention import Retention
from residency.journal.store import Journal
from residency.moments import parse_moment
from residency.rendering import table
from residency.settings import journal_location, state_directory

if TYPE_CHECKING:
    from datetime import tzinfo

    from residency.journal.prune import Removal

DEFAULT = Retention()


@click.command(epilog=exit_codes({3: "there is no journal, it cannot be written, or the role does not own it"}))
@click.option(
    "--keep-since",
    metavar="WHEN",
    default=f"{DEFAULT.days} days ago",
    show_default=True,
    help="Keep every life whose last event is as young: '30 days ago', or an RFC 3339 time.",
)
@click.option(
    "--keep-epochs",
    metavar="N",
    type=click.IntRange(min=1),
    default=DEFAULT.epochs,
    show_default=True,
    help="Keep the last N lives of every worker, however old they are.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@journal_option
@stream_option
@json_option
@utc_option
def prune(
    *,
    keep_since: str,
    keep_epochs: int,
    dry_run: bool,
    journal: str | None,
    stream: str | None,
    as_json: bool,
    zone: tzinfo | None,
) -> None:
    """Remove the lives of workers that are older than both bounds, whole, and leave the proof of what was there.

    Whatever a start can still need stays, and so does a worker that runs. 'residency verify' finds nothing wrong
    afterwards, and every number of a round stays given. Make a backup first if you may still want to know.
    """
    now_ns = time.time_ns()
    since_ns = parse_moment(keep_since, now_ns=now_ns, name="--keep-since", zone=zone)
    location = journal_location(journal)
    with ExitStack() as stack:
        # First, and for a dry run only, without a trace: the store would make a journal where there is none.
        reader = stack.enter_context(open_reader(journal))
        chosen = choose_stream(reader, stream) if stream is not None else None
        if dry_run:
            # It asks a journal for streams and events only.
            store = cast("Journal", reader)
        else:
            store = stack.enter_context(Journal.open(location, state_folder=state_directory()))
        found = remove(
            store, keep_since_ns=since_ns, keep_epochs=keep_epochs, now_ns=now_ns, stream=chosen, dry_run=dry_run
        )
    _tell(found, dry_run=dry_run, as_json=as_json)


def _tell(found: tuple[Removal, ...], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        show_json(found)
    elif found:
        headings = ("STREAM", "LIVES", "ROUNDS", "EVENTS", "PLACEMENTS", "LIVES LEFT")
        rows = (
            (
                one.stream,
                *map(str, (one.num_epochs, one.num_rounds, one.num_events)),
                "not counted" if dry_run else str(one.num_blobs),
                str(one.kept_epochs),
            )
            for one in found
        )
        show_lines(table(headings, rows))
    if not found:
        say("there is nothing to remove")
    elif dry_run:
        say("nothing was removed: this is a dry run")
