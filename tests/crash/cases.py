"""Jobs that were disturbed, and what must hold of their journals afterwards."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residency.errors import ResidencyError
from residency.journal import migrations
from residency.journal.events import Event, EventType, payload
from residency.journal.fold import fold_stream
from residency.journal.host import boot_id
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from residency.journal.verify import verify
from residency.statemachine.recovery import closing
from tests.crash.jobs import LATER, STREAM, batch, exported
from tests.crash.power import image_at
from tests.crash.shim import CHANGES, EVERYTHING, Action, Kind, Record, environment, read_records

if TYPE_CHECKING:
    from collections.abc import Iterator

# Job -> what it begins with: nothing, or the journal that another job leaves.
BEGINS_WITH = {
    "create": None,
    "append": "made",
    "checkpoint": "fill",
    "migrate": "made",
    "recover": "crash",
    "prune": "lives",
    "import": None,
    "backup": "fill",
}
ROOT = Path(__file__).parents[2]
_SUFFIXES = ("", "-wal", ".head")


@dataclass(slots=True)
class Tally:
    """What a part of the campaign has counted. problems: the first few, told in full."""

    cases: int = 0
    events_lost: int = 0
    wrong_placements: int = 0
    effects_unannounced: int = 0
    problems: int = 0
    first_problems: list[str] = field(default_factory=list)

    def add(self, found: Found, what: str) -> None:
        """Count one case."""
        self.cases += 1
        self.events_lost += found.lost
        self.wrong_placements += found.wrong_placements
        self.effects_unannounced += found.unannounced
        self.problems += len(found.problems)
        self.first_problems += [f"{what}: {problem}" for problem in found.problems][: max(0, 20 - self.problems)]


@dataclass(slots=True)
class Found:
    """What one case has come to. lost: acknowledged events that are not there, or are others."""

    problems: list[str] = field(default_factory=list)
    lost: int = 0
    wrong_placements: int = 0
    unannounced: int = 0


class Server:
    """A preloaded process that forks a child for every request: python -m `module`."""

    def __init__(self, module: str, library: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(library),
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Have something done, and return what came of it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


class Workshop:
    """Runs jobs on journals of their own, in a folder."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._folder, self._number = folder, 0
        self._server = Server("tests.crash.jobs", library)
        self._records: dict[tuple[str, str], tuple[Path, list[list[Any]], list[Record]]] = {}
        self._made: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    def close(self) -> None:
        """End the process that does the jobs."""
        self._server.close()

    def made(self, job: str) -> tuple[Path, list[dict[str, Any]]]:
        """Return the journal that a job leaves which nobody disturbs, and what it said. It is not to be changed."""
        if job not in self._made:
            journal = self._fresh(None)
            answer = self._server.ask(job=job, journal=str(journal), kinds=int(CHANGES))
            assert answer["status"] == 0, answer
            self._made[job] = journal, answer["said"]
        return self._made[job]

    def begin(self, job: str) -> tuple[Path, list[list[Any]]]:
        """Return a fresh journal for a job, and the events that are in it."""
        start = BEGINS_WITH.get(job)
        journal = self._fresh(None if start is None else self.made(start)[0])
        if job == "import":
            journal.parent.with_name("export.jsonl").write_bytes(exported(self.made("lives")[0]))
        return journal, [] if start is None else acknowledged(self.made(start)[1])

    def num_calls(self, job: str, kinds: Kind) -> int:
        """Return how many calls a job makes if nobody disturbs it."""
        journal, _ = self.begin(job)
        said = self.run(job, journal, kinds=int(kinds))["said"]
        self.discard(journal)
        return int(said[-1]["calls"])

    def run(self, job: str, journal: Path, **fault: Any) -> dict[str, Any]:
        """Do a job in a child."""
        return self._server.ask(job=job, journal=str(journal), **fault)

    def killed(self, job: str, *, at: int, action: Action, mutation: str = "") -> Found:
        """Kill a job at one of its calls, and look at what it leaves."""
        return self._case(job, {"kinds": int(CHANGES), "action": int(action), "at": at, "mutation": mutation})

    def failed(self, job: str, *, at: int, action: Action, error: int, sticky: bool) -> Found:
        """Have one call of a job fail, or all from there on until the job gives up, and look at what it leaves."""
        fault = {"kinds": int(EVERYTHING), "action": int(action), "at": at, "error": error, "sticky": sticky}
        return self._case(job, fault)

    def lost_power(self, job: str, seed: int, *, mutation: str = "") -> Found:
        """Let a job run, and look at one of the folders that a power loss in its middle may leave."""
        rng = random.Random(f"{job} {seed}")
        before, known, records = self._recorded(job, mutation)
        num = rng.randrange(len(records) + 1)
        journal = self._fresh(None)
        image_at(before, records, num, journal.parent, rng)
        told = [json.loads(record.path) for record in records[:num] if record.kind == "m"]
        found = check(job, journal, known, {"status": -9, "said": told})
        self.discard(journal)
        return found

    def _recorded(self, job: str, mutation: str) -> tuple[Path, list[list[Any]], list[Record]]:
        """Return the folder before a job, the events in it, and everything that the job did to it."""
        if (job, mutation) not in self._records:
            journal, known = self.begin(job)
            before = journal.parent.with_name("before")
            shutil.copytree(journal.parent, before)
            record = journal.parent.with_name("record")
            answer = self.run(job, journal, kinds=int(CHANGES), record=str(record), mutation=mutation)
            assert answer["status"] == 0, answer
            self._records[job, mutation] = before, known, list(read_records(record, journal.parent))
        return self._records[job, mutation]

    def wal_bytes(self) -> int:
        """Return how large the WAL is that `cut` cuts."""
        return self.made("fill")[0].with_name("journal.db-wal").stat().st_size

    def cut(self, size: int) -> Found:
        """Cut the WAL of a crashed journal to a size, and look at what is left; now and then, go on with it."""
        template, said = self.made("fill")
        must = [one for one in said if one.get("wal_bytes", size + 1) <= size]
        journal, found = self._fresh(template), Found()
        os.truncate(journal.with_name("journal.db-wal"), size)
        journal.with_name("journal.db.head").unlink()
        with JournalReader.open(journal) as reader:
            events = list(reader.events(check=True))
        _compare(acknowledged(must), events, found)
        told = acknowledged(said)
        if [[event.position, event.hash.hex()] for event in events] != told[: len(events)]:
            found.problems.append("what is left is not a beginning of what was written")
        _is_whole(events, found)
        if size % 97 == 0:
            again = check("append", journal, acknowledged(must), {"status": -9, "said": []})
            found.problems += again.problems
            found.lost += again.lost
        self.discard(journal)
        return found

    def discard(self, journal: Path) -> None:
        """Remove a journal and its folder."""
        shutil.rmtree(journal.parent.parent)

    def _case(self, job: str, fault: dict[str, Any]) -> Found:
        journal, before = self.begin(job)
        answer = self.run(job, journal, **fault)
        found = check(job, journal, before, answer)
        self.discard(journal)
        return found

    def _fresh(self, template: Path | None) -> Path:
        self._number += 1
        folder = self._folder / str(self._number) / "j"
        folder.mkdir(parents=True)
        for suffix in _SUFFIXES if template is not None else ():
            source = Path(f"{template}{suffix}")
            if source.exists():
                shutil.copy(source, folder / f"journal.db{suffix}")
        return folder / "journal.db"


def acknowledged(said: list[dict[str, Any]]) -> list[list[Any]]:
    """Return position and hash of everything that was acknowledged."""
    return [event for one in said for event in one.get("acknowledged", ())]


@contextmanager
def program_of(job: str) -> Iterator[None]:
    """Be the program that does a job: a migration makes a later one of this."""
    known = migrations.MIGRATIONS
    if job == "migrate":
        migrations.MIGRATIONS = (*known, LATER)
    try:
        yield
    finally:
        migrations.MIGRATIONS = known


def check(job: str, journal: Path, before: list[list[Any]], answer: dict[str, Any]) -> Found:
    """Look at what a job left, open it for writing, close what is open, and write on."""
    said = answer["said"]
    found = Found()
    found.problems += [str(one["unexpected"]) for one in said if "unexpected" in one]
    found.problems += [f"{one['set_aside']} was set aside" for one in said if "set_aside" in one]
    if answer["status"] not in (0, -9) and not found.problems:
        found.problems.append(f"the process ended with {answer['status']}")
    known = [*before, *acknowledged(said)]
    try:
        with program_of(job):
            _look(job, journal, known, found)
    except (ResidencyError, OSError, AssertionError) as error:
        found.problems.append(f"{type(error).__name__}: {error}")
        found.lost += len(known) if not isinstance(error, AssertionError) else 0
    aside = [name for name in os.listdir(journal.parent) if ".corrupt-" in name or ".contradicted-" in name]
    found.problems += [f"{name} was set aside" for name in aside]
    return found


def _look(job: str, journal: Path, known: list[list[Any]], found: Found) -> None:
    with Journal.open(journal) as opened:
        events = list(opened.events())
        _compare(known, events, found)
        _is_whole(events, found)
        close_all(opened)
        opened.append(batch(99, 2), stream=STREAM, epoch="later", witness=True)
    with JournalReader.open(journal) as reader:
        found.problems += [f"verify: {one.text}" for one in verify(reader) if not one.is_note]
        view = fold_stream(reader.events(stream=STREAM), STREAM)
        opens = [epoch.epoch for epoch in view.epochs[:-1] if not epoch.ended]
        num_doubtful = sum(len(one.open_intents) for one in view.rounds)
        if job == "recover" and (opens or num_doubtful):
            found.problems.append(f"{num_doubtful} intents are open, and the epochs {opens}")
    copy = journal.with_name("copy.db")
    if copy.exists():
        with JournalReader.open(copy) as reader:
            found.problems += [f"verify of the copy: {one.text}" for one in verify(reader) if not one.is_note]


def _compare(known: list[list[Any]], events: list[Event], found: Found) -> None:
    there = [[event.position, event.hash.hex()] for event in events]
    pruned = [payload(event)["removed"] for event in events if event.type == EventType.PRUNED.value]
    gone = [range(one["first_position"], one["last_position"] + 1) for removed in pruned for one in removed]
    missing = [one for one in known if one not in there and not any(one[0] in span for span in gone)]
    if missing:
        found.lost += len(missing)
        found.problems.append(f"{len(missing)} acknowledged events are not there: {missing[:3]}")
    positions = [one[0] for one in known]
    if positions != sorted(set(positions)):
        found.problems.append("what was acknowledged is out of order")


def _is_whole(events: list[Event], found: Found) -> None:
    """Of every batch, all is there or nothing."""
    there: dict[tuple[int, int], int] = {}
    sizes: dict[tuple[int, int], int] = {}
    number = 0
    last: int | None = None
    for event in events:
        content = payload(event)
        if "batch" not in content:
            continue
        if content["batch"] != last:
            number, last = number + 1, content["batch"]
        key = (number, content["batch"])
        there[key] = there.get(key, 0) + 1
        sizes[key] = content["of"]
    halves = [key[1] for key, count in there.items() if count % sizes[key]]
    if halves:
        found.problems.append(f"batches {halves} are there in part")


def close_all(journal: Journal) -> None:
    """Close what dead lives left open, as the next start does."""
    view = fold_stream(journal.events(stream=STREAM), STREAM)
    for one in closing(view, boot_id=boot_id(), now_ns=time.time_ns(), by_epoch="next"):
        journal.append(one.drafts, stream=STREAM, epoch=one.epoch, rank=one.rank, witness=True)
