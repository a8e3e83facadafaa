"""Reading a control request off an ASGI connection: how large it may be, how long it may take, what it must be."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import msgspec

from residency.control import ControlRequest, read_request
from residency.errors import SettingsError
from residency.http_problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from residency.health import Receive

BODY_BYTES_MAX = 64 * 1024  # a request has some 200 bytes
BODY_WAIT_S = 10.0  # for all of it: who sends a byte now and then must not hold a place for ever
WAIT_MAX_S = 60.0  # shorter than what proxies allow a silent connection
_LENGTH_DIGITS_MAX = 18

_SHAPE = "send {verb, epoch, round, attempt, args} with verb status, calibrate, validate or roll_back"
_WAIT = re.compile(r"(?:^|[\s,;])wait=([0-9]{1,6})(?:$|[\s,;])", re.IGNORECASE)


def wanted_wait(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """Return for how many seconds the caller waits for an outcome (`Prefer: wait=20`), None for as long as it takes."""
    for name, value in headers:
        if name.lower() == b"prefer" and (found := _WAIT.search(value.decode("latin-1"))):
            return min(float(found[1]), WAIT_MAX_S)
    return None


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> Problem | None:
    """Return why a body is refused before it is read, None if it may come."""
    known = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    # A page in a browser can send anything else without asking first.
    if known.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return Problem(
            status=415, fact="the body is not declared as JSON", remedy="send 'Content-Type: application/json'"
        )
    if known.get("content-encoding", "identity").strip().lower() != "identity":
        return Problem(status=415, fact="the body is compressed", remedy="send it as it is")
    length = known.get("content-length", "0").strip().lstrip("0")
    # Python reads no number of thousands of digits.
    if length.isdecimal() and (len(length) > _LENGTH_DIGITS_MAX or int(length) > BODY_BYTES_MAX):
        return _too_large()
    return None


async def read_body(receive: Receive, *, wait_s: float = BODY_WAIT_S) -> bytes | Problem | None:
    """Return the whole body, why it is refused, or None if the caller has gone."""
    body = bytearray()
    try:
        async with asyncio.timeout(wait_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > BODY_BYTES_MAX:
                    return _too_large()
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        return Problem(
            status=408,
            fact="the body did not come within its time",
            values={"wait_s": wait_s, "num_bytes": len(body)},
            remedy="send it at once",
            headers={"connection": "close"},
        )


def parse_body(body: bytes) -> ControlRequest | Problem:
    """Return the request that a body holds, or why it is none, without saying what it holds."""
    try:
        decoded: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return Problem(status=400, fact="the body is no JSON", values={"num_bytes": len(body)}, remedy=_SHAPE)
    try:
        return read_request(decoded)
    except SettingsError as error:
        # Its own text quotes the request, which may hold anything.
        wrong = error.fields.get("field")
        return Problem(status=400, fact="the body is no control request", values={"field": wrong}, remedy=_SHAPE)


def _too_large() -> Problem:
    return Problem(
        status=413,
        fact="the body is too large",
        values={"bytes_max": BODY_BYTES_MAX},
        remedy=_SHAPE,
        headers={"connection": "close"},
    )
