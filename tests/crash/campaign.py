"""Kills, cuts, power losses and failing disks, by the thousand: can a journal lose something, or restore what is wrong?

    python -m tests.crash.campaign --journal-of-progress FILE

It may be stopped (SIGINT, SIGTERM) and goes on where it was when the same command is run again. At the end, and
whenever it is stopped, it prints its figures as JSON; it ends with 1 if anything was lost, wrong or found.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.crash.cases import BEGINS_WITH, Found, Tally, Workshop
from tests.crash.rounds import KILLS_A_JOURNAL, Rounds
from tests.crash.shim import CHANGES, EVERYTHING, Action, NoShim, build

SAVED_EVERY_S = 2.0
# What is recorded for power losses: the long one most of all.
POWER_JOBS = ("log", "log", "log", "create", "append", "checkpoint", "migrate", "recover", "prune", "import")
FAULTS = tuple(
    (action, error, sticky)
    for action, error in ((Action.FAIL, errno.EIO), (Action.FAIL, errno.ENOSPC), (Action.FAIL_HALFWAY, errno.ENOSPC))
    for sticky in (False, True)
)

# What one case has come to: how many kills (or cuts, images, failures) it was, and what was found.
Run = Callable[[int], tuple[int, Found]]


@dataclass(frozen=True, slots=True)
class Part:
    """One part. runs: one for every thread that may work on it. wanted: so many units, of at most so many cases."""

    name: str
    unit: str
    wanted: int
    cases: int
    runs: Sequence[Run]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is left of the campaign, and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.campaign", description=str(__doc__).splitlines()[0])
    parser.add_argument("--journal-of-progress", type=Path, required=True, metavar="FILE", help="made, or gone on with")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be repeated")
    parser.add_argument("--kills", type=int, default=10_000, help="of whole rounds (default: %(default)s)")
    parser.add_argument("--images", type=int, default=3_000, help="of power losses (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="that start rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=None, help="stop after so many")
    chosen = parser.parse_args(arguments)
    fast = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="residency-campaign-", dir=fast if fast.is_dir() else None))
    try:
        library = build(folder)
    except NoShim as error:
        shutil.rmtree(folder)
        parser.exit(2, f"skipped: {error}\n")
    progress = Progress(chosen.journal_of_progress, seconds=chosen.seconds)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: progress.stop())
    # A journal that is damaged, as many are here, is told by the log; the figures are what counts.
    with open(folder / "log", "w") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    try:
        for name in chosen.part or PARTS:
            if not progress.is_over():
                progress.run(name, lambda name=name: PARTS[name](folder, library, chosen))  # type: ignore[misc]
    finally:
        progress.save()
        shutil.rmtree(folder)
    sys.stdout.write(json.dumps(progress.figures(), indent=1) + "\n")
    return int(progress.is_bad())


class Progress:
    """How far the campaign has come, in a file."""

    def __init__(self, path: Path, *, seconds: float | None) -> None:
        self._path = path
        self._until = None if seconds is None else time.monotonic() + seconds
        self._is_stopped = False
        self._parts: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def is_over(self) -> bool:
        """Whether it is to stop."""
        return self._is_stopped or (self._until is not None and time.monotonic() > self._until)

    def run(self, name: str, begin: Callable[[], tuple[Part, Callable[[], None]]]) -> None:
        """Run what is left of a part. begin: makes it, and what ends it."""
        if self._parts.get(name, {}).get("done"):
            return
        part, end = begin()
        state = self._parts.setdefault(
            name, {"unit": part.unit, "wanted": part.wanted, "units": 0, "next": 0, "seconds": 0.0, "tally": {}}
        )
        state["wanted"] = part.wanted
        tally, saved = Tally(**state["tally"]), time.monotonic()
        began, before_s = time.monotonic(), state["seconds"]
        try:
            with ThreadPoolExecutor(len(part.runs)) as pool:
                while not self.is_over() and state["next"] < part.cases and state["units"] < part.wanted:
                    some = range(state["next"], min(part.cases, state["next"] + 4 * len(part.runs)))
                    # Each thread has its own, and takes every so manieth.
                    batches = [list(some[number :: len(part.runs)]) for number in range(len(part.runs))]
                    for results in pool.map(_run_all, part.runs, batches):
                        for index, num, found in results:
                            tally.add(found, f"{name} {index}")
                            state["units"] += num
                    state |= {"next": some.stop, "tally": asdict(tally)}
                    state["seconds"] = round(before_s + time.monotonic() - began, 1)
                    if time.monotonic() - saved > SAVED_EVERY_S:
                        self.save()
                        saved = time.monotonic()
            state["done"] = state["next"] >= part.cases or state["units"] >= part.wanted
        finally:
            self.save()
            end()

    def save(self) -> None:
        """Write it down, whole or not at all."""
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        temporary.write_text(json.dumps(self._parts, indent=1) + "\n")
        temporary.replace(self._path)

    def figures(self) -> dict[str, Any]:
        """Return what has come out so far."""
        tallies = [state["tally"] for state in self._parts.values()]
        total = {key: sum(tally.get(key, 0) for tally in tallies) for key in COUNTED}
        return {"total": total, "parts": self._parts}

    def is_bad(self) -> bool:
        """Whether something was lost, wrong or found."""
        return any(value for key, value in self.figures()["total"].items() if key != "cases")

    def stop(self) -> None:
        """Have it end soon, with all that was done written down."""
        self._is_stopped = True


COUNTED = ("cases", "events_lost", "wrong_placements", "effects_unannounced", "problems")


def _run_all(run: Run, indices: Sequence[int]) -> list[tuple[int, int, Found]]:
    return [(index, *run(index)) for index in indices]


def _jobs(
    folder: Path, library: Path, name: str, unit: str, listed: Callable[[Workshop], Sequence[Callable[[], Found]]]
) -> tuple[Part, Callable[[], None]]:
    workshop = Workshop(folder / name, library)
    cases = listed(workshop)
    return Part(name, unit, len(cases), len(cases), [lambda index: (1, cases[index]())]), workshop.close


def _kills(folder: Path, library: Path, _: argparse.Namespace) -> tuple[Part, Callable[[], None]]:
    def listed(workshop: Workshop) -> list[Callable[[], Found]]:
        return [
            lambda job=job, at=at, action=action: workshop.killed(job, at=at, action=action)  # type: ignore[misc]
            for job in BEGINS_WITH
            for at in range(1, workshop.num_calls(job, CHANGES) + 1)
            for action in (Action.KILL_BEFORE, Action.KILL_HALFWAY, Action.KILL_AFTER)
        ]

    return _jobs(folder, library, "kills", "kills at a call", listed)


def _faults(folder: Path, library: Path, _: argparse.Namespace) -> tuple[Part, Callable[[], None]]:
    def listed(workshop: Workshop) -> list[Callable[[], Found]]:
        return [
            lambda job=job, at=at, one=one: workshop.failed(  # type: ignore[misc]
                job, at=at, action=one[0], error=one[1], sticky=one[2]
            )
            for job in BEGINS_WITH
            for at in range(1, workshop.num_calls(job, EVERYTHING) + 1)
            for one in FAULTS
        ]

    return _jobs(folder, library, "faults", "failing calls", listed)


def _cuts(folder: Path, library: Path, _: argparse.Namespace) -> tuple[Part, Callable[[], None]]:
    def listed(workshop: Workshop) -> list[Callable[[], Found]]:
        sizes = range(workshop.wal_bytes() + 1)
        return [lambda size=size: workshop.cut(size) for size in sizes]  # type: ignore[misc]

    return _jobs(folder, library, "cuts", "lengths of a WAL", listed)


def _images(folder: Path, library: Path, chosen: argparse.Namespace) -> tuple[Part, Callable[[], None]]:
    def listed(workshop: Workshop) -> list[Callable[[], Found]]:
        return [
            lambda seed=seed: workshop.lost_power(POWER_JOBS[seed % len(POWER_JOBS)], seed)  # type: ignore[misc]
            for seed in range(chosen.images)
        ]

    return _jobs(folder, library, "images", "power losses", listed)


def _rounds(folder: Path, library: Path, chosen: argparse.Namespace) -> tuple[Part, Callable[[], None]]:
    made = [Rounds(folder / f"rounds-{number}", library) for number in range(chosen.processes)]
    runs = [one.killed for one in made]
    part = Part("rounds", "kills of a whole round", chosen.kills, KILLS_A_JOURNAL * chosen.kills, runs)
    return part, lambda: _close(made)


def _round_faults(folder: Path, library: Path, chosen: argparse.Namespace) -> tuple[Part, Callable[[], None]]:
    made = [Rounds(folder / f"faults-{number}", library) for number in range(chosen.processes)]
    kinds = [(error, sticky) for error in (errno.EIO, errno.ENOSPC) for sticky in (False, True)]

    def run(one: Rounds, index: int) -> tuple[int, Found]:
        error, sticky = kinds[index % len(kinds)]
        return 1, one.failed(at=1 + index // len(kinds), error=error, sticky=sticky)

    num = made[0].num_calls_at_all * len(kinds)
    runs = [lambda index, one=one: run(one, index) for one in made]
    return Part("round-faults", "failing calls in a whole round", num, num, runs), lambda: _close(made)


def _close(made: Sequence[Rounds]) -> None:
    for one in made:
        one.close()


PARTS = {
    "kills": _kills,
    "images": _images,
    "cuts": _cuts,
    "faults": _faults,
    "rounds": _rounds,
    "round-faults": _round_faults,
}

if __name__ == "__main__":
    sys.exit(main())
