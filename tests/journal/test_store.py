"""What holds for a journal in a file alone; what holds for every journal is in test_contract.py."""

from __future__ import annotations

import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from residency.errors import JournalError
from residency.journal.events import Draft
from residency.journal.file_store import FileStore
from residency.journal.store import Journal

if TYPE_CHECKING:
    from pathlib import Path


Drafts = Callable[[int], list[Draft]]


def test_file_and_folder_are_made_for_this_user_only(tmp_path: Path, drafts: Drafts) -> None:
    path = tmp_path / "state" / "residency" / "journal.db"
    with Journal.open(path) as journal:
        assert journal.created
        assert journal.location == str(path)
        journal.append(drafts(1), stream="worker", epoch="e", witness=True)
        modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in path.parent.iterdir()}
    assert set(modes) == {"journal.db", "journal.db-wal", "journal.db-shm", "journal.db.lock", "journal.db.head"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700


def test_a_link_and_its_target_are_one_journal(tmp_path: Path, path: Path, drafts: Drafts) -> None:
    (tmp_path / "link.db").symlink_to(path)
    with Journal.open(tmp_path / "link.db") as one, Journal.open(path) as other:
        one.append(drafts(1), stream="worker", epoch="e")
        other.append(drafts(1), stream="worker", epoch="e")
        assert one.location == other.location
        assert [event.stream_version for event in one.events()] == [1, 2]


def test_a_closed_journal_is_one_file_without_a_wal(path: Path, drafts: Drafts) -> None:
    with Journal.open(path) as journal:
        journal.append(drafts(1), stream="worker", epoch="e")
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["journal.db", "journal.db.lock"]


def test_the_connection_is_durable_and_checks_itself(journal: Journal) -> None:
    assert isinstance(journal._store, FileStore)
    raw = journal._store._connected().connection
    cursor = raw.cursor()
    settings = {}
    for name in ("synchronous", "journal_mode", "foreign_keys", "recursive_triggers", "trusted_schema", "mmap_size"):
        cursor.execute(f"PRAGMA {name}")
        row = cursor.fetchone()
        settings[name] = row[0] if row is not None else None
    assert settings == {
        "synchronous": 2,
        "journal_mode": "wal",
        "foreign_keys": 1,
        "recursive_triggers": 1,
        "trusted_schema": 0,
        "mmap_size": 0,
    }


def test_a_journal_whose_file_was_taken_away_refuses_to_write_into_nothing(
    journal: Journal, path: Path, drafts: Drafts
) -> None:
    path.rename(path.parent / "elsewhere.db")
    with pytest.raises(JournalError, match="no such file"):
        journal.append(drafts(1), stream="worker", epoch="e")
    path.write_bytes(b"")
    with pytest.raises(JournalError, match="replaced since it was opened"):
        journal.append(drafts(1), stream="worker", epoch="e")
