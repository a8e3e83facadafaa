"""The health app: what it answers before, during and after rounds, and that nothing makes it wait."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import residency
from residency.settings import KILL_SWITCHES

if TYPE_CHECKING:
    from collections.abc import Callable

QUICK = residency.Policy(image_area_max=128 * 128, samples_max=1)
WAIT_S = 30.0


def drive(app: Any, scope: dict[str, Any], *received: dict[str, Any]) -> list[dict[str, Any]]:
    """Call an ASGI app as a server does; returns what it sent."""
    messages, sent = iter(received), []

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


def get(manager: residency.Manager, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    start, body = drive(manager.health(), {"type": "http", "method": method, "path": path})
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"application/json"
    return start["status"], json.loads(body["body"])


def without_a_warmup(worker: Any, monkeypatch: pytest.MonkeyPatch) -> residency.Manager:
    manager: residency.Manager = worker.attach(warmup=None)
    return manager


def under_a_kill_switch(worker: Any, monkeypatch: pytest.MonkeyPatch) -> residency.Manager:
    monkeypatch.setenv(KILL_SWITCHES[0], "1")
    manager: residency.Manager = worker.attach()
    return manager


def on_a_folder(worker: Any, monkeypatch: pytest.MonkeyPatch) -> residency.Manager:
    manager: residency.Manager = worker.attach(journal=worker.journal.parent)
    return manager


def calibrated(worker: Any, monkeypatch: pytest.MonkeyPatch) -> residency.Manager:
    manager: residency.Manager = worker.attach(policy=QUICK)
    return manager


@pytest.mark.parametrize(
    ("attach", "decision"),
    [
        (calibrated, "committed"),
        (without_a_warmup, "gated"),
        (under_a_kill_switch, "pinned"),
        (on_a_folder, "without-journal"),
    ],
)
def test_a_worker_is_ready_once_start_has_returned_whatever_it_decided(
    worker: Any,
    monkeypatch: pytest.MonkeyPatch,
    attach: Callable[[Any, pytest.MonkeyPatch], residency.Manager],
    decision: str,
) -> None:
    manager = attach(worker, monkeypatch)
    code, before = get(manager, "/health/ready")
    assert (code, before["ready"], before["state"], before["decision"]) == (503, False, "measuring", None)
    assert before["elapsed_s"] >= 0
    assert get(manager, "/health/live")[0] == 200

    manager.start()

    code, after = get(manager, "/health/ready")
    assert (code, after["ready"], after["decision"]) == (200, True, decision)
    assert after["epoch"] == manager.epoch
    assert get(manager, "/health/live")[0] == 200


def test_health_is_never_blocked_by_a_warmup_and_not_ready_during_a_round(worker: Any) -> None:
    manager = worker.attach(policy=QUICK)
    begun, may_go_on = threading.Event(), threading.Event()

    def stand_still(shape: Any) -> None:
        begun.set()
        assert may_go_on.wait(WAIT_S)

    def looked_at(state: str, round_number: int) -> None:
        """Ask twice while the warmup stands still, and let it go on."""
        assert begun.wait(WAIT_S)
        asked = time.monotonic()
        code, first = get(manager, "/health/ready")
        time.sleep(0.02)
        later = get(manager, "/health/ready")[1]
        assert (code, first["state"], first["round"]) == (503, state, round_number)
        assert "request" in first["working"]
        assert later["elapsed_s"] > first["elapsed_s"]
        assert get(manager, "/health/live")[0] == 200
        assert time.monotonic() - asked < 5
        worker.pipeline.fail = None
        may_go_on.set()

    worker.pipeline.fail = stand_still
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(manager.start)
        looked_at("measuring", 1)
        starting.result(WAIT_S)
        assert get(manager, "/health/ready")[0] == 200

        begun.clear()
        may_go_on.clear()
        worker.pipeline.fail = stand_still
        request = {"verb": "validate", "epoch": manager.epoch, "round": 1}
        validating = pool.submit(manager.handle, request)
        looked_at("validating", 2)
        assert validating.result(WAIT_S)["outcome"] == "committed"
        assert get(manager, "/health/ready")[0] == 200


def test_a_round_that_waits_for_a_request_in_flight_leaves_the_worker_ready(worker: Any) -> None:
    manager = worker.attach(policy=QUICK)
    manager.start()

    with ThreadPoolExecutor(1) as pool:
        with manager.request():
            answer = pool.submit(manager.handle, {"verb": "validate", "epoch": manager.epoch})
            time.sleep(0.05)
            assert get(manager, "/health/ready")[0] == 200
        assert answer.result(WAIT_S)["outcome"] == "committed"


def test_a_worker_is_alive_and_not_ready_after_detach(worker: Any) -> None:
    manager = worker.attach(warmup=None)
    manager.start()
    manager.detach()

    code, told = get(manager, "/health/ready")

    assert (code, told["working"]) == (503, "ended")
    assert get(manager, "/health/live")[0] == 200


def test_a_worker_whose_start_failed_is_not_ready(worker: Any) -> None:
    manager = worker.attach(policy=residency.Policy(busy_wait_s=0.05))
    with ThreadPoolExecutor(1) as pool, manager.request(), pytest.raises(residency.ResidencyError, match="busy"):
        pool.submit(manager.start).result(WAIT_S)

    code, told = get(manager, "/health/ready")

    assert (code, told["working"]) == (503, "ended")


def test_head_gives_the_status_without_a_body(worker: Any) -> None:
    manager = worker.attach(warmup=None)

    start, body = drive(manager.health(), {"type": "http", "method": "HEAD", "path": "/health/ready"})

    assert (start["type"], start["status"]) == ("http.response.start", 503)
    assert body == {"type": "http.response.body", "body": b""}


def test_another_path_is_404_and_another_method_405_with_what_is_allowed(worker: Any) -> None:
    manager = worker.attach(warmup=None)

    assert get(manager, "/health")[0] == 404
    assert get(manager, "/metrics", "POST")[0] == 404
    code, body = get(manager, "/health/ready", "POST")
    assert (code, body["error"]) == (405, "method 'POST' is not allowed; use GET")
    start, _ = drive(manager.health(), {"type": "http", "method": "POST", "path": "/health/live"})
    assert (b"allow", b"GET, HEAD") in start["headers"]


def test_lifespan_is_completed_so_that_a_server_may_run_it_alone(worker: Any) -> None:
    sent = drive(
        worker.attach(warmup=None).health(),
        {"type": "lifespan"},
        {"type": "lifespan.startup"},
        {"type": "lifespan.shutdown"},
    )

    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize("path", ["/worker/health/live", "/health/live"])
def test_mounted_below_a_path_it_answers_there(path: str, worker: Any) -> None:
    scope = {"type": "http", "method": "GET", "path": path, "root_path": "/worker"}
    start, _ = drive(worker.attach(warmup=None).health(), scope)
    assert start["status"] == 200
