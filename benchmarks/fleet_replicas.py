"""Replicas without weights, for tests and benchmarks: the real control core and app, over real sockets, in one process.

What they lack is a pipeline: their rounds take a time and end as they are told. Beside them there are servers that are
broken in one way each.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import uvicorn

from residency.control import Control
from residency.http_app import ControlApp
from residency.statemachine.source import RoundResult, Source, SourceKind
from residency.statemachine.states import State

Broken = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WAIT_S = 60.0


@dataclass
class Manager:
    """As an app sees one. round_s: how long a round takes; result: how it ends; hold: it waits for that, too."""

    round_s: float = 0.0
    state: State = State.COMMITTED
    kept: bool = False
    pinned: bool = False
    digest: str = "ab" * 32
    error: BaseException | None = None
    hold: threading.Event | None = None
    epoch: str = field(default_factory=lambda: str(uuid.uuid4()))
    journal: Any = None
    num_rounds: int = 0
    num_handled: int = 0

    def __post_init__(self) -> None:
        self._epoch = SimpleNamespace(
            id=self.epoch,
            round_number=1,
            machine=SimpleNamespace(state=State.COMMITTED),
            setup=SimpleNamespace(
                worker=SimpleNamespace(placement=SimpleNamespace(digest=self.digest)),
                policy=SimpleNamespace(busy_wait_s=0.2),
                switch=lambda: None,
                stream="worker",
                initial=None,
            ),
            pinned=None,
            gate=None,
            recovery=None,
            journal=self.journal,
            log=SimpleNamespace(usable=True, note=lambda *_, **__: None),
            run_round=self._run_round,
            remembered=tuple,
        )
        self._control = Control(self._epoch, run=lambda run: run())  # type: ignore[arg-type]

    def handle(self, request: Any) -> dict[str, Any]:
        """Serve a control request."""
        self.num_handled += 1
        return self._control.handle(request, ready=True, decision="committed")

    def status(self) -> dict[str, Any]:
        """Tell what health tells."""
        now = {"ready": True, "state": self._epoch.machine.state.value, "epoch": self.epoch}
        return {**now, "round": self._epoch.round_number, "working": "validating", "elapsed_s": 1.5}

    def _run_round(self, source: Source) -> RoundResult:
        self.num_rounds += 1
        self._epoch.round_number += 1
        if self.hold is not None:
            assert self.hold.wait(WAIT_S)
        threading.Event().wait(self.round_s)
        if self.error is not None:
            raise self.error
        self._epoch.machine.state = self.state
        return RoundResult(
            number=self._epoch.round_number,
            source=SourceKind.CALIBRATION,
            state=self.state,
            kept=self.kept,
            pinned=self.pinned,
            reason="as it was told to end",
        )


class Servers:
    """Servers on loopback, all on one event loop in a thread of its own. Close them in the end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
        self._broken: list[asyncio.Server] = []
        self._sockets: list[socket.socket] = []

    def serve(self, app: Any, *, host: str = "127.0.0.1", **options: Any) -> str:
        """Serve an ASGI app; return its URL."""
        listening = listen(host)
        port = listening.getsockname()[1]
        settings = {"log_level": "critical", "lifespan": "off", "timeout_graceful_shutdown": 1, **options}
        server = uvicorn.Server(uvicorn.Config(app, **settings))

        async def start() -> None:
            self._running.append((server, asyncio.ensure_future(server.serve(sockets=[listening]))))
            while not server.started:
                await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(WAIT_S)
        scheme = "https" if "ssl_certfile" in options else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def replica(self, manager: Manager | None = None, **options: Any) -> str:
        """Serve a replica's control app; return its URL."""
        return self.serve(ControlApp(manager or Manager(), **options))

    def broken(self, behave: Broken) -> str:
        """Serve whatever a function does with each connection; return its URL."""
        listening = listen("127.0.0.1")

        async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
                await behave(reader, writer)
            with suppress(ConnectionError, RuntimeError):
                writer.close()

        async def start() -> None:
            self._broken.append(await asyncio.start_server(call, sock=listening))

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(WAIT_S)
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    def dead(self) -> str:
        """Return a URL at which nobody listens; the port stays ours, so that nobody else will."""
        bound = keep_port()
        self._sockets.append(bound)
        return f"http://127.0.0.1:{bound.getsockname()[1]}"

    def close(self) -> None:
        """End all of them."""

        async def stop() -> None:
            for server, _ in self._running:
                server.should_exit = True
                server.force_exit = True
            for one in self._broken:
                one.close()
            await asyncio.gather(*(task for _, task in self._running), return_exceptions=True)
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()
        for bound in self._sockets:
            bound.close()


def keep_port() -> socket.socket:
    """Return a socket with a port of loopback at which nobody listens: nobody is given it while this is open.

    Who asks for it by its number and lets addresses be reused, as servers do, may listen there all the same.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    return bound


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, 0))
    listening.listen(128)
    return listening


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Return the body of one HTTP request, as far as it has a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    return await reader.readexactly(length)


async def black_hole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take everything and say nothing."""
    while await reader.read(4096):
        pass


async def dies_in_mid_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Promise more than comes."""
    await read_request(reader)
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"epoch": "')
    await writer.drain()
