"""The demo's story: calibrate and commit, die in mid-round, restart and restore; then what the journal says of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

KILLED = -9
# Each start imports torch and diffusers, builds, and runs a dozen small requests; a hang must not last for ever.
START_S_MAX = 600
PIPELINES = ("small", "flux", "small-wan", "wan")


@click.command()
@click.option("--journal", type=click.Path(path_type=Path), required=True, help="A journal of the story's own.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--vram", help="Memory cap with its unit; a fitting default.")
@click.option("--pipeline", type=click.Choice(PIPELINES), default="small", show_default=True)
def main(journal: Path, device: str, vram: str | None, pipeline: str) -> None:
    """Tell the story in three starts on a fresh journal; exit 0 only if the third restored what the first committed."""
    _start_afresh(journal)
    options = ["--journal", str(journal), "--device", device, "--pipeline", pipeline]
    options += ["--vram", vram] if vram else []
    click.secho("1. a first start calibrates and commits", bold=True)
    first = _start(options)
    click.secho("2. a second start is killed with SIGKILL between two effects", bold=True)
    _start([*options, "--crash-at", "planned"], killed=True)
    click.secho("3. a third start recovers and restores", bold=True)
    third = _start(options)
    click.secho("4. the journal's account of it", bold=True)
    for verb in (["rounds"], ["placement"], ["explain", str(first["round"])], ["verify"]):
        click.echo(f"$ residency {' '.join(verb)} --journal {journal}")
        subprocess.run(
            [sys.executable, "-m", "residency", *verb, "--journal", str(journal)], check=True, timeout=START_S_MAX
        )
    problems = _problems(first, third)
    for problem in problems:
        click.secho(f"the story is not as told: {problem}", fg="red", err=True)
    if problems:
        sys.exit(1)
    click.secho("restored: the same placement, the same output bit for bit, no probe", bold=True)
    click.echo(f"ready after {first['ready_ms'] / 1e3:.2f} s at first, {third['ready_ms'] / 1e3:.2f} s when restored")


def _start_afresh(journal: Path) -> None:
    """Remove the story's own journal of an earlier run, with everything beside it."""
    for path in journal.parent.glob(f"{journal.name}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _start(options: list[str], *, killed: bool = False) -> dict[str, Any]:
    command = [sys.executable, "-m", "residency", "demo", "--json", *options]
    click.echo(f"$ residency demo {' '.join(options)}")
    ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=START_S_MAX, check=False)
    if ended.returncode != (KILLED if killed else 0):
        click.secho(f"exit status {ended.returncode} was not expected", fg="red", err=True)
        sys.exit(1)
    if killed:
        click.echo("   killed in mid-round, as asked")
        return {}
    answer: dict[str, Any] = msgspec.json.decode(ended.stdout)
    click.echo(f"   {answer['decision']}: {answer['reason']}")
    click.echo(
        f"   placement {answer['placement_digest'][:12]}, output {answer['output']['digest'][:12]}, "
        f"{answer['num_requests']} measured requests, {answer['num_probes']} of them probes; "
        f"{answer['journal_ms']:.1f} ms of {answer['ready_ms']:.0f} ms in the journal"
    )
    return answer


def _problems(first: dict[str, Any], third: dict[str, Any]) -> list[str]:
    expected = {
        "the first start committed": first["decision"] == "committed",
        "the first start ran a probe": first["num_probes"] > 0,
        "the third start took its plan from the journal": third["decision"] == "restored",
        "the third start ran no probe": third["num_probes"] == 0,
        "both serve one placement": first["placement_digest"] == third["placement_digest"],
        "both give one output": first["output"] == third["output"],
    }
    return [f"it is not so that {what}" for what, is_so in expected.items() if not is_so]


if __name__ == "__main__":
    main()
