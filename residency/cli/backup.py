"""The verb `backup`: a checked copy of a journal that may be in use."""

from __future__ import annotations

from pathlib import Path

import click

from residency.cli.common import exit_codes, journal_option, json_option, say, show_json
from residency.journal.backup import backup as copy_journal
from residency.rendering import size
from residency.settings import journal_location


@click.command(
    epilog=exit_codes(
        {
            3: "there is no journal, the copy cannot be written, or its name is taken",
            5: "the journal is damaged, and there is no copy",
        }
    )
)
@click.argument("target", metavar="FILE", type=click.Path(path_type=Path))
@journal_option
@json_option
def backup(*, target: Path, journal: str | None, as_json: bool) -> None:
    """Copy a journal, and the witness of its head, to a new file; workers go on meanwhile.

    The copy is a journal of its own, whole as it was at one moment, and is verified before it gets its name.
    """
    made = copy_journal(journal_location(journal), target)
    if as_json:
        show_json([made])
    else:
        witness = "" if made.has_witness else "; there was no head witness to copy"
        say(f"copied to {made.path}, verified: {size(made.num_bytes)}, up to event {made.last_position}{witness}")
