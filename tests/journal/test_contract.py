"""What holds for every journal, in a file and on a server alike: appending, numbering, chaining, reading."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from residency.errors import JournalCorrupt, JournalError
from residency.journal.events import Draft, EventType, payload
from residency.journal.hashing import ZERO_HASH, blob_digest, hash_event
from residency.journal.schema import EVENT_COLUMNS
from residency.journal.slots import read_slots
from tests.journal.places import Place, findings, opened, reading

if TYPE_CHECKING:
    from residency.journal.reader import JournalReader
    from residency.journal.store import Journal

Drafts = Callable[[int], list[Draft]]


@pytest.fixture
def journal(place: Place) -> Iterator[Journal]:
    with opened(place) as journal:
        yield journal


def test_appended_events_read_back_equal(place: Place, journal: Journal, drafts: Drafts) -> None:
    written = journal.append(drafts(3), stream="worker", epoch="e1", rank=2)
    written += journal.append(drafts(1), stream="worker", epoch="e2")
    assert tuple(journal.events()) == written
    with reading(place) as reader:
        assert tuple(reader.events()) == written


def test_every_field_is_kept(journal: Journal) -> None:
    first = Draft(
        type=EventType.TRANSITION,
        round=2**40,
        payload={"a": [1, None, "ü"], "b": -(2**63), "c": 2**63},
        from_state="measuring",
        to_state="planned",
        trigger="plan",
        causation="0b8f6f0e",
    )
    (event,) = journal.append([first], stream="ü'\"\\ %s ? \n", epoch="e", rank=7)
    assert tuple(journal.events()) == (event,)
    assert (event.round, event.rank, event.from_state, event.to_state) == (2**40, 7, "measuring", "planned")
    assert (event.trigger, event.causation, payload(event)) == ("plan", "0b8f6f0e", first.payload)


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


def test_a_blob_is_stored_once_and_read_by_its_digest(place: Place, journal: Journal) -> None:
    content = b'{"placement":1}\x00\xff'
    for _ in range(3):
        draft = Draft(type=EventType.MEASURED, round=1, blobs=(content, content, b"other"))
        journal.append([draft], stream="worker", epoch="e")
    assert journal.blob(blob_digest(content)) == content
    with reading(place) as reader:
        assert dict(reader.blobs()) == {blob_digest(one): one for one in (content, b"other")}


def test_an_unknown_blob_is_an_error_that_names_it(journal: Journal) -> None:
    with pytest.raises(JournalError, match="0123"):
        journal.blob("0123")


def test_the_clock_is_the_callers(place: Place, drafts: Drafts) -> None:
    ticks = iter(range(1_000, 2_000))
    with opened(place, clock_ns=lambda: next(ticks)) as journal:
        events = journal.append(drafts(2), stream="worker", epoch="e")
    assert events[1].recorded_at == events[0].recorded_at + 1


def test_time_in_appends_is_counted(journal: Journal, drafts: Drafts) -> None:
    journal.append(drafts(1), stream="worker", epoch="e")
    first = journal.spent_ns
    journal.append(drafts(1), stream="worker", epoch="e")
    assert 0 < first < journal.spent_ns


def test_a_second_open_continues_the_journal(place: Place, drafts: Drafts) -> None:
    with opened(place) as journal:
        assert journal.created
        journal.append(drafts(1), stream="worker", epoch="e1")
    with opened(place) as journal:
        assert not journal.created
        journal.append(drafts(1), stream="worker", epoch="e2")
        assert [event.stream_version for event in journal.events()] == [1, 2]


def test_two_open_journals_never_give_a_number_twice(place: Place, drafts: Drafts) -> None:
    with opened(place) as one, opened(place) as other:
        versions = [j.append(drafts(1), stream="worker", epoch="e")[0].stream_version for j in (one, other, one)]
    assert versions == [1, 2, 3]


def test_threads_append_one_after_the_other(place: Place, journal: Journal, drafts: Drafts) -> None:
    def append() -> None:
        for _ in range(10):
            journal.append(drafts(2), stream="worker", epoch="e")
            list(journal.events(after=60))

    threads = [threading.Thread(target=append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.stream_version for event in journal.events()] == list(range(1, 81))
    assert findings(place) == ()


def test_a_closed_journal_says_so(place: Place, drafts: Drafts) -> None:
    journal = opened(place)
    journal.close()
    journal.close()
    for use in (
        lambda: journal.append(drafts(1), stream="worker", epoch="e"),
        lambda: list(journal.events()),
        lambda: journal.hold("worker"),
        journal.keep,
    ):
        with pytest.raises(JournalError, match="is closed"):
            use()


def test_an_iteration_outlives_its_journal_by_an_error_only(place: Place, drafts: Drafts) -> None:
    with opened(place) as journal:
        journal.append(drafts(600), stream="worker", epoch="e")
        found = journal.events()
        next(found)
    with pytest.raises(JournalError, match="is closed"):
        list(found)


def test_an_append_within_an_append_is_refused_and_the_outer_one_succeeds(place: Place, drafts: Drafts) -> None:
    refused: list[JournalError] = []

    def clock() -> int:
        # As a signal handler would: in the middle of the transaction, on the same thread.
        if holder and not refused:
            try:
                holder[0].append(drafts(1), stream="worker", epoch="e")
            except JournalError as error:
                refused.append(error)
        return 1

    holder: list[Journal] = []
    with opened(place, clock_ns=clock) as journal:
        holder.append(journal)
        journal.append(drafts(1), stream="worker", epoch="e")
        assert len(list(journal.events())) == 1
        holder.clear()
    assert "under way on this very thread" in str(refused[0])


def test_an_interrupt_in_the_middle_of_an_append_writes_nothing(place: Place, drafts: Drafts) -> None:
    armed: list[bool] = []

    def clock() -> int:
        if armed:
            armed.clear()
            raise KeyboardInterrupt
        return 1

    with opened(place, clock_ns=clock) as journal, journal.hold("worker"):
        armed.append(True)
        with pytest.raises(KeyboardInterrupt):
            journal.append(drafts(2), stream="worker", epoch="e")
        assert list(journal.events()) == []
        assert len(journal.append(drafts(1), stream="worker", epoch="e")) == 1


# The head witness.


def test_the_witness_says_how_far_each_stream_had_come(place: Place, journal: Journal, drafts: Drafts) -> None:
    journal.append(drafts(2), stream="a", epoch="e", witness=True)
    (event,) = journal.append(drafts(1), stream="b", epoch="e", witness=True)
    journal.append(drafts(1), stream="a", epoch="e")
    slot, _ = read_slots(place.head.read_bytes())
    assert slot is not None
    head = json.loads(bytes(slot.content))
    assert head["position"] == 3
    assert {name: (one["position"], one["stream_version"]) for name, one in head["streams"].items()} == {
        "a": (2, 2),
        "b": (3, 1),
    }
    assert head["streams"]["b"]["hash"] == event.hash.hex()
    assert place.head.stat().st_mode & 0o777 == 0o600


def test_a_witness_that_cannot_be_written_does_not_undo_the_events(
    place: Place, journal: Journal, drafts: Drafts, caplog: pytest.LogCaptureFixture
) -> None:
    place.head.mkdir(parents=True)
    journal.append(drafts(1), stream="worker", epoch="e", witness=True)
    assert len(list(journal.events())) == 1
    assert "head witness cannot be written" in caplog.text


# The tables refuse.


def copy_of(of: int, **changed: str) -> str:
    """A SELECT of an event's row, with some columns changed."""
    columns = (changed.get(column, f'"{column}"') for column in EVENT_COLUMNS)
    return f"SELECT {', '.join(columns)} FROM events WHERE position = {of}"


NEW_ID = "'another'"
REFUSED = {
    "update an event": "UPDATE events SET round = 7 WHERE position = 2",
    "delete an event": "DELETE FROM events WHERE position = 3",
    "append an event that is not the next of its stream": (
        f"INSERT INTO events {copy_of(3, position='4', event_id=NEW_ID, stream_version='5', previous_hash='hash')}"
    ),
    "append an event that breaks the chain": (
        f"INSERT INTO events {copy_of(3, position='4', event_id=NEW_ID, stream_version='4')}"
    ),
    "append an event at an earlier position": (
        f"INSERT INTO events {copy_of(3, position='0', event_id=NEW_ID, stream_version='4', previous_hash='hash')}"
    ),
    "update a blob": "UPDATE blobs SET digest = digest",
    "delete a blob": "DELETE FROM blobs",
    "update meta": "UPDATE meta SET value = 'x'",
    "delete meta": "DELETE FROM meta",
}


@pytest.mark.parametrize("attempt", REFUSED)
def test_the_tables_refuse_to(attempt: str, place: Place, drafts: Drafts) -> None:
    with opened(place) as journal:
        drafts_with_blobs = [Draft(type=EventType.MEASURED, round=1, payload={"n": n}, blobs=(b"b",)) for n in range(3)]
        journal.append(drafts_with_blobs, stream="worker", epoch="e")
    before = contents(place)
    with pytest.raises(place.refusals, match="append-only|does not continue"):
        place.run(REFUSED[attempt])
    assert contents(place) == before


def test_an_event_id_is_given_once(place: Place, drafts: Drafts) -> None:
    with opened(place) as journal:
        journal.append(drafts(2), stream="worker", epoch="e")
    with pytest.raises(place.refusals):
        place.run(f"INSERT INTO events {copy_of(2, position='3', stream_version='3', previous_hash='hash')}")


def contents(place: Place) -> list[list[tuple[object, ...]]]:
    return [sorted(place.run(f"SELECT * FROM {table}")) for table in ("events", "blobs", "meta")]


# Reading.


@pytest.fixture
def reader(place: Place, drafts: Drafts) -> Iterator[JournalReader]:
    """Positions 1 to 12, of streams b and a by turns, recorded at 10, 20, ... 120."""
    opened(place).close()
    ticks = iter(range(10, 130, 10))
    with opened(place, clock_ns=lambda: next(ticks)) as journal:
        for number in range(12):
            journal.append(drafts(1), stream="ba"[number % 2], epoch="e")
    with reading(place) as reader:
        yield reader


ASKED: list[tuple[dict[str, object], list[int]]] = [
    ({}, [*range(1, 13)]),
    ({"stream": "a"}, [2, 4, 6, 8, 10, 12]),
    ({"stream": "nobody"}, []),
    ({"after": 9}, [10, 11, 12]),
    ({"before": 4}, [1, 2, 3]),
    ({"after": 3, "before": 6}, [4, 5]),
    ({"limit": 2}, [1, 2]),
    ({"limit": 0}, []),
    ({"newest_first": True}, [*range(12, 0, -1)]),
    ({"newest_first": True, "limit": 2, "stream": "b"}, [11, 9]),
    ({"newest_first": True, "after": 9, "before": 12}, [11, 10]),
    ({"since_ns": 100}, [10, 11, 12]),
    ({"until_ns": 30}, [1, 2, 3]),
    ({"since_ns": 20, "until_ns": 40, "stream": "a"}, [2, 4]),
]


def test_events_are_found_by_what_is_asked(reader: JournalReader) -> None:
    for asked, expected in ASKED:
        assert [event.position for event in reader.events(**asked)] == expected, asked  # type: ignore[arg-type]
    assert reader.streams() == ("a", "b")
    assert reader.last_position() == 12


def test_pages_join_without_gap_or_repetition(place: Place, drafts: Drafts) -> None:
    with opened(place) as journal:
        journal.append(drafts(1203), stream="worker", epoch="e")
    with reading(place) as reader:
        for newest_first in (False, True):
            expected = [*range(1203, 0, -1)] if newest_first else [*range(1, 1204)]
            for limit in (None, 499, 500, 501, 1203, 5000):
                found = [event.position for event in reader.events(limit=limit, newest_first=newest_first)]
                assert found == expected[:limit]


def test_streams_are_sorted_by_their_bytes(place: Place, drafts: Drafts) -> None:
    names = ["b", "B", "a b", "ab", "a", "Z", "ä", "1"]
    with opened(place) as journal:
        for name in names:
            journal.append(drafts(1), stream=name, epoch="e")
    with reading(place) as reader:
        assert reader.streams() == tuple(sorted(names))


def test_an_empty_journal_has_no_streams_and_no_events(place: Place) -> None:
    opened(place).close()
    with reading(place) as reader:
        assert reader.streams() == ()
        assert list(reader.events()) == []
        assert reader.last_position() == 0
        assert reader.meta()["format"] == "residency.journal"


def test_a_reader_sees_what_is_appended_after_it_was_opened(place: Place, journal: Journal, drafts: Drafts) -> None:
    with reading(place) as reader:
        assert list(reader.events()) == []
        journal.append(drafts(2), stream="worker", epoch="e")
        assert len(list(reader.events())) == 2


def test_a_reader_cannot_write(reader: JournalReader) -> None:
    with pytest.raises(JournalError):
        reader.query("INSERT INTO meta VALUES ('a', 'b')")
    assert "a" not in reader.meta()


def test_a_missing_journal_cannot_be_read_and_is_not_made(place: Place) -> None:
    for _ in range(2):
        with pytest.raises(JournalError, match="does not exist") as caught:
            reading(place)
        assert caught.value.exit_code == 3


def test_a_closed_reader_says_so(reader: JournalReader) -> None:
    reader.close()
    reader.close()
    with pytest.raises(JournalError, match="is closed"):
        reader.streams()


def test_a_damaged_blob_is_not_handed_out(place: Place) -> None:
    with opened(place) as journal:
        journal.append([Draft(type=EventType.MEASURED, round=1, blobs=(b"content",))], stream="worker", epoch="e")
    place.lift(lambda: place.run("UPDATE blobs SET content = ?", (b"\x00",)))
    with reading(place) as reader, pytest.raises(JournalCorrupt, match="is damaged"):
        reader.blob(blob_digest(b"content"))
