"""Time one durable append to a journal on a PostgreSQL server beside one to a SQLite file, in turn."""

from __future__ import annotations

import statistics
import tempfile
import time
import uuid
from pathlib import Path

import click

from residency.journal.events import Draft, EventType
from residency.journal.location import shown_location
from residency.journal.store import Journal

STREAM = "worker"


@click.command()
@click.argument("url", envvar="RESIDENCY_TEST_POSTGRESQL")
@click.option("--appends", type=click.IntRange(min=10), default=200, show_default=True, help="In each round.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
def main(url: str, appends: int, rounds: int) -> None:
    """Print median, 99 of 100 and worst of both. URL names a database; a schema is made in it, and left there."""
    schema = f"benchmark_{uuid.uuid4().hex[:12]}"
    draft = Draft(type=EventType.MEASURED, round=1, payload={"placement": "f" * 64, "filler": "x" * 200})
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal.open(Path(folder) / "journal.db") as file,
        Journal.open(f"{url}{'&' if '?' in url else '?'}schema={schema}") as server,
        file.hold(STREAM),
        server.hold(STREAM),
    ):
        journals = {"SQLite": file, "PostgreSQL": server}
        times: dict[str, list[float]] = {name: [] for name in journals}
        for _ in range(rounds):
            # In turn, so that a machine that becomes busy slows both.
            for name, journal in journals.items():
                times[name] += _seconds(journal, draft, appends)
    click.echo(f"one append, {rounds * appends} of each in turn; {shown_location(url)}, schema {schema}")
    first = statistics.median(times["SQLite"])
    for name, found in times.items():
        found.sort()
        median, late = statistics.median(found), found[len(found) * 99 // 100]
        figures = f"median {median * 1e3:6.2f} ms   99 of 100 {late * 1e3:6.2f} ms   worst {found[-1] * 1e3:6.2f} ms"
        click.echo(f"{name:12}{figures}   ratio {median / first:.2f}")


def _seconds(journal: Journal, draft: Draft, count: int) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        journal.append([draft], stream=STREAM, epoch="e")
        times.append(time.perf_counter() - started)
    return times


if __name__ == "__main__":
    main()
