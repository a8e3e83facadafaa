"""What writers do to a journal, one job a forked child, with the system's calls counted, recorded, killed or failed.

Run as `python -m tests.crash.jobs` with the library of shim.py preloaded: reads one JSON request a line, answers one
JSON line. What a job was told by the journal comes back even if it was killed.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from residency.errors import JournalError
from residency.journal import migrations
from residency.journal.backup import backup
from residency.journal.events import Draft, Event, EventType
from residency.journal.export import export
from residency.journal.fold import fold_stream
from residency.journal.hashing import blob_digest
from residency.journal.host import boot_id
from residency.journal.importing import import_lines
from residency.journal.prune import prune
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from residency.statemachine.recovery import closing
from tests.crash.shim import Action, Kind, Shim

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Result = TypeVar("Result")

STREAM = "worker"
JOB_S_MAX = 60
# Nobody else writes: a lock that is not had at once is one that the system refuses.
WAIT_S = 0.2
DAY_NS = 86_400 * 10**9

# What a later format might add. Migrations are additive, and so is this.
LATER = (
    "CREATE TABLE later (name TEXT NOT NULL PRIMARY KEY, content BLOB NOT NULL) STRICT",
    "CREATE INDEX events_by_round ON events (round)",
    "CREATE TRIGGER later_no_delete BEFORE DELETE ON later\nBEGIN\n    SELECT RAISE(ABORT, 'no');\nEND",
)


# Journals that nobody closes: their process dies as if it were killed.
_left_open: list[Journal] = []


@dataclass
class Work:
    """One job under way. `told` goes into `out` as soon as it is known; `wait_s` bounds every wait of the journal."""

    path: Path
    out: int
    shim: Shim
    mutation: str

    def say(self, **told: Any) -> None:
        line = json.dumps(told)
        self.shim.mark(line)
        os.write(self.out, (line + "\n").encode())

    def attempt(self, call: Callable[[], Result]) -> Result:
        """Try again after an error of the journal's, and at last with a system that does as it is asked."""
        for _ in range(2):
            try:
                return call()
            except JournalError as error:
                self.say(error=str(error))
        self.shim.disarm()
        return call()

    def open(self) -> Journal:
        journal = self.attempt(lambda: Journal.open(self.path, wait_s=WAIT_S))
        if journal.set_aside is not None:
            self.say(set_aside=journal.set_aside)
        self.say(opened=True)
        if self.mutation == "synchronous NORMAL":
            self._execute(journal, "PRAGMA synchronous = NORMAL")
        elif self.mutation == "a trigger dropped":
            self._execute(journal, "DROP TRIGGER events_no_delete")
        return journal

    def append(self, journal: Journal, drafts: Sequence[Draft], *, epoch: str = "e", witness: bool = False) -> None:
        self.acknowledge(
            self.attempt(lambda: journal.append(drafts, stream=STREAM, epoch=epoch, rank=0, witness=witness))
        )

    def acknowledge(self, events: Sequence[Event]) -> None:
        wal = self.path.with_name(f"{self.path.name}-wal")
        told = [[event.position, event.hash.hex()] for event in events]
        self.say(acknowledged=told, wal_bytes=wal.stat().st_size if wal.exists() else 0)

    def _execute(self, journal: Journal, sql: str) -> None:
        cursor = journal._store._connected().connection.cursor()  # type: ignore[attr-defined]
        cursor.execute(sql)
        cursor.close()


def batch(number: int, size: int, *, filler: int = 50) -> list[Draft]:
    """Events that belong together: each says how many there are."""
    payloads = [{"batch": number, "of": size, "filler": "x" * filler} for _ in range(size)]
    blob = b'{"placement":%d}' % number
    return [Draft(type=EventType.MEASURED, round=1, payload=one, blobs=(blob,)) for one in payloads]


def create(work: Work) -> None:
    """Make a journal, and write to it."""
    journal = work.open()
    work.append(journal, batch(1, 1), witness=True)
    work.append(journal, batch(2, 2))


def append(work: Work) -> None:
    """Append to a journal, in all the ways that there are."""
    journal = work.open()
    for number, (size, witness) in enumerate([(1, True), (3, False), (1, False), (2, True)]):
        work.append(journal, batch(number, size), witness=witness)
    journal.close()


def log(work: Work) -> None:
    """Append many times, with write-backs among them, and a close and an open."""
    for number in range(3):
        journal = work.open()
        for index in range(12):
            filler = 60_000 if index % 5 == 4 else 200
            size = 1 + index % 2
            work.append(journal, batch(100 * number + index, size, filler=filler), witness=index % 3 == 0)
        journal.close()


def checkpoint(work: Work) -> None:
    """Append until the WAL is written back, go on in it from its beginning, and close."""
    journal = work.open()
    for number in range(4):
        work.append(journal, batch(number, 1, filler=400_000 if number < 2 else 50), witness=number % 2 == 0)
    journal.close()


def migrate(work: Work) -> None:
    """Open a journal of the format before, and append."""
    migrations.MIGRATIONS = (*migrations.MIGRATIONS, LATER)
    append(work)


def crash(work: Work) -> None:
    """Begin a life, move something, and leave everything open."""
    journal = work.open()
    _left_open.append(journal)
    started = {"fingerprint": {"a": "b"}, "fingerprint_digest": "f", "initial_placement": blob_digest(b"{}")}
    work.append(journal, [Draft(type=EventType.EPOCH_STARTED, round=0, payload=started, blobs=(b"{}",))])
    plan = {"placement": blob_digest(b"{}"), "previous": blob_digest(b"{}"), "source": "calibration"}
    planned = Draft(
        type=EventType.TRANSITION,
        round=1,
        payload=plan,
        from_state="measuring",
        to_state="planned",
        trigger="plan",
    )
    work.append(journal, [planned])
    for index in range(3):
        intent = Draft(type=EventType.EFFECT_INTENT, round=1, payload={"index": index, "component": f"c{index}"})
        (event,) = journal.append([intent], stream=STREAM, epoch="e", witness=True)
        work.acknowledge((event,))
        if index == 0:
            outcome = {"index": 0, "component": "c0", "result": "applied"}
            done = Draft(type=EventType.EFFECT_OUTCOME, round=1, payload=outcome, causation=event.event_id)
            work.append(journal, [done])


def recover(work: Work) -> None:
    """Close what a dead life left open, as a start does."""
    journal = work.open()
    view = work.attempt(lambda: fold_stream(journal.events(stream=STREAM), STREAM))
    for one in closing(view, boot_id=boot_id(), now_ns=time.time_ns(), by_epoch="later"):
        work.append(journal, one.drafts, epoch=one.epoch, witness=True)
    journal.close()


def lives(work: Work) -> None:
    """Write lives of a worker of which the first are old."""
    clock = iter(range(10**18, 10**18 + 400 * DAY_NS, DAY_NS // 4))
    with Journal.open(work.path, clock_ns=lambda: next(clock)) as journal:
        for number in range(8):
            started = {"fingerprint_digest": "f", "initial_placement": blob_digest(b"%d" % number)}
            blob = b"%d" % number
            drafts = [
                Draft(type=EventType.EPOCH_STARTED, round=0, payload=started, blobs=(blob,)),
                Draft(type=EventType.STOPPED, round=0, payload={"reason": "detach", "signal": None}),
            ]
            work.acknowledge(journal.append(drafts, stream=STREAM, epoch=f"e{number}", witness=True))


def remove(work: Work) -> None:
    """Prune a journal."""
    journal = work.open()
    now_ns = 10**18 + 500 * DAY_NS
    work.attempt(lambda: prune(journal, keep_since_ns=now_ns - DAY_NS, keep_epochs=2, now_ns=now_ns))
    work.say(pruned=True)
    journal.close()


def take_in(work: Work) -> None:
    """Import the export that lies beside the journal."""
    lines = work.path.parent.with_name("export.jsonl").read_bytes().splitlines(keepends=True)
    journal = work.open()
    try:
        work.attempt(lambda: import_lines(lines, journal))
    except JournalError as error:
        # It was in, and only nobody knew.
        if "is not empty" not in str(error):
            raise
    work.say(imported=True)
    journal.close()


def copy(work: Work) -> None:
    """Back a journal up beside itself."""
    try:
        work.attempt(lambda: backup(work.path, work.path.with_name("copy.db")))
    except JournalError as error:
        # It was named, and only the folder could not be put on disk.
        if "is there already" not in str(error):
            raise
    work.say(copied=True)


def fill(work: Work) -> None:
    """Write events, and leave all of them in the WAL."""
    journal = work.open()
    _left_open.append(journal)
    for number in range(5):
        work.append(journal, batch(number, 1 + number % 2, filler=300), witness=number % 4 == 0)


def made(work: Work) -> None:
    """Write a small journal and close it."""
    with work.open() as journal:
        work.append(journal, batch(90, 2), witness=True)
        work.append(journal, batch(91, 1))


JOBS = {
    "create": create,
    "append": append,
    "checkpoint": checkpoint,
    "migrate": migrate,
    "recover": recover,
    "prune": remove,
    "import": take_in,
    "backup": copy,
    # What the others begin with, or are made from.
    "made": made,
    "fill": fill,
    "crash": crash,
    "lives": lives,
    "log": log,
}


def run(request: dict[str, Any], shim: Shim, out: int) -> int:
    """Do one job in this process; returns its exit status."""
    path = Path(request["journal"])
    work = Work(path=path, out=out, shim=shim, mutation=request.get("mutation", ""))
    record = request.get("record")
    fd = -1 if record is None else os.open(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    kinds = Kind(request.get("kinds", 0))
    shim.arm(
        path.parent,
        kinds=kinds,
        action=Action(request.get("action", 0)),
        at=request.get("at", 0),
        record=fd,
        error=request.get("error", 0),
        sticky=bool(request.get("sticky")),
    )
    try:
        JOBS[request["job"]](work)
    finally:
        if sys.exception() is not None:
            work.say(disturbed=shim.disturbed())
            work.say(unexpected=traceback.format_exc()[-300:])
    num = shim.count()
    shim.disarm()
    work.say(calls=num, disturbed=shim.disturbed())
    return 0


def serve(request: dict[str, Any], shim: Shim) -> dict[str, Any]:
    """Do one job in a forked child, and return its exit status and everything that it said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(JOB_S_MAX)
        status = 70
        try:
            status = run(request, shim, writing)
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return {"status": os.waitstatus_to_exitcode(status), "said": [json.loads(line) for line in said.splitlines()]}


def exported(journal: Path) -> bytes:
    """Return a journal's export."""
    out = io.BytesIO()
    with JournalReader.open(journal) as reader:
        export(reader, out)
    return out.getvalue()


def main() -> None:
    """Serve requests until the input ends."""
    shim = Shim()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(serve(json.loads(line), shim)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
