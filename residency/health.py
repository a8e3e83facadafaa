"""A small ASGI app: is the worker alive, and may traffic reach it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PATHS = ("/health/live", "/health/ready")


def path_of(scope: Message) -> str:
    """Return the path of an HTTP scope below where the app is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    # Some servers leave the root out of the path.
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


class HealthApp:
    """Answers `/health/live` and `/health/ready` from values in memory; a warmup in another thread never blocks it.

    `status` returns what to tell: at least `ready` (bool), `state` and `elapsed_s`.
    Ready is 503 until `start()` has returned, whatever it decided.
    """

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope: http, and lifespan so that servers may run it alone."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            code, body = self.answer(scope["method"], path_of(scope))
            headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
            if code == 405:
                headers.append((b"allow", b"GET, HEAD"))
            await send({"type": "http.response.start", "status": code, "headers": headers})
            content = b"" if scope["method"] == "HEAD" else msgspec.json.encode(body)
            await send({"type": "http.response.body", "body": content})

    def answer(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and the JSON body for a request. Read-only."""
        if path not in PATHS:
            return 404, {"error": f"no such path {path!r}; ask /health/live or /health/ready"}
        if method not in ("GET", "HEAD"):
            return 405, {"error": f"method {method!r} is not allowed; use GET"}
        status = self._status()
        if path == "/health/live":
            return 200, {"live": True, **status}
        return (200 if status["ready"] else 503), status

    @staticmethod
    async def _lifespan(receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
