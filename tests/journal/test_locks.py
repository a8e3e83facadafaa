"""The lock around writes: fair to those who wait, bounded, and never left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from residency.errors import JournalError
from residency.journal.locks import FileLock

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

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


# Waits for the lock, and says so once it has it and again once it has let go; stops itself if told to.
IN_LINE = """
import os, sys
from pathlib import Path
from residency.journal.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
print("here", flush=True)
sys.stdin.readline()
lock.acquire(wait_s=60)
print("had", flush=True)
sys.stdin.readline()
lock.release()
"""


def lined_up(path: Path, start: Callable[..., subprocess.Popen[str]], num: int) -> list[subprocess.Popen[str]]:
    """So many processes that wait for a lock, one after the other."""
    processes = [start(IN_LINE, path) for _ in range(num)]
    for number, process in enumerate(processes, start=1):
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "here\n"
        process.stdin.write("\n")
        process.stdin.flush()
        until(lambda number=number: int.from_bytes(path.read_bytes()[:8], "little") == number)  # type: ignore[misc]
    return processes


def test_those_who_wait_come_in_their_order_and_before_whoever_had_the_lock(
    path: Path, lock: FileLock, start: Callable[..., subprocess.Popen[str]]
) -> None:
    assert lock.try_acquire()
    processes = lined_up(path, start, 3)
    order: list[int] = []

    def go(number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "had\n"
        order.append(number)
        process.stdin.write("\n")
        process.stdin.flush()

    threads = [threading.Thread(target=go, args=one) for one in enumerate(processes)]
    for thread in threads:
        thread.start()
    # At once, when nobody can have woken up yet.
    lock.release()
    lock.acquire(wait_s=30)
    order.append(-1)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, -1]


def is_still(process: subprocess.Popen[str]) -> bool:
    """Whether none of its threads runs: the one that waits for the lock may still get it after the first is stopped."""
    states = set()
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states <= {"T", "Z"}


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL])
def test_whoever_stops_or_dies_in_the_queue_holds_nobody_up_for_long(
    sign: signal.Signals, path: Path, lock: FileLock, start: Callable[..., subprocess.Popen[str]]
) -> None:
    other = FileLock(path)
    assert other.try_acquire()
    (first,) = lined_up(path, start, 1)
    first.send_signal(sign)
    # Before it can be given the lock.
    until(lambda: is_still(first))
    other.close()
    started = time.monotonic()
    for _ in range(3):
        lock.acquire(wait_s=30)
        lock.release()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("there", [b"", b"x", b"\xff" * 8, b"process 4242"])
def test_whatever_the_lock_file_holds_it_locks(there: bytes, path: Path, lock: FileLock) -> None:
    path.write_bytes(there)
    other = FileLock(path)
    for _ in range(3):
        assert other.try_acquire()
        threading.Timer(0.02, other.release).start()
        lock.acquire(wait_s=5)
        assert not other.try_acquire()
        lock.release()
    other.close()


def test_without_such_locks_there_is_no_order_and_the_lock_is_had_all_the_same(
    path: Path, lock: FileLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> bytes:
        raise OSError(errno.EINVAL, "not here")

    monkeypatch.setattr(fcntl, "fcntl", refuses)
    other = FileLock(path)
    assert other.try_acquire()
    threading.Timer(0.05, other.close).start()
    lock.acquire(wait_s=5)
    assert not other.try_acquire()


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
