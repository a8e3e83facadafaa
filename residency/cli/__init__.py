"""The command line: one verb a function, errors in one line, exit codes that scripts can rely on."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import shell_complete

from residency.cli.common import OPENING, USAGE, WORKER, code_lines
from residency.errors import ResidencyError
from residency.settings import completion_request, wants_color

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_OWN = {
    1: "a check found something, two things differ, or there is nothing by that name",
    6: "of a fleet: whether a replica did what was asked is not known",
    124: "the time to wait passed",
    130: "interrupted",
    141: "the reader of a pipe went away",
}
EXIT_CODES = "\n".join(
    ("\b", "Exit codes:", *code_lines(USAGE | OPENING | _OWN), "A worker ends with", *code_lines(WORKER), "")
)


# Verb -> the module it is in, in the order of the help. None of these modules loads torch or SQLAlchemy.
VERBS = {
    "demo": "residency.cli.host",
    "at": "residency.cli.at",
    "rounds": "residency.cli.rounds",
    "log": "residency.cli.log",
    "show": "residency.cli.rounds",
    "placement": "residency.cli.placement",
    "explain": "residency.cli.explain",
    "plan": "residency.cli.plan",
    "diff": "residency.cli.diff",
    "stats": "residency.cli.stats",
    "quarantine": "residency.cli.quarantine",
    "replay": "residency.cli.replay",
    "verify": "residency.cli.replay",
    "graph": "residency.cli.host",
    "doctor": "residency.cli.host",
    "fleet": "residency.cli.fleet",
    "export": "residency.cli.export",
    "completion": "residency.cli.completion",
}
# The same of verbs that write, which load SQLAlchemy.
WRITING = {
    "import": "residency.cli.importing",
    "backup": "residency.cli.backup",
    "prune": "residency.cli.prune",
}
COMPLETION_VARIABLE = "_RESIDENCY_COMPLETE"


class Verbs(click.Group):
    """Imports the module of a verb when it is asked for, so that `log` does not wait for what `replay` needs.

    verbs: verb -> its module. The verb's function has its name, with an underscore behind it where that is Python's.
    """

    def __init__(self, *, verbs: Mapping[str, str], **attributes: Any) -> None:
        super().__init__(**attributes)
        self._verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs' names."""
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a verb, None if there is none of that name."""
        if cmd_name not in self._verbs:
            return None
        module = import_module(self._verbs[cmd_name])
        found: click.Command = getattr(module, cmd_name, None) or getattr(module, f"{cmd_name}_")
        return found


@click.group(
    cls=Verbs,
    verbs=VERBS | WRITING,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="residency", prog_name="residency")
def residency() -> None:
    """Reversible, journaled weight residency for GPU inference workers.

    Data goes to the standard output, messages to the standard error. Every verb tells its exit codes; verbs that read
    a journal change nothing.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. Raises nothing a user could have caused."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal of another encoding cannot show must not end the showing.
            # A stream that was pointed elsewhere may refuse; it then stays as it is.
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    if request := completion_request():
        return shell_complete(residency, {}, "residency", COMPLETION_VARIABLE, request)
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
