"""Every byte of a journal's file, its WAL and its witness, changed one at a time: found, or nobody ever reads it.

A part of the bytes by default; all of them, some minutes, with the environment variable RESIDENCY_TEST_EVERY_BYTE=1.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from residency.errors import JournalError
from residency.journal.events import Draft, EventType
from residency.journal.hashing import blob_digest
from residency.journal.reader import JournalReader
from residency.journal.schema import EVENT_COLUMNS
from residency.journal.sqlite import connect
from residency.journal.store import Journal
from residency.journal.verify import Finding, FindingKind, verify

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

EVERY = bool(os.environ.get("RESIDENCY_TEST_EVERY_BYTE"))

# Fields of the file's header that SQLite does not need to read what is there, each with its reason.
UNREAD_HEADER = {
    **dict.fromkeys(range(24, 28), "counts changes, so that other processes drop their caches"),
    **dict.fromkeys(range(28, 32), "the size of the file; a wrong one is not believed"),
    **dict.fromkeys(range(36, 40), "how many free pages there are; integrity_check counts them where there are some"),
    **dict.fromkeys(range(40, 44), "counts changes of the schema"),
    **dict.fromkeys(range(44, 47), "of the schema's format only the last byte is looked at"),
    **dict.fromkeys(range(48, 52), "a suggested cache size"),
    **dict.fromkeys(range(72, 92), "reserved, and zero"),
    **dict.fromkeys(range(92, 96), "the change at which the size of the file was right"),
    **dict.fromkeys(range(96, 100), "the version of the last SQLite that wrote it"),
}

State = tuple[Any, ...]


@pytest.fixture
def own(written: Path) -> set[int]:
    """The pages of the schema and of SQLite's count of positions."""
    connection = connect(written, mode="ro", wait_s=1)
    (row,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'sqlite_sequence'").fetchall()
    connection.close()
    return {1, int(row[0])}


@pytest.fixture
def written(path: Path) -> Path:
    """A small journal with two streams, every kind of column, and blobs."""
    placement = b'{"p":1}'
    with Journal.open(path, clock_ns=lambda: 1_700_000_000_123_456_789) as journal:
        for number in range(2):
            started = {"initial_placement": blob_digest(placement), "n": number}
            draft = Draft(type=EventType.EPOCH_STARTED, round=0, payload=started, blobs=(placement,))
            (event,) = journal.append([draft], stream="one", epoch=f"e{number}")
            moved = Draft(
                type=EventType.TRANSITION,
                round=1,
                payload={"n": number},
                from_state="measuring",
                to_state="planned",
                trigger="plan",
                causation=event.event_id,
            )
            journal.append([moved, Draft(type=EventType.STOPPED, round=1)], stream="two", epoch="e", witness=True)
    return path


def state(path: Path) -> State:
    """Everything that anybody reads."""
    with JournalReader.open(path) as reader:
        return list(reader.events()), list(reader.blobs()), reader.meta(), reader.streams()


def said(path: Path) -> tuple[Finding, ...]:
    with JournalReader.open(path) as reader:
        return tuple(finding for finding in verify(reader) if not finding.is_note)


def is_found(path: Path) -> bool:
    try:
        return bool(said(path))
    except JournalError:
        return True


def number_at(content: bytes | bytearray, at: int, size: int) -> int:
    return int.from_bytes(content[at : at + size], "big")


def varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(9):
        byte = content[at + index]
        if index == 8:
            return value << 8 | byte, at + 9
        value = value << 7 | byte & 0x7F
        if not byte & 0x80:
            return value, at + index + 1
    raise AssertionError


def read_bytes(content: bytes, own: set[int]) -> list[int]:
    """Which bytes of a file SQLite reads: the headers of its pages, and the cells that they point to. No overflow.

    own: the pages of SQLite's own tables, whose rows have numbers that nobody asks for.
    """
    page_bytes = number_at(content, 16, 2)
    found = set(range(100))
    for base in range(0, len(content), page_bytes):
        header = base + (100 if base == 0 else 0)
        kind = content[header]
        assert kind in (2, 5, 10, 13), "a page of this journal is a b-tree"
        pointers = header + (12 if kind in (2, 5) else 8)
        num_cells = number_at(content, header + 3, 2)
        found.update(range(header, pointers + 2 * num_cells))
        for index in range(num_cells):
            start = base + number_at(content, pointers + 2 * index, 2)
            end = start + (4 if kind in (2, 5) else 0)
            size, end = (0, end) if kind == 5 else varint(content, end)
            rowid = end
            end = varint(content, end)[1] if kind in (5, 13) else end
            found.update(range(start, end + size))
            if base // page_bytes + 1 in own:
                found.difference_update(range(rowid, end))
    return sorted(found)


@pytest.mark.parametrize("change", [0x01, 0xFF])
def test_a_changed_byte_that_is_read_is_found(change: int, written: Path, own: set[int]) -> None:
    whole = written.read_bytes()
    read = [index for index in read_bytes(whole, own) if index not in UNREAD_HEADER]
    assert len(read) > 5000
    missed = []
    for index in read if EVERY else read[change % 40 :: 40]:
        content = bytearray(whole)
        content[index] ^= change
        written.write_bytes(content)
        if not is_found(written):
            missed.append(index)
    assert missed == []


def test_a_changed_byte_that_is_not_read_changes_nothing(written: Path, own: set[int]) -> None:
    whole = written.read_bytes()
    before = state(written)
    unread = sorted(set(range(len(whole))) - set(read_bytes(whole, own)) | set(UNREAD_HEADER))
    for index in unread if EVERY else [*UNREAD_HEADER, *unread[::400]]:
        content = bytearray(whole)
        content[index] ^= 0xFF
        written.write_bytes(content)
        # Free space that SQLite accounts for may be found, too.
        assert is_found(written) or state(written) == before, index


def changed_bit(value: object) -> object:
    if isinstance(value, int):
        return value ^ 8
    if isinstance(value, str):
        return value[:-1] + chr(ord(value[-1]) ^ 1)
    assert isinstance(value, bytes)
    return value[:-2] + bytes([value[-2] ^ 1]) + value[-1:]


@pytest.mark.parametrize("column", EVENT_COLUMNS)
def test_one_changed_bit_of_an_event_is_found_with_its_position_stream_and_column(
    column: str, written: Path, tamper: Callable[..., None]
) -> None:
    with JournalReader.open(written) as reader:
        event = next(event for event in reader.events() if event.position == 5)
    tamper(
        f'UPDATE events SET "{column}" = ? WHERE position = 5',
        (changed_bit(getattr(event, column)),),
    )
    where = 13 if column == "position" else 5
    found = [one for one in said(written) if one.kind is FindingKind.CHAIN and "its hash differs" in one.text]
    stream = changed_bit("two") if column == "stream" else "two"
    assert [(one.position, one.stream, one.column) for one in found] == [(where, stream, column)]


REPLACED = {"epoch": "another", "previous_hash": bytes(32), "pid": 1, "boot_id": "another", "stream_version": 99}


@pytest.mark.parametrize("column", REPLACED)
def test_a_replaced_value_is_found_with_its_column_if_the_event_before_has_the_right_one(
    column: str, written: Path, tamper: Callable[..., None]
) -> None:
    tamper(f'UPDATE events SET "{column}" = ? WHERE position = 6', (REPLACED[column],))
    found = [one for one in said(written) if "its hash differs" in one.text]
    assert [(one.position, one.column) for one in found] == [(6, column)]


# Rows that are gone, in another place, or there twice.
ROWS = {
    "the first event": "DELETE FROM events WHERE position = 1",
    "an event in the middle": "DELETE FROM events WHERE position = 3",
    "the last event": "DELETE FROM events WHERE position = 6",
    "the last event, and the count of it": (
        "DELETE FROM events WHERE position = 6",
        "UPDATE sqlite_sequence SET seq = 5 WHERE name = 'events'",
    ),
    "a whole stream": "DELETE FROM events WHERE stream = 'one'",
    "all events": "DELETE FROM events",
    "two events of one stream exchanged": (
        "UPDATE events SET position = 99 WHERE position = 2",
        "UPDATE events SET position = 2 WHERE position = 3",
        "UPDATE events SET position = 3 WHERE position = 99",
    ),
    "two events of two streams exchanged": (
        "UPDATE events SET position = 99 WHERE position = 3",
        "UPDATE events SET position = 3 WHERE position = 4",
        "UPDATE events SET position = 4 WHERE position = 99",
    ),
    "two versions exchanged": (
        "UPDATE events SET stream_version = 99 WHERE position = 2",
        "UPDATE events SET stream_version = 1 WHERE position = 3",
        "UPDATE events SET stream_version = 2 WHERE position = 99",
    ),
    "an event repeated at the end": (
        "CREATE TEMP TABLE copy AS SELECT * FROM events WHERE position = 6",
        "UPDATE copy SET position = 7, event_id = 'other', stream_version = 5",
        "INSERT INTO events SELECT * FROM copy",
    ),
    "an event in another stream": "UPDATE events SET stream = 'one', stream_version = 3 WHERE position = 6",
    "a blob": "DELETE FROM blobs",
    "what it says about itself": "DELETE FROM meta WHERE key = 'created_at_ns'",
    "its id": "UPDATE meta SET value = 'another' WHERE key = 'journal_id'",
    "an index": "DROP INDEX events_by_stream",
    "a foreign table": "CREATE TABLE mine (a)",
    "a foreign view": "CREATE VIEW mine AS SELECT 1",
    "another format": "PRAGMA user_version = 0",
    "a count of positions that is too low": "UPDATE sqlite_sequence SET seq = 2 WHERE name = 'events'",
    "no count of positions": "DELETE FROM sqlite_sequence",
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_that_are_gone_or_moved_or_not_ours_are_found(
    what: str, written: Path, tamper: Callable[..., None]
) -> None:
    statements = ROWS[what]
    tamper((statements,) if isinstance(statements, str) else statements)
    assert said(written)


def test_an_older_copy_of_the_file_is_found_by_the_witness(written: Path, drafts: Callable[[int], list[Draft]]) -> None:
    older = written.read_bytes()
    with Journal.open(written) as journal:
        journal.append(drafts(1), stream="one", epoch="e", witness=True)
    written.write_bytes(older)
    (finding,) = said(written)
    assert finding.kind is FindingKind.HEAD and "stream 'one' lost its tail" in finding.text


# Every event with its witness, as an intent or a commit is written.
CRASHED = """
import os, sys
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal
journal = Journal.open(sys.argv[1])
for number in range(6):
    draft = Draft(type=EventType.MEASURED, round=1, payload={"number": number})
    journal.append([draft], stream="worker", epoch="e", witness=True)
os._exit(0)
"""


@pytest.fixture
def crashed(path: Path, finish: Callable[..., str]) -> Path:
    """A journal whose worker was killed: its events are in the WAL."""
    finish(CRASHED, path)
    assert path.with_name("journal.db-wal").stat().st_size > 6 * 4096
    return path


def variants(size: int, *, step: int) -> range:
    return range(0, size, 1 if EVERY else step)


def test_a_changed_byte_of_the_wal_is_found_or_changes_nothing(crashed: Path, tmp_path: Path) -> None:
    wal = crashed.with_name("journal.db-wal").read_bytes()
    before = state(crashed)
    copy = _copied(crashed, tmp_path / "copy")
    found = 0
    for index in variants(len(wal), step=211):
        content = bytearray(wal)
        content[index] ^= 0x10
        copy.with_name("journal.db-wal").write_bytes(content)
        is_said = is_found(copy)
        assert is_said or state(copy) == before, index
        found += is_said
    # SQLite itself reports none of them.
    assert found > 0.9 * len(variants(len(wal), step=211))


def test_damage_in_the_middle_of_the_wal_is_found_without_a_witness(crashed: Path, tmp_path: Path) -> None:
    copy = _copied(crashed, tmp_path / "copy")
    copy.with_name("journal.db.head").unlink()
    wal = bytearray(copy.with_name("journal.db-wal").read_bytes())
    frame = 24 + 4096
    for where, what in ((20, "the header"), (32 + frame + 2000, "frame 2"), (32 + 3 * frame + 10, "frame 4")):
        content = bytearray(wal)
        content[where] ^= 1
        copy.with_name("journal.db-wal").write_bytes(content)
        (finding,) = said(copy)
        assert finding.kind is FindingKind.WAL
        assert finding.text.startswith(f"{what} of the WAL is damaged")


def test_a_wal_that_a_crash_cut_or_left_half_written_at_its_end_is_no_finding(crashed: Path, tmp_path: Path) -> None:
    copy = _copied(crashed, tmp_path / "copy")
    copy.with_name("journal.db.head").unlink()
    wal = copy.with_name("journal.db-wal").read_bytes()
    for content in (wal[:-1], wal[:-4096], wal[:-4097], wal[:-100] + bytes(100), wal[:32], wal[:31], b""):
        copy.with_name("journal.db-wal").write_bytes(content)
        assert said(copy) == (), len(content)


def test_a_write_that_a_crash_tore_over_what_an_earlier_crash_left_is_no_finding(crashed: Path, tmp_path: Path) -> None:
    copy = _copied(crashed, tmp_path / "copy")
    copy.with_name("journal.db.head").unlink()
    wal = bytearray(copy.with_name("journal.db-wal").read_bytes())
    frame = 24 + 4096
    starts = range(32, len(wal), frame)
    commits = [number for number, at in enumerate(starts) if number_at(wal, at + 4, 4)]
    assert commits[-1] == len(starts) - 1 and commits[-1] - commits[-2] > 2
    # The last transaction lost its end in the first crash, and its first frame to the second.
    del wal[starts[-1] :]
    wal[starts[commits[-2] + 1] + 12] ^= 1
    copy.with_name("journal.db-wal").write_bytes(wal)
    assert said(copy) == ()


def test_a_wal_that_is_being_written_is_no_finding(path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    code = CRASHED.replace("range(6)", "range(100_000)").replace("{", "{'filler': 'x' * 9000, ")
    process = start(code, path)
    while not path.exists():
        assert process.poll() is None
    for _ in range(20):
        assert said(path) == ()
    assert process.poll() is None


def test_a_wal_cut_anywhere_is_found_by_the_witness(crashed: Path, tmp_path: Path) -> None:
    wal = crashed.with_name("journal.db-wal").read_bytes()
    copy = _copied(crashed, tmp_path / "copy")
    for size in variants(len(wal), step=509):
        copy.with_name("journal.db-wal").write_bytes(wal[:size])
        assert {finding.kind for finding in said(copy)} == {FindingKind.HEAD}, size


def test_a_changed_byte_of_the_witness_is_told(written: Path) -> None:
    head = written.with_name("journal.db.head")
    whole = head.read_bytes()
    assert len(whole) == 8192
    for index in variants(len(whole), step=61):
        content = bytearray(whole)
        content[index] ^= 1
        head.write_bytes(content)
        with JournalReader.open(written) as reader:
            assert {finding.kind for finding in verify(reader)} == {FindingKind.HEAD_DAMAGED}, index
    head.write_bytes(bytes(reversed(whole)))
    (finding,) = said(written)
    assert finding.kind is FindingKind.HEAD and "cannot be read" in finding.text


def _copied(journal: Path, folder: Path) -> Path:
    folder.mkdir()
    for suffix in ("", "-wal", ".head"):
        shutil.copy(f"{journal}{suffix}", folder / f"journal.db{suffix}")
    return folder / "journal.db"
