"""The command line: one verb a function, errors in one line, exit codes that scripts can rely on."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import click

from residency.errors import ResidencyError
from residency.settings import wants_color

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_CODES = """\b
Exit codes:
  0    all is well
  1    a check found something, or there is nothing by that name
  2    usage: an option, an argument or a setting is wrong
  3    the journal cannot be opened
  4    the journal is of a newer format than this program
  5    the journal is unreadable: corrupt, or not one of ours
  130  interrupted
  141  the reader of a pipe went away
A worker ends with
  70   a rollback failed, where the weights are is unknown
  71   the device is lost to the process: a sticky CUDA error, or a broken allocator
  72   no placement fits under the cap
"""


# Verb -> the module it is in, in the order of the help.
VERBS = {
    "demo": "residency.cli_host",
    "rounds": "residency.cli_rounds",
    "log": "residency.cli_log",
    "show": "residency.cli_rounds",
    "placement": "residency.cli_placement",
    "explain": "residency.cli_explain",
    "replay": "residency.cli_replay",
    "verify": "residency.cli_replay",
    "graph": "residency.cli_host",
    "doctor": "residency.cli_host",
}


class Verbs(click.Group):
    """Imports the module of a verb when it is asked for, so that `log` does not wait for what `replay` needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs' names."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a verb, None if there is none of that name."""
        if cmd_name not in VERBS:
            return None
        found: click.Command = getattr(import_module(VERBS[cmd_name]), cmd_name)
        return found


@click.group(
    cls=Verbs, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="residency", prog_name="residency")
def residency() -> None:
    """Reversible, journaled weight residency for GPU inference workers.

    Every verb but `demo` and `doctor` only reads a journal. Data goes to the standard output, messages to the
    standard error.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. Raises nothing a user could have caused."""
    try:
        # Whoever names no verb wants to know which there are.
        code = _run(list(sys.argv[1:] if arguments is None else arguments) or ["--help"])
        sys.stdout.flush()
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "residency"
        return _complain(f"{error.format_message().rstrip('.')}; see '{where} --help'", error.exit_code)
    except ResidencyError as error:
        return _complain(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        # Python would flush the closed pipe once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _run(arguments: list[str]) -> int:
    # Not click's own main(), which would turn a closed pipe into 1, the code of a finding.
    try:
        with residency.make_context("residency", arguments, color=None if wants_color() else False) as context:
            code = residency.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return code
