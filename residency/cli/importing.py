"""The verb `import`: makes a new journal of an export."""

from __future__ import annotations

from contextlib import ExitStack
from typing import IO

import click

from residency.cli.common import exit_codes, journal_option, json_option, say, show_json
from residency.journal.importing import import_lines
from residency.journal.store import Journal
from residency.settings import journal_location, state_directory


@click.command(
    "import",
    epilog=exit_codes(
        {
            3: "the journal is not empty, or cannot be written",
            4: "the export is of a newer format",
            5: "a line of the export is wrong, and which",
        }
    ),
)
@click.argument("source", metavar="FILE", type=click.File("rb"))
@click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Check every hash, chain and blob, and that no line is missing or changed.",
)
@journal_option
@json_option
def import_(*, source: IO[bytes], verify: bool, journal: str | None, as_json: bool) -> None:
    """Make a new journal of what 'residency export' wrote; FILE may be - for the standard input.

    It gets the same positions and hashes, whole or not at all. Without verifying, what a damaged journal still holds
    can be looked at.
    """
    location = journal_location(journal)
    with ExitStack() as stack:
        store = stack.enter_context(Journal.open(location, state_folder=state_directory()))
        num_events = import_lines(source, store, verify=verify)
    if as_json:
        show_json([{"journal": store.location, "events": num_events, "verified": verify}])
    else:
        say(f"imported {num_events} events into {store.location}{'' if verify else ', unverified'}")
