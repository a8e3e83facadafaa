"""Threads that ran before a pipeline was attached: they are reached at their next call, and keep what was theirs."""

from __future__ import annotations

import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from residency.gpu.emulated import EmulatedDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 30.0
REFUSED, COMPUTED = "Expected all tensors", "computed"


class Foreign(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Somebody else's mode."""


class Host:
    """A device, a weight on its host, and its guard, which threads are to find in force."""

    def __init__(self) -> None:
        self.device = EmulatedDevice(total_bytes=2**30)
        self.weight = torch.ones(4, 4)
        self.device.claim_host(self.weight.untyped_storage())
        self.begun = threading.Event()

    def use(self) -> str:
        """Compute with the weight by an operator, which alone is no call that anybody could see."""
        try:
            _ = self.weight @ self.weight
        except RuntimeError as error:
            return str(error)[: len(REFUSED)]
        return COMPUTED

    def guard_meanwhile(self, work: Callable[[], Any], wake: Callable[[], object] | None = None) -> Any:
        """Start a thread, have the guard called while it is at work, and return what the work returned."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
        thread.start()
        assert self.begun.wait(WAIT_S)
        self.device.guard()
        if wake is not None:
            wake()
        thread.join(WAIT_S)
        (result,) = found
        return result


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.device.close()
    assert threading.getprofile() is None


def test_a_thread_that_waits_for_a_queue_is_guarded_when_it_goes_on(host: Host) -> None:
    items: queue.Queue[None] = queue.Queue()

    def work() -> str:
        host.begun.set()
        items.get(timeout=WAIT_S)
        return host.use()

    assert host.guard_meanwhile(work, wake=lambda: items.put(None)) == REFUSED


def test_a_thread_that_waits_for_an_event_is_guarded_when_it_goes_on(host: Host) -> None:
    event = threading.Event()

    def work() -> str:
        host.begun.set()
        event.wait(WAIT_S)
        return host.use()

    assert host.guard_meanwhile(work, wake=event.set) == REFUSED


def test_a_thread_that_sleeps_is_guarded_when_it_goes_on(host: Host) -> None:
    def work() -> str:
        host.begun.set()
        time.sleep(0.05)
        return host.use()

    assert host.guard_meanwhile(work) == REFUSED


def test_a_pool_that_has_worked_before_is_guarded(host: Host) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: host.use(), range(4))) == [COMPUTED] * 4
        host.device.guard()
        assert list(pool.map(lambda _: host.use(), range(4))) == [REFUSED] * 4


def test_a_thread_that_is_busy_in_a_loop_is_guarded_at_its_next_call(host: Host) -> None:
    def work() -> str:
        host.begun.set()
        deadline = time.monotonic() + WAIT_S
        while (found := host.use()) == COMPUTED and time.monotonic() < deadline:
            pass
        return found

    assert host.guard_meanwhile(work) == REFUSED


def test_nothing_remains_on_a_thread_that_was_reached_and_threads_that_never_go_on_do_no_harm(host: Host) -> None:
    blocked, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        blocked.set()
        may_end.wait(WAIT_S)

    sleeper = threading.Thread(target=wait)
    sleeper.start()
    assert blocked.wait(WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        host.device.guard()
        assert pool.submit(host.use).result() == REFUSED
        assert pool.submit(sys.getprofile).result() is None
    assert sys.getprofile() is None
    host.device.close()
    may_end.set()
    sleeper.join(WAIT_S)
    assert not sleeper.is_alive()


def test_the_profilers_of_this_thread_and_of_new_ones_go_on_and_running_threads_get_the_latter(host: Host) -> None:
    def mine(*_: object) -> None:
        pass

    def everybodys(*_: object) -> None:
        pass

    threading.setprofile(everybodys)
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(sys.getprofile).result() is everybodys
            sys.setprofile(mine)
            host.device.guard()
            assert sys.getprofile() is mine
            sys.setprofile(None)
            assert pool.submit(host.use).result() == REFUSED
            assert pool.submit(sys.getprofile).result() is everybodys
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(sys.getprofile).result() is everybodys
            assert pool.submit(host.use).result() == REFUSED
        host.device.close()
        assert threading.getprofile() is everybodys
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_a_tracer_of_a_running_thread_is_left_alone(host: Host) -> None:
    traced: list[str] = []
    may_go_on = threading.Event()

    def tracer(frame: Any, event: str, argument: object) -> Any:
        traced.append(frame.f_code.co_name)
        return tracer

    def work() -> tuple[str, bool]:
        sys.settrace(tracer)
        host.begun.set()
        may_go_on.wait(WAIT_S)
        found = host.use()
        is_kept = sys.gettrace() is tracer
        sys.settrace(None)
        return found, is_kept

    assert host.guard_meanwhile(work, wake=may_go_on.set) == (REFUSED, True)
    assert "use" in traced


def test_a_thread_inside_somebody_elses_mode_is_guarded_once_that_has_ended(host: Host) -> None:
    may_go_on = threading.Event()
    foreign = Foreign()  # type: ignore[no-untyped-call]

    def work() -> list[object]:
        with foreign:
            host.begun.set()
            may_go_on.wait(WAIT_S)
            inside = _get_current_dispatch_mode_stack()
        return [inside, host.use(), len(_get_current_dispatch_mode_stack()), sys.getprofile()]

    assert host.guard_meanwhile(work, wake=may_go_on.set) == [[foreign], REFUSED, 1, None]


def test_a_thread_in_a_backward_pass_is_guarded_once_that_has_ended(host: Host) -> None:
    may_go_on = threading.Event()

    def hold(gradient: torch.Tensor) -> None:
        host.begun.set()
        may_go_on.wait(WAIT_S)

    def work() -> str:
        value = torch.ones(3, requires_grad=True)
        value.register_hook(hold)  # type: ignore[no-untyped-call]
        value.sum().backward()  # type: ignore[no-untyped-call]
        return host.use()

    assert host.guard_meanwhile(work, wake=may_go_on.set) == REFUSED


def test_a_thread_in_the_middle_of_a_request_is_guarded_once_and_for_good(host: Host) -> None:
    may_go_on = threading.Event()

    def work() -> list[object]:
        with host.device.running():
            host.begun.set()
            may_go_on.wait(WAIT_S)
            inside, depth = host.use(), len(_get_current_dispatch_mode_stack())
        return [inside, depth, host.use(), len(_get_current_dispatch_mode_stack())]

    assert host.guard_meanwhile(work, wake=may_go_on.set) == [REFUSED, 1, REFUSED, 1]


def test_two_devices_guard_the_same_running_thread(host: Host) -> None:
    second = Host()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        host.device.guard()
        assert pool.submit(host.use).result() == REFUSED
        second.device.guard()
        assert [pool.submit(one.use).result() for one in (host, second)] == [REFUSED, REFUSED]
        second.device.close()
        assert [pool.submit(one.use).result() for one in (host, second)] == [REFUSED, COMPUTED]


def test_threads_that_come_and_go_while_others_are_guarded_do_no_harm(host: Host) -> None:
    is_over = threading.Event()

    def churn() -> None:
        while not is_over.is_set():
            threads = [threading.Thread(target=sum, args=(range(100),)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)

    with ThreadPoolExecutor(2) as pool:
        churning = [pool.submit(churn) for _ in range(2)]
        try:
            for _ in range(50):
                other = Host()
                other.device.guard()
                other.device.close()
        finally:
            is_over.set()
        for one in churning:
            one.result(WAIT_S)


def test_a_thread_leaves_its_guards_before_it_ends(host: Host) -> None:
    second = Host()
    found: list[int] = []

    class AtEnd:
        def __del__(self) -> None:
            found.append(len(_get_current_dispatch_mode_stack()))

    of_thread = threading.local()

    def work() -> None:
        of_thread.first = AtEnd()
        found.append(len(_get_current_dispatch_mode_stack()))

    # Data of a thread dies in the order in which it was made: the guards', then this.
    host.device.guard()
    second.device.guard()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_S)
    second.device.close()
    assert found == [2, 0]
