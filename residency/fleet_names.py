"""Where replicas' names lead, looked up on threads that nobody waits for."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from typing import Any

LOOKUPS_MAX = 64  # at a time: one that a silent name server holds may take a minute, and has a thread as long


class NameLoop(asyncio.SelectorEventLoop):
    """An event loop that ends in time, whatever a name server does.

    The usual one looks up names in a pool whose threads it waits for at its end, and so does the interpreter.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turns = asyncio.Semaphore(LOOKUPS_MAX)

    async def getaddrinfo(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[Any]:
        """Return what `socket.getaddrinfo` returns, and raise what it raises."""
        await self._turns.acquire()
        found: asyncio.Future[list[Any]] = self.create_future()

        def settle(addresses: list[Any], error: Exception | None) -> None:
            self._turns.release()
            if found.done():
                return
            if error is None:
                found.set_result(addresses)
            else:
                found.set_exception(error)

        def look_up() -> None:
            addresses, failure = [], None
            try:
                addresses = socket.getaddrinfo(host, port, family, type, proto, flags)
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                failure = error
            with suppress(RuntimeError):  # the loop has ended
                self.call_soon_threadsafe(settle, addresses, failure)

        threading.Thread(target=look_up, name="residency-name", daemon=True).start()
        return await found
