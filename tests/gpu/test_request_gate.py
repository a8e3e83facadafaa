"""The gate of a pipeline: free again after an interrupt, wherever that comes."""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from residency.gpu.gate import RequestGate

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th step of the gate's own code: a line, or the start of a function.

    The end of a `with` is a line for the tracer only: Python lets no signal in before the lock is released.
    """

    def __init__(self, step: int) -> None:
        self._left = step
        self._withs: set[tuple[FrameType, int]] = set()

    @property
    def is_spent(self) -> bool:
        return self._left <= 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith("gate.py"):
            return None
        if event in {"call", "line"} and not self._is_end_of_with(frame, event):
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        return self

    def _is_end_of_with(self, frame: FrameType, event: str) -> bool:
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event != "line" or not source.strip().startswith("with "):
            return False
        was_here = (frame, frame.f_lineno) in self._withs
        self._withs.add((frame, frame.f_lineno))
        return was_here


def interrupted(interrupt: InterruptAt, action: Callable[[], None]) -> None:
    tracer = sys.gettrace()
    sys.settrace(interrupt)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(tracer)


# Where the interrupt falls into the end of a generator that is being thrown away, Python reports it and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_step_of_an_exclusive_hold_leaves_the_gate_free() -> None:
    num_steps = 0
    with ThreadPoolExecutor(max_workers=1) as other:
        for step in itertools.count(1):
            gate = RequestGate()

            def hold(gate: RequestGate = gate) -> None:
                with gate.exclusive(holder="round 1", timeout_s=0.0):
                    pass

            interrupt = InterruptAt(step)
            interrupted(interrupt, hold)
            assert gate.holder is None, step
            other.submit(hold).result(timeout=30)
            if not interrupt.is_spent:
                break
            num_steps = step
    assert num_steps > 10, "nothing was interrupted, so that this test shows nothing"


def test_what_the_hold_is_for_may_raise() -> None:
    gate = RequestGate()
    with pytest.raises(KeyboardInterrupt), gate.exclusive(holder="round 1", timeout_s=0.0):
        assert gate.is_mine_exclusively
        raise KeyboardInterrupt
    assert gate.holder is None


def test_whoever_waits_to_have_it_exclusively_goes_before_new_requests() -> None:
    gate = RequestGate()
    first = object()
    order: list[str] = []
    gate.acquire(first, holder="a request", timeout_s=1)

    def exclusive() -> None:
        with gate.exclusive(holder="a round", timeout_s=5):
            order.append("round")

    def request() -> None:
        token = object()
        gate.acquire(token, holder="a request", timeout_s=5)
        order.append("request")
        gate.release(token)

    threads = [threading.Thread(target=exclusive), threading.Thread(target=request)]
    threads[0].start()
    while not gate._waiting:
        time.sleep(0.001)
    threads[1].start()
    time.sleep(0.05)
    nested = object()
    gate.acquire(nested, holder="a request", timeout_s=1)  # the request in flight may still nest
    gate.release(nested)
    gate.release(first)
    for thread in threads:
        thread.join(10)
    assert order == ["round", "request"]
