from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from residency.journal.events import Draft, EventType
from residency.journal.schema import EVENT_COLUMNS
from residency.journal.sqlite import connect, driver
from residency.journal.store import Journal

if TYPE_CHECKING:
    from pathlib import Path

NEW_ID = "'another'"


def copy_of(of: int, **changed: str) -> str:
    """A SELECT of an event's row, with some columns changed."""
    columns = (changed.get(column, f'"{column}"') for column in EVENT_COLUMNS)
    return f"SELECT {', '.join(columns)} FROM events WHERE position = {of}"


@pytest.fixture
def written(path: Path) -> Path:
    with Journal.open(path) as journal:
        drafts = [Draft(type=EventType.MEASURED, round=1, payload={"n": n}, blobs=(b"blob",)) for n in range(3)]
        journal.append(drafts, stream="worker", epoch="e")
    return path


# Written by hand on a plain connection: recursive_triggers is off there, as in any other program.
REFUSED = {
    "update an event": "UPDATE events SET payload = x'7b7d' WHERE position = 2",
    "delete an event": "DELETE FROM events WHERE position = 3",
    "replace an event": f"INSERT OR REPLACE INTO events {copy_of(2)}",
    "replace an event under another position": f"INSERT OR REPLACE INTO events {copy_of(2, position='9')}",
    "append an event that is not the next of its stream": (
        f"INSERT INTO events {copy_of(3, position='9', event_id=NEW_ID, stream_version='5', previous_hash='hash')}"
    ),
    "append an event that breaks the chain": (
        f"INSERT INTO events {copy_of(3, position='9', event_id=NEW_ID, stream_version='4')}"
    ),
    "append an event at an earlier position": (
        f"INSERT INTO events {copy_of(3, position='0', event_id=NEW_ID, stream_version='4', previous_hash='hash')}"
    ),
    "update a blob": "UPDATE blobs SET content = x'00'",
    "delete a blob": "DELETE FROM blobs",
    "replace a blob": "INSERT OR REPLACE INTO blobs SELECT digest, x'00' FROM blobs",
    "update meta": "UPDATE meta SET value = 'x'",
    "delete meta": "DELETE FROM meta",
    "replace meta": "INSERT OR REPLACE INTO meta SELECT key, 'x' FROM meta",
}


def contents(connection: driver.Connection) -> list[list[tuple[object, ...]]]:
    return [connection.execute(f"SELECT * FROM {table}").fetchall() for table in ("events", "blobs", "meta")]


@pytest.mark.parametrize("attempt", REFUSED)
def test_the_file_itself_refuses_to(attempt: str, written: Path) -> None:
    connection = connect(written, mode="rw", wait_s=1)
    before = contents(connection)
    with pytest.raises(driver.IntegrityError, match="append-only|does not continue"):
        connection.execute(REFUSED[attempt])
    assert contents(connection) == before
    connection.close()


def test_tables_are_strict(written: Path) -> None:
    connection = connect(written, mode="rw", wait_s=1)
    with pytest.raises(driver.IntegrityError, match="cannot store TEXT value in BLOB column"):
        connection.execute("INSERT INTO blobs VALUES (?, 'text')", ("0" * 64,))
    connection.close()
