from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from residency.errors import JournalError
from residency.journal.events import Draft, EventType
from residency.journal.hashing import blob_digest
from residency.journal.reader import JournalReader
from residency.journal.schema import TRIGGERS
from residency.journal.slots import read_slots
from residency.journal.sqlite import connect
from residency.journal.store import Journal
from residency.journal.verify import Finding, FindingKind, verify

if TYPE_CHECKING:
    from pathlib import Path

Write = Callable[..., None]
Tamper = Callable[..., None]
Findings = Callable[[], tuple[Finding, ...]]


def kinds(findings: tuple[Finding, ...]) -> set[FindingKind]:
    return {finding.kind for finding in findings}


def test_an_untouched_journal_has_nothing_to_say(path: Path, write: Write) -> None:
    write(5, stream="a", witness=True)
    write(5, stream="b", witness=True)
    with JournalReader.open(path) as reader:
        assert verify(reader) == ()


@pytest.mark.parametrize(
    "witnessed",
    [
        Draft(type=EventType.EFFECT_INTENT, round=1),
        Draft(type=EventType.TRANSITION, round=1, to_state="committed"),
        Draft(type=EventType.TRANSITION, round=1, to_state="rolled-back"),
    ],
    ids=lambda draft: draft.to_state or draft.type.value,
)
def test_a_missing_witness_is_a_note(witnessed: Draft, path: Path, write: Write) -> None:
    write(3)
    with Journal.open(path) as journal:
        journal.append([witnessed], stream="worker", epoch="e")
    with JournalReader.open(path) as reader:
        (note,) = verify(reader)
    assert note.kind is FindingKind.HEAD_MISSING and note.is_note


def test_a_journal_that_never_had_a_witness_misses_none(path: Path, write: Write) -> None:
    write(3)
    with JournalReader.open(path) as reader:
        assert verify(reader) == ()


def test_a_witness_that_lags_is_no_finding(write: Write, findings: Findings) -> None:
    write(3, witness=True)
    write(3)
    assert findings() == ()


def test_a_changed_event_is_named_by_position_and_stream(write: Write, tamper: Tamper, findings: Findings) -> None:
    write(4)
    tamper("UPDATE events SET payload = x'7b7d' WHERE position = 3")
    (finding,) = findings()
    assert (finding.position, finding.stream) == (3, "worker")
    assert "not what was written" in finding.text


def test_a_removed_event_is_a_gap_in_positions_versions_and_chain(
    write: Write, tamper: Tamper, findings: Findings
) -> None:
    write(4)
    tamper("DELETE FROM events WHERE position = 2")
    assert kinds(findings()) == {FindingKind.GAP, FindingKind.VERSION, FindingKind.CHAIN}


def test_a_tail_cut_off_is_noticed_by_the_sequence_and_by_the_witness(
    write: Write, tamper: Tamper, findings: Findings
) -> None:
    write(4, witness=True)
    tamper("DELETE FROM events WHERE position >= 3")
    assert kinds(findings()) == {FindingKind.GAP, FindingKind.HEAD}
    tamper("UPDATE sqlite_sequence SET seq = 2 WHERE name = 'events'")
    (finding,) = findings()
    assert finding.kind is FindingKind.HEAD
    assert "lost its tail: the head witness saw event 4" in finding.text


def test_a_journal_that_was_written_anew_is_noticed_by_the_witness(
    path: Path, write: Write, findings: Findings
) -> None:
    write(4, witness=True)
    head = path.with_name("journal.db.head").read_bytes()
    path.unlink()
    write(4)
    path.with_name("journal.db.head").write_bytes(head)
    (finding,) = findings()
    assert finding.kind is FindingKind.HEAD
    assert "the head witness is of journal" in finding.text


def test_a_contradiction_outlives_the_next_start(
    path: Path, write: Write, tamper: Tamper, findings: Findings, caplog: pytest.LogCaptureFixture
) -> None:
    write(4, witness=True)
    tamper("DELETE FROM events WHERE position >= 3")
    tamper("UPDATE sqlite_sequence SET seq = 2 WHERE name = 'events'")
    write(4, witness=True)
    assert "lost its tail" in caplog.text
    (finding,) = findings()
    assert finding.kind is FindingKind.HEAD
    assert "an earlier head witness contradicted this journal" in finding.text


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"journal_id": 3}'])
def test_a_witness_that_cannot_be_read_is_a_finding(
    content: bytes, path: Path, write: Write, findings: Findings
) -> None:
    write(2, witness=True)
    path.with_name("journal.db.head").write_bytes(content)
    (finding,) = findings()
    assert finding.kind is FindingKind.HEAD and "cannot be read" in finding.text


def test_a_forged_witness_is_noticed(path: Path, write: Write, findings: Findings) -> None:
    write(2, witness=True)
    file = path.with_name("journal.db.head")
    slot, _ = read_slots(file.read_bytes())
    assert slot is not None
    head = json.loads(bytes(slot.content))
    head["streams"]["worker"]["hash"] = "00" * 32
    file.write_text(json.dumps(head))
    (finding,) = findings()
    assert "not the one that the head witness saw" in finding.text


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_a_missing_trigger_is_a_finding(trigger: str, path: Path, write: Write, findings: Findings) -> None:
    write(1)
    connection = connect(path, mode="rw", wait_s=1)
    connection.execute(f"DROP TRIGGER {trigger}")
    connection.close()
    (finding,) = findings()
    assert finding.kind is FindingKind.SCHEMA and finding.text == f"trigger {trigger} is missing"


def test_a_weakened_or_foreign_trigger_is_a_finding(path: Path, write: Write, findings: Findings) -> None:
    write(1)
    connection = connect(path, mode="rw", wait_s=1)
    connection.execute("DROP TRIGGER events_no_delete")
    connection.execute("CREATE TRIGGER events_no_delete BEFORE DELETE ON events WHEN 0 BEGIN SELECT 1; END")
    connection.execute("CREATE TRIGGER other AFTER INSERT ON meta BEGIN SELECT 1; END")
    connection.close()
    assert {finding.text for finding in findings()} == {
        "trigger events_no_delete is not as it was made",
        "trigger other is not one of ours",
    }


def test_a_damaged_blob_and_a_missing_one_are_findings(path: Path, tamper: Tamper, findings: Findings) -> None:
    placements = [b"initial", b"planned"]
    first, second = map(blob_digest, placements)
    drafts = [
        Draft(
            type=EventType.EPOCH_STARTED,
            round=0,
            payload={"initial_placement": first},
            blobs=(placements[0],),
        ),
        Draft(
            type=EventType.TRANSITION, round=1, trigger="plan", payload={"placement": second}, blobs=(placements[1],)
        ),
    ]
    with Journal.open(path) as journal:
        journal.append(drafts, stream="worker", epoch="e")
    assert findings() == ()
    tamper("UPDATE blobs SET content = x'00' WHERE digest = ?", (first,))
    tamper("DELETE FROM blobs WHERE digest = ?", (second,))
    assert {finding.text for finding in findings()} == {f"blob {first} is damaged", f"blob {second} is missing"}


def test_a_second_outcome_and_one_without_intent_are_findings(path: Path, findings: Findings) -> None:
    with Journal.open(path) as journal:
        (intent,) = journal.append([Draft(type=EventType.EFFECT_INTENT, round=1)], stream="worker", epoch="e")
        outcomes = [
            Draft(type=EventType.EFFECT_OUTCOME, round=1, causation=cause)
            for cause in (intent.event_id, intent.event_id, "nobody", None)
        ]
        journal.append(outcomes, stream="worker", epoch="e")
    assert [(finding.kind, finding.position) for finding in findings()] == [
        (FindingKind.OUTCOME, 3),
        (FindingKind.OUTCOME, 4),
        (FindingKind.OUTCOME, 5),
    ]


@pytest.mark.parametrize("damaged", [b"[]", b"{", b"\xff"])
def test_a_payload_that_is_no_object_is_a_finding(
    damaged: bytes, write: Write, tamper: Tamper, findings: Findings
) -> None:
    write(2)
    tamper("UPDATE events SET payload = ? WHERE position = 1", (damaged,))
    assert kinds(findings()) == {FindingKind.CHAIN, FindingKind.PAYLOAD}


def test_a_flipped_byte_of_a_payload_is_found_where_it_is(path: Path, write: Write, findings: Findings) -> None:
    write(50)
    content = bytearray(path.read_bytes())
    content[content.index(b'{"number":37}') + 10] ^= 1
    path.write_bytes(content)
    (finding,) = findings()
    assert (finding.kind, finding.position) == (FindingKind.CHAIN, 38)


def test_no_flipped_bit_changes_what_is_read_without_being_found(path: Path, write: Write) -> None:
    write(30, witness=True)
    whole = path.read_bytes()
    with JournalReader.open(path) as reader:
        expected = list(reader.events())
    seed = random.Random(20_261_130)
    found = 0
    for _ in range(150):
        content = bytearray(whole)
        content[seed.randrange(len(content))] ^= 1 << seed.randrange(8)
        path.write_bytes(content)
        try:
            with JournalReader.open(path) as reader:
                said = [finding for finding in verify(reader) if not finding.is_note]
                same = not said and list(reader.events()) == expected
        except JournalError:
            said, same = [], False
            found += 1
            continue
        assert said or same
        found += bool(said)
    # Most bits are of rows and indexes; the rest is free space.
    assert found > 30
