"""Who may send control requests over HTTP: whoever has the token; without one, whoever is on loopback for sure."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from typing import TYPE_CHECKING, Any

from residency.http_problem import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

# Any of these says that somebody else stands between the caller and us. They can be forged, but only to be refused.
_FORWARDED = ("forwarded", "via", "x-real-ip", "x-forwarded", "x-client-ip", "x-cluster-client-ip", "true-client-ip")
_FORWARDED_PREFIXES = ("x-forwarded-", "x-envoy-", "x-original-", "cf-", "fly-", "fastly-")
_SINGLE = ("authorization", "host", "content-type", "content-length")
_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")  # with a port or without
_HOW_TO = "set RESIDENCY_CONTROL_TOKEN for the worker, and send it as 'Authorization: Bearer TOKEN'"


class Guard:
    """Checks every request. token: None if only loopback is served."""

    def __init__(self, token: str | None) -> None:
        # Of equal length, so that comparing them tells nothing about the token's.
        self._digest = None if token is None else _digest(token.encode())

    def check(self, scope: Mapping[str, Any]) -> Problem | None:
        """Return why the request of an ASGI scope is refused, None if it may be served. Constant time in the token."""
        headers = _headers(scope)
        for name in _SINGLE:
            if len(headers.get(name, ())) > 1:
                return Problem(status=400, fact=f"there are several headers {name!r}", remedy="send it once")
        if self._digest is None:
            return _check_loopback(scope, headers)
        scheme, _, given = (headers.get("authorization") or [b""])[0].partition(b" ")
        # Compared whatever the scheme is: one path for every wrong answer.
        is_equal = hmac.compare_digest(_digest(given.strip()), self._digest)
        if is_equal and scheme.lower() == b"bearer":
            return None
        return Problem(
            status=401,
            fact="the request has no token" if not given else "the request has a wrong token",
            remedy="send the worker's token as 'Authorization: Bearer TOKEN'",
            headers={"www-authenticate": "Bearer"},
        )


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _headers(scope: Mapping[str, Any]) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for name, value in scope.get("headers", ()):
        found.setdefault(name.decode("latin-1").lower(), []).append(value)
    return found


def _check_loopback(scope: Mapping[str, Any], headers: Mapping[str, list[bytes]]) -> Problem | None:
    """Refuse what may have come from elsewhere.

    The address that a connection arrived at is what the system says, and no packet from outside can have a loopback
    address there. It is not enough: a proxy on this host connects from loopback, too, and so does a browser, on behalf
    of any page. On a Unix socket nobody knows who is at the other end, and most have a proxy there.
    """
    server, client = scope.get("server"), scope.get("client")
    if server is None or server[1] is None or not _is_loopback(str(server[0])):
        return _refused("it did not arrive at a loopback address", server=server)
    if client is not None and not _is_loopback(str(client[0])):
        return _refused("it did not come from a loopback address", client=client)
    for name in headers:
        if name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES):
            return _refused("it came through a proxy", header=name)
    if "origin" in headers:
        return _refused("it comes from a page in a browser", header="origin")
    host = (headers.get("host") or [b""])[0].decode("latin-1")
    if not _is_local_name(host):
        return _refused("it is addressed to another host", header="host")
    return None


def _refused(why: str, **values: object) -> Problem:
    # Addresses are those of the connection; of headers only the name is told.
    told = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    fact = f"this worker has no token, so that it takes control requests on loopback only, and {why}"
    return Problem(status=403, fact=fact, values=told, remedy=_HOW_TO)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _is_local_name(host: str) -> bool:
    """Whether a Host header names this host by its loopback. Other names may be a page's own, pointed at us."""
    found = _HOST.fullmatch(host)
    name = "" if found is None else found[1] or found[2]
    return name.lower() == "localhost" or _is_loopback(name)
