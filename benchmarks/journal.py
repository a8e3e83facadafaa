"""Time the journal beside the bare driver: folding a large one, appending to it, and eight writers at once."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from residency.journal.encode import canonical_json
from residency.journal.events import Draft, Event, EventType
from residency.journal.fold import fold
from residency.journal.hashing import ZERO_HASH, hash_row
from residency.journal.reader import JournalReader
from residency.journal.schema import EVENT_COLUMNS, INDEXES, TABLES
from residency.journal.sqlite import VERSION, connect
from residency.journal.store import Journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH = 5_000
COLUMNS = ", ".join(f'"{name}"' for name in EVENT_COLUMNS)
INSERT = f"INSERT INTO events ({COLUMNS}) VALUES ({', '.join('?' * len(EVENT_COLUMNS))})"
STREAM = "worker-0123456789ab"
BOOT = str(uuid.uuid4())

Life = list[tuple[str, int, str | None, str | None, str | None, dict[str, Any]]]


@click.command()
@click.option("--events", type=click.IntRange(min=1_000), default=1_000_000, show_default=True)
@click.option("--appends", type=click.IntRange(min=10), default=400, show_default=True, help="In each round.")
@click.option("--writers", type=click.IntRange(min=2), default=8, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="On the disk that is meant.")
def main(events: int, appends: int, writers: int, rounds: int, folder: Path | None) -> None:
    """Print times and ratios. What is compared runs in turn, so that a machine that becomes busy slows all of it."""
    click.echo(f"SQLite {'.'.join(map(str, VERSION))}")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        print_folds(Path(temporary) / "fold.db", events, rounds)
        print_appends(Path(temporary), appends, rounds)
        print_writers(Path(temporary) / "writers.db", writers, appends)


# Folding.


def life(number: int) -> Life:
    """What a worker writes that calibrates, commits, serves and stops."""
    placement = f"{number % 7:064x}"
    phase = {"key": "use:transformer", "allocated_peak_bytes": 23_456_789_012, "duration_ns": 99_999 + number}
    record = {"record": {"kind": "baseline", "workload": {"width": 1024, "height": 1024}, "phases": [phase] * 2}}
    moves: Life = []
    for component in ("text_encoder", "transformer"):
        spec = {"index": len(moves), "component": component, "before": {"mode": "resident"}, "undo": False}
        moves += [
            ("effect.intent", 1, None, None, None, {**spec, "after": {"mode": "layerwise-offload"}}),
            ("effect.outcome", 1, None, None, None, {"component": component, "result": "applied"}),
        ]
    started = {"fingerprint": {"device": "gpu"}, "fingerprint_digest": "f" * 64, "initial_placement": placement}
    plan = {"placement": placement, "previous": placement, "source": "calibration", "inputs": {"records": [record] * 2}}
    return [
        ("epoch.started", 0, None, None, None, started),
        *([("measured", 1, None, None, None, record)] * 6),
        ("transition", 1, "measuring", "planned", "plan", plan),
        *moves,
        ("transition", 1, "planned", "applied", "apply", {"placement": placement, "num_effects": 2}),
        ("transition", 1, "applied", "validating", "validate", {}),
        ("transition", 1, "validating", "committed", "commit", {"placement": placement, "output_digest": placement}),
        ("serving", 1, None, None, None, {"placement": placement, "decision": "committed"}),
        ("stopped", 1, None, None, None, {"reason": "detach", "signal": None}),
    ]


def history() -> Iterator[Event]:
    """Yield the events of one life after another."""
    position, before = 0, ZERO_HASH
    for number in itertools.count(1):
        epoch, intent = str(uuid.uuid4()), None
        for kind, is_round, source, target, trigger, content in life(number):
            position += 1
            event_id = str(uuid.uuid4())
            row = (
                *(position, STREAM, position, event_id, epoch, number * is_round, 0, kind, 1, source, target, trigger),
                *(10**18 + position * 10**6, BOOT, 4242, intent if kind == "effect.outcome" else None),
                *(canonical_json(content), before),
            )
            intent = event_id if kind == "effect.intent" else intent
            before = hash_row((*row, None))
            yield Event._make((*row, before))


def make_journal(path: Path, num_events: int) -> None:
    """Write a journal of that many events, past the triggers, which would take minutes."""
    events = itertools.islice(history(), num_events)
    with Journal.open(path) as journal, journal.rewriting() as rewrite, rewrite.lifted():
        while batch := list(itertools.islice(events, BATCH)):
            rewrite.insert_events(batch)
        rewrite.set_last_position(num_events)


def plain_hash(columns: tuple[Any, ...]) -> bytes:
    """Return an event's hash as the description of the format says it."""
    parts = [b"residency.journal.event.1\x00"]
    for value in columns:
        if value is None:
            parts.append(b"n")
            continue
        kind, content = (
            (b"t", value.encode())
            if isinstance(value, str)
            else (b"b", value)
            if isinstance(value, bytes)
            else (b"i", b"%d" % value)
        )
        parts += (kind, len(content).to_bytes(8, "big"), content)
    return hashlib.sha256(b"".join(parts)).digest()


def read_plainly(path: Path, *, hashed: Callable[[tuple[Any, ...]], bytes]) -> None:
    """Read every event with the driver, decode its payload and check its hash and its place in the chain."""
    connection = connect(path, mode="ro", wait_s=1)
    before = ZERO_HASH
    for row in connection.execute(f"SELECT {COLUMNS} FROM events ORDER BY position"):
        msgspec.json.decode(row[16])
        assert row[17] == before
        before = hashed(row)
        assert before == row[18]
    connection.close()


def fold_it(path: Path) -> None:
    """Read every event with the reader, check its hash and its place in the chain, and fold it."""
    with JournalReader.open(path) as reader:
        fold(reader.events(check=True))


def print_folds(path: Path, num_events: int, rounds: int) -> None:
    """Print what folding a journal takes."""
    make_journal(path, num_events)
    variants: dict[str, Callable[[], object]] = {
        "driver, msgspec, hash check": lambda: read_plainly(path, hashed=lambda row: plain_hash(row[:-1])),
        "the same with our hash": lambda: read_plainly(path, hashed=hash_row),
        "fold, hash check": lambda: fold_it(path),
    }
    times = in_turn(variants, rounds)
    click.echo(f"\nfold of {num_events} events ({path.stat().st_size / 2**20:.0f} MiB)")
    print_table(times, unit="s", scale=1)
    command = [sys.executable, "-m", "residency", "log", "-n", "20", "--journal", str(path)]
    found = in_turn({"log": lambda: subprocess.run(command, check=True, capture_output=True)}, 2 * rounds)
    click.echo("\n'residency log -n 20' on it, the whole process")
    print_table(found, unit="s", scale=1)


# Appending.


def draft(number: int) -> Draft:
    """A transition with a payload of some 300 bytes."""
    figures = {f"figure_{index}": number * index for index in range(12)}
    return Draft(type=EventType.MEASURED, round=1, payload={"placement": "f" * 64, **figures})


class Bare:
    """Appends with the driver alone: the same columns, indexes, hash and durability; no triggers, locks or checks."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._connection = connect(path, mode="rw", wait_s=10)
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            self._connection.execute(f"PRAGMA {pragma}")
        for statement in (*TABLES.values(), *INDEXES.values()):
            self._connection.execute(statement)
        self._position, self._before = 0, ZERO_HASH

    def append(self, one: Draft) -> None:
        """Insert one event, in a transaction of its own."""
        self._position += 1
        row: tuple[Any, ...] = (
            *(self._position, STREAM, self._position, str(uuid.uuid4()), "e", one.round, 0, one.type.value, 1),
            *(None, None, None, time.time_ns(), BOOT, 4242, None, canonical_json(one.payload), self._before),
        )
        self._before = hash_row((*row, None))
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute(INSERT, (*row, self._before))
        self._connection.execute("COMMIT")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def print_appends(folder: Path, appends: int, rounds: int) -> None:
    """Print what one durable append takes."""
    bare = Bare(folder / "bare.db")
    with Journal.open(folder / "plain.db") as plain, Journal.open(folder / "witnessed.db") as witnessed:
        numbers = itertools.count()
        variants: dict[str, Callable[[], object]] = {
            "driver": lambda: bare.append(draft(next(numbers))),
            "journal": lambda: _append(plain, draft(next(numbers)), witness=False),
            "journal, with its witness": lambda: _append(witnessed, draft(next(numbers)), witness=True),
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, found in in_turn(variants, appends).items():
                times[name] += found
    bare.close()
    click.echo(f"\none append ({rounds * appends} of each, in turn)")
    print_table(times, unit="us", scale=1e6)


def _append(journal: Journal, one: Draft, *, witness: bool) -> None:
    journal.append([one], stream=STREAM, epoch="e", witness=witness)


# Several writers.


def write(path: str, number: int, appends: int, barrier: Any, results: Any) -> None:
    """Append from one process, once all have opened the journal."""
    with Journal.open(path) as journal:
        barrier.wait()
        times = []
        for index in range(appends):
            started = time.perf_counter()
            journal.append([draft(index)], stream=f"worker-{number}", epoch="e", witness=index % 4 == 0)
            times.append(time.perf_counter() - started)
    results.put(times)


def print_writers(path: Path, writers: int, appends: int) -> None:
    """Print how long appends take while several processes write as fast as they can."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(writers), spawn.Queue()
    processes = [
        spawn.Process(target=write, args=(str(path), number, appends, barrier, results)) for number in range(writers)
    ]
    for process in processes:
        process.start()
    times = sorted(one for _ in processes for one in results.get(timeout=600))
    for process in processes:
        process.join()
    click.echo(f"\n{writers} processes, {appends} appends each, every fourth with the witness")
    for name, value in (
        ("median", statistics.median(times)),
        ("99 of 100", times[len(times) * 99 // 100]),
        ("worst", times[-1]),
    ):
        click.echo(f"{name:28} {value * 1e3:9.1f} ms")


# What all of them share.


def in_turn(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each variant in each round; the order rotates."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = time.perf_counter()
            variants[name]()
            times[name].append(time.perf_counter() - started)
    return times


def print_table(times: dict[str, list[float]], *, unit: str, scale: float) -> None:
    """Print median and least of each variant, and the ratio of its median to the first one's."""
    first = statistics.median(next(iter(times.values())))
    for name, found in times.items():
        median = statistics.median(found)
        figures = f"median {median * scale:9.2f} {unit}   least {min(found) * scale:9.2f} {unit}"
        click.echo(f"{name:28} {figures}   ratio {median / first:.2f}")


if __name__ == "__main__":
    main()
