"""What is told of a replica that answers badly, late, twice, elsewhere, or not at all."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import threading
import time
from typing import Any

import pytest

from benchmarks.fleet_replicas import Manager, black_hole, dies_in_mid_answer, read_request
from residency.control import Verb
from residency.errors import ResidencyError, RollbackFailed, SettingsError
from residency.fleet import AsyncFleetClient, FleetClient
from residency.fleet_replica import TRIES_MAX
from residency.fleet_urls import replica_url, replica_urls
from residency.statemachine.replicas import Fault, ReplicaOutcome
from residency.statemachine.states import State

PASSES_S = 2.0  # a time that is to pass, in which a busy machine gets as far as asking
UNKNOWN, REFUSED = ReplicaOutcome.UNKNOWN, ReplicaOutcome.REFUSED


def ask(
    url: str, verb: Verb = Verb.CALIBRATE, *, timeout_s: float = 60.0, answer_s: float = 30.0, **options: Any
) -> Any:
    """Ask one replica, and return what is known of it."""
    return FleetClient([url], answer_s=answer_s).ask(verb, timeout_s=timeout_s, **options).replicas[0]


class Undecided(ResidencyError):
    exit_code = 79


class Scripted:
    """A replica that tells its status as it should, and then answers each request as a function says.

    answer: gets how many requests came before, and the request; returns bytes to send, or None to close.
    """

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, list[dict[str, Any]]()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await read_request(reader))
        if request["verb"] == "status":
            writer.write(http(now()))
        else:
            self.asked.append(request)
            sent = self.answer(len(self.asked) - 1, request)
            if asyncio.iscoroutine(sent):
                sent = await sent
            if sent is not None:
                writer.write(sent)
        await writer.drain()


def now(**fields: Any) -> dict[str, Any]:
    return {
        "epoch": "e1",
        "round": 1,
        "state": "committed",
        "placement": "p",
        "ready": True,
        "verb": "status",
        **fields,
    }


def done(request: dict[str, Any], **fields: Any) -> bytes:
    four = {name: request[name] for name in ("verb", "epoch", "round", "attempt")}
    return http(now(verb=request["verb"], round=2, outcome="committed", reason="done", request=four, **fields))


def http(body: object, status: str = "200 OK", *headers: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@pytest.mark.parametrize(
    ("manager", "verb", "outcome"),
    [
        (Manager(), Verb.CALIBRATE, "committed"),
        (Manager(kept=True), Verb.CALIBRATE, "kept"),
        (Manager(pinned=True), Verb.VALIDATE, "pinned"),
        (Manager(state=State.ROLLED_BACK), Verb.VALIDATE, "rolled-back"),
        (Manager(), Verb.ROLL_BACK, "rolled-back"),
        (Manager(error=RollbackFailed(round_number=2, problems=("x",))), Verb.ROLL_BACK, "rollback-failed"),
        (Manager(error=Undecided("the ranks")), Verb.CALIBRATE, "unknown"),
    ],
)
def test_the_outcome_of_a_replica_is_told(servers: Any, manager: Manager, verb: Verb, outcome: str) -> None:
    answer = ask(servers.replica(manager), verb)

    assert (answer.outcome.value, answer.fault, answer.epoch, answer.num_tries) == (outcome, None, manager.epoch, 1)
    assert manager.num_rounds == 1


def test_the_status_asks_nothing_of_a_worker(servers: Any) -> None:
    manager = Manager()
    answer = ask(servers.replica(manager), Verb.STATUS)

    assert (answer.outcome, answer.ready, answer.state) == (ReplicaOutcome.ANSWERED, True, "committed")
    assert answer.request is None and manager.num_rounds == 0


def test_a_long_round_is_waited_for_and_what_goes_on_is_told(servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("residency.fleet_replica.WAIT_S", 1)
    news: list[tuple[str, str]] = []
    held = threading.Event()
    manager = Manager(hold=held)
    url = servers.replica(manager)

    def hear(*told: str) -> None:
        news.append((told[0], told[1]))
        held.set()

    answer = ask(url, on_news=hear)

    assert (answer.outcome, manager.num_rounds) == (ReplicaOutcome.COMMITTED, 1)
    assert news[0] == (url, "validating, 1.5 s")


# Before anything was asked of it, it is known that nothing was done.


@pytest.mark.parametrize(
    ("behave", "fault"),
    [
        (None, Fault.REFUSED_CONNECTION),
        (black_hole, Fault.TIMEOUT),
        (dies_in_mid_answer, Fault.DIED),
        (http(b"<html>"), Fault.RUBBISH),
        (http(b"[1]"), Fault.RUBBISH),
        (http(b"[" * 100_000), Fault.RUBBISH),
        (http(b"{}"), Fault.RUBBISH),
        (http({**now(), "epoch": 7}), Fault.RUBBISH),
        (http({**now(), "round": True}), Fault.RUBBISH),
        (http({**now(), "epoch": "e" * 1000}), Fault.RUBBISH),
        (http(b"{" + b" " * 300_000 + b"}"), Fault.RUBBISH),
        (http(now(), "200 OK", "content-encoding: gzip"), Fault.RUBBISH),
        (http(now()) + http(now(epoch="e2")), None),
        (b"SSH-2.0-OpenSSH_9.7\r\n\r\n", Fault.RUBBISH),
        (b"\x00" * 10_000, Fault.RUBBISH),
        (http(b"{}", "302 Found", "location: http://127.0.0.1:1/control"), Fault.REDIRECTED),
        (http(b"", "401 Unauthorized"), Fault.UNAUTHORIZED),
        (http(b"", "404 Not Found"), Fault.HTTP_ERROR),
        (http(b"", "500 Internal Server Error"), Fault.HTTP_ERROR),
        (http(b"", "502 Bad Gateway"), Fault.HTTP_ERROR),
    ],
    ids=lambda value: value.value if isinstance(value, Fault) else str(value)[:40],
)
def test_a_replica_that_cannot_be_looked_at_is_refused_or_unknown(servers: Any, behave: Any, fault: Any) -> None:
    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(behave)
        await writer.drain()

    url = servers.dead() if behave is None else servers.broken(send if isinstance(behave, bytes) else behave)

    # Only one that says nothing at all is waited for.
    answer_s = 0.5 if fault is Fault.TIMEOUT else 30.0
    looked = ask(url, Verb.STATUS, answer_s=answer_s)
    asked = ask(url, answer_s=answer_s) if fault is not None else None

    if asked is None:
        assert (looked.outcome, looked.epoch) == (ReplicaOutcome.ANSWERED, "e1")
        return
    assert (looked.fault, asked.fault) == (fault, fault)
    assert looked.outcome is (
        REFUSED if fault in (Fault.UNAUTHORIZED, Fault.HTTP_ERROR) and "HTTP 4" in looked.reason else UNKNOWN
    )
    assert asked.outcome is REFUSED and asked.request is None


# From when it was asked on, nobody knows, unless it says so.


def test_a_replica_that_dies_in_mid_answer_is_asked_the_same_again(servers: Any) -> None:
    replica = Scripted(lambda index, request: done(request)[: -5 if index == 0 else None])
    answer = ask(servers.broken(replica))

    assert (answer.outcome, answer.num_tries) == (ReplicaOutcome.COMMITTED, 2)
    assert replica.asked[0] == replica.asked[1]


@pytest.mark.parametrize(
    ("sent", "fault", "num_tries"),
    [
        (lambda request: None, Fault.DIED, TRIES_MAX),
        (lambda request: done(request)[:-5], Fault.DIED, TRIES_MAX),
        (lambda request: http(b"", "502 Bad Gateway"), Fault.HTTP_ERROR, TRIES_MAX),
        (lambda request: http(b"", "500 Internal Server Error"), Fault.HTTP_ERROR, 1),
        (lambda request: http(b"", "303 See Other", "location: /elsewhere"), Fault.REDIRECTED, 1),
        (lambda request: b"rubbish\r\n\r\n", Fault.RUBBISH, 1),
        (lambda request: http(b"rubbish"), Fault.RUBBISH, 1),
        (lambda request: http(now()), Fault.RUBBISH, 1),
        (lambda request: done(request | {"attempt": 0}), Fault.RUBBISH, 1),
        (lambda request: done(request, epoch="e2"), Fault.ANOTHER_EPOCH, 1),
        (lambda request: http({**now(), "outcome": "splendid", "request": request}), Fault.RUBBISH, 1),
        (lambda request: http({**now(), "outcome": "answered", "request": request}), Fault.RUBBISH, 1),
        (lambda request: http(b'{"outcome": "committed"}' * 2), Fault.RUBBISH, 1),
    ],
)
def test_a_replica_that_was_asked_and_answers_badly_is_unknown(
    servers: Any, sent: Any, fault: Fault, num_tries: int
) -> None:
    replica = Scripted(lambda index, request: sent(request))
    answer = ask(servers.broken(replica))

    assert (answer.outcome, answer.fault, answer.num_tries) == (UNKNOWN, fault, num_tries)
    assert len({json.dumps(one) for one in replica.asked}) == 1
    assert answer.request == {name: replica.asked[0][name] for name in ("verb", "epoch", "round", "attempt")}


def test_a_replica_that_refuses_in_so_many_words_is_refused(servers: Any) -> None:
    for status, fault in (("401 Unauthorized", Fault.UNAUTHORIZED), ("413 Too Large", Fault.HTTP_ERROR)):
        replica = Scripted(lambda index, request, status=status: http(b"", status))

        assert ask(servers.broken(replica)).outcome is REFUSED
        assert ask(servers.broken(replica)).fault is fault


def test_a_refusal_after_a_request_that_may_have_been_done_is_unknown(servers: Any) -> None:
    replica = Scripted(lambda index, request: None if index == 0 else http(b"", "401 Unauthorized"))

    assert ask(servers.broken(replica)).outcome is UNKNOWN


def test_a_replica_that_never_answers_is_unknown_when_the_time_is_over(servers: Any) -> None:
    async def never(*_: Any) -> None:
        await asyncio.sleep(60)

    begun_s = time.monotonic()
    answer = ask(servers.broken(Scripted(never)), timeout_s=PASSES_S)

    assert (answer.outcome, answer.fault) == (UNKNOWN, Fault.TIMEOUT)
    assert time.monotonic() - begun_s < 30


def test_a_replica_that_trickles_is_unknown_when_the_time_is_over(servers: Any) -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await read_request(reader))
        whole = http(now()) if request["verb"] == "status" else done(request)
        if request["verb"] == "status":
            writer.write(whole)
            return
        for index in range(len(whole)):
            writer.write(whole[index : index + 1])
            await writer.drain()
            await asyncio.sleep(0.1)

    answer = ask(servers.broken(trickle), timeout_s=PASSES_S)

    assert (answer.outcome, answer.fault) == (UNKNOWN, Fault.TIMEOUT)


def test_a_replica_that_says_not_yet_for_ever_is_not_asked_all_the_time(servers: Any) -> None:
    def not_yet(index: int, request: dict[str, Any]) -> bytes:
        four = {name: request[name] for name in ("verb", "epoch", "round", "attempt")}
        return http({**now(), "outcome": None, "request": four, "working": "x", "elapsed_s": 1}, "202 Accepted")

    replica = Scripted(not_yet)
    answer = ask(servers.broken(replica), timeout_s=PASSES_S)

    assert (answer.outcome, answer.fault) == (UNKNOWN, Fault.OUT_OF_TIME)
    assert 1 <= len(replica.asked) <= 3


def test_a_second_answer_is_never_taken_for_the_answer_to_something_else(servers: Any) -> None:
    answer = ask(servers.broken(Scripted(lambda index, request: done(request) + done(request, epoch="e9"))))

    assert (answer.outcome, answer.epoch) == (ReplicaOutcome.COMMITTED, "e1")


def test_a_late_answer_is_heard_by_asking_again(servers: Any) -> None:
    manager = Manager(hold=threading.Event())
    url = servers.replica(manager)
    late = ask(url, timeout_s=PASSES_S)
    assert late.outcome is UNKNOWN
    assert manager.hold is not None
    manager.hold.set()

    again = ask(url, again={url: late.request})

    assert (again.outcome, again.request, manager.num_rounds) == (ReplicaOutcome.COMMITTED, late.request, 1)


def test_stale_and_busy_are_told_apart(servers: Any) -> None:
    for word, fault in (("stale", Fault.STALE), ("busy", Fault.BUSY)):
        replica = Scripted(
            lambda index, request, word=word: done(request).replace(
                b'"committed", "reason": "done"', b'"refused", "reason": "%s: x"' % word.encode()
            )
        )
        # The length is that of the other words.
        replica.answer = lambda index, request, word=word: http(
            now(outcome="refused", reason=f"{word}: x", request={k: v for k, v in request.items() if k != "args"})
        )
        answer = ask(servers.broken(replica))

        assert (answer.outcome, answer.fault) == (REFUSED, fault)


# A worker that was restarted answers with another epoch.


def restarted(request: dict[str, Any], became: object) -> bytes:
    four = {name: value for name, value in request.items() if name != "args"}
    return http(now(epoch="e2", outcome="refused", reason="stale: another", request=four, became=became))


def test_a_worker_restarted_between_looking_and_asking_is_refused(servers: Any) -> None:
    answer = ask(servers.broken(Scripted(lambda index, request: restarted(request, None))))

    assert (answer.outcome, answer.fault, answer.epoch) == (REFUSED, Fault.ANOTHER_EPOCH, "e2")


@pytest.mark.parametrize(
    ("became", "outcome"),
    [
        ({"outcome": "rolled-back", "round": 2, "state": "rolled-back", "why": "y"}, ReplicaOutcome.ROLLED_BACK),
        ({"outcome": None, "round": 2, "state": "measuring", "done": False, "why": "it died"}, REFUSED),
        ({"outcome": None, "round": 2, "state": "committed", "done": None, "why": "it died"}, UNKNOWN),
        ({"outcome": "splendid", "round": 2}, UNKNOWN),
        (None, UNKNOWN),
        ("rubbish", UNKNOWN),
    ],
)
def test_of_a_worker_that_died_with_a_request_its_next_life_tells(
    servers: Any, became: object, outcome: ReplicaOutcome
) -> None:
    replica = Scripted(lambda index, request: None if index == 0 else restarted(request, became))
    answer = ask(servers.broken(replica))

    assert (answer.outcome, answer.fault) == (outcome, Fault.ANOTHER_EPOCH)
    assert "restarted" in answer.reason


# Transport.


def test_a_certificate_that_cannot_be_trusted_is_told_and_nothing_is_sent(servers: Any, tmp_path: Any) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    from residency.http_app import ControlApp

    manager = Manager()
    app = ControlApp(manager)
    url = servers.serve(app, ssl_certfile=str(certificate), ssl_keyfile=str(key))

    distrusted = ask(url)
    assert (distrusted.outcome, distrusted.fault, manager.num_handled) == (REFUSED, Fault.TLS, 0)
    assert ask(url.replace("https", "http")).outcome is REFUSED
    trusting = FleetClient([url], ca_file=certificate)
    assert trusting.calibrate().merged.outcome is ReplicaOutcome.COMMITTED
    with pytest.raises(SettingsError, match="key.pem' cannot be used"):
        FleetClient([url], ca_file=key)


def test_ipv6_is_spoken(servers: Any) -> None:
    from residency.http_app import ControlApp

    url = servers.serve(ControlApp(Manager()), host="::1")

    assert url.startswith("http://[::1]:") and ask(url).outcome is ReplicaOutcome.COMMITTED


def test_a_host_without_an_address_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    answer = ask("http://no-such-host.invalid:8000")

    assert (answer.outcome, answer.fault) == (REFUSED, Fault.UNREACHABLE)


def test_a_silent_name_server_keeps_nobody_beyond_the_time(monkeypatch: pytest.MonkeyPatch, servers: Any) -> None:
    answers, plain = threading.Event(), socket.getaddrinfo
    held: list[str] = []

    def look_up(host: str | bytes, *others: Any) -> Any:
        if host in ("slow.invalid", b"slow.invalid"):
            held.append(threading.current_thread().name)
            assert threading.current_thread().daemon, "the interpreter would wait for it at its end"
            answers.wait(60)
        return plain(host, *others)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    other = servers.replica()
    urls = [f"http://slow.invalid:{8000 + index}" for index in range(3)]
    begun_s = time.monotonic()

    report = FleetClient([*urls, other], answer_s=PASSES_S).calibrate(timeout_s=2 * PASSES_S)

    took_s = time.monotonic() - begun_s
    answers.set()
    assert took_s < 30 and held
    assert [one.fault for one in report.replicas] == [Fault.UNREACHABLE] * 3 + [None]
    assert report.merged.counts == {REFUSED: 3, ReplicaOutcome.COMMITTED: 1}


def test_neither_proxies_nor_stored_passwords_take_part(
    servers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / ".netrc").write_text("default login me password SECRET")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HTTP_PROXY", servers.dead())
    monkeypatch.setenv("ALL_PROXY", servers.dead())

    assert ask(servers.replica()).outcome is ReplicaOutcome.COMMITTED


def test_the_token_is_sent_and_a_wrong_one_is_told(servers: Any, token: str) -> None:
    url = servers.replica(token=token)

    def asked(**options: Any) -> Any:
        return FleetClient([url], **options).status().replicas[0]

    assert asked(token=token).outcome is ReplicaOutcome.ANSWERED
    assert (asked(token=f"{token}x").outcome, asked().fault) == (REFUSED, Fault.UNAUTHORIZED)


# URLs and usage.


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("HTTP://Worker-0:8000/", "http://worker-0:8000"),
        ("http://worker:80", "http://worker"),
        ("https://worker:443/a/b/", "https://worker/a/b"),
        ("http://worker:8000/residency/control", "http://worker:8000/residency"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://[0:0:0:0:0:0:0:1]", "http://[::1]"),
    ],
)
def test_urls_of_one_place_are_one_url(text: str, url: str) -> None:
    assert replica_url(text) == url
    assert replica_urls([text, url]) == (url,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "worker",
        "worker:8000",
        "ftp://worker",
        "file:///etc/passwd",
        "http://",
        "http://:8000",
        "http://worker:port",
        "http://worker:99999",
        "http://worker?x=1",
        "http://worker#x",
        "http://worker/?",
        "http://worker\r\nx-header: 1",
        "http://worker/%\n",
        "http://worker/a b",
        "http://w\u00f6rker",
        "http://worker\\@evil",
        "http://[::1",
        "http://[fe80::1%25eth0]",
        "http://[worker]",
        "http://wor ker",
        "http://worker\x00",
        "http://user:SECRET@worker",
        "ht!tp://user:SECRET@worker",
        "http://user:SECRET@[::1",
        "http://" + "w" * 10_000,
    ],
)
def test_a_url_that_is_none_is_an_error_before_anything_is_sent(text: str) -> None:
    with pytest.raises(SettingsError, match=r"http://HOST:PORT") as caught:
        FleetClient([text])

    assert "SECRET" not in str(caught.value) and len(str(caught.value)) < 600
    assert not re.search(r"[\r\n\x00]", str(caught.value))


@pytest.mark.parametrize(
    "options", [{"concurrency": 0}, {"concurrency": 1000}, {"answer_s": 0}, {"answer_s": float("nan")}]
)
def test_bounds_that_are_none_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="must be"):
        FleetClient(["http://worker"], **options)


def test_without_replicas_there_is_nothing_to_ask() -> None:
    with pytest.raises(SettingsError, match="no replica"):
        FleetClient([])


def test_the_blocking_client_refuses_to_block_an_event_loop(servers: Any) -> None:
    url = servers.replica()

    async def both() -> Any:
        with pytest.raises(SettingsError, match="AsyncFleetClient"):
            FleetClient([url]).status()
        return await AsyncFleetClient([url]).status()

    assert asyncio.run(both()).merged.outcome is ReplicaOutcome.ANSWERED
