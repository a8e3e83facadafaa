"""Copies that block are made on a thread of their own, in order, and what goes wrong reaches whoever waits for them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest

from residency.gpu.copy_thread import CopyThread, result_of

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "residency-copies"


@pytest.fixture
def thread() -> Iterator[CopyThread[int]]:
    thread: CopyThread[int] = CopyThread()
    yield thread
    thread.close(wait_s=10)


def num_threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def test_nobody_who_copies_from_pinned_memory_alone_has_a_thread(thread: CopyThread[int]) -> None:
    assert thread.is_idle
    thread.wait()
    thread.close()
    assert num_threads() == 0


def test_the_asker_goes_on_while_a_copy_blocks(thread: CopyThread[int]) -> None:
    gate = threading.Event()
    done = thread.ask(lambda: gate.wait(10) and threading.get_ident())
    assert not thread.is_idle and not done.done()
    gate.set()
    assert result_of(done, wait_s=10) != threading.get_ident()
    assert thread.is_idle


def test_errands_are_done_one_after_the_other_in_order(thread: CopyThread[int]) -> None:
    gate, seen = threading.Event(), list[int]()

    def work(number: int) -> int:
        assert gate.wait(10)
        seen.append(number)
        return number

    done = [thread.ask(lambda number=number: work(number)) for number in range(50)]  # type: ignore[misc]
    gate.set()
    thread.wait(wait_s=10)
    assert seen == [each.result(0) for each in done] == list(range(50))
    assert num_threads() == 1


def test_an_error_reaches_who_waits_for_it_alone_and_the_next_errand_is_done(thread: CopyThread[int]) -> None:
    def fail() -> int:
        raise MemoryError("no page")

    failed, done = thread.ask(fail), thread.ask(lambda: 7)
    thread.wait(wait_s=10)
    with pytest.raises(MemoryError, match="no page"):
        result_of(failed, wait_s=10)
    assert result_of(done, wait_s=10) == 7


def test_a_disk_that_hangs_is_an_error_within_the_bound(thread: CopyThread[int]) -> None:
    gate = threading.Event()
    done = thread.ask(lambda: int(gate.wait(10)))
    with pytest.raises(TimeoutError, match=r"not ended within 0\.05 s; the disk of a mapped file"):
        result_of(done, wait_s=0.05)
    with pytest.raises(TimeoutError, match=r"not ended within 0\.05 s"):
        thread.wait(wait_s=0.05)
    gate.set()
    thread.wait(wait_s=10)


def test_closing_ends_the_thread_and_tells_whoever_still_waits(thread: CopyThread[int]) -> None:
    started, gate = threading.Event(), threading.Event()

    def work() -> int:
        started.set()
        return int(gate.wait(10))

    running, waiting = thread.ask(work), thread.ask(lambda: 7)
    assert started.wait(10)
    opening = threading.Timer(0.05, gate.set)
    opening.start()
    thread.close(wait_s=10)
    assert running.result(0) == 1
    with pytest.raises(RuntimeError, match="closed before this copy"):
        waiting.result(0)
    with pytest.raises(RuntimeError, match="nothing is copied any more"):
        thread.ask(lambda: 7)
    thread.close()
    opening.join()
    assert num_threads() == 0


def test_a_thread_that_hangs_keeps_nobody_from_closing(thread: CopyThread[int]) -> None:
    gate = threading.Event()
    thread.ask(lambda: int(gate.wait(10)))
    thread.close(wait_s=0.05)
    gate.set()


ENDS_IN_MID_COPY = """
import threading
import torch
from residency.gpu.copy_thread import CopyThread

source = torch.ones(2**25, dtype=torch.uint8)
begun = threading.Event()

def copy():
    begun.set()
    for _ in range(10):
        source.clone()
    print("copied")

thread = CopyThread()
thread.ask(copy)
thread.ask(lambda: print("copied more"))
begun.wait(10)
"""


def test_a_process_that_ends_in_mid_copy_is_not_aborted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_IN_MID_COPY], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "copied\n", "")


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_copied_is_not_kept_alive(thread: CopyThread[int], fails: bool) -> None:
    class Source:
        size = 8

    source = Source()
    watched = weakref.ref(source)

    def work(source: Source = source) -> int:
        if fails:
            raise ValueError(str(source.size))
        return source.size

    done = thread.ask(work)
    assert (done.exception(10) is not None) == fails
    del source, work, done
    deadline = time.monotonic() + 10
    while watched() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert watched() is None
