"""Several processes on one journal: writers, killed writers, forks and locks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from residency.errors import JournalError, StreamInUse
from residency.journal.events import Draft, EventType
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from residency.journal.verify import Finding, FindingKind, verify

if TYPE_CHECKING:
    from pathlib import Path

Start = Callable[..., subprocess.Popen[str]]
Finish = Callable[..., str]
Findings = Callable[[], tuple[Finding, ...]]

# Appends and prints the number of every event that was acknowledged.
WRITER = """
import sys
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal

path, stream, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
journal = Journal.open(path)
for number in range(count):
    payload = {"number": number, "filler": "x" * 500}
    draft = Draft(type=EventType.MEASURED, round=1, payload=payload, blobs=(b"%d" % number,))
    (event,) = journal.append([draft], stream=stream, epoch="e", witness=number % 3 == 0)
    print(event.stream_version, flush=True)
"""


@pytest.mark.parametrize("nth", [1, 5, 12, 23, 31, 47])
def test_a_writer_killed_inside_a_write_leaves_a_whole_journal_or_none(nth: int, tmp_path: Path, start: Start) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    path = tmp_path / "journal.db"
    inject = "inject=pwrite64,fdatasync,fsync,rename,ftruncate,unlink:signal=SIGKILL:when="
    trace = [strace, "-f", "-qq", "-o", os.devnull, "-e", f"{inject}{nth}"]
    process = start(WRITER, path, "worker", 12, prefix=trace)
    output, errors = process.communicate(timeout=60)
    if "PTRACE" in errors or "ptrace" in errors:
        pytest.skip("tracing is forbidden here")
    assert process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), errors
    acknowledged = len(output.split())

    with Journal.open(path) as journal:
        assert journal.set_aside is None
        versions = [event.stream_version for event in journal.events()]
    assert versions[:acknowledged] == [*range(1, acknowledged + 1)]
    assert len(versions) <= acknowledged + 1
    with JournalReader.open(path) as reader:
        assert [finding for finding in verify(reader) if not finding.is_note] == []


def test_a_lock_file_removed_under_its_holder_does_not_let_the_holder_release_anothers(
    path: Path, journal: Journal
) -> None:
    first = journal.hold("worker")
    for file in path.parent.glob("*.stream-*.lock"):
        file.unlink()
    second = journal.hold("worker")
    first.release()
    with pytest.raises(StreamInUse):
        journal.hold("worker")
    second.release()


# Holds SQLite's own lock, as a program that knows nothing of ours would.
LOCKER = """
import sys
from residency.journal.sqlite import connect
connection = connect(sys.argv[1], mode="rw", wait_s=1)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


# Holds the lock around writes.
FLOCKER = """
import sys
from pathlib import Path
from residency.journal.locks import FileLock
lock = FileLock(Path(sys.argv[1] + ".lock"))
assert lock.try_acquire()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("code", [LOCKER, FLOCKER], ids=["sqlite", "flock"])
def test_a_journal_locked_for_too_long_is_an_error_and_then_usable(code: str, path: Path, start: Start) -> None:
    with Journal.open(path, wait_s=0.2) as journal:
        process = start(code, path)
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        started = time.monotonic()
        with pytest.raises(JournalError, match="locked for longer than 0.2 s") as caught:
            journal.append([Draft(type=EventType.MEASURED, round=1)], stream="worker", epoch="e")
        assert time.monotonic() - started < 5
        assert caught.value.exit_code == 3
        with pytest.raises(JournalError, match="locked for longer than"):
            Journal.open(path, wait_s=0.1)
        process.kill()
        process.wait()
        journal.append([Draft(type=EventType.MEASURED, round=1)], stream="worker", epoch="e")
        assert [event.stream_version for event in journal.events()] == [1]


# A limit on the size of files is the disk that is full without a disk to fill.
FULL = """
import resource, sys
from residency.errors import JournalError
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal
journal = Journal.open(sys.argv[1])
small = [Draft(type=EventType.MEASURED, round=1)]
large = [Draft(type=EventType.MEASURED, round=1, payload={"filler": "x" * 3_000_000})]
journal.append(small, stream="worker", epoch="e", witness=True)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
try:
    journal.append(large, stream="worker", epoch="e")
except JournalError as error:
    print(error.exit_code, error, flush=True)
journal.append(small, stream="worker", epoch="e", witness=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
journal.append(large, stream="worker", epoch="e")
print([event.stream_version for event in journal.events()])
journal.close()
"""


def test_a_disk_that_takes_no_more_is_an_error_and_nothing_is_half_written(
    path: Path, finish: Finish, findings: Findings
) -> None:
    lines = finish(FULL, path).splitlines()
    assert lines[0].startswith("3 journal ") and ("disk" in lines[0])
    assert lines[1] == "[1, 2, 3]"
    assert findings() == ()


def test_a_wal_cut_anywhere_leaves_a_gapless_prefix_and_the_witness_tells(
    tmp_path: Path, path: Path, start: Start
) -> None:
    process = start(WRITER, path, "worker", 100_000)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 13:
            break
    process.kill()
    process.wait()
    wal = (path.parent / "journal.db-wal").read_bytes()
    with JournalReader.open(path) as reader:
        num_events = sum(1 for _ in reader.events())
    assert num_events >= 13
    noticed = 0
    for size in range(0, len(wal), max(1, len(wal) // 40)):
        copy = tmp_path / f"cut-{size}" / "journal.db"
        copy.parent.mkdir()
        shutil.copy(path, copy)
        shutil.copy(path.parent / "journal.db.head", copy.parent / "journal.db.head")
        (copy.parent / "journal.db-wal").write_bytes(wal[:size])
        with JournalReader.open(copy) as reader:
            left = [event.stream_version for event in reader.events()]
            kinds = {finding.kind for finding in verify(reader)}
        assert left == [*range(1, len(left) + 1)]
        assert kinds <= {FindingKind.HEAD}
        # The witness was written at the 1st, 4th, 7th, 10th and 13th event.
        assert (FindingKind.HEAD in kinds) == (len(left) < (num_events - 1) // 3 * 3 + 1)
        noticed += FindingKind.HEAD in kinds
    assert noticed > 10
