"""Control requests and health over HTTP: an ASGI app that any server can run or another app can mount."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from residency.control import ControlRequest, Verb, is_fatal
from residency.errors import ResidencyError
from residency.health import PATHS as HEALTH_PATHS
from residency.health import HealthApp, path_of
from residency.http_body import check_headers, parse_body, read_body, wanted_wait
from residency.http_guard import Guard
from residency.http_problem import Problem
from residency.interrupts import Terminated
from residency.settings import control_token

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from residency.health import Message, Receive, Send

log = logging.getLogger(__name__)

PATH = "/control"
IN_FLIGHT_MAX = 8  # different requests at once; all but one of them only wait to be refused as busy


class Controlled(Protocol):
    """What an app needs of a manager."""

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Serve a control request. Blocks."""
        ...

    def status(self) -> dict[str, Any]:
        """Return what health tells. Never blocks."""
        ...


class Reply(NamedTuple):
    """What is sent: the status of HTTP, the JSON body, headers beside those of every answer."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = {}


class ControlApp:
    """Serves `/control`, `/health/live` and `/health/ready` of one manager. Needs a server that runs asyncio.

    token, token_file: what control requests must carry; else RESIDENCY_CONTROL_TOKEN or RESIDENCY_CONTROL_TOKEN_FILE;
    without any only connections on loopback are served. on_fatal: called once, in another thread, after an error for
    which the process must end with its exit code; see that the server stops.

    A request that takes long runs in a thread, and goes on when its caller goes away; the same one again waits for the
    same outcome. Raises SettingsError for a token that cannot be used.
    """

    def __init__(
        self,
        manager: Controlled,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        on_fatal: Callable[[ResidencyError], object] | None = None,
    ) -> None:
        self._manager, self._on_fatal = manager, on_fatal
        self._guard = Guard(control_token(token, file=token_file))
        self._health = HealthApp(manager.status)
        self._threads = ThreadPoolExecutor(IN_FLIGHT_MAX, thread_name_prefix="residency-control")
        self._lock = threading.Lock()
        self._in_flight: dict[tuple[str, str, int, int], Future[Reply]] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope: http, lifespan so that servers may run it alone, and no websocket."""
        if scope["type"] == "lifespan":
            await self._health(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] == "http":
            reply = await self._answer(scope, receive)
            if reply is not None:
                await _send(reply, send, is_head=scope["method"] == "HEAD")

    async def _answer(self, scope: Message, receive: Receive) -> Reply | None:
        """Return what to send; None if the caller has gone."""
        path, method = path_of(scope), scope["method"]
        if path not in (PATH, *HEALTH_PATHS):
            remedy = f"ask {PATH}, /health/live or /health/ready"
            return _reply_of(Problem(status=404, fact="there is no such path", remedy=remedy))
        is_health = path != PATH
        if method not in (("GET", "HEAD") if is_health else ("GET", "HEAD", "POST")):
            remedy = "send GET" if is_health else "send POST with a control request, or GET for the status"
            allow = {"allow": "GET, HEAD" if is_health else "GET, HEAD, POST"}
            return _reply_of(Problem(status=405, fact="there is no such method here", remedy=remedy, headers=allow))
        if is_health:
            return Reply(*self._health.answer(method, path))
        problem = self._guard.check(scope)
        if problem is not None:
            log.info("a control request is refused: %s", problem.fact)
            return _reply_of(problem)
        return await self._asked(scope, receive) if method == "POST" else self._status()

    async def _asked(self, scope: Message, receive: Receive) -> Reply | None:
        problem = check_headers(scope["headers"])
        if problem is not None:
            return _reply_of(problem)
        body = await read_body(receive)
        if body is None:
            return None
        asked = body if isinstance(body, Problem) else parse_body(body)
        if isinstance(asked, Problem):
            return _reply_of(asked)
        if asked.verb is Verb.STATUS:
            return self._status()
        serving = self._begin(asked)
        if isinstance(serving, Problem):
            return _reply_of(serving)
        if not await _outcome_or_gone(serving, receive, wait_s=wanted_wait(scope["headers"])):
            return None
        return serving.result() if serving.done() else self._running(asked)

    def _status(self) -> Reply:
        return Reply(200, self._manager.handle({"verb": Verb.STATUS.value}))

    def _running(self, asked: ControlRequest) -> Reply:
        """Say that there is no outcome yet; whoever asks again with the same four gets it."""
        told = {**self._manager.handle({"verb": Verb.STATUS.value}), **self._manager.status()}
        return Reply(202, {**told, "verb": asked.verb.value, "request": asked.four, "outcome": None})

    def _begin(self, asked: ControlRequest) -> Future[Reply] | Problem:
        """Return the serving of a request: one for all that ask the same, however often."""
        with self._lock:
            found = self._in_flight.get(asked.key)
            if found is not None:
                return found
            if len(self._in_flight) >= IN_FLIGHT_MAX:
                return Problem(
                    status=503,
                    fact="too many different control requests are waiting",
                    values={"in_flight_max": IN_FLIGHT_MAX},
                    remedy="try again later",
                    headers={"retry-after": "30"},
                )
            begun = self._threads.submit(self._serve, asked)
            self._in_flight[asked.key] = begun
        begun.add_done_callback(lambda _: self._forget(asked))
        return begun

    def _forget(self, asked: ControlRequest) -> None:
        with self._lock:
            self._in_flight.pop(asked.key, None)

    def _serve(self, asked: ControlRequest) -> Reply:
        """Serve a request on a thread of its own. Raises nothing: nobody may be there to hear it."""
        request = msgspec.to_builtins(asked)
        try:
            return _reply(self._manager.handle(request))
        except Terminated as error:
            return self._kept(request, error)
        except Exception as error:
            if isinstance(error, ResidencyError) and is_fatal(error):
                log.critical("%s", error)
                self._tell_fatal(error)
                return self._kept(request, error)
            log.exception("a control request failed")
            return _failed(error)

    def _kept(self, request: Mapping[str, Any], error: BaseException) -> Reply:
        """Return the outcome that was journaled before an error was raised."""
        try:
            return _reply(self._manager.handle(request))
        except Exception:
            log.exception("the outcome of a control request cannot be told")
            return _failed(error)

    def _tell_fatal(self, error: ResidencyError) -> None:
        if self._on_fatal is not None:
            try:
                self._on_fatal(error)
            except Exception:
                log.exception("what is to end this process failed")


async def _outcome_or_gone(serving: Future[Reply], receive: Receive, *, wait_s: float | None) -> bool:
    """Wait for an outcome, for a time, or until the caller goes away; False if it has. The serving goes on anyhow."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Future[Reply]) -> None:
        # The loop may be closed by then.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    serving.add_done_callback(tell)
    waiting = {asyncio.create_task(done.wait()), leaving := asyncio.create_task(gone())}
    try:
        await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        return serving.done() or not leaving.done()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _reply(answer: Mapping[str, Any]) -> Reply:
    msgspec.json.encode(answer)  # here, where it can still be told, and not while it is being sent
    return Reply(200, answer)


def _reply_of(problem: Problem) -> Reply:
    return Reply(problem.status, problem.body, problem.headers)


def _failed(error: BaseException) -> Reply:
    remedy = "send the same request again, which is safe; the worker's log has the error"
    return _reply_of(Problem(status=500, fact="it failed", values={"error": type(error).__name__}, remedy=remedy))


async def _send(reply: Reply, send: Send, *, is_head: bool) -> None:
    content = msgspec.json.encode(reply.body)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        **reply.headers,
    }
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": pairs})
    await send({"type": "http.response.body", "body": b"" if is_head else content})
