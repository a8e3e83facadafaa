"""Every journal that cannot be used: one clear line, the documented exit code, and nothing lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from residency.errors import JournalCorrupt, JournalError, JournalNewer
from residency.journal.events import Draft, EventType
from residency.journal.location import journal_path
from residency.journal.reader import JournalReader
from residency.journal.schema import FORMAT
from residency.journal.sqlite import connect
from residency.journal.store import Journal

Write = Callable[..., None]


def open_both(url: str | os.PathLike[str]) -> list[JournalError]:
    """The errors of opening it for writing and for reading."""
    errors: list[JournalError] = []
    for opened in (Journal.open, JournalReader.open):
        with pytest.raises(JournalError) as caught:
            opened(url)
        errors.append(caught.value)
    return errors


def text_file(path: Path) -> None:
    path.write_text("these are my notes\n" * 100)


def short_file(path: Path) -> None:
    path.write_bytes(b"SQLite")


def foreign_database(path: Path) -> None:
    path.touch()
    connection = connect(path, mode="rw", wait_s=1)
    connection.execute("CREATE TABLE mine (a)")
    connection.execute("INSERT INTO mine VALUES (1)")
    connection.close()


def foreign_database_with_wal(path: Path) -> None:
    foreign_database(path)
    connection = connect(path, mode="rw", wait_s=1)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("INSERT INTO mine VALUES (2)")
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{path}.copy{suffix}")
    connection.close()
    for suffix in ("", "-wal"):
        os.rename(f"{path}.copy{suffix}", f"{path}{suffix}")


@pytest.mark.parametrize("make", [text_file, short_file, foreign_database, foreign_database_with_wal])
def test_a_file_that_is_not_ours_is_never_touched(make: Callable[[Path], None], path: Path) -> None:
    make(path)
    before = {entry.name: entry.read_bytes() for entry in path.parent.iterdir()}
    for error in open_both(path):
        assert isinstance(error, JournalCorrupt) and error.exit_code == 5
        assert "is not a residency journal" in str(error) and str(path) in str(error)
    assert {entry.name: entry.read_bytes() for entry in path.parent.iterdir()} == before


def test_a_directory_is_an_error(tmp_path: Path) -> None:
    for error in open_both(tmp_path):
        assert str(error) == f"journal {tmp_path}: is a directory; name a file in it"
        assert error.exit_code == 3
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_an_error() -> None:
    for error in open_both("/dev/null"):
        assert "is not a regular file" in str(error) and error.exit_code == 3


def test_a_path_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for error in open_both(tmp_path / "file" / "journal.db"):
        assert error.exit_code == 3 and "not a directory" in str(error)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mysql://user:secret@host/db", "mysql journals are not supported"),
        ("sqlite://", "names no file"),
        (":memory:", "names no file"),
        ("", "names no file"),
        ("sqlite://host/journal.db", "has no host"),
        ("sqlite:///journal.db?mode=ro", "options in the URL"),
        ("a\x00b", "NUL"),
    ],
)
def test_a_url_that_names_no_journal_file_is_an_error(url: str, problem: str) -> None:
    for error in open_both(url):
        assert problem in str(error) and error.exit_code == 3
        assert "secret" not in str(error)


def test_paths_and_urls_name_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = tmp_path / "odd name #1?.db"
    assert journal_path("odd name #1?.db") == journal_path(expected) == expected
    plain = tmp_path / "plain.db"
    assert journal_path("sqlite:///plain.db") == journal_path(f"sqlite:///{plain}") == plain
    assert journal_path(f"sqlite+pysqlite:///{plain}") == plain


def test_odd_names_work(tmp_path: Path) -> None:
    path = tmp_path / "odd % name #1?&mode=memory" / "jöurnal \udcff.db"
    with Journal.open(path) as journal:
        journal.append([Draft(type=EventType.MEASURED, round=1)], stream="worker", epoch="e")
    with JournalReader.open(path) as reader:
        assert len(list(reader.events())) == 1
    assert path.exists()


def test_a_missing_journal_cannot_be_read_and_is_not_made(path: Path) -> None:
    with pytest.raises(JournalError, match="does not exist") as caught:
        JournalReader.open(path)
    assert caught.value.exit_code == 3
    assert list(path.parent.iterdir()) == []


def test_an_empty_file_becomes_a_journal_but_is_none_to_read(path: Path) -> None:
    path.touch()
    with pytest.raises(JournalCorrupt, match="is not a residency journal"):
        JournalReader.open(path)
    with Journal.open(path) as journal:
        assert journal.created
        assert journal.set_aside is None
    JournalReader.open(path).close()


def test_a_newer_journal_is_refused_and_left_alone(path: Path, write: Write) -> None:
    write(2)
    connection = connect(path, mode="rw", wait_s=1)
    connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    connection.close()
    before = path.read_bytes()
    for error in open_both(path):
        assert isinstance(error, JournalNewer) and error.exit_code == 4
        assert f"format {FORMAT + 1} is newer than this program's {FORMAT}" in str(error)
    assert path.read_bytes() == before


def damage_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096 : len(content) - 4096] = os.urandom(len(content) - 8192)
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_schema(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100:4096] = bytes(3996)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [damage_middle, cut_short, damage_schema])
def test_a_corrupt_journal_of_ours_is_set_aside_and_a_new_one_begun(
    damage: Callable[[Path], None], path: Path, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    write(100, witness=True)
    damage(path)
    evidence = path.read_bytes()
    aside = path.with_name("journal.db.corrupt-20231114T221320Z")
    with Journal.open(path, clock_ns=lambda: 1_700_000_000_000_000_000) as journal:
        assert journal.created
        assert journal.set_aside == str(aside)
        assert list(journal.events()) == []
        journal.append([Draft(type=EventType.MEASURED, round=1)], stream="worker", epoch="e", witness=True)
    assert aside.read_bytes() == evidence
    assert Path(f"{aside}.head").exists()
    assert "was set aside as" in caplog.text
    with pytest.raises(JournalCorrupt) as caught, JournalReader.open(aside) as reader:
        list(reader.events())
    assert caught.value.exit_code == 5


def test_journals_set_aside_in_the_same_second_do_not_overwrite_each_other(path: Path, write: Write) -> None:
    kept = set()
    for _ in range(3):
        write(100)
        damage_middle(path)
        with Journal.open(path, clock_ns=lambda: 10**18) as journal:
            kept.add(journal.set_aside)
    assert len(kept) == 3 and None not in kept


def test_the_wal_of_a_corrupt_journal_goes_with_it(path: Path, write: Write) -> None:
    write(100)
    damage_middle(path)
    path.with_name("journal.db-wal").write_bytes(b"tail")
    with Journal.open(path) as journal:
        kept = journal.set_aside
    assert kept is not None and Path(f"{kept}-wal").read_bytes() == b"tail"


def test_what_a_removed_journal_left_behind_is_kept_and_not_mixed_in(path: Path, write: Write) -> None:
    write(3, witness=True)
    path.unlink()
    path.with_name("journal.db-wal").write_bytes(b"tail")
    with Journal.open(path) as journal:
        assert journal.created
        assert list(journal.events()) == []
    (wal,) = path.parent.glob("journal.db.orphan-*-wal")
    (head,) = path.parent.glob("journal.db.orphan-*.head")
    assert wal.read_bytes() == b"tail"
    assert b"streams" in head.read_bytes()


# Root may write everything, so the test becomes nobody first.
READ_ONLY = """
import os, sys
from residency.errors import JournalError
from residency.journal.events import Draft, EventType
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from residency.journal.verify import verify
Journal.open(sys.argv[2]).close()
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    Journal.open(sys.argv[1], wait_s=0.2)
except JournalError as error:
    print(error.exit_code, error)
try:
    with JournalReader.open(sys.argv[1]) as reader:
        print(len(list(reader.events())), [finding.kind.value for finding in verify(reader)])
except JournalError as error:
    print(error.exit_code, error)
"""


@pytest.mark.parametrize("locked", ["folder", "file"])
@pytest.mark.parametrize("state", ["closed", "crashed"])
def test_a_read_only_journal_cannot_be_written_and_can_be_read(
    locked: str, state: str, shared_folder: Path, path: Path, finish: Callable[..., str]
) -> None:
    folder = shared_folder / "journal"
    folder.mkdir()
    with Journal.open(folder / "journal.db") as journal:
        for number in range(4):
            draft = Draft(type=EventType.MEASURED, round=1, payload={"n": number})
            journal.append([draft], stream="worker", epoch="e", witness=True)
        if state == "crashed":
            shutil.copytree(folder, shared_folder / "crashed", ignore=shutil.ignore_patterns("*-shm"))
    if state == "crashed":
        shutil.rmtree(folder)
        (shared_folder / "crashed").rename(folder)
    for entry in folder.iterdir():
        entry.chmod(0o444 if entry.suffix != ".lock" or locked == "folder" else 0o666)
    folder.chmod(0o555 if locked == "folder" else 0o777)
    before = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    refused, read = finish(READ_ONLY, folder / "journal.db", path).splitlines()
    assert refused.startswith("3 journal ")
    assert "permission denied" in refused or "read-only" in refused
    assert read == "4 []"
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_a_journal_that_may_not_be_read_is_an_error(
    shared_folder: Path, path: Path, finish: Callable[..., str]
) -> None:
    with Journal.open(shared_folder / "journal.db"):
        pass
    (shared_folder / "journal.db").chmod(0o000)
    lines = finish(READ_ONLY, shared_folder / "journal.db", path).splitlines()
    assert len(lines) == 2
    assert all(line.startswith("3 journal ") and "permission denied" in line for line in lines)
