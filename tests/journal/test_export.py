from __future__ import annotations

import hashlib
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from residency.errors import JournalCorrupt, JournalError, JournalNewer
from residency.journal.events import Draft, EventType
from residency.journal.export import export
from residency.journal.hashing import blob_digest
from residency.journal.head import read_head
from residency.journal.importing import import_lines
from residency.journal.reader import JournalReader
from residency.journal.schema import EVENT_COLUMNS
from residency.journal.store import Journal
from residency.journal.verify import Finding, FindingKind, verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PLACEMENT = b'{"components":{"vae":{"mode":"resident"}}}'
ODD = 'ü \x00 \u2028 " \\ \U0001f642'


@pytest.fixture
def written(path: Path) -> Path:
    """A journal with everything that a line can hold: two streams, odd text, blobs of both kinds, no values."""
    started = {"initial_placement": blob_digest(PLACEMENT), "note": ODD}
    plan = {"placement": blob_digest(PLACEMENT), "figures": [1.5, -0.0, 1e300, 2**53, None]}
    with Journal.open(path, clock_ns=lambda: 1_700_000_000_123_456_789) as journal:
        for stream in ("worker", ODD):
            (first,) = journal.append(
                [Draft(type=EventType.EPOCH_STARTED, round=0, payload=started, blobs=(PLACEMENT, b"\xff\x00"))],
                stream=stream,
                epoch="e",
                rank=3,
            )
            drafts = [
                Draft(
                    type=EventType.TRANSITION,
                    round=1,
                    payload=plan,
                    from_state="measuring",
                    to_state="planned",
                    trigger="plan",
                    causation=first.event_id,
                    blobs=(b"nobody names it",),
                ),
                Draft(type=EventType.SERVING, round=1),
            ]
            journal.append(drafts, stream=stream, epoch="e", rank=3, witness=True)
    return path


def exported(path: Path, **options: Any) -> bytes:
    out = io.BytesIO()
    with JournalReader.open(path) as reader:
        export(reader, out, **options)
    return out.getvalue()


def imported(content: bytes, path: Path, **options: Any) -> Path:
    with Journal.open(path) as journal:
        import_lines(content.splitlines(keepends=True), journal, **options)
    return path


def said(path: Path) -> tuple[Finding, ...]:
    with JournalReader.open(path) as reader:
        return verify(reader)


def changed(content: bytes, number: int, change: Callable[[dict[str, Any]], object], *, sign: bool = True) -> bytes:
    """Change one line of an export; sign: have the end agree with it, as a forger would."""
    lines = content.splitlines()
    line = json.loads(lines[number - 1])
    change(line)
    lines[number - 1] = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode()
    if sign and number < len(lines):
        end = json.loads(lines[-1])
        end["end"]["sha256"] = hashlib.sha256(b"".join(one + b"\n" for one in lines[:-1])).hexdigest()
        lines[-1] = json.dumps(end).encode()
    return b"".join(one + b"\n" for one in lines)


def test_an_imported_export_is_the_same_journal_and_its_export_the_same_bytes(written: Path, tmp_path: Path) -> None:
    content = exported(written)
    other = imported(content, tmp_path / "other" / "journal.db")
    assert exported(other) == content
    with JournalReader.open(written) as one, JournalReader.open(other) as two:
        assert list(one.events()) == list(two.events())
        assert dict(one.blobs()) == dict(two.blobs())
        assert one.meta() == two.meta()
    assert said(other) == ()
    assert read_head(written) == read_head(other) is not None


def test_an_imported_journal_is_continued_where_the_exported_one_ended(
    written: Path, tmp_path: Path, drafts: Callable[[int], list[Draft]]
) -> None:
    other = imported(exported(written), tmp_path / "other.db")
    with Journal.open(other) as journal:
        (event,) = journal.append(drafts(1), stream="worker", epoch="e2", witness=True)
    assert (event.position, event.stream_version) == (7, 4)
    assert said(other) == ()


def test_every_column_is_in_the_line_of_an_event_and_hashes_again(written: Path) -> None:
    # As somebody else would check it: with the standard library and the description of the format.
    lines = [json.loads(line) for line in exported(written).splitlines()]
    events = [line["event"] for line in lines if "event" in line]
    assert len(events) == 6
    previous = {event["stream"]: "00" * 32 for event in events}
    for event in events:
        assert tuple(event) == EVENT_COLUMNS
        assert event["previous_hash"] == previous[event["stream"]]
        parts = [b"residency.journal.event.1\x00"]
        for name in EVENT_COLUMNS[:-1]:
            value = event[name]
            if value is None:
                parts.append(b"n")
                continue
            kind = b"i" if isinstance(value, int) else b"b" if name in ("payload", "previous_hash") else b"t"
            text = bytes.fromhex(str(value)) if name == "previous_hash" else str(value).encode()
            parts += [kind, len(text).to_bytes(8, "big"), text]
        assert hashlib.sha256(b"".join(parts)).hexdigest() == event["hash"]
        previous[event["stream"]] = event["hash"]


def test_some_streams_are_exported_with_the_blobs_they_name_and_imported_as_a_part(
    written: Path, tmp_path: Path
) -> None:
    content = exported(written, streams=["worker"])
    lines = [json.loads(line) for line in content.splitlines()]
    assert lines[0]["header"]["streams"] == ["worker"]
    assert [line["blob"]["digest"] for line in lines if "blob" in line] == [blob_digest(PLACEMENT)]
    assert [line["event"]["position"] for line in lines if "event" in line] == [1, 2, 3]
    other = imported(content, tmp_path / "other.db")
    assert exported(other) == content
    assert [finding.kind for finding in said(other)] == [FindingKind.PARTIAL]


def test_an_empty_journal_is_exported_and_imported_too(path: Path, tmp_path: Path) -> None:
    Journal.open(path).close()
    content = exported(path)
    assert len(content.splitlines()) == 2
    assert exported(imported(content, tmp_path / "other.db")) == content


def test_a_damaged_payload_is_exported_as_it_is_and_imported_only_unchecked(
    written: Path, tmp_path: Path, tamper: Callable[..., None]
) -> None:
    tamper("UPDATE events SET payload = x'7bff' WHERE position = 2")
    content = exported(written)
    with pytest.raises(JournalCorrupt, match="position 2"):
        imported(content, tmp_path / "checked.db")
    other = imported(content, tmp_path / "unchecked.db", verify=False)
    assert exported(other) == content
    assert {finding.position for finding in said(other)} == {2}


def test_what_is_appended_during_an_export_is_left_out(written: Path, drafts: Callable[[int], list[Draft]]) -> None:
    before = exported(written)
    with Journal.open(written) as journal, JournalReader.open(written) as reader:
        out = io.BytesIO()
        plain = reader.blobs

        def appending() -> Any:
            journal.append(drafts(1), stream="worker", epoch="e")
            yield from plain()

        reader.blobs = appending  # type: ignore[method-assign]
        assert export(reader, out) == 6
    assert out.getvalue() == before


# Lines: 1 header, 2 to 4 blobs, 5 to 10 events, 11 end.
WRONG: dict[str, tuple[int, Callable[[dict[str, Any]], object], str]] = {
    "a payload": (6, lambda line: line["event"].update(payload="{}"), "line 6: position 2, .* its hash differs"),
    "a hash": (6, lambda line: line["event"].update(hash="00" * 32), "line 6: .* its hash differs"),
    "a link": (6, lambda line: line["event"].update(previous_hash="00" * 32), "line 6: .* does not follow"),
    "a version": (6, lambda line: line["event"].update(stream_version=1), "line 6: .* event 1 .* comes after event 1"),
    "a position": (6, lambda line: line["event"].update(position=1), "line 6: position 1 comes after 1"),
    "a column of another type": (6, lambda line: line["event"].update(round="1"), "line 6: is no line of an export"),
    "a column too many": (6, lambda line: line["event"].update(more=1), "line 6: .*unknown field"),
    "a column too few": (6, lambda line: line["event"].pop("rank"), "line 6: .*missing required field"),
    "a hash that is none": (6, lambda line: line["event"].update(hash="zz"), "line 6: hash 'zz' is no SHA-256"),
    "a blob's bytes": (2, lambda line: line["blob"].update(text="other", base64=None), "line 2: blob .* is not what"),
    "a blob without bytes": (2, lambda line: line["blob"].update(text=None, base64=None), "line 2: .* either"),
    "a blob's name": (3, lambda line: line["blob"].update(digest="0" * 64), "line 3: blob 0+ comes after"),
    "two things": (6, lambda line: line.update(end=None, blob={"digest": "", "text": ""}), "line 6: holds 2 things"),
    "the count of events": (11, lambda line: line["end"].update(events=7), "line 11: the export had 7 events"),
    "the count of blobs": (11, lambda line: line["end"].update(blobs=7), "line 11: the export had 7 blobs"),
    "the last position": (11, lambda line: line["end"].update(last_position=9), "position 6.* 7 to 9 were written"),
    "another format": (1, lambda line: line["header"].update(format="x"), "line 1: is of format 'x'"),
    "no journal": (1, lambda line: line["header"].update(meta={}), "line 1: the header names no journal_id"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_line_that_is_wrong_is_named_with_what_is_wrong_and_nothing_is_written(
    what: str, written: Path, tmp_path: Path
) -> None:
    number, change, expected = WRONG[what]
    content = changed(exported(written), number, change)
    with Journal.open(tmp_path / "other.db") as journal:
        with pytest.raises(JournalCorrupt, match=expected) as caught:
            import_lines(content.splitlines(), journal)
        assert caught.value.exit_code == 5
        assert list(journal.events()) == []
        # As empty as before, and with its own id.
        import_lines(exported(written).splitlines(), journal)
    assert said(tmp_path / "other.db") == ()


@pytest.mark.parametrize("number", range(1, 12))
def test_a_missing_and_a_repeated_line_are_noticed(number: int, written: Path, tmp_path: Path) -> None:
    lines = exported(written).splitlines()
    for wrong in ([*lines[: number - 1], *lines[number:]], [*lines[:number], *lines[number - 1 :]]):
        with Journal.open(tmp_path / "other.db") as journal, pytest.raises(JournalCorrupt, match=r"line \d+"):
            import_lines(wrong, journal)


def test_every_changed_byte_of_an_export_is_noticed(written: Path, tmp_path: Path) -> None:
    content = exported(written)
    with Journal.open(tmp_path / "other.db") as journal:
        for index in range(0, len(content), 31):
            wrong = bytearray(content)
            wrong[index] ^= 1
            with pytest.raises((JournalCorrupt, JournalNewer)):
                import_lines(bytes(wrong).splitlines(keepends=True), journal)
        assert import_lines(content.splitlines(), journal) == 6


def test_swapped_events_are_noticed(written: Path, tmp_path: Path) -> None:
    lines = exported(written).splitlines()
    lines[6], lines[7] = lines[7], lines[6]
    with (
        Journal.open(tmp_path / "other.db") as journal,
        pytest.raises(JournalCorrupt, match="line 8: position 3 comes"),
    ):
        import_lines(lines, journal)


def test_a_blob_that_an_event_needs_must_be_there(written: Path, tmp_path: Path) -> None:
    lines = exported(written).splitlines()
    kept = [line for line in lines if blob_digest(PLACEMENT).encode() not in line or b'"blob"' not in line]
    with Journal.open(tmp_path / "other.db") as journal, pytest.raises(JournalCorrupt, match=r"line 4: .* is missing"):
        import_lines(kept, journal)


@pytest.mark.parametrize("field", ["version", "journal_format"])
def test_an_export_of_a_newer_program_is_refused_as_newer(field: str, written: Path, tmp_path: Path) -> None:
    content = changed(exported(written), 1, lambda line: line["header"].update({field: 9}))
    with Journal.open(tmp_path / "other.db") as journal, pytest.raises(JournalNewer, match="format 9 is newer"):
        import_lines(content.splitlines(), journal)


def test_a_journal_that_has_events_is_not_imported_into(written: Path) -> None:
    content = exported(written)
    with Journal.open(written) as journal, pytest.raises(JournalError, match="is not empty"):
        import_lines(content.splitlines(), journal)
    assert exported(written) == content
