"""Real journals on disk, and processes that can be killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from residency.journal.events import Draft, EventType
from residency.journal.reader import JournalReader
from residency.journal.sqlite import connect
from residency.journal.store import Journal
from residency.journal.verify import Finding, verify
from tests.journal.places import OnFile, OnServer, Place

Write = Callable[..., None]


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place for a journal, once in a file and once on a server, where a server can be had."""
    if request.param == "sqlite":
        yield OnFile(tmp_path)
        return
    made = OnServer(request.getfixturevalue("database"), tmp_path)
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal.open(path) as opened:
        yield opened


@pytest.fixture
def drafts() -> Callable[[int], list[Draft]]:
    """A number of measured events, told apart by their payload."""

    def make(count: int) -> list[Draft]:
        return [Draft(type=EventType.MEASURED, round=1, payload={"number": number}) for number in range(count)]

    return make


@pytest.fixture
def write(path: Path, drafts: Callable[[int], list[Draft]]) -> Write:
    """Write events into the journal and close it: one transaction each, so that the chain is really continued."""

    def run(count: int, *, stream: str = "worker", epoch: str = "epoch", witness: bool = False) -> None:
        with Journal.open(path) as journal:
            for draft in drafts(count):
                journal.append([draft], stream=stream, epoch=epoch, witness=witness)

    return run


@pytest.fixture
def tamper(path: Path) -> Callable[..., None]:
    """Change the file behind the journal's back: triggers off, statements, triggers as they were."""

    def run(
        sql: str | Sequence[str], parameters: Sequence[int | str | bytes | None] = (), *, restore: bool = True
    ) -> None:
        connection = connect(path, mode="rw", wait_s=5)
        triggers = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for statement in (sql,) if isinstance(sql, str) else sql:
            connection.execute(statement, tuple(parameters))
        for _, trigger in triggers if restore else ():
            connection.execute(trigger)
        connection.close()

    return run


@pytest.fixture
def findings(path: Path) -> Callable[[], tuple[Finding, ...]]:
    """What verify has to say, without its notes."""

    def run() -> tuple[Finding, ...]:
        with JournalReader.open(path) as reader:
            return tuple(finding for finding in verify(reader) if not finding.is_note)

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python on a piece of code, with arguments; whatever still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *arguments: object, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def finish(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., str]:
    """Run Python on a piece of code to its end and return its output; an error fails the test."""

    def run(code: str, *arguments: object) -> str:
        process = start(code, *arguments)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return output

    return run


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that another user can reach, for tests that give up root: root may write everything."""
    folder = Path(tempfile.mkdtemp(prefix="residency-test-"))
    folder.chmod(0o755)
    yield folder
    for root, folders, _ in os.walk(folder):
        for name in folders:
            os.chmod(os.path.join(root, name), 0o700)
    shutil.rmtree(folder)
