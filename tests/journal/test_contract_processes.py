"""Several processes on one journal, in a file and on a server alike: writers, killed writers, forks and holds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from residency.errors import JournalError, StreamInUse
from residency.journal.events import Draft, EventType
from tests.journal.places import Place, findings, opened, reading

if TYPE_CHECKING:
    from residency.journal.store import Journal

Start = Callable[..., subprocess.Popen[str]]
Finish = Callable[..., str]

ONE = [Draft(type=EventType.MEASURED, round=1)]

# Appends and prints the number of every event that was acknowledged.
WRITER = """
import sys
from pathlib import Path
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal

url, state, stream, count = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
journal = Journal.open(url, state_folder=state)
for number in range(count):
    payload = {"number": number, "filler": "x" * 500}
    draft = Draft(type=EventType.MEASURED, round=1, payload=payload, blobs=(b"%d" % number,))
    (event,) = journal.append([draft], stream=stream, epoch="e", witness=number % 3 == 0)
    print(event.stream_version, flush=True)
"""


@pytest.mark.parametrize("num_before", [0, 1, 30])
def test_a_writer_killed_between_appends_loses_nothing_it_acknowledged(
    num_before: int, place: Place, start: Start
) -> None:
    process = start(WRITER, place.url, place.state, "worker", 100_000)
    assert process.stdout is not None
    acknowledged = 0
    for line in process.stdout:
        acknowledged = int(line)
        if acknowledged > num_before:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    acknowledged = max([acknowledged, *(int(line) for line in process.stdout.read().splitlines())])

    with opened(place) as journal:
        # A server may still be writing what the dead had asked for; this waits for its turn.
        (event,) = journal.append(ONE, stream="worker", epoch="e2")
    # The last one may have been written without the writer having lived to say so.
    assert event.stream_version in (acknowledged + 1, acknowledged + 2)
    with reading(place) as reader:
        assert [event.stream_version for event in reader.events()] == [*range(1, event.stream_version + 1)]
    assert findings(place) == ()


def test_writer_processes_share_a_journal(place: Place, start: Start) -> None:
    writers = [start(WRITER, place.url, place.state, stream, 40) for stream in ("a", "b", "a")]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    with reading(place) as reader:
        assert [event.position for event in reader.events()] == [*range(1, 121)]
        assert [event.stream_version for event in reader.events("a")] == [*range(1, 81)]
        assert [event.stream_version for event in reader.events("b")] == [*range(1, 41)]
    assert findings(place) == ()


def test_many_starts_at_once_make_one_journal(place: Place, start: Start) -> None:
    writers = [start(WRITER, place.url, place.state, f"worker-{number}", 1) for number in range(4)]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    with reading(place) as reader:
        assert len(reader.streams()) == 4
    assert findings(place) == ()


def test_no_position_ever_appears_behind_a_reader(place: Place, start: Start) -> None:
    num_writers, num_events = 8, 25
    opened(place).close()
    writers = [start(WRITER, place.url, place.state, f"worker-{n}", num_events) for n in range(num_writers)]
    seen: list[int] = []
    polls = 0
    deadline = time.monotonic() + 60
    with reading(place) as reader:
        while len(seen) < num_writers * num_events and time.monotonic() < deadline:
            polls += 1
            seen += [event.position for event in reader.events(after=seen[-1] if seen else 0)]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    # A position that had become visible late would have been passed over for ever.
    assert seen == [*range(1, num_writers * num_events + 1)]
    assert polls > 20
    assert findings(place) == ()


HOLDER = """
import sys
from residency.journal.store import Journal
journal = Journal.open(sys.argv[1])
lock = journal.hold("worker")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_held_stream_is_refused_until_its_holder_dies(place: Place, start: Start) -> None:
    with opened(place) as journal:
        process = start(HOLDER, place.url)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(StreamInUse, match=f"'worker' is in use by process {process.pid}"):
            journal.hold("worker")
        with journal.hold("another"):
            pass
        process.kill()
        process.wait()
        journal.hold("worker").release()


def test_a_stream_is_held_against_the_same_process_too(place: Place) -> None:
    with opened(place) as journal, opened(place) as other:
        with journal.hold("worker") as lock:
            assert lock.stream == "worker"
            for each in (journal, other):
                with pytest.raises(StreamInUse):
                    each.hold("worker")
        lock.release()
        other.hold("worker").release()
        journal.hold("worker").release()


def test_a_hold_ends_with_its_journal(place: Place) -> None:
    journal = opened(place)
    lock = journal.hold("worker")
    lock.release()
    lock = journal.hold("worker")
    journal.close()
    lock.release()
    with opened(place) as other:
        other.hold("worker").release()


def test_a_held_stream_is_kept_through_errors_of_appends(place: Place) -> None:
    with opened(place) as journal, opened(place) as other, journal.hold("worker"):
        with pytest.raises(JournalError):
            journal.append([Draft(type=EventType.MEASURED, round=-1)], stream="worker", epoch="e")
        journal.keep()
        assert journal.append(ONE, stream="worker", epoch="e")[0].position == 1
        with pytest.raises(StreamInUse):
            other.hold("worker")


FORKER = """
import os, sys, time
from residency.errors import JournalError
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal
draft = [Draft(type=EventType.MEASURED, round=1)]
journal = Journal.open(sys.argv[1])
journal.append(draft, stream="worker", epoch="e")
list(journal.events())
lock = journal.hold("worker")
done, tell = os.pipe()
child = os.fork()
if child == 0:
    for use in (lambda: journal.append(draft, stream="worker", epoch="e"), lambda: list(journal.events()),
                lambda: journal.hold("other"), journal.keep):
        try:
            use()
        except JournalError as error:
            print(error, flush=True)
    lock.release()
    journal.close()
    with Journal.open(sys.argv[1]) as mine:
        mine.append(draft, stream="child", epoch="e")
    del journal, mine, lock
    os.write(tell, b"x")
    sys.exit(0) if sys.argv[2] == "exit" else time.sleep(60)
os.read(done, 1)
if sys.argv[2] == "exit":
    os.waitpid(child, 0)
    journal.append(draft, stream="worker", epoch="e")
    print(len(list(journal.events())), flush=True)
else:
    print(child, flush=True)
    time.sleep(60)
"""


def test_a_child_cannot_use_its_parents_journal_and_can_open_its_own(place: Place, finish: Finish) -> None:
    lines = finish(FORKER, place.url, "exit").splitlines()
    assert [line.partition(" is used by its child")[1] for line in lines[:4]] == [" is used by its child"] * 4
    assert lines[4] == "3"
    assert findings(place) == ()


def test_a_child_that_outlives_its_parent_does_not_keep_the_stream(place: Place, start: Start) -> None:
    process = start(FORKER, place.url, "stay")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(5)]
    child = int(lines[-1])
    try:
        with opened(place) as journal:
            with pytest.raises(StreamInUse):
                journal.hold("worker")
            process.kill()
            process.wait()
            journal.hold("worker").release()
    finally:
        os.kill(child, signal.SIGKILL)


READER_FORKER = """
import os, sys
from residency.errors import JournalError
from residency.journal.reader import JournalReader
reader = JournalReader.open(sys.argv[1])
if os.fork() == 0:
    try:
        reader.streams()
    except JournalError as error:
        print(error)
    reader.close()
    sys.exit(0)
os.wait()
print(reader.streams())
"""


def test_a_reader_carried_over_a_fork_says_so(place: Place, finish: Finish) -> None:
    opened(place).close()
    lines = finish(READER_FORKER, place.url).splitlines()
    assert "is used by its child" in lines[0]
    assert lines[1] == "()"


def test_a_journal_locked_for_too_long_is_an_error_and_then_usable(place: Place, start: Start) -> None:
    with opened(place, wait_s=0.2) as journal, journal.hold("worker"):
        process = start(place.locker(), place.url)
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(JournalError, match=r"locked for longer than 0\.2 s") as caught:
                journal.append(ONE, stream="worker", epoch="e")
            assert 0.2 <= time.monotonic() - started < 5
            assert caught.value.exit_code == 3
        process.kill()
        process.wait()
        _append_soon(journal)
        assert [event.stream_version for event in journal.events()] == [1]


def _append_soon(journal: Journal) -> None:
    """Append as soon as a server has noticed that the holder of its lock is dead."""
    deadline = time.monotonic() + 10
    while True:
        try:
            journal.append(ONE, stream="worker", epoch="e")
            return
        except JournalError:
            if time.monotonic() > deadline:
                raise


NO_DESCRIPTOR = """
import os, sys
from residency.errors import JournalError
from residency.journal.events import Draft, EventType
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from pathlib import Path
def use():
    with Journal.open(sys.argv[1], state_folder=Path(sys.argv[2])) as journal, journal.hold("worker"):
        journal.append([Draft(type=EventType.MEASURED, round=1)], stream="worker", epoch="e", witness=True)
        list(journal.events())
    with JournalReader.open(sys.argv[1]) as reader:
        list(reader.events())
use()
before = len(os.listdir("/proc/self/fd"))
for _ in range(3):
    use()
print(len(os.listdir("/proc/self/fd")) - before)
"""


def test_no_descriptor_is_left_behind(place: Place, finish: Finish) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("there is no /proc here")
    assert finish(NO_DESCRIPTOR, place.url, place.state) == "0\n"
