"""Where replicas are: their URLs, checked before anything is sent anywhere."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from residency.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})")
_PATH = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*/?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_SHAPE = "write it as http://HOST:PORT or https://HOST:PORT, with the path of the worker's app behind it if it has one"
_SHOWN_MAX = 200


def replica_url(text: str) -> str:
    """Return the URL of a replica in one spelling: lower case, without a default port and without a slash at the end.

    Raises SettingsError for what is none: another scheme, no host, a bad port, credentials, a query, a fragment, or
    characters that belong in no URL.
    """
    # Checked first: parsers drop line breaks, and what is shown must be what was written.
    if not text.isascii() or not text.isprintable() or any(letter in text for letter in ' \\"<>^`{|}'):
        raise _problem(text, "has characters that belong in no URL (write them as %XX, a host's name in Punycode)")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _problem(text, "is none") from None
    if "@" in parts.netloc:
        # Neither is shown: what is before it may be a password.
        raise SettingsError(f"a URL holds credentials; leave them out, a token comes from a file ({_SHAPE})")
    if parts.scheme not in _DEFAULT_PORTS:
        raise _problem(text, f"has the scheme {parts.scheme!r}" if "://" in text else "has no scheme")
    if parts.query or parts.fragment or "?" in text or "#" in text:
        raise _problem(text, "has a query or a fragment")
    if not _PATH.fullmatch(parts.path):
        raise _problem(text, "has a path that is none")
    at = "" if port in (None, _DEFAULT_PORTS[parts.scheme]) else f":{port}"
    path = parts.path.rstrip("/").removesuffix("/control")
    return f"{parts.scheme}://{_host(text, host, is_bracketed='[' in parts.netloc)}{at}{path}"


def replica_urls(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the URLs of all replicas in the order given, each once. Raises SettingsError, also without any."""
    found = tuple(dict.fromkeys(map(replica_url, texts)))
    if not found:
        raise SettingsError(f"there is no replica to ask; name one, and {_SHAPE}")
    return found


def _host(text: str, host: str, *, is_bracketed: bool) -> str:
    if not is_bracketed:
        if not _HOST.fullmatch(host):
            raise _problem(text, "has no host")
        return host.lower()
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        raise _problem(text, "has a host in brackets that is no IPv6 address") from None
    if address.scope_id is not None:
        raise _problem(text, "has an IPv6 address with a zone, which belongs to one host alone")
    return f"[{address}]"


def _problem(text: str, problem: str) -> SettingsError:
    shown = text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."
    # A password may be anywhere in what cannot be read.
    shown = "a URL" if "@" in text else f"URL {shown!r}"
    return SettingsError(f"{shown} {problem}; {_SHAPE}")
