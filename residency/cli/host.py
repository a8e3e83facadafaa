"""The verbs that need no journal: `graph`, `doctor` and `demo`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import click

from residency.cli.common import FINDING, WORKER, exit_codes, journal_option, json_option, show_json, show_lines
from residency.errors import SettingsError
from residency.rendering import table
from residency.settings import parse_size
from residency.statemachine.diagram import mermaid
from residency.statemachine.states import TRANSITIONS

if TYPE_CHECKING:
    from residency.doctor import Check

EXTRA = frozenset({"diffusers", "transformers", "accelerate"})  # what pip installs with the extra `diffusers`
INSTALL_EXTRA = "pip install 'residency[diffusers]'"
PIPELINES = ("small", "flux", "small-wan", "wan")
CRASH_POINTS = ("measuring", "planned", "applied", "validating")


@click.command(epilog=exit_codes(journal=False))
@json_option
def graph(*, as_json: bool) -> None:
    """Print the states and triggers of a round as a mermaid diagram."""
    if as_json:
        show_json(
            {"trigger": trigger.value, "from": source.value, "to": target.value}
            for trigger, source, target in TRANSITIONS
        )
        return
    click.echo(mermaid().rstrip("\n"))


@click.command(epilog=exit_codes({1: "a check found a problem"}, journal=False))
@journal_option
@json_option
def doctor(*, journal: str | None, as_json: bool) -> int:
    """Examine host, device and journal. Moves and writes nothing."""
    # It imports torch and reads packages' metadata, for which no other verb may pay.
    examine = importlib.import_module("residency.doctor").examine
    checks: list[Check] = examine(journal)
    if as_json:
        show_json(checks)
    else:
        rows = (
            (one.health.value, one.subject, one.found + (f"; {one.remedy}" if one.remedy else "")) for one in checks
        )
        show_lines(table(("", "WHAT", "FOUND"), rows))
    return FINDING if any(one.health.value == "problem" for one in checks) else 0


@click.command(epilog=exit_codes(WORKER | {1: "the round could not be run"}))
@click.option("--device", type=click.Choice(("auto", "cpu", "cuda")), default="auto", show_default=True)
@click.option("--vram", metavar="SIZE", help="Cap of device memory, with its unit: 24GiB.")
@click.option(
    "--pipeline", type=click.Choice(("small", "flux", "small-wan", "wan")), default="small", show_default=True
)
@click.option("--crash-at", type=click.Choice(CRASH_POINTS), help="Kill the process with SIGKILL in that state.")
@journal_option
@json_option
def demo(
    *, device: str, vram: str | None, pipeline: str, crash_at: str | None, journal: str | None, as_json: bool
) -> int:
    """Start a real worker once, and say what it decided.

    It restores or calibrates, serves one request, and exits with 0, also when it is pinned.
    """
    if vram is not None:
        parse_size(vram, name="--vram")
    try:
        # It builds a pipeline with torch and diffusers.
        run = importlib.import_module("residency.demo").run
        code: int = run(device=device, vram=vram, journal=journal, crash_at=crash_at, pipeline=pipeline, json=as_json)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        raise SettingsError(f"the demo needs {missing}, which is not installed; {INSTALL_EXTRA}") from error
    return code
