"""Requests and rounds at the same time: who waits for whom, for how long, and that nothing is interleaved."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import residency
from residency.gpu.placement import Mode
from residency.settings import sentinel_path

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 30.0
# One sample a side: what a verdict takes is shown elsewhere.
QUICK = residency.Policy(image_area_max=128 * 128, samples_max=1)


def start(worker: Any, **options: Any) -> residency.Manager:
    manager: residency.Manager = worker.attach(**{"policy": QUICK, **options})
    manager.start()
    return manager


def ask(manager: residency.Manager, verb: str, **fields: Any) -> dict[str, Any]:
    """Send a request as a caller that has just looked at the status."""
    now = manager.status()
    return manager.handle({"verb": verb, "epoch": now["epoch"], "round": now["round"], "attempt": 0, **fields})


@contextmanager
def a_request_in_flight(manager: residency.Manager) -> Iterator[None]:
    """Hold one request open on another thread while inside."""
    begun, may_end = threading.Event(), threading.Event()

    def serve() -> None:
        with manager.request():
            begun.set()
            may_end.wait(WAIT_S)

    thread = threading.Thread(target=serve)
    thread.start()
    assert begun.wait(WAIT_S)
    try:
        yield
    finally:
        may_end.set()
        thread.join(WAIT_S)


@contextmanager
def a_round_in_flight(worker: Any, manager: residency.Manager) -> Iterator[threading.Event]:
    """Have a validation stand still on another thread, in its request, until the event inside is set."""
    begun, may_end = threading.Event(), threading.Event()

    def stand_still(shape: Any) -> None:
        if not begun.is_set():
            begun.set()
            may_end.wait(WAIT_S)

    worker.pipeline.fail = stand_still
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, manager, "validate")
        assert begun.wait(WAIT_S)
        worker.pipeline.fail = None
        try:
            yield may_end
        finally:
            may_end.set()
        assert answer.result(WAIT_S)["outcome"] == "committed"


def test_two_threads_that_ask_the_same_at_once_get_one_round(worker: Any) -> None:
    manager = start(worker)
    request = {"verb": "calibrate", "epoch": manager.epoch, "round": 1, "attempt": 1}

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(manager.handle, [request, request]))

    assert sorted(answer.pop("repeated", False) for answer in answers) == [False, True]
    assert answers[0] == answers[1]
    assert manager.status()["round"] == 2
    assert sum(event.type == "control" for event in worker.events()) == 1


def test_two_threads_that_ask_different_things_at_once_get_one_round_and_one_refusal(worker: Any) -> None:
    manager = start(worker)
    requests = [{"verb": verb, "epoch": manager.epoch, "round": 1, "attempt": 1} for verb in ("validate", "roll_back")]

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(manager.handle, requests))

    assert sorted(answer["outcome"] == "refused" for answer in answers) == [False, True]
    assert next(a["reason"] for a in answers if a["outcome"] == "refused").startswith("stale: ")


def test_a_request_in_flight_for_too_long_makes_the_pipeline_busy(worker: Any, tiny: Any) -> None:
    manager = start(worker, policy=replace(QUICK, busy_wait_s=0.05))
    request = {"verb": "validate", "epoch": manager.epoch, "round": 1, "attempt": 1}

    with a_request_in_flight(manager):
        begun = time.monotonic()
        answer = manager.handle(request)
        waited_s = time.monotonic() - begun

    assert answer["outcome"] == "refused"
    assert answer["reason"].startswith("busy: ") and "after waiting 0.05" in answer["reason"]
    assert 0.05 <= waited_s < 5
    assert not [event for event in worker.events() if event.type == "control"]
    # The very same request is served once the reason is gone.
    assert manager.handle(request)["outcome"] == "committed"


def test_a_round_waits_for_a_request_in_flight(worker: Any) -> None:
    manager = start(worker)

    with ThreadPoolExecutor(1) as pool:
        with a_request_in_flight(manager):
            answer = pool.submit(ask, manager, "validate")
            time.sleep(0.05)
            assert not answer.done()
        assert answer.result(WAIT_S)["outcome"] == "committed"


def test_a_control_request_from_inside_a_request_is_refused_as_busy_at_once(worker: Any) -> None:
    manager = start(worker)

    with manager.request():
        answer = ask(manager, "validate")

    assert answer["reason"].startswith("busy: ")


def test_status_is_told_during_a_round_without_waiting_for_it(worker: Any) -> None:
    manager = start(worker)

    with a_round_in_flight(worker, manager):
        status = manager.handle({"verb": "status"})

    assert (status["ready"], status["round"], status["state"]) == (False, 2, "validating")


def test_requests_that_arrive_during_a_round_wait_and_give_the_same_output(worker: Any, tiny: Any) -> None:
    manager = start(worker)
    expected = worker.pipeline.request(tiny.WORKLOAD)

    def serve() -> torch.Tensor:
        with manager.request():
            output: torch.Tensor = worker.pipeline.request(tiny.WORKLOAD)
            return output

    with ThreadPoolExecutor(2) as pool, a_round_in_flight(worker, manager) as may_end:
        outputs = [pool.submit(serve) for _ in range(2)]
        time.sleep(0.05)
        assert not any(output.done() for output in outputs)
        may_end.set()
        assert all(torch.equal(output.result(WAIT_S), expected) for output in outputs)


def test_a_request_waits_for_a_round_only_so_long(worker: Any) -> None:
    manager = start(worker, policy=replace(QUICK, request_wait_s=0.05))

    with a_round_in_flight(worker, manager), pytest.raises(residency.ResidencyError, match="busy with a round"):
        manager.request().__enter__()


def test_concurrent_callers_of_one_pipeline_are_served_one_after_another(worker: Any, tiny: Any) -> None:
    manager = start(worker)
    expected = worker.pipeline.request(tiny.WORKLOAD)
    inside = most = 0

    def look(shape: Any) -> None:
        nonlocal most
        most = max(most, inside)

    def serve(index: int) -> bool:
        nonlocal inside
        with manager.request():
            inside += 1
            # Outputs that are kept would fill the device.
            is_same = torch.equal(worker.pipeline.request(tiny.WORKLOAD), expected)
            inside -= 1
            return is_same

    worker.pipeline.fail = look
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(serve, range(8)))

    assert most == 1


def test_a_round_gets_in_between_requests_that_follow_one_another_without_a_pause(worker: Any, tiny: Any) -> None:
    manager = start(worker, policy=replace(QUICK, busy_wait_s=5.0))
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            with manager.request():
                worker.pipeline.request(tiny.WORKLOAD)

    with ThreadPoolExecutor(2) as pool:
        callers = [pool.submit(serve) for _ in range(2)]
        try:
            answer = ask(manager, "validate")
        finally:
            is_over.set()
        for caller in callers:
            caller.result(WAIT_S)

    assert answer["outcome"] == "committed"


def test_a_kill_switch_thrown_in_mid_round_ends_it_and_later_requests_are_served(worker: Any, tiny: Any) -> None:
    """The round runs on the main thread, and a request that takes the pipeline back waits on another one."""
    manager = start(worker)
    expected = worker.pipeline.request(tiny.WORKLOAD)

    def serve() -> torch.Tensor:
        with manager.request():
            output: torch.Tensor = worker.pipeline.request(tiny.WORKLOAD)
            return output

    with ThreadPoolExecutor(1) as pool:
        outputs = []

        def throw(shape: Any) -> None:
            worker.pipeline.fail = None
            sentinel_path(str(worker.journal)).touch()
            outputs.append(pool.submit(serve))
            time.sleep(0.1)

        worker.pipeline.fail = throw
        answer = ask(manager, "validate")
        assert answer["outcome"] == "pinned"
        assert torch.equal(outputs[0].result(WAIT_S), expected)

    assert manager.placement == manager._setup.initial
    assert manager.ready


def test_a_pool_from_before_the_attach_cannot_compute_with_a_weight_that_it_kept(worker: Any) -> None:
    kept: list[torch.Tensor] = []

    def use() -> str:
        try:
            torch.nn.functional.linear(torch.ones(1, 256), kept[0])
        except RuntimeError as error:
            return str(error)[:20]
        return "computed"

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result(WAIT_S)
        manager = start(worker)
        away = [name for name, one in manager.placement.components.items() if one.mode is Mode.COMPONENT_OFFLOAD]
        kept += [next(worker.pipeline.modules[name].parameters()).data for name in away]
        assert pool.submit(use).result(WAIT_S) == "Expected all tensors"
