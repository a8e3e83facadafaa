"""Where a journal may be: a file or a server, behind one face, for tests that hold for both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from residency.journal.location import beside, head_path
from residency.journal.pg_location import ServerLocation
from residency.journal.reader import JournalReader
from residency.journal.sqlite import connect, driver
from residency.journal.store import Journal
from residency.journal.verify import Finding, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

Value = int | str | bytes | None


class Place(Protocol):
    """One place for one journal, empty at first. `refusals`: what a driver raises for a statement."""

    kind: str
    url: str
    state: Path
    refusals: type[Exception]

    def run(self, sql: str, parameters: Sequence[Value] = ()) -> list[tuple[Any, ...]]:
        """Run a statement as a tool that knows nothing of ours would, with '?' for parameters; return its rows."""
        ...

    def lift(self, run: Callable[[], object]) -> None:
        """Do something with the triggers off, as somebody who may do everything."""
        ...

    def locker(self) -> str:
        """Return code that holds the lock around appends, says `locked` and waits; its argument is the URL."""
        ...

    @property
    def head(self) -> Path:
        """The head witness."""
        ...

    def move(self) -> None:
        """Take the journal away, and leave its witness."""
        ...


class OnFile:
    """A journal in a SQLite file."""

    kind = "sqlite"
    refusals: type[Exception] = driver.IntegrityError

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.db"
        self.url, self.state = str(self.path), folder / "state"
        self._lifted: driver.Connection | None = None

    @property
    def head(self) -> Path:
        return head_path(self.path)

    def run(self, sql: str, parameters: Sequence[Value] = ()) -> list[tuple[Any, ...]]:
        if self._lifted is not None:
            return self._lifted.execute(sql, tuple(parameters)).fetchall()
        connection = connect(self.path, mode="rw", wait_s=5)
        try:
            return connection.execute(sql, tuple(parameters)).fetchall()
        finally:
            connection.close()

    def lift(self, run: Callable[[], object]) -> None:
        self._lifted = connect(self.path, mode="rw", wait_s=5)
        self.run("BEGIN IMMEDIATE")
        triggers = self.run("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'")
        for name, _ in triggers:
            self.run(f"DROP TRIGGER {name}")
        run()
        for _, sql in triggers:
            self.run(sql)
        self.run("COMMIT")
        self._lifted.close()
        self._lifted = None

    def locker(self) -> str:
        return """
import sys
from pathlib import Path
from residency.journal.locks import FileLock
lock = FileLock(Path(sys.argv[1] + ".lock"))
assert lock.try_acquire()
print("locked", flush=True)
sys.stdin.read()
"""

    def move(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            beside(self.path, suffix).unlink(missing_ok=True)


class OnServer:
    """A journal on a PostgreSQL server: a schema of a database."""

    kind = "postgresql"

    def __init__(self, database: Any, folder: Path) -> None:
        self.database, self.schema = database, database.new_schema()
        self.url, self.state = database.url(self.schema), folder / "state"
        self.refusals: type[Exception] = database.refusals
        self._connection: Any = None

    @property
    def head(self) -> Path:
        return head_path(ServerLocation.parse(self.url).witness_path(self.state))

    def run(self, sql: str, parameters: Sequence[Value] = ()) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = self.database.connect(self.schema)
        done = self._connection.execute(sql.replace("?", "%s"), tuple(parameters) or None)
        return done.fetchall() if done.description is not None else []

    def lift(self, run: Callable[[], object]) -> None:
        triggers = self.run(
            "SELECT c.relname, t.tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid "
            "WHERE c.relnamespace = ?::regnamespace AND NOT t.tgisinternal",
            (self.schema,),
        )
        for table, name in triggers:
            self.run(f'ALTER TABLE {table} DISABLE TRIGGER "{name}"')
        run()
        for table, name in triggers:
            self.run(f'ALTER TABLE {table} ENABLE ALWAYS TRIGGER "{name}"')

    def locker(self) -> str:
        return """
import sys
from residency.journal.pg_location import ServerLocation
from residency.journal.pg_schema import append_key
from residency.journal.postgresql import connect
location = ServerLocation.parse(sys.argv[1])
session = connect(location, wait_s=5, patience_s=0)
session.execute("SELECT pg_advisory_lock(%s)", (append_key(location.schema),))
print("locked", flush=True)
sys.stdin.read()
"""

    def move(self) -> None:
        self.database.drop_schema(self.schema)

    def forget(self) -> None:
        """Let go of the connection that `run` keeps: the server has ended it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Remove it."""
        self.forget()
        self.database.drop_schema(self.schema)


def opened(place: Place, **options: Any) -> Journal:
    """Open the journal for writing."""
    return Journal.open(place.url, state_folder=place.state, **options)


def reading(place: Place) -> JournalReader:
    """Open the journal for reading."""
    return JournalReader.open(place.url, state_folder=place.state)


def findings(place: Place) -> tuple[Finding, ...]:
    """What verify has to say, without its notes."""
    with reading(place) as reader:
        return tuple(finding for finding in verify(reader) if not finding.is_note)


def witness_aside(place: Place) -> list[Path]:
    """The witnesses that were set aside."""
    folder = place.head.parent
    return sorted(folder.glob(f"{place.head.name}.contradicted-*Z")) if folder.is_dir() else []
