"""The app that takes control requests: over real sockets, from callers of every kind."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
import uvicorn

from benchmarks.fleet_replicas import Manager
from residency import http_body
from residency.errors import ProcessPoisoned, RollbackFailed
from residency.http_app import IN_FLIGHT_MAX, ControlApp
from residency.statemachine.states import State

WAIT_S = 60.0
SHAPE = "send {verb, epoch, round, attempt, args} with verb status, calibrate, validate or roll_back"


def request(manager: Manager, verb: str = "calibrate", **fields: Any) -> dict[str, Any]:
    return {"verb": verb, "epoch": manager.epoch, "round": 1, "attempt": 3, **fields}


def post(url: str, body: object, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.post(
        f"{url}/control", content=content, headers={"content-type": "application/json", **headers}, timeout=WAIT_S
    )


def raw(url: str, sent: bytes, *, until_closed: bool = True) -> bytes:
    """Send bytes as they are and return what comes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(sent)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
            if not until_closed:
                break
        return received


def send(url: str, body: object) -> socket.socket:
    """Send a request and return the connection, on which nobody has waited for an answer."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = "POST /control HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection((host, int(port)), timeout=WAIT_S)
    connection.sendall(head.encode() + f"content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def wait_for(is_so: Any) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def error_of(response: httpx2.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"fact", "values", "remedy"}
    error: dict[str, Any] = body["error"]
    return error


def test_a_request_is_served_and_its_four_values_come_back(servers: Any) -> None:
    manager = Manager()
    answer = post(servers.replica(manager), request(manager))

    body = answer.json()
    assert (answer.status_code, body["outcome"], body["round"]) == (200, "committed", 2)
    assert body["request"] == {"verb": "calibrate", "epoch": manager.epoch, "round": 1, "attempt": 3}


def test_the_status_is_served_to_get_and_to_post(servers: Any) -> None:
    url = servers.replica(Manager())

    got = httpx2.get(f"{url}/control").json()
    assert got == post(url, {"verb": "status"}).json()
    assert (got["verb"], got["ready"], got["control"]) == ("status", True, {"running": None, "last": None})
    assert httpx2.head(f"{url}/control").content == b""


def test_health_is_served_beside_it_without_a_token(servers: Any, token: str) -> None:
    url = servers.replica(token=token)

    assert httpx2.get(f"{url}/health/live").status_code == 200
    assert httpx2.get(f"{url}/health/ready").json()["ready"] is True
    assert httpx2.get(f"{url}/control").status_code == 401
    assert httpx2.get(f"{url}/control", headers={"authorization": f"Bearer {token}"}).status_code == 200


def test_status_is_told_while_a_round_runs(servers: Any) -> None:
    manager = Manager(hold=threading.Event())
    url = servers.replica(manager)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(post, url, request(manager))
        while (running := httpx2.get(f"{url}/control").json()["control"]["running"]) is None:
            time.sleep(0.01)
        assert running["verb"] == "calibrate" and not asked.done()
        assert manager.hold is not None
        manager.hold.set()

        assert asked.result().json()["outcome"] == "committed"
    assert httpx2.get(f"{url}/control").json()["control"]["last"]["outcome"] == "committed"


def test_a_caller_that_goes_away_does_not_stop_it_and_asking_again_gives_the_outcome(servers: Any) -> None:
    manager = Manager(hold=threading.Event())
    url = servers.replica(manager)
    assert manager.hold is not None
    gone = send(url, request(manager))
    wait_for(lambda: manager.num_rounds == 1)
    gone.close()
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(post, url, request(manager)) for _ in range(4)]
        time.sleep(0.3)  # so that they wait together; one that comes later is told the same
        manager.hold.set()
        answers = [one.result().json() for one in asked]

    assert [one["outcome"] for one in answers] == ["committed"] * 4
    assert manager.num_rounds == 1
    # And once more, when it has long been done.
    again = post(url, request(manager)).json()
    assert again.pop("repeated") is True
    assert again == {name: value for name, value in answers[0].items() if name != "repeated"}


def test_who_does_not_want_to_wait_is_told_what_goes_on(servers: Any) -> None:
    manager = Manager(hold=threading.Event())
    url = servers.replica(manager)

    answer = post(url, request(manager), prefer="respond-async, wait=0")

    body = answer.json()
    assert (answer.status_code, body["outcome"], body["request"]["attempt"]) == (202, None, 3)
    assert body["working"] == "validating"
    assert manager.hold is not None
    manager.hold.set()
    assert post(url, request(manager), prefer="wait=10").json()["outcome"] == "committed"
    assert manager.num_rounds == 1


def test_another_request_meanwhile_is_busy_and_afterwards_stale(servers: Any) -> None:
    manager = Manager(hold=threading.Event())
    url = servers.replica(manager)
    assert post(url, request(manager), prefer="wait=0").status_code == 202

    busy = post(url, request(manager, attempt=4)).json()
    assert manager.hold is not None
    manager.hold.set()
    post(url, request(manager))
    stale = post(url, request(manager, attempt=4)).json()

    assert (busy["outcome"], busy["reason"][:5]) == ("refused", "busy:")
    assert (stale["outcome"], stale["reason"][:6]) == ("refused", "stale:")
    assert manager.num_rounds == 1


def test_only_so_many_different_requests_wait(servers: Any) -> None:
    manager = Manager(hold=threading.Event())
    url = servers.replica(manager)
    manager._epoch.setup.policy.busy_wait_s = WAIT_S
    answers = [post(url, request(manager, attempt=index), prefer="wait=0") for index in range(IN_FLIGHT_MAX + 1)]

    assert [one.status_code for one in answers] == [202] * IN_FLIGHT_MAX + [503]
    assert error_of(answers[-1])["values"] == {"in_flight_max": IN_FLIGHT_MAX}
    assert manager.hold is not None
    manager.hold.set()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b"{", None),
        (b"\xff\xfe", None),
        (b"[" * 50_000, None),
        (b'"calibrate"', None),
        (b"{}", "verb"),
        ({"verb": "SECRET"}, "verb"),
        ({"verb": "calibrate", "epoch": 7}, "epoch"),
        ({"verb": "calibrate", "round": "SECRET"}, "round"),
        ({"verb": "calibrate", "attempt": True}, "attempt"),
        ({"verb": "calibrate", "attempt": 2**64}, None),
        ({"verb": "calibrate", "epoch": "SECRET" * 100}, None),
        ({"verb": "calibrate", "args": "SECRET"}, "args"),
        ({"verb": "calibrate", "args": {"a": "SECRET" * 1000}}, None),
        (b'{"verb": "calibrate", "args": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_request_is_refused_without_being_told_back(servers: Any, body: Any, field: str | None) -> None:
    manager = Manager()
    answer = post(servers.replica(manager), body)

    error = error_of(answer)
    assert (answer.status_code, error["remedy"]) == (400, SHAPE)
    assert error["values"].get("field") == field
    assert "SECRET" not in answer.text
    assert manager.num_rounds == 0


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/nothing", "GET", {}, 404),
        ("/control/more", "POST", {}, 404),
        ("/control", "PUT", {}, 405),
        ("/control", "DELETE", {}, 405),
        ("/health/ready", "POST", {}, 405),
        ("/health/SECRET", "GET", {}, 404),
        ("/health/live", "SECRET", {}, 405),
        ("/control", "POST", {"content-type": "text/plain"}, 415),
        ("/control", "POST", {"content-type": "application/x-www-form-urlencoded"}, 415),
        ("/control", "POST", {"content-type": "application/json", "content-encoding": "gzip"}, 415),
    ],
)
def test_other_ways_of_asking_are_refused(
    servers: Any, path: str, method: str, headers: dict[str, str], status: int
) -> None:
    answer = httpx2.request(method, servers.replica() + path, headers=headers, content=b"{}")

    assert answer.status_code == status
    assert error_of(answer)["remedy"] and "SECRET" not in answer.text


@pytest.mark.parametrize("length", ["9" * 5000, "65537", "0" * 5000 + "65537"])
def test_a_length_of_any_digits_is_too_large(length: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", length.encode())]

    problem = http_body.check_headers(headers)

    assert problem is not None and problem.status == 413


def test_who_has_no_token_is_refused_before_anything_is_read_of_it(servers: Any, token: str) -> None:
    """Neither a body that never comes nor a wrong one keeps the worker: it is not asked what it is."""
    url = servers.replica(token=token)
    head = b"POST /control HTTP/1.1\r\nhost: worker\r\nauthorization: Bearer x\r\ncontent-length: 99999999\r\n\r\n{"

    assert raw(url, head, until_closed=False).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_giant_body_is_refused_before_it_is_there(servers: Any, chunked: bool) -> None:
    url = servers.replica()
    length = "transfer-encoding: chunked" if chunked else "content-length: 100000000000"
    head = f"POST /control HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{length}\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"

    received = raw(url, head.encode() + (chunk * 2 if chunked else b"{"), until_closed=False)

    assert received.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_trickles_is_given_up(servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body.read_body, "__kwdefaults__", {"wait_s": 0.2})
    head = b"POST /control HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"

    received = raw(servers.replica(), head, until_closed=False)

    assert received.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"POST /control HTTP/9.9\r\n\r\n",
        b"POST /control HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        b"POST /control HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"GET /control HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        b"GET /control HTTP/1.1\r\nhost: localhost\r\nx: \x00\r\n\r\n",
        b"GET " + b"/" * 200_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
    ids=lambda sent: str(sent[:30]),
)
def test_malformed_http_changes_nothing_and_the_next_request_is_served(servers: Any, sent: bytes) -> None:
    manager = Manager()
    url = servers.replica(manager)
    try:
        assert not raw(url, sent, until_closed=False).startswith(b"HTTP/1.1 200")
    except ConnectionError:
        pass

    assert post(url, request(manager)).json()["outcome"] == "committed"


def test_of_a_failed_rollback_and_a_lost_device_the_outcome_is_told_and_the_process_is_to_end(servers: Any) -> None:
    for error, outcome in (
        (RollbackFailed(round_number=2, problems=("x",)), "rollback-failed"),
        (ProcessPoisoned(round_number=2, problem="x"), "poisoned"),
    ):
        fatal: list[Any] = []
        manager = Manager(error=error)

        answer = post(servers.replica(manager, on_fatal=fatal.append), request(manager))

        assert (answer.status_code, answer.json()["outcome"]) == (200, outcome)
        assert fatal == [error]


def test_an_error_nobody_thought_of_is_no_outcome_and_tells_nothing_but_its_kind(servers: Any) -> None:
    manager = Manager(error=KeyError("SECRET"))
    answer = post(servers.replica(manager), request(manager))

    assert answer.status_code == 500
    assert error_of(answer)["values"] == {"error": "KeyError"}
    assert "SECRET" not in answer.text


def test_a_round_that_is_rolled_back_says_so(servers: Any) -> None:
    manager = Manager(state=State.ROLLED_BACK)

    assert post(servers.replica(manager), request(manager)).json()["outcome"] == "rolled-back"


@pytest.mark.parametrize("mounted", ["/residency", "/deep/er"])
def test_it_can_be_mounted_in_another_app(servers: Any, mounted: str) -> None:
    applications = pytest.importorskip("starlette.applications")
    routing = pytest.importorskip("starlette.routing")
    manager = Manager()
    outer = applications.Starlette(routes=[routing.Mount(mounted, app=ControlApp(manager))])

    url = servers.serve(outer) + mounted

    assert httpx2.get(f"{url}/health/ready").status_code == 200
    assert post(url, request(manager)).json()["outcome"] == "committed"


def test_a_forwarded_address_is_not_believed_whatever_the_server_does_with_it(servers: Any) -> None:
    url = servers.serve(ControlApp(Manager()), proxy_headers=True, forwarded_allow_ips="*")

    refused = httpx2.get(f"{url}/control", headers={"x-forwarded-for": "127.0.0.1"})

    assert refused.status_code == 403
    assert error_of(refused)["fact"].endswith("it came through a proxy")


def test_a_unix_socket_needs_a_token(tmp_path: Any, token: str, servers: Any) -> None:
    for given, status in ((None, 403), (token, 200)):
        path = tmp_path / f"{status}.sock"
        app = ControlApp(Manager(), token=given)
        server = uvicorn.Server(uvicorn.Config(app, uds=str(path), log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        headers = {"authorization": f"Bearer {token}"}
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), headers=headers) as client:
            assert client.get("http://localhost/control").status_code == status
        server.should_exit = True
        thread.join(WAIT_S)


def test_a_websocket_is_closed(servers: Any) -> None:
    url = servers.replica()
    upgrade = (
        b"GET /control HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )

    assert not raw(url, upgrade, until_closed=False).startswith(b"HTTP/1.1 101")
