"""Where a journal is: a path or a sqlite:/// URL made into one absolute path, the files beside it, or a server."""

from __future__ import annotations

import os
import re
from pathlib import Path

from residency.errors import JournalError
from residency.journal.pg_location import SCHEMES, ServerLocation

_SCHEME = re.compile(r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)$", re.DOTALL)


def is_server(url: str | os.PathLike[str]) -> bool:
    """Whether this names a journal on a PostgreSQL server, and not a file."""
    return scheme_of(url) in SCHEMES


def scheme_of(url: str | os.PathLike[str]) -> str | None:
    """Return the scheme of a URL in lower case; None for a path."""
    found = _SCHEME.match(os.fspath(url))
    return None if found is None else found["scheme"].lower()


def shown_location(url: str | os.PathLike[str]) -> str:
    """Return a path or a URL as people may see it: without a password."""
    text = os.fspath(url)
    if is_server(text):
        try:
            return str(ServerLocation.parse(text))
        except JournalError:
            pass
    found = _SCHEME.match(text)
    # What cannot be parsed may hold a password anywhere.
    return text if found is None or found["scheme"].lower().startswith("sqlite") else f"{found['scheme']}://..."


def driver_missing(location: str, error: ImportError) -> JournalError:
    """Return the error for a journal on a server where the driver cannot be loaded."""
    return JournalError(
        journal=location,
        problem=f"needs psycopg, which cannot be loaded ({error})",
        remedy="pip install 'residency[postgresql]'",
    )


def journal_path(url: str | os.PathLike[str]) -> Path:
    """Return the absolute path, with links followed, that a path or a sqlite:/// URL names. Read-only.

    Links are followed because the locks beside the file must be the same ones for everybody.

    Raises:
        JournalError: a server's URL or another kind, a journal in memory, or a path that no system takes.
    """
    text = os.fspath(url)
    found = _SCHEME.match(text)
    path = text if found is None else _path_of_url(text, found["scheme"], found["rest"])
    if path in ("", ":memory:"):
        raise JournalError(
            journal=repr(text), problem="names no file, and a journal in memory is lost at exit", remedy="name a file"
        )
    if "\x00" in path:
        raise JournalError(journal=repr(text), problem="the path holds a NUL character", remedy="name a file")
    return Path(os.path.realpath(os.path.expanduser(path)))


def _path_of_url(text: str, scheme: str, rest: str) -> str:
    if is_server(text):
        raise JournalError(
            journal=shown_location(text),
            problem="is on a server, and this needs a journal in a file",
            remedy="use the server's own tools, or name a path or a sqlite:/// URL",
        )
    if scheme.lower().split("+")[0] != "sqlite":
        raise JournalError(
            journal=shown_location(text),
            problem=f"{scheme} journals are not supported",
            remedy="name a path, a sqlite:/// URL, or a postgresql+psycopg:// URL",
        )
    if "?" in rest:
        raise JournalError(
            journal=text, problem="options in the URL are not supported", remedy="leave out what follows '?'"
        )
    if rest and not rest.startswith("/"):
        raise JournalError(
            journal=text,
            problem="a SQLite URL has no host",
            remedy="write sqlite:///relative.db or sqlite:////absolute.db",
        )
    return rest[1:]


def beside(path: Path, suffix: str) -> Path:
    """Return the path of a file that lies beside the journal: its name with a suffix."""
    return path.with_name(path.name + suffix)


def lock_path(path: Path) -> Path:
    """Return the file whose lock is held around every write transaction, open and close."""
    return beside(path, ".lock")


def head_path(path: Path) -> Path:
    """Return the file that witnesses the head of the journal outside it."""
    return beside(path, ".head")


# What SQLite keeps beside a database; they belong to it and move with it.
SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")
