from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from residency.errors import JournalError
from residency.journal.events import Draft, EventType, payload
from residency.journal.hashing import ZERO_HASH, blob_digest, hash_event
from residency.journal.sqlite import connect
from residency.journal.store import Journal

if TYPE_CHECKING:
    from pathlib import Path

    from residency.journal.verify import Finding

Drafts = Callable[[int], list[Draft]]


def test_appended_events_read_back_equal(journal: Journal, drafts: Drafts) -> None:
    written = journal.append(drafts(3), stream="worker", epoch="e1", rank=2)
    written += journal.append(drafts(1), stream="worker", epoch="e2")
    assert tuple(journal.events()) == written


def test_positions_count_the_journal_and_versions_count_the_stream(journal: Journal, drafts: Drafts) -> None:
    for stream in ("a", "b", "a"):
        journal.append(drafts(2), stream=stream, epoch="e")
    found = [(event.position, event.stream, event.stream_version) for event in journal.events()]
    assert found == [(1, "a", 1), (2, "a", 2), (3, "b", 1), (4, "b", 2), (5, "a", 3), (6, "a", 4)]


def test_each_stream_is_a_chain_of_its_own(journal: Journal, drafts: Drafts) -> None:
    for stream in ("a", "b", "a"):
        journal.append(drafts(1), stream=stream, epoch="e")
    first, other, second = journal.events()
    assert first.previous_hash == other.previous_hash == ZERO_HASH
    assert second.previous_hash == first.hash
    assert all(event.hash == hash_event(event) for event in (first, other, second))


def test_a_batch_with_one_bad_event_writes_nothing(journal: Journal, drafts: Drafts) -> None:
    bad = Draft(type=EventType.MEASURED, round=-1)
    with pytest.raises(JournalError):
        journal.append([*drafts(2), bad], stream="worker", epoch="e")
    assert list(journal.events()) == []
    assert [event.position for event in journal.append(drafts(1), stream="worker", epoch="e")] == [1]


def test_a_payload_that_is_not_json_writes_nothing(journal: Journal) -> None:
    with pytest.raises(JournalError, match="cannot be written as JSON"):
        journal.append(
            [Draft(type=EventType.MEASURED, round=1, payload={"thing": object()})], stream="worker", epoch="e"
        )
    assert list(journal.events()) == []


def test_no_events_are_no_transaction(journal: Journal) -> None:
    assert journal.append([], stream="worker", epoch="e") == ()
    assert journal.spent_ns == 0


def test_payloads_are_canonical_whatever_order_they_were_made_in(journal: Journal) -> None:
    one = Draft(type=EventType.MEASURED, round=1, payload={"b": {"y": 1, "x": [1, 2.5, None]}, "a": "ü"})
    two = Draft(type=EventType.MEASURED, round=1, payload={"a": "ü", "b": {"x": [1, 2.5, None], "y": 1}})
    first, second = journal.append([one, two], stream="worker", epoch="e")
    assert first.payload == second.payload == '{"a":"ü","b":{"x":[1,2.5,null],"y":1}}'.encode()
    assert payload(first) == one.payload


def test_text_that_is_no_unicode_is_escaped_rather_than_refused(journal: Journal) -> None:
    odd = os.fsdecode(b"/models/\xff")
    (event,) = journal.append([Draft(type=EventType.MEASURED, round=1, payload={"path": [odd]})], stream=odd, epoch="e")
    assert payload(event) == {"path": ["/models/\\udcff"]}
    assert [found.stream for found in journal.events()] == ["/models/\\udcff"]


def test_a_blob_is_stored_once_and_read_by_its_digest(journal: Journal, path: Path) -> None:
    content = b'{"placement":1}'
    for _ in range(3):
        draft = Draft(type=EventType.MEASURED, round=1, blobs=(content, content, b"other"))
        journal.append([draft], stream="worker", epoch="e")
    assert journal.blob(blob_digest(content)) == content
    connection = connect(path, mode="ro", wait_s=1)
    assert connection.execute("SELECT count(*) FROM blobs").fetchone() == (2,)
    connection.close()


def test_an_unknown_blob_is_an_error_that_names_it(journal: Journal) -> None:
    with pytest.raises(JournalError, match="0123"):
        journal.blob("0123")


def test_the_clock_is_the_callers(path: Path, drafts: Drafts) -> None:
    ticks = iter(range(1_000, 2_000))
    with Journal.open(path, clock_ns=lambda: next(ticks)) as journal:
        events = journal.append(drafts(2), stream="worker", epoch="e")
    assert events[1].recorded_at == events[0].recorded_at + 1


def test_time_in_appends_is_counted(journal: Journal, drafts: Drafts) -> None:
    journal.append(drafts(1), stream="worker", epoch="e")
    first = journal.spent_ns
    journal.append(drafts(1), stream="worker", epoch="e")
    assert 0 < first < journal.spent_ns


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


def test_a_second_open_continues_the_journal(path: Path, drafts: Drafts) -> None:
    with Journal.open(path) as journal:
        journal.append(drafts(1), stream="worker", epoch="e1")
    with Journal.open(f"sqlite:///{path}") as journal:
        assert not journal.created
        journal.append(drafts(1), stream="worker", epoch="e2")
        assert [event.stream_version for event in journal.events()] == [1, 2]


def test_a_link_and_its_target_are_one_journal(tmp_path: Path, path: Path, drafts: Drafts) -> None:
    (tmp_path / "link.db").symlink_to(path)
    with Journal.open(tmp_path / "link.db") as one, Journal.open(path) as other:
        one.append(drafts(1), stream="worker", epoch="e")
        other.append(drafts(1), stream="worker", epoch="e")
        assert one.location == other.location
        assert [event.stream_version for event in one.events()] == [1, 2]


def test_threads_append_one_after_the_other(
    journal: Journal, drafts: Drafts, findings: Callable[[], tuple[Finding, ...]]
) -> None:
    def append() -> None:
        for _ in range(10):
            journal.append(drafts(2), stream="worker", epoch="e")

    threads = [threading.Thread(target=append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.stream_version for event in journal.events()] == list(range(1, 81))
    assert findings() == ()


def test_a_closed_journal_says_so(path: Path, drafts: Drafts) -> None:
    journal = Journal.open(path)
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="is closed"):
        journal.append(drafts(1), stream="worker", epoch="e")
    with pytest.raises(JournalError, match="is closed"):
        list(journal.events())


def test_a_closed_journal_is_one_file_without_a_wal(path: Path, drafts: Drafts) -> None:
    with Journal.open(path) as journal:
        journal.append(drafts(1), stream="worker", epoch="e")
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["journal.db", "journal.db.lock"]


def test_the_connection_is_durable_and_checks_itself(journal: Journal) -> None:
    raw = journal._connected().connection
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


def test_the_witness_says_how_far_each_stream_had_come(journal: Journal, path: Path, drafts: Drafts) -> None:
    journal.append(drafts(2), stream="a", epoch="e", witness=True)
    (event,) = journal.append(drafts(1), stream="b", epoch="e", witness=True)
    journal.append(drafts(1), stream="a", epoch="e")
    head = json.loads((path.parent / "journal.db.head").read_bytes())
    assert head["position"] == 3
    assert {name: (one["position"], one["stream_version"]) for name, one in head["streams"].items()} == {
        "a": (2, 2),
        "b": (3, 1),
    }
    assert head["streams"]["b"]["hash"] == event.hash.hex()


def test_a_witness_that_cannot_be_written_does_not_undo_the_events(
    journal: Journal, path: Path, drafts: Drafts, caplog: pytest.LogCaptureFixture
) -> None:
    (path.parent / "journal.db.head").mkdir()
    journal.append(drafts(1), stream="worker", epoch="e", witness=True)
    assert len(list(journal.events())) == 1
    assert "head witness cannot be written" in caplog.text


def test_a_journal_whose_file_was_taken_away_refuses_to_write_into_nothing(
    journal: Journal, path: Path, drafts: Drafts
) -> None:
    path.rename(path.parent / "elsewhere.db")
    with pytest.raises(JournalError, match="no such file"):
        journal.append(drafts(1), stream="worker", epoch="e")
    path.write_bytes(b"")
    with pytest.raises(JournalError, match="replaced since it was opened"):
        journal.append(drafts(1), stream="worker", epoch="e")


def test_an_append_within_an_append_is_refused_and_the_outer_one_succeeds(path: Path, drafts: Drafts) -> None:
    refused: list[JournalError] = []

    def clock() -> int:
        # As a signal handler would: in the middle of the transaction, on the same thread.
        if opened and not refused:
            try:
                opened[0].append(drafts(1), stream="worker", epoch="e")
            except JournalError as error:
                refused.append(error)
        return 1

    opened: list[Journal] = []
    with Journal.open(path, clock_ns=clock) as journal:
        opened.append(journal)
        journal.append(drafts(1), stream="worker", epoch="e")
        assert len(list(journal.events())) == 1
        opened.clear()
    assert "under way on this very thread" in str(refused[0])


def test_an_interrupt_in_the_middle_of_an_append_writes_nothing(path: Path, drafts: Drafts) -> None:
    armed: list[bool] = []

    def clock() -> int:
        if armed:
            armed.clear()
            raise KeyboardInterrupt
        return 1

    with Journal.open(path, clock_ns=clock) as journal:
        armed.append(True)
        with pytest.raises(KeyboardInterrupt):
            journal.append(drafts(2), stream="worker", epoch="e")
        assert list(journal.events()) == []
        assert len(journal.append(drafts(1), stream="worker", epoch="e")) == 1
