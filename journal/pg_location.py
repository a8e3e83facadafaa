"""Where a journal on a PostgreSQL server is: a URL made into its parts, and into a text without the password."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qsl, quote, unquote

from residency.errors import JournalError

if TYPE_CHECKING:
    from pathlib import Path

SCHEMES = ("postgresql+psycopg", "postgresql")
DEFAULT_SCHEMA = "residency"

# Options of libpq that a URL may carry. Those that would undo what a session is set to, and passwords, are not here.
_OPTIONS = frozenset(
    {
        "channel_binding",
        "gssencmode",
        "host",
        "krbsrvname",
        "passfile",
        "port",
        "require_auth",
        "sslcert",
        "sslcrl",
        "sslkey",
        "sslmode",
        "sslrootcert",
        "target_session_attrs",
    }
)

# Written into statements, so only names that need no quoting.
_SCHEMA = re.compile("[a-z_][a-z0-9_]{0,47}")

_EXAMPLE = f"{SCHEMES[0]}://user:password@host/database"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLocation:
    """A journal on a server. `str()` of it never holds the password, nor does `repr()`.

    user, host, port, password: None where libpq is to choose (PGUSER, PGHOST, PGPORT; PGPASSWORD or ~/.pgpass).
    """

    user: str | None
    host: str | None
    port: int | None
    database: str
    schema: str
    options: tuple[tuple[str, str], ...]
    password: str | None = field(repr=False)

    @classmethod
    def parse(cls, url: str) -> Self:
        """Return the parts of a URL.

        Raises:
            JournalError: it is none that names a database, or holds options that are not allowed. Never says more of
                the URL than its scheme and the names of its options: what cannot be parsed may be a password.
        """
        scheme, _, rest = url.partition("://")
        if any(ord(character) < 32 for character in unquote(url)):
            raise _unusable(scheme, "holds a control character", "leave it out")
        authority, path, query = re.fullmatch(r"([^/?]*)([^?]*)\??(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
        if "@" in path or "@" in query:
            raise _unusable(
                scheme, "has an '@' after the host", "write '/', '?' and '@' of a password as %2F, %3F and %40"
            )
        userinfo, _, address = authority.rpartition("@")
        user, _, password = userinfo.partition(":")
        options = _options(scheme, query)
        host, port = _address(scheme, address, options)
        database = unquote(path[1:])
        if not database or "/" in path[1:]:
            raise _unusable(scheme, "names no database", f"write it as {_EXAMPLE}")
        schema = options.pop("schema", DEFAULT_SCHEMA)
        if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
            raise _unusable(
                scheme,
                f"names a schema {schema!r}",
                "take lower-case letters, digits and '_', 48 at most, and not 'pg_'",
            )
        return cls(
            user=unquote(user) or None,
            host=host,
            port=port,
            database=database,
            schema=schema,
            options=tuple(sorted(options.items())),
            password=unquote(password) or None,
        )

    def __str__(self) -> str:
        user = "" if self.user is None else f"{quote(self.user, safe='')}@"
        host = self.host or ""
        is_folder = host.startswith("/")
        address = "" if is_folder else f"[{host}]" if ":" in host else host
        port = "" if self.port is None else f":{self.port}"
        shown = [("host", host)] if is_folder else []
        shown += [("schema", self.schema)] if self.schema != DEFAULT_SCHEMA else []
        query = "&".join(f"{name}={quote(value, safe='/')}" for name, value in shown)
        return f"{SCHEMES[0]}://{user}{address}{port}/{quote(self.database, safe='')}{'?' + query if query else ''}"

    def parameters(self) -> dict[str, str | int]:
        """Return what the driver connects with. Holds the password."""
        given: dict[str, str | int | None] = {
            "user": self.user,
            "host": self.host,
            "port": self.port,
            "dbname": self.database,
            "password": self.password,
        }
        return {**dict(self.options), **{name: value for name, value in given.items() if value is not None}}

    def witness_path(self, folder: Path) -> Path:
        """Return the path, in a folder of this host, beside which the head witness of this journal lies."""
        where = f"{self.host or ''}\0{self.port or 5432}\0{self.database}\0{self.schema}"
        return folder / f"postgresql-{hashlib.sha256(where.encode()).hexdigest()[:16]}"


def _options(scheme: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS | {"schema"}:
            raise _unusable(
                scheme,
                f"has the option {name!r}, which is not supported",
                f"use any of {', '.join(sorted(_OPTIONS | {'schema'}))}",
            )
        if name in options:
            raise _unusable(scheme, f"has the option {name!r} twice", "leave one of them out")
        options[name] = value
    return options


def _address(scheme: str, address: str, options: dict[str, str]) -> tuple[str | None, int | None]:
    """Return host and port, from before the database's name or from the options, which lose them."""
    found = re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::([0-9]+))?", address)
    if found is None:
        raise _unusable(scheme, "has a host or port that cannot be read", f"write it as {_EXAMPLE}")
    host = unquote(found[1].strip("[]")) or None
    port = found[2]
    for name, value in (("host", host), ("port", port)):
        if name in options and value is not None:
            raise _unusable(scheme, f"names its {name} twice", "leave one of them out")
    host = options.pop("host", None) or host
    port = options.pop("port", None) or port
    if port is not None and not (port.isdecimal() and 0 < int(port) < 65536):
        raise _unusable(scheme, "has a port that is none", "write a number from 1 to 65535")
    return host, None if port is None else int(port)


def _unusable(scheme: str, problem: str, remedy: str) -> JournalError:
    return JournalError(journal=f"{scheme}://...", problem=f"the URL {problem}", remedy=remedy)
