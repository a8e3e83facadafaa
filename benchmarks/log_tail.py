"""Time `residency log -n 20` on a large journal, beside the start of a bare interpreter in the same run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from residency.journal.events import Draft, EventType
from residency.journal.store import Journal

EVENTS_PER_APPEND = 2_000


@click.command()
@click.option("--events", type=click.IntRange(min=EVENTS_PER_APPEND), default=100_000, show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=9, show_default=True)
def main(events: int, runs: int) -> None:
    """Print the median wall time of both, and what the command adds to an interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        draft = Draft(type=EventType.GATED, round=0, payload={"reason": "no-warmup", "detail": "one of many events"})
        with Journal.open(path) as journal:
            for _ in range(events // EVENTS_PER_APPEND):
                journal.append([draft] * EVENTS_PER_APPEND, stream="worker", epoch="epoch")
        tail = [sys.executable, "-m", "residency", "log", "-n", "20", "--journal", str(path)]
        bare = [sys.executable, "-c", "pass"]
        times: dict[str, list[float]] = {"tail": [], "bare": []}
        for _ in range(runs):
            # In turn, so that a machine that becomes busy slows both.
            times["tail"].append(_seconds(tail))
            times["bare"].append(_seconds(bare))
        tail_s, bare_s = (statistics.median(times[name]) for name in ("tail", "bare"))
        click.echo(f"events in the journal       {events}")
        click.echo(f"residency log -n 20         {tail_s:.3f} s (median of {runs}, least {min(times['tail']):.3f} s)")
        click.echo(f"a bare interpreter          {bare_s:.3f} s")
        click.echo(f"ratio                       {tail_s / bare_s:.1f}")


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
