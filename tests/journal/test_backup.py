from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from residency.errors import JournalCorrupt, JournalError
from residency.journal.backup import backup
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from residency.journal.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

    from residency.journal.events import Draft

Start = Callable[..., subprocess.Popen[str]]
Write = Callable[..., None]

WRITER = """
import sys
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal
journal = Journal.open(sys.argv[1])
for number in range(100_000):
    draft = Draft(type=EventType.MEASURED, round=1, payload={"number": number, "filler": "x" * 3000})
    (event,) = journal.append([draft], stream="worker", epoch="e", witness=number % 3 == 0)
    print(event.position, flush=True)
"""


def positions(path: Path) -> list[int]:
    """Of a copy that has nothing wrong with it."""
    with JournalReader.open(path) as reader:
        assert [finding for finding in verify(reader) if not finding.is_note] == []
        return [event.position for event in reader.events()]


def test_a_copy_of_a_journal_that_is_being_written_holds_all_that_was_acknowledged(
    path: Path, tmp_path: Path, start: Start
) -> None:
    process = start(WRITER, path)
    assert process.stdout is not None
    for number in range(8):
        acknowledged = [int(process.stdout.readline()) for _ in range(20)][-1]
        made = backup(path, tmp_path / f"copy-{number}.db")
        found = positions(tmp_path / f"copy-{number}.db")
        assert found == [*range(1, len(found) + 1)]
        assert len(found) == made.last_position >= acknowledged
        assert made.has_witness
    assert process.poll() is None
    # Nothing else is left, neither beside the journal nor beside the copies.
    copies = {f"copy-{number}.db{suffix}" for number in range(8) for suffix in ("", ".head")}
    journal = {f"journal.db{suffix}" for suffix in ("", "-wal", "-shm", ".lock", ".head")}
    assert {entry.name for entry in tmp_path.iterdir()} - {"journal.db.head.tmp"} == copies | journal


@pytest.mark.parametrize("state", ["open", "closed", "crashed"])
def test_a_copy_is_a_journal_of_its_own_and_leaves_the_first_as_it_was(
    state: str, path: Path, tmp_path: Path, drafts: Callable[[int], list[Draft]], finish: Callable[..., str]
) -> None:
    if state == "crashed":
        code = "import os\n" + WRITER.replace("100_000", "5") + "os._exit(0)\n"
        finish(code, path)
    journal = Journal.open(path) if state != "crashed" else None
    if journal is not None:
        for draft in drafts(5):
            journal.append([draft], stream="worker", epoch="e", witness=True)
    if state == "closed" and journal is not None:
        journal.close()
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir() if entry.suffix != ".db-shm"}
    made = backup(path, tmp_path / "copies" / "copy.db")
    after = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir() if entry.is_file()}
    assert {name: after[name] for name in before} == before
    copy = tmp_path / "copies" / "copy.db"
    assert made.path == str(copy) and made.num_bytes == copy.stat().st_size
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert positions(copy) == [1, 2, 3, 4, 5]
    if journal is not None and state == "open":
        # The locks of this very process are still held: it still writes, and others still wait for it.
        journal.append(drafts(1), stream="worker", epoch="e")
        journal.close()
    with Journal.open(copy) as other:
        (event,) = other.append(drafts(1), stream="worker", epoch="e2", witness=True)
    assert event.position == 6
    assert positions(copy) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("taken", ["copy.db", "copy.db-wal", "copy.db.head"])
def test_nothing_is_ever_overwritten(taken: str, path: Path, tmp_path: Path, write: Write) -> None:
    write(3, witness=True)
    (tmp_path / taken).write_text("mine")
    with pytest.raises(JournalError, match="is there already") as caught:
        backup(path, tmp_path / "copy.db")
    assert caught.value.exit_code == 3
    assert (tmp_path / taken).read_text() == "mine"
    assert {entry.name for entry in tmp_path.glob("copy*")} == {taken}
    with pytest.raises(JournalError, match="is there already"):
        backup(path, path)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_name_that_is_taken_while_it_is_copied_stays_the_takers(
    has_links: bool, path: Path, tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(3)
    plain = JournalReader.copy_into

    def copy_and_take(self: JournalReader, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        (tmp_path / "copy.db").write_text("mine")

    monkeypatch.setattr(JournalReader, "copy_into", copy_and_take)
    if not has_links:
        monkeypatch.setattr(os, "link", _no_links)
    with pytest.raises(JournalError, match="is there already"):
        backup(path, tmp_path / "copy.db")
    assert [entry.read_text() for entry in tmp_path.glob("copy*")] == ["mine"]


def _no_links(*_: object) -> None:
    raise OSError(errno.EPERM, "no links here")


def test_a_file_system_without_links_takes_a_copy_too(
    path: Path, tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(3, witness=True)
    monkeypatch.setattr(os, "link", _no_links)
    backup(path, tmp_path / "copy.db")
    assert positions(tmp_path / "copy.db") == [1, 2, 3]
    assert {entry.name for entry in tmp_path.glob("copy*")} == {"copy.db", "copy.db.head"}


def test_a_damaged_journal_is_told_and_not_copied(
    path: Path, tmp_path: Path, write: Write, tamper: Callable[..., None]
) -> None:
    write(3, witness=True)
    tamper("UPDATE events SET payload = x'7b7d' WHERE position = 2")
    with pytest.raises(JournalCorrupt, match="its copy has 1 findings, the first: the event is not what was written"):
        backup(path, tmp_path / "copy.db")
    assert list(tmp_path.glob("copy*")) == []


def test_a_copy_that_takes_too_long_ends_with_nothing_left(path: Path, tmp_path: Path, write: Write) -> None:
    write(3)
    with pytest.raises(JournalError, match="took longer than 0 s"):
        backup(path, tmp_path / "copy.db", limit_s=0)
    assert list(tmp_path.glob("copy*")) == []


def test_a_journal_on_a_server_is_not_copied_to_a_file(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="server"):
        backup("postgresql+psycopg://user:secret@host/db", tmp_path / "copy.db")
    assert list(tmp_path.iterdir()) == []


FULL = """
import resource, sys
from residency.errors import JournalError
from residency.journal.backup import backup
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    backup(sys.argv[1], sys.argv[2])
except JournalError as error:
    print(error.exit_code, error)
"""


def test_a_disk_that_takes_no_more_is_an_error_and_leaves_nothing(
    path: Path, tmp_path: Path, write: Write, finish: Callable[..., str]
) -> None:
    write(50)
    (line,) = finish(FULL, path, tmp_path / "copy.db").splitlines()
    assert line.startswith(f"3 journal {path}, copied to {tmp_path / 'copy.db'}: the disk ")
    assert list(tmp_path.glob("copy*")) == []


def test_a_missing_journal_is_an_error_and_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="does not exist"):
        backup(tmp_path / "none.db", tmp_path / "folder" / "copy.db")
    assert list(tmp_path.iterdir()) == []
