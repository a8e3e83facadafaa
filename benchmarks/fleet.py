"""How long it takes to ask 64 replicas and to merge what they answer, with three of them dead in three ways.

The replicas are servers in this process, over real sockets; their rounds take no time, so that what is timed is the
fan-out. Beside it: the same number of requests to one replica, one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import time

import click
from fleet_replicas import Manager, Servers, black_hole, dies_in_mid_answer

from residency.control import Verb
from residency.fleet import FleetClient

BLACK_HOLE_S = 1.0  # what a replica that says nothing costs: it is the bound that is given to every one


def main() -> None:
    """Print a line for each thing that is timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=64)
    options = parser.parse_args()
    for verb in (Verb.STATUS, Verb.CALIBRATE):
        for num_dead in (0, 3):
            click.echo(line(verb, options, num_dead=num_dead))


def line(verb: Verb, options: argparse.Namespace, *, num_dead: int) -> str:
    """Time one fan-out a few times, each over fresh replicas."""
    samples = [once(verb, options, num_dead=num_dead) for _ in range(options.repeat)]
    times = [taken_s for taken_s, _ in samples]
    head = f"{verb.value} of {options.replicas} replicas, {num_dead} dead, {options.concurrency} at a time"
    return f"{head}: median {statistics.median(times):.3f} s, worst {max(times):.3f} s; {samples[-1][1]}"


def once(verb: Verb, options: argparse.Namespace, *, num_dead: int) -> tuple[float, str]:
    """Return the seconds of one fan-out with its merging, and what it came to."""
    servers = Servers()
    try:
        urls = [servers.replica(Manager()) for _ in range(options.replicas - num_dead)]
        dead = [servers.dead(), servers.broken(black_hole), servers.broken(dies_in_mid_answer)]
        # In between, so that they do not all come last.
        for index, url in enumerate(dead[:num_dead]):
            urls.insert(index * options.replicas // 4, url)
        client = FleetClient(urls, concurrency=options.concurrency, answer_s=BLACK_HOLE_S)
        begun = time.perf_counter()
        report = client.ask(verb, timeout_s=30.0)
        taken_s = time.perf_counter() - begun
    finally:
        servers.close()
    counts = ", ".join(f"{count} {outcome.value}" for outcome, count in report.merged.counts.items())
    faults = ", ".join(one.fault.value for one in report.replicas if one.fault)
    return taken_s, f"{report.merged.outcome.value}: {counts}" + (f" ({faults})" if faults else "")


if __name__ == "__main__":
    main()
