from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from residency.errors import JournalCorrupt, JournalError
from residency.journal.events import Draft, EventType, payload
from residency.journal.file_store import FileStore
from residency.journal.hashing import blob_digest
from residency.journal.reader import JournalReader
from residency.journal.store import Journal

if TYPE_CHECKING:
    from pathlib import Path

    from residency.journal.findings import Finding

Drafts = Callable[[int], list[Draft]]


@pytest.fixture
def reader(path: Path, drafts: Drafts) -> JournalReader:
    """Positions 1 to 12, of streams b and a by turns, recorded at 10, 20, ... 120."""
    Journal.open(path).close()
    ticks = iter(range(10, 130, 10))
    with Journal.open(path, clock_ns=lambda: next(ticks)) as journal:
        for number in range(12):
            journal.append(drafts(1), stream="ba"[number % 2], epoch="e")
    return JournalReader.open(path)


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("limit", [None, 499, 500, 501, 1203, 5000])
def test_pages_join_without_gap_or_repetition(
    limit: int | None, newest_first: bool, path: Path, drafts: Drafts
) -> None:
    with Journal.open(path) as journal:
        journal.append(drafts(1203), stream="worker", epoch="e")
    expected = [*range(1203, 0, -1)] if newest_first else [*range(1, 1204)]
    with JournalReader.open(path) as reader:
        found = [event.position for event in reader.events(limit=limit, newest_first=newest_first)]
    assert found == expected[:limit]


def test_streams_are_listed_by_name(reader: JournalReader) -> None:
    with reader:
        assert reader.streams() == ("a", "b")


def test_an_empty_journal_has_no_streams_and_no_events(path: Path) -> None:
    Journal.open(path).close()
    with JournalReader.open(path) as reader:
        assert reader.streams() == ()
        assert list(reader.events()) == []


def test_a_reader_sees_what_is_appended_after_it_was_opened(journal: Journal, path: Path, drafts: Drafts) -> None:
    with JournalReader.open(path) as reader:
        assert list(reader.events()) == []
        journal.append(drafts(2), stream="worker", epoch="e")
        assert len(list(reader.events())) == 2


def test_an_iteration_left_open_does_not_hold_up_the_writer(journal: Journal, path: Path, drafts: Drafts) -> None:
    journal.append(drafts(10), stream="worker", epoch="e")
    with JournalReader.open(path) as reader:
        iteration = reader.events()
        next(iteration)
        journal.append(drafts(1), stream="worker", epoch="e")
        assert isinstance(journal._store, FileStore)
        cursor = journal._store._connected().connection.cursor()
        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert cursor.fetchone() == (0, 0, 0)


def test_a_reader_cannot_write(reader: JournalReader) -> None:
    with reader, pytest.raises(JournalError):
        reader.query("INSERT INTO meta VALUES ('a', 'b')")


def test_a_crashed_journal_is_read_with_its_wal_and_left_as_it_was(tmp_path: Path, path: Path, drafts: Drafts) -> None:
    with Journal.open(path) as journal:
        journal.append(drafts(5), stream="worker", epoch="e")
        crashed = tmp_path / "crashed"
        crashed.mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", crashed / f"journal.db{suffix}")
    before = {entry.name: entry.read_bytes() for entry in crashed.iterdir()}
    with JournalReader.open(crashed / "journal.db") as reader:
        assert len(list(reader.events())) == 5
    after = {entry.name: entry.read_bytes() for entry in crashed.iterdir() if not entry.name.endswith("-shm")}
    assert after == before


def contents(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


def test_reading_a_closed_journal_leaves_no_file_beside_it(path: Path, drafts: Drafts) -> None:
    with Journal.open(path) as journal:
        journal.append(drafts(5), stream="worker", epoch="e")
    before = contents(path.parent)

    with JournalReader.open(path) as reader:
        assert len(list(reader.events())) == 5
        assert contents(path.parent) == before
    assert contents(path.parent) == before
    assert not {"journal.db-wal", "journal.db-shm"} & set(before)


def test_reading_a_copy_of_a_journal_with_its_wal_alone_leaves_no_file_beside_it(
    tmp_path: Path, path: Path, drafts: Drafts
) -> None:
    copied = tmp_path / "copied"
    copied.mkdir()
    with Journal.open(path) as journal:
        journal.append(drafts(5), stream="worker", epoch="e")
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", copied / f"journal.db{suffix}")
    before = contents(copied)

    with JournalReader.open(copied / "journal.db") as reader:
        assert len(list(reader.events())) == 5
    assert contents(copied) == before


WRITER = """
import sys
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal
with Journal.open(sys.argv[1]) as journal:
    journal.append([Draft(type=EventType.MEASURED, round=1)] * 600, stream="worker", epoch="e")
    if sys.argv[2] == "crash":
        import os
        os._exit(0)
"""


@pytest.mark.parametrize("end", ["close", "crash"])
def test_a_reader_of_a_closed_journal_sees_what_another_process_writes_later(
    end: str, path: Path, drafts: Drafts, finish: Callable[..., str]
) -> None:
    with Journal.open(path) as journal:
        journal.append(drafts(2), stream="worker", epoch="e")
    with JournalReader.open(path) as reader:
        assert len(list(reader.events())) == 2
        for number in (1, 2):
            finish(WRITER, path, end)
            assert len(list(reader.events())) == 2 + 600 * number


def test_a_damaged_blob_is_not_handed_out(path: Path, tamper: Callable[..., None]) -> None:
    with Journal.open(path) as journal:
        journal.append([Draft(type=EventType.MEASURED, round=1, blobs=(b"content",))], stream="worker", epoch="e")
    tamper("UPDATE blobs SET content = x'00'")
    with JournalReader.open(path) as reader, pytest.raises(JournalCorrupt, match="is damaged"):
        reader.blob(blob_digest(b"content"))


def test_a_damaged_payload_is_an_error_that_names_its_position(path: Path, tamper: Callable[..., None]) -> None:
    with Journal.open(path) as journal:
        journal.append([Draft(type=EventType.MEASURED, round=1)], stream="worker", epoch="e")
    for damaged in (b"{", b"[]", b"\xff", b""):
        tamper("UPDATE events SET payload = ?", (damaged,))
        with JournalReader.open(path) as reader:
            (event,) = reader.events()
        with pytest.raises(JournalCorrupt, match="event 1"):
            payload(event)


@pytest.mark.parametrize("column", ["epoch", "stream", "to_state"])
def test_damaged_text_is_read_as_far_as_it_goes_so_that_verify_can_name_it(
    path: Path, tamper: Callable[..., None], column: str, findings: Callable[[], tuple[Finding, ...]]
) -> None:
    with Journal.open(path) as journal:
        journal.append([Draft(type=EventType.MEASURED, round=1, to_state="measuring")], stream="worker", epoch="e")
    tamper(f"UPDATE events SET {column} = CAST(x'84ff84' AS TEXT)")
    with JournalReader.open(path) as reader:
        assert [event.position for event in reader.events()] == [1]
    assert 1 in {finding.position for finding in findings()}


def test_a_closed_reader_says_so(reader: JournalReader) -> None:
    reader.close()
    reader.close()
    with pytest.raises(JournalError, match="is closed"):
        reader.streams()


def test_reading_needs_neither_sqlalchemy_nor_torch(path: Path, drafts: Drafts, finish: Callable[..., str]) -> None:
    with Journal.open(path) as journal:
        journal.append(drafts(3), stream="worker", epoch="e", witness=True)
    code = """
import sys
from residency.journal.fold import fold
from residency.journal.reader import JournalReader
from residency.journal.verify import verify
with JournalReader.open(sys.argv[1]) as reader:
    print(len(fold(reader.events())), verify(reader))
print(sorted({"sqlalchemy", "torch", "transitions"} & set(sys.modules)))
"""
    assert finish(code, path).splitlines() == ["1 ()", "[]"]


def test_the_last_events_of_a_long_journal_are_read_in_milliseconds(path: Path) -> None:
    with Journal.open(path) as journal:
        for number in range(10):
            batch = [
                Draft(type=EventType.MEASURED, round=1, payload={"number": 10_000 * number + one, "filler": "x" * 100})
                for one in range(10_000)
            ]
            journal.append(batch, stream=f"worker-{number // 9}", epoch="e")
    took_s: list[float] = []
    last: list[int] = []
    for _ in range(5):
        started = time.perf_counter()
        with JournalReader.open(path) as reader:
            # The first stream's end lies 10,000 events back.
            last = [event.position for event in reader.events("worker-0", limit=20, newest_first=True)]
            assert reader.streams() == ("worker-0", "worker-1")
        took_s.append(time.perf_counter() - started)
    assert last == [*range(90_000, 89_980, -1)]
    # About 2 ms on an idle core; a scan would take 50 times as long.
    assert min(took_s) < 0.02


def test_a_reader_carried_over_a_fork_says_so(path: Path, drafts: Drafts, finish: Callable[..., str]) -> None:
    Journal.open(path).close()
    code = """
import os, sys
from residency.errors import JournalError
from residency.journal.reader import JournalReader
reader = JournalReader.open(sys.argv[1])
if os.fork() == 0:
    try:
        reader.streams()
    except JournalError as error:
        print(error)
    reader.close()
    sys.exit(0)
os.wait()
print(reader.streams())
"""
    lines = finish(code, path).splitlines()
    assert "is used by its child" in lines[0]
    assert lines[1] == "()"


def test_no_descriptor_is_left_behind(path: Path, drafts: Drafts) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("there is no /proc here")
    before = descriptors()
    for _ in range(3):
        with Journal.open(path) as journal, journal.hold("worker"):
            journal.append(drafts(1), stream="worker", epoch="e", witness=True)
            list(journal.events())
        with JournalReader.open(path) as reader:
            list(reader.events())
        with pytest.raises(JournalError):
            Journal.open(path.parent)
    assert descriptors() == before
