"""Formats of a SQLite journal: a newer program brings an older one up to date, whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from residency.errors import JournalError, JournalNewer
from residency.journal import migrations
from residency.journal.events import Draft, EventType
from residency.journal.export import export
from residency.journal.importing import import_lines
from residency.journal.prune import prune
from residency.journal.reader import JournalReader
from residency.journal.schema import FORMAT, TABLES, TRIGGERS
from residency.journal.sqlite import connect
from residency.journal.store import Journal
from residency.journal.verify import Finding, verify

Write = Callable[..., None]

LATER = (
    "CREATE TABLE later (name TEXT NOT NULL PRIMARY KEY, content BLOB NOT NULL) STRICT",
    "ALTER TABLE blobs ADD COLUMN kind TEXT",
    "CREATE TRIGGER later_no_delete BEFORE DELETE ON later\nBEGIN\n    SELECT RAISE(ABORT, 'no');\nEND",
)


def become_later(monkeypatch: pytest.MonkeyPatch, *statements: str) -> None:
    """Be a program that knows one more format."""
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, statements or LATER))


def serious(path: Path) -> list[Finding]:
    with JournalReader.open(path) as reader:
        return [finding for finding in verify(reader) if not finding.is_note]


def number(path: Path) -> int:
    connection = connect(path, mode="ro", wait_s=1)
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    connection.close()
    return found


def test_the_files_format_is_the_number_of_its_last_migration() -> None:
    assert FORMAT == migrations.known_format()
    made = {name for kind, name in migrations.definitions(FORMAT) if kind in ("table", "trigger")}
    assert made >= {*TABLES, *TRIGGERS}


def test_an_older_journal_is_brought_up_to_date_with_everything_in_it(
    path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(3, witness=True)
    with JournalReader.open(path) as reader:
        before = list(reader.events())
    become_later(monkeypatch)
    assert serious(path) == []  # looking changes nothing, and an older format is no finding
    assert number(path) == FORMAT
    write(1)
    assert number(path) == FORMAT + 1
    assert serious(path) == []
    with JournalReader.open(path) as reader:
        assert list(reader.events())[:3] == before


def test_a_new_journal_is_the_same_as_one_that_was_brought_up_to_date(
    path: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(1)
    become_later(monkeypatch)
    write(1)
    new = tmp_path / "new.db"
    Journal.open(new).close()
    schemas = []
    for one in (path, new):
        connection = connect(one, mode="ro", wait_s=1)
        schemas.append(migrations.as_defined(connection.execute(migrations.DEFINED).fetchall()))
        connection.close()
    assert schemas[0] == schemas[1] == migrations.definitions(FORMAT + 1)


def test_what_rewrites_a_journal_leaves_the_triggers_of_its_format(
    path: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(2, witness=True)
    become_later(monkeypatch)
    with Journal.open(path) as journal:
        prune(journal, keep_epochs=1, now_ns=10**18)
    exported = tmp_path / "export.jsonl"
    with JournalReader.open(path) as reader, exported.open("wb") as out:
        export(reader, out)
    with Journal.open(tmp_path / "imported.db") as journal, exported.open("rb") as lines:
        assert import_lines(lines, journal) == 2
    assert serious(path) == serious(tmp_path / "imported.db") == []


@pytest.mark.parametrize("what", ["DROP TRIGGER events_no_update", "CREATE TABLE mine (a)"])
def test_a_journal_that_is_not_as_it_was_made_is_not_touched(
    what: str, path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(2)
    connection = connect(path, mode="rw", wait_s=1)
    connection.execute(what)
    connection.close()
    before = path.read_bytes()
    become_later(monkeypatch)
    with pytest.raises(JournalError, match=rf"cannot be brought to format {FORMAT + 1}: {what.split()[2]}") as caught:
        Journal.open(path)
    assert caught.value.exit_code == 3
    assert path.read_bytes() == before
    assert number(path) == FORMAT


@pytest.mark.parametrize(
    "statements",
    [
        ("CREATE TABLE later (a)", "CREATE TABLE later (a)"),
        ("CREATE TABLE later (a)", "CREATE TABLE"),
    ],
)
def test_a_migration_that_fails_halfway_has_not_begun(
    statements: tuple[str, ...], path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(2)
    known = migrations.definitions(FORMAT)
    monkeypatch.setattr(migrations, "definitions", lambda _: known)
    become_later(monkeypatch, *statements)
    with pytest.raises(JournalError):
        Journal.open(path)
    monkeypatch.undo()
    assert number(path) == FORMAT
    assert serious(path) == []
    write(1)


def test_a_migration_that_drops_a_trigger_by_the_way_is_undone(
    path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(2)
    become_later(monkeypatch, "ALTER TABLE blobs ADD COLUMN kind TEXT")
    expected = migrations.definitions(FORMAT + 1)
    # As the tools do that alter a table by copying it.
    copied = (
        "CREATE TABLE copied AS SELECT * FROM meta",
        "DROP TABLE meta",
        "ALTER TABLE copied RENAME TO meta",
    )
    first = migrations.MIGRATIONS[:1]
    monkeypatch.setattr(migrations, "MIGRATIONS", (*first, copied))
    before = migrations.definitions(FORMAT)
    monkeypatch.setattr(migrations, "definitions", lambda known: before if known == FORMAT else expected)
    with pytest.raises(JournalError, match="meta_no_update"):
        Journal.open(path)
    monkeypatch.undo()
    assert serious(path) == []


def test_an_older_program_leaves_a_migrated_journal_alone(
    path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        become_later(later)
        write(1)
    for act in (Journal.open, JournalReader.open):
        with pytest.raises(JournalNewer, match=f"format {FORMAT + 1} is newer than this program's {FORMAT}"):
            act(path)
    assert not list(path.parent.glob("*.corrupt-*"))


def test_two_starts_migrate_once(path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(1)
    become_later(monkeypatch)
    first, second = Journal.open(path), Journal.open(path)
    for journal in (first, second):
        journal.append([Draft(type=EventType.MEASURED, round=1)], stream="worker", epoch="e")
    first.close()
    second.close()
    assert serious(path) == []


def test_a_file_that_says_it_is_of_no_format_is_set_aside(path: Path, write: Write) -> None:
    write(1)
    connection = connect(path, mode="rw", wait_s=1)
    connection.execute("PRAGMA user_version = 0")
    connection.close()
    shutil.copy(path, path.with_name("before"))
    with Journal.open(path) as journal:
        assert journal.set_aside is not None
        assert Path(journal.set_aside).read_bytes() == path.with_name("before").read_bytes()
