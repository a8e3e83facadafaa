"""What verify finds in every journal, in a file and on a server alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from residency.journal.events import Draft, EventType
from residency.journal.findings import Finding, FindingKind
from residency.journal.hashing import blob_digest
from residency.journal.reader import JournalReader
from residency.journal.schema import EVENT_COLUMNS
from residency.journal.slots import read_slots
from residency.journal.verify import verify
from tests.journal.places import OnServer, findings, opened, reading, witness_aside

if TYPE_CHECKING:
    from tests.journal.places import Place, Value

Write = Callable[..., None]
Tamper = Callable[..., None]


@pytest.fixture
def write(place: Place, drafts: Callable[[int], list[Draft]]) -> Write:
    """Write events one by one and close the journal."""

    def run(count: int, *, stream: str = "worker", witness: bool = False) -> None:
        with opened(place) as journal:
            for draft in drafts(count):
                journal.append([draft], stream=stream, epoch="e", witness=witness)

    return run


@pytest.fixture
def tamper(place: Place) -> Tamper:
    """Change the tables behind the journal's back: triggers off, statement, triggers as they were."""

    def run(sql: str, *parameters: Value) -> None:
        place.lift(lambda: place.run(sql, parameters))

    return run


def kinds(found: tuple[Finding, ...]) -> set[FindingKind]:
    return {finding.kind for finding in found}


def test_an_untouched_journal_has_nothing_to_say(place: Place, write: Write) -> None:
    write(5, stream="a", witness=True)
    write(5, stream="b", witness=True)
    write(2, stream="a")
    with reading(place) as reader:
        assert verify(reader) == ()


def test_a_missing_witness_is_a_note_where_witnesses_are_kept(place: Place) -> None:
    with opened(place) as journal:
        journal.append([Draft(type=EventType.EFFECT_INTENT, round=1)], stream="worker", epoch="e")
    with reading(place) as reader:
        (note,) = verify(reader)
    assert note.kind is FindingKind.HEAD_MISSING and note.is_note
    if isinstance(place, OnServer):
        with JournalReader.open(place.url) as reader:
            assert verify(reader) == ()


CHANGED = {
    "position": 9,
    "stream": "another",
    "stream_version": 9,
    "event_id": "another",
    "epoch": "another",
    "round": 7,
    "rank": 7,
    "type": "serving",
    "schema_version": 7,
    "from_state": "measuring",
    "to_state": "planned",
    "trigger": "plan",
    "recorded_at": 7,
    "boot_id": "another",
    "pid": 1,
    "causation": "another",
    "payload": b'{"number":7}',
    "previous_hash": bytes(32),
    "hash": bytes(32),
}


def test_a_change_of_any_column_breaks_the_chain(place: Place, write: Write, tamper: Tamper) -> None:
    write(4)
    for column in EVENT_COLUMNS:
        ((before,),) = place.run(f'SELECT "{column}" FROM events WHERE position = 2')
        tamper(f'UPDATE events SET "{column}" = ? WHERE position = 2', CHANGED[column])
        assert FindingKind.CHAIN in kinds(findings(place)), column
        changed_position = 9 if column == "position" else 2
        tamper(f'UPDATE events SET "{column}" = ? WHERE position = {changed_position}', before)
        assert findings(place) == ()


def test_a_removed_event_is_a_gap_in_positions_versions_and_chain(place: Place, write: Write, tamper: Tamper) -> None:
    write(4)
    tamper("DELETE FROM events WHERE position = 2")
    assert kinds(findings(place)) == {FindingKind.GAP, FindingKind.VERSION, FindingKind.CHAIN}


def test_a_tail_cut_off_is_noticed_by_the_witness(place: Place, write: Write, tamper: Tamper) -> None:
    write(4, witness=True)
    tamper("DELETE FROM events WHERE position >= 3")
    found = findings(place)
    assert FindingKind.HEAD in kinds(found)
    assert any("lost its tail: the head witness saw event 4" in finding.text for finding in found)


def test_a_journal_that_was_made_anew_is_noticed_by_the_witness(place: Place, write: Write) -> None:
    write(4, witness=True)
    content = place.head.read_bytes()
    place.move()
    write(4)
    for aside in witness_aside(place):
        aside.unlink()
    place.head.write_bytes(content)
    (finding,) = findings(place)
    assert finding.kind is FindingKind.HEAD
    assert "the head witness is of journal" in finding.text


def test_a_contradiction_outlives_the_next_start(
    place: Place, write: Write, tamper: Tamper, caplog: pytest.LogCaptureFixture
) -> None:
    write(4, witness=True)
    tamper("DELETE FROM events WHERE position >= 3")
    write(4, witness=True)
    assert "lost its tail" in caplog.text
    assert len(witness_aside(place)) == 1
    assert any("an earlier head witness contradicted this journal" in finding.text for finding in findings(place))


def test_a_forged_witness_and_one_that_cannot_be_read_are_findings(place: Place, write: Write) -> None:
    write(2, witness=True)
    slot, _ = read_slots(place.head.read_bytes())
    assert slot is not None
    head = json.loads(bytes(slot.content))
    head["streams"]["worker"]["hash"] = "00" * 32
    place.head.write_text(json.dumps(head))
    (finding,) = findings(place)
    assert "not the one that the head witness saw" in finding.text
    place.head.write_bytes(b"{")
    (finding,) = findings(place)
    assert finding.kind is FindingKind.HEAD and "cannot be read" in finding.text


def test_every_missing_trigger_is_a_finding(place: Place, write: Write) -> None:
    write(1)
    if isinstance(place, OnServer):
        found = place.run(
            "SELECT t.tgname, 'DROP TRIGGER ' || t.tgname || ' ON ' || c.relname FROM pg_trigger t "
            "JOIN pg_class c ON c.oid = t.tgrelid WHERE c.relnamespace = ?::regnamespace AND NOT t.tgisinternal",
            (place.schema,),
        )
    else:
        found = place.run("SELECT name, 'DROP TRIGGER ' || name FROM sqlite_schema WHERE type = 'trigger'")
    assert len(found) >= 10
    gone = set()
    for name, drop in found:
        place.run(drop)
        gone.add(f"trigger {name} is missing")
        assert {finding.text for finding in findings(place)} == gone


def test_a_trigger_of_somebody_else_is_a_finding(place: Place, write: Write) -> None:
    write(1)
    if isinstance(place, OnServer):
        place.run("CREATE TRIGGER other AFTER INSERT ON meta FOR EACH ROW EXECUTE FUNCTION refuse_change()")
    else:
        place.run("CREATE TRIGGER other AFTER INSERT ON meta BEGIN SELECT 1; END")
    (finding,) = findings(place)
    assert finding.kind is FindingKind.SCHEMA and finding.text == "trigger other is not one of ours"


def test_a_changed_meta_is_a_finding(place: Place, write: Write, tamper: Tamper) -> None:
    write(1)
    tamper("UPDATE meta SET value = 'x' WHERE key = 'created_at_ns'")
    (finding,) = findings(place)
    assert finding.kind is FindingKind.META


def test_a_damaged_blob_and_a_missing_one_are_findings(place: Place, tamper: Tamper) -> None:
    placements = [b"initial", b"planned"]
    first, second = map(blob_digest, placements)
    drafts = [
        Draft(type=EventType.EPOCH_STARTED, round=0, payload={"initial_placement": first}, blobs=(placements[0],)),
        Draft(
            type=EventType.TRANSITION, round=1, trigger="plan", payload={"placement": second}, blobs=(placements[1],)
        ),
    ]
    with opened(place) as journal:
        journal.append(drafts, stream="worker", epoch="e")
    assert findings(place) == ()
    tamper("UPDATE blobs SET content = ? WHERE digest = ?", b"\x00", first)
    tamper("DELETE FROM blobs WHERE digest = ?", second)
    assert {finding.text for finding in findings(place)} == {f"blob {first} is damaged", f"blob {second} is missing"}


@pytest.mark.parametrize("damaged", [b"[]", b"{", b"\xff"])
def test_a_payload_that_is_no_object_is_a_finding(damaged: bytes, place: Place, write: Write, tamper: Tamper) -> None:
    write(2)
    tamper("UPDATE events SET payload = ? WHERE position = 1", damaged)
    assert {FindingKind.CHAIN, FindingKind.PAYLOAD} <= kinds(findings(place))
