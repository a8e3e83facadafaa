"""One HTTP exchange with a replica: bounded in time and size, and told exactly if it fails."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from residency.errors import SettingsError
from residency.statemachine.replicas import Fault

try:
    import httpx2
except ModuleNotFoundError as error:
    raise SettingsError(
        f"{error.name} is not installed, and replicas are asked over HTTP with httpx2; pip install 'residency[http]'"
    ) from error

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

PATH = "/control"
ANSWER_BYTES_MAX = 256 * 1024  # an answer has some 500 bytes; the longest reason of a plan a few thousand
GRACE_S = 10.0  # of an answer that was promised after a wait

# What may be another one's word, on the way to a replica that has the request or has not.
_GATEWAY = frozenset({502, 503, 504})


class Heard(NamedTuple):
    """An answer: the status of HTTP, 200 or 202, and the JSON object."""

    status: int
    body: Mapping[str, Any]


class Unheard(Exception):
    """Raised where no answer was heard. Never leaves the client: it becomes a replica's outcome.

    was_sent: whether the replica may have got the request. is_refusal: whether it is known that it was not served.
    is_worth_repeating: whether the same again may be heard.
    """

    def __init__(
        self,
        fault: Fault,
        text: str,
        *,
        was_sent: bool,
        is_refusal: bool = False,
        is_worth_repeating: bool = False,
    ) -> None:
        super().__init__(text)
        self.fault, self.text = fault, text
        self.was_sent, self.is_refusal, self.is_worth_repeating = was_sent, is_refusal, is_worth_repeating


def tls_context(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext | bool:
    """Return what certificates are checked against: the authorities of a file alone, else those of the system.

    Raises SettingsError for a file that holds none.
    """
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"the file of certificate authorities {str(ca_file)!r} cannot be used: {error}; name one in PEM format"
        ) from error


def make_client(
    *, token: str | None, connect_s: float, num_connections: int, tls: ssl.SSLContext | bool
) -> httpx2.AsyncClient:
    """Return a client that talks to replicas and to nobody else: no proxy, no redirect, no connection used twice.

    A connection of its own for each request: what a broken replica sends after its answer can then not be taken for
    the answer to the next one.
    """
    headers = {"accept": "application/json", "accept-encoding": "identity", "connection": "close"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    return httpx2.AsyncClient(
        headers=headers,
        timeout=httpx2.Timeout(None, connect=connect_s),
        limits=httpx2.Limits(max_connections=num_connections, max_keepalive_connections=0),
        follow_redirects=False,
        verify=tls,
        # Neither the proxies of variables nor the passwords of ~/.netrc have a part in it.
        trust_env=False,
    )


async def exchange(
    http: httpx2.AsyncClient, url: str, request: Mapping[str, Any], *, limit_s: float, wait_s: int | None = None
) -> Heard:
    """Send one control request and return the answer. wait_s: how long the replica may take to say "not yet".

    Raises Unheard; within limit_s, whatever the replica does.
    """
    sent = _Sent()
    headers = {"content-type": "application/json", **({"prefer": f"wait={wait_s}"} if wait_s is not None else {})}
    try:
        async with asyncio.timeout(limit_s):
            content = msgspec.json.encode(request)
            extensions = {"trace": sent.trace}
            posting = http.stream("POST", f"{url}{PATH}", content=content, headers=headers, extensions=extensions)
            async with posting as response:
                body = await _read(response)
    except TimeoutError:
        fault = Fault.TIMEOUT if sent.is_begun else Fault.UNREACHABLE
        text = f"no answer within {limit_s:.3g} s" if sent.is_begun else f"no connection within {limit_s:.3g} s"
        raise Unheard(fault, text, was_sent=sent.is_begun, is_worth_repeating=sent.is_begun) from None
    except httpx2.HTTPError as error:
        raise _unheard(error, was_sent=sent.is_begun) from None
    except (httpx2.InvalidURL, UnicodeError, ValueError) as error:
        raise Unheard(Fault.UNREACHABLE, f"the URL cannot be used: {error}", was_sent=sent.is_begun) from None
    return _judge(response, body)


class _Sent:
    """Sees whether a request began to leave this host."""

    def __init__(self) -> None:
        self.is_begun = False

    async def trace(self, name: str, info: Mapping[str, Any]) -> None:
        if name.endswith("send_request_headers.started"):
            self.is_begun = True


async def _read(response: httpx2.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            raise Unheard(Fault.RUBBISH, f"the answer has over {ANSWER_BYTES_MAX} bytes", was_sent=True)
    return bytes(body)


def _unheard(error: httpx2.HTTPError, *, was_sent: bool) -> Unheard:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    if not was_sent:
        fault = _why_unconnected(error)
        # A certificate is the same a moment later.
        is_passing = fault is not Fault.TLS
        return Unheard(fault, f"no connection: {text}", was_sent=False, is_worth_repeating=is_passing)
    # h11 says what it did not understand; what ended too early is another kind of the same error.
    is_end = not isinstance(error, httpx2.RemoteProtocolError) or "disconnected" in text or "closed" in text
    if is_end:
        return Unheard(Fault.DIED, f"it went away in mid-answer: {text}", was_sent=True, is_worth_repeating=True)
    return Unheard(Fault.RUBBISH, f"what it answers is not HTTP: {text}", was_sent=True)


def _why_unconnected(error: BaseException) -> Fault:
    causes = list(_causes(error))
    if any(isinstance(one, ssl.SSLError) for one in causes):
        return Fault.TLS
    if any(isinstance(one, ConnectionRefusedError) for one in causes) or "refused" in str(error):
        return Fault.REFUSED_CONNECTION
    return Fault.UNREACHABLE


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        yield one
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _judge(response: httpx2.Response, body: bytes) -> Heard:
    """Return the answer in a response. Raises Unheard where it is none."""
    status = response.status_code
    decoded = _object(body)
    if status in (200, 202):
        if decoded is None or response.headers.get("content-encoding"):
            raise Unheard(Fault.RUBBISH, f"what it answers is no JSON object ({len(body)} bytes)", was_sent=True)
        return Heard(status, decoded)
    ours = (decoded or {}).get("error")
    told = f"HTTP {status}"
    if isinstance(ours, dict):
        told += f": {str(ours.get('fact'))[:300]}; {str(ours.get('remedy'))[:300]}"
    if 300 <= status < 400:
        raise Unheard(Fault.REDIRECTED, f"{told}: it sends elsewhere, where nothing is sent to", was_sent=True)
    if status in (401, 403):
        raise Unheard(Fault.UNAUTHORIZED, told, was_sent=True, is_refusal=True)
    if 400 <= status < 500:
        raise Unheard(Fault.HTTP_ERROR, told, was_sent=True, is_refusal=True)
    if status == 503 and isinstance(ours, dict):
        raise Unheard(Fault.BUSY, told, was_sent=True, is_refusal=True)
    raise Unheard(Fault.HTTP_ERROR, told, was_sent=True, is_worth_repeating=status in _GATEWAY)


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) else None
