"""The PostgreSQL driver: how a session is opened and what it is set to, how long it may take, what its errors mean."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import pq

from residency.errors import JournalCorrupt, JournalError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from residency.journal.pg_location import ServerLocation

__all__ = ["FAILURES", "Session", "connect", "explain", "is_answered", "is_lost", "may_be_retried", "refusal"]

Returned = TypeVar("Returned")

# Everything that the driver raises.
FAILURES = (psycopg.Error,)

# What the settings of a session need: idle_session_timeout came with 14.
_VERSION_MIN = 140000

# The driver's compiled part hands control back while it waits only since then; before, a wait could last for ever.
_DRIVER_MIN = (3, 2, 12)

# The server ends a statement this much later than a wait for a lock, so that it is the lock that is told; the client
# gives up this much later than that: it only has to when the server has stopped answering at all.
_GRACE_S = 1.0

# Between two tries to reach a server that may be starting.
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.05, 0.5

# The server must notice within about a minute that the host of a worker is gone, or its stream stays held; and the
# client that the server is. Seconds, and how many may go unanswered.
_ALIVE_IDLE_S, _ALIVE_EVERY_S, _ALIVE_COUNT = 30, 10, 3


class Session(psycopg.Connection[Any]):
    """A connection that never waits for ever: what takes too long closes it and raises OperationalError.

    limit_s: of every single wait for the server, outside of `within()`, which bounds several of them together.
    """

    limit_s: float = 60.0
    _deadline: float | None = None

    @contextmanager
    def within(self, wait_s: float) -> Iterator[None]:
        """Bound everything that is done inside, all together, to what a lock may take and some grace."""
        outer, self._deadline = self._deadline, time.monotonic() + wait_s + 2 * _GRACE_S
        try:
            yield
        finally:
            self._deadline = outer

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows, none if it has no result. Raises psycopg.Error.

        Without parameters a '%' in it stands for itself.
        """
        done = self.execute(sql.encode(), parameters or None)
        return done.fetchall() if done.description is not None else []

    def wait(self, gen: Generator[Any, Any, Returned], *args: Any, **options: Any) -> Returned:
        """Wait for the server, as the driver does it, but not beyond the deadline."""
        return super().wait(self._bounded(gen), *args, **options)

    def _bounded(self, gen: Generator[Any, Any, Returned]) -> Generator[Any, Any, Returned]:
        # The driver resumes the generator at short intervals even if nothing comes.
        deadline = time.monotonic() + self.limit_s if self._deadline is None else self._deadline
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()
                    raise psycopg.OperationalError("the server has stopped answering")
                wanted = gen.send(ready)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def connect(location: ServerLocation, *, wait_s: float, patience_s: float, read_only: bool = False) -> Session:
    """Return a session in autocommit mode, set up and checked.

    wait_s: how long one try, and later every lock, may take. patience_s: for how long it is tried again while the
    server cannot be reached.

    Raises:
        psycopg.Error: whatever the driver says; see explain().
        JournalError: driver or server are too old, or the server is not durable, not writable, or of another encoding.
    """
    _check_driver(location)
    deadline = time.monotonic() + patience_s
    pause_s = _PAUSE_S_MIN
    while True:
        try:
            session = _connected(location, wait_s=max(wait_s, 1.0))
            break
        except FAILURES as error:
            if _is_refusal(error) or time.monotonic() + pause_s >= deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)
    try:
        session.limit_s = wait_s + 2 * _GRACE_S
        with session.within(wait_s):
            _set_up(session, location, wait_s=wait_s, read_only=read_only)
    except BaseException:
        session.close()
        raise
    return session


def _check_driver(location: ServerLocation) -> None:
    found = tuple(int(part) for part in re.findall("[0-9]+", psycopg.__version__)[:3])
    if found < _DRIVER_MIN:
        raise refusal(
            location,
            f"psycopg {psycopg.__version__} is older than {'.'.join(map(str, _DRIVER_MIN))}",
            "pip install --upgrade 'residency[postgresql]'",
        )


def _connected(location: ServerLocation, *, wait_s: float) -> Session:
    # The host and process that hold a stream are told to others by this name; the server cuts it at 63 bytes.
    name = f"residency process {os.getpid()} on {socket.gethostname()}"[:63]
    defaults: dict[str, Any] = {
        "gssencmode": "disable",  # else libpq may ask a ticket server first
        "application_name": name,
        "client_encoding": "UTF8",
        "connect_timeout": max(2, round(wait_s)),  # whole seconds; libpq takes 1 for 2
        "keepalives": 1,
        "keepalives_idle": _ALIVE_IDLE_S,
        "keepalives_interval": _ALIVE_EVERY_S,
        "keepalives_count": _ALIVE_COUNT,
        "tcp_user_timeout": _ALIVE_EVERY_S * _ALIVE_COUNT * 1000,
    }
    return Session.connect(autocommit=True, **{**defaults, **location.parameters()})


_CHECK = """
SELECT pg_catalog.current_setting('server_version_num')::int,
    pg_catalog.current_setting('fsync'),
    pg_catalog.current_setting('server_encoding'),
    pg_catalog.current_setting('synchronous_commit'),
    pg_catalog.pg_is_in_recovery()
"""


def _set_up(session: Session, location: ServerLocation, *, wait_s: float, read_only: bool) -> None:
    ((version, fsync, encoding, commits, is_standby),) = session.rows(_CHECK)
    if version < _VERSION_MIN:
        raise refusal(location, f"PostgreSQL {version // 10000} is older than 14", "use a newer server")
    if encoding != "UTF8":
        raise refusal(location, f"the database's encoding is {encoding}", "make one with ENCODING 'UTF8'")
    if not read_only and is_standby:
        raise refusal(location, "the server is a standby, which takes no writes", "name the primary")
    if not read_only and fsync != "on":
        raise refusal(location, "the server does not write durably (fsync is off)", "turn fsync on")
    lock_ms = max(1, round(wait_s * 1000))
    settings = {
        # Nothing but our own tables is found by a bare name.
        "search_path": location.schema,
        "lock_timeout": f"{lock_ms}ms",
        "statement_timeout": f"{lock_ms + round(_GRACE_S * 1000)}ms",
        # A worker that stops in mid-append (a debugger, a frozen container) must not keep all others waiting.
        "idle_in_transaction_session_timeout": f"{max(1000, lock_ms // 2)}ms",
        "idle_session_timeout": "0",  # a worker that serves for days is idle, and holds its stream
        "tcp_keepalives_idle": str(_ALIVE_IDLE_S),
        "tcp_keepalives_interval": str(_ALIVE_EVERY_S),
        "tcp_keepalives_count": str(_ALIVE_COUNT),
        "default_transaction_isolation": "read committed",  # every statement sees what was committed before it
        "default_transaction_read_only": "on" if read_only else "off",
        # Whatever the server's default; remote_apply waits for more.
        "synchronous_commit": "remote_apply" if commits == "remote_apply" else "on",
    }
    calls = ", ".join("pg_catalog.set_config(%s, %s, false)" for _ in settings)
    # Whatever a setting is rejected for is an error, and what is in force afterwards is what comes back.
    (found,) = session.rows(f"SELECT {calls}", [part for setting in settings.items() for part in setting])
    in_force = dict(zip(settings, found, strict=True))
    if in_force["search_path"] != location.schema or in_force["synchronous_commit"] not in ("on", "remote_apply"):
        raise refusal(
            location,
            f"the session does not keep its settings ({in_force['search_path']}, {in_force['synchronous_commit']})",
            "connect to the server itself, not through a pool of sessions",
        )


def refusal(location: object, problem: str, remedy: str) -> JournalError:
    """Return the error for a server that this program does not use."""
    return JournalError(journal=str(location), problem=problem, remedy=remedy)


def _sqlstate(error: BaseException) -> str:
    """Return the server's five letters for an error; empty if the server said none."""
    return getattr(error, "sqlstate", None) or ""


def is_lost(session: Session) -> bool:
    """Whether a session is over, and with it every lock that it held."""
    return session.pgconn.status != pq.ConnStatus.OK


def is_answered(session: Session) -> bool:
    """Whether a session stands, and the server has answered to everything that it was asked."""
    return not is_lost(session) and session.info.transaction_status != pq.TransactionStatus.ACTIVE


def may_be_retried(error: BaseException) -> bool:
    """Whether the server undid the transaction for reasons that lie in other transactions."""
    return _sqlstate(error) in ("40001", "40P01")


# What a server says, in its own language, when it is reached and will have none of us: trying again is of no use.
_REFUSALS = ("authentication", "does not exist", "pg_hba.conf", "no password supplied", "certificate", "SSL")


def _is_refusal(error: BaseException) -> bool:
    return any(word in str(error) for word in _REFUSALS)


# (beginning of the SQLSTATE, what it means, what to do). First match wins.
_BY_CODE = (
    ("55P03", "another writer has kept it locked for longer than {wait_s:g} s", "end that process, then try again"),
    ("57014", "a statement took longer than {wait_s:g} s", "look at the server's load and locks, then try again"),
    ("53100", "the server's disk is full", "free some space, then try again"),
    ("53200", "the server has no memory left", "free some memory, then try again"),
    ("53300", "the server takes no more connections", "raise max_connections, or end some"),
    ("53", "the server is out of resources ({said})", "look at the server, then try again"),
    ("58", "the server reports an I/O error ({said})", "look at the server's disk and log"),
    ("25006", "it is read-only there", "name the primary, or allow writing"),
    ("42501", "this role may not do that ({said})", "grant it what docs/operations.md lists for a worker"),
    ("57P", "the server is starting or going down ({said})", "wait until it is up"),
    ("08", "the server cannot be reached ({said})", "check that it is up, and host and port of the URL"),
    ("", "PostgreSQL reports {said!r} ({code})", "look at the server's log"),
)

# The same for a connection that was never made: a server that refuses one is known by its words alone.
_BY_WORDS = (
    ("password authentication failed", "the server refuses the role or its password", "correct the URL, or PGPASSWORD"),
    ("no password supplied", "the server wants a password", "put it into the URL, PGPASSWORD or ~/.pgpass"),
    ("authentication", "the server refuses the role ({said})", "correct the role, or the server's pg_hba.conf"),
    ("pg_hba.conf", "the server refuses this host or role ({said})", "allow it in the server's pg_hba.conf"),
    ("does not exist", "the server has none of that name ({said})", "make it, or correct the URL"),
    ("", "the server cannot be reached ({said})", "check that it is up, and host and port of the URL"),
)

# undefined table, column, function or schema; damaged data, damaged index.
_CORRUPT = ("42P01", "42703", "42883", "3F000", "XX001", "XX002")


def explain(error: BaseException, *, location: object, wait_s: float) -> JournalError:
    """Return the journal error that a driver's error means. JournalCorrupt if what is there is damaged."""
    code, said = _sqlstate(error), _first_line(error)
    if code in _CORRUPT:
        return JournalCorrupt(
            journal=str(location),
            problem=f"it is damaged ({said})",
            remedy="keep it as evidence and name another schema, or restore a backup",
        )
    for key, meaning, remedy in _BY_CODE if code else _BY_WORDS:
        if code.startswith(key) if code else key in str(error):
            problem = meaning.format(wait_s=wait_s, said=said, code=code)
            return JournalError(journal=str(location), problem=problem, remedy=remedy)
    raise AssertionError("the last one matches everything")


def _first_line(error: BaseException) -> str:
    diagnosis = getattr(getattr(error, "diag", None), "message_primary", None)
    lines = str(diagnosis or error).strip().splitlines()
    # What comes before is said by our own words, and host and port by the location.
    return lines[0].rpartition("failed: ")[2] if lines else type(error).__name__
