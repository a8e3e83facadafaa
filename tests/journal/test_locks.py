"""The lock around writes: fair to those who wait, bounded, and never left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from residency.errors import JournalError
from residency.journal.locks import FileLock

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Takes the lock again at once, as a writer does that never pauses.
GREEDY = """
import sys, time
from pathlib import Path
from residency.journal.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
for number in range(100_000):
    lock.acquire(wait_s=60)
    if number == 0:
        print("held", flush=True)
    time.sleep(0.002)
    lock.release()
"""


@pytest.fixture
def lock(path: Path) -> Iterator[FileLock]:
    made = FileLock(path)
    yield made
    made.close()


def num_waiting() -> int:
    return sum(thread.name == "residency-journal-lock" for thread in threading.enumerate())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_who_waits_gets_its_turn_among_writers_that_never_pause(
    path: Path, lock: FileLock, start: Callable[..., subprocess.Popen[str]]
) -> None:
    for process in [start(GREEDY, path) for _ in range(3)]:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
    for _ in range(20):
        lock.acquire(wait_s=10)
        lock.release()


def test_a_wait_ends_in_time_and_leaves_nothing_behind(path: Path, lock: FileLock) -> None:
    other = FileLock(path)
    assert other.try_acquire()
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(JournalError, match=r"locked for longer than 0\.1 s"):
            lock.acquire(wait_s=0.1)
        assert 0.1 <= time.monotonic() - started < 2
    other.release()
    until(lambda: num_waiting() == 0)
    # Those who gave up got the lock at last, and let go of it.
    lock.acquire(wait_s=5)
    assert not other.try_acquire()
    other.close()


def test_an_interrupted_wait_leaves_the_lock_to_others(path: Path, lock: FileLock) -> None:
    other = FileLock(path)
    assert other.try_acquire()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        lock.acquire(wait_s=30)
    lock.release()
    other.release()
    until(lambda: num_waiting() == 0)
    assert other.try_acquire()
    other.close()


def test_a_lock_file_removed_while_somebody_waits_is_not_taken_for_the_lock(path: Path, lock: FileLock) -> None:
    other, third = FileLock(path), FileLock(path)
    assert other.try_acquire()

    def replace() -> None:
        path.unlink()
        assert third.try_acquire()
        other.close()

    threading.Timer(0.1, replace).start()
    with pytest.raises(JournalError, match="locked for longer"):
        lock.acquire(wait_s=0.5)
    third.close()
    lock.acquire(wait_s=5)


def test_a_child_forked_while_somebody_waits_does_not_keep_the_lock(path: Path, finish: Callable[..., str]) -> None:
    code = """
import os, sys, threading, time
from pathlib import Path
from residency.journal.locks import FileLock
one, other = FileLock(Path(sys.argv[1])), FileLock(Path(sys.argv[1]))
assert one.try_acquire()
waiting = threading.Thread(target=other.acquire, kwargs={"wait_s": 30})
waiting.start()
time.sleep(0.2)
child = os.fork()
if child == 0:
    time.sleep(30)
    os._exit(0)
one.release()
waiting.join()
other.close()
one.acquire(wait_s=10)  # the child takes a moment to close what it got
os.kill(child, 9)
print("free")
"""
    assert finish(code, path) == "free\n"


def test_no_thread_and_no_descriptor_is_left(path: Path, lock: FileLock) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("there is no /proc here")
    before = len(os.listdir("/proc/self/fd"))
    other = FileLock(path)
    for _ in range(5):
        assert other.try_acquire()
        threading.Timer(0.02, other.release).start()
        lock.acquire(wait_s=5)
        lock.close()
    other.close()
    until(lambda: num_waiting() == 0)
    assert len(os.listdir("/proc/self/fd")) == before
