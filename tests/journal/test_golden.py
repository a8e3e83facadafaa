"""Journals that earlier programs wrote: read as they were meant, exported as they were, and continued."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from residency.errors import JournalCorrupt, JournalNewer
from residency.journal import insert
from residency.journal.events import Draft, EventType, payload
from residency.journal.export import export
from residency.journal.fold import fold, fold_stream
from residency.journal.importing import import_lines
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from residency.journal.upcast import UPCASTERS
from residency.journal.verify import verify
from residency.rehearsal import rehearse

if TYPE_CHECKING:
    from collections.abc import Callable

JOURNALS = Path(__file__).parents[1] / "journals"
VERSIONS = sorted(path.name for path in JOURNALS.glob("v*"))

# What the next start decides: of every stream of a journal, by the stream's name.
DECISIONS = {
    "cleared": "calibrate",
    "committed": "restore",
    "controlled": "restore",
    "gated": "calibrate",
    "kept": "restore",
    "killed-applied": "replan",
    "killed-in-mid-move": "replan",
    "killed-measuring": "calibrate",
    "killed-planned": "replan",
    "killed-validating": "replan",
    "pinned": "calibrate",
    "poisoned": "replan",
    "pruned": "calibrate",
    "quarantined": "quarantined",
    "recovered": "restore",
    "rollback-failed": "replan",
    "rolled-back": "calibrate",
    "terminated": "calibrate",
    "together.rank0": "restore",
    "vanished": "restore",
}


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest) -> Path:
    """The folder of one journal."""
    return JOURNALS / str(request.param)


@pytest.fixture
def unpacked(golden: Path, path: Path) -> Path:
    """The journal's file with its witness."""
    path.write_bytes(gzip.decompress((golden / "journal.db.gz").read_bytes()))
    shutil.copy(golden / "journal.db.head", path.with_name("journal.db.head"))
    return path


@pytest.fixture(scope="module")
def folded() -> Callable[[JournalReader], str]:
    """What wrote the fold beside the journals."""
    spec = spec_from_file_location("write_journals", JOURNALS / "fold.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["write_journals"] = module
    spec.loader.exec_module(module)
    found: Callable[[JournalReader], str] = module.folded
    return found


def test_there_is_a_journal_of_every_format() -> None:
    assert VERSIONS == ["v1"]


def test_a_journal_of_an_earlier_program_is_whole(unpacked: Path) -> None:
    with JournalReader.open(unpacked) as reader:
        assert verify(reader) == ()


def test_a_journal_of_an_earlier_program_folds_to_what_it_meant(
    golden: Path, unpacked: Path, folded: Callable[[JournalReader], str]
) -> None:
    with JournalReader.open(unpacked) as reader:
        found = folded(reader)
    assert json.loads(found) == json.loads((golden / "fold.json").read_bytes())


def test_a_start_on_a_journal_of_an_earlier_program_decides_as_that_would_have(unpacked: Path) -> None:
    decided = {}
    with JournalReader.open(unpacked) as reader:
        for stream in reader.streams():
            events = tuple(reader.events(stream))
            last = events[-1]
            told = rehearse(events, stream, boot_id=last.boot_id, now_ns=last.recorded_at + 1, pinned_by=None)
            decided[stream] = told["decision"]["kind"]
    assert decided == DECISIONS


def test_an_export_of_an_earlier_program_is_what_this_one_exports_and_imports(
    golden: Path, unpacked: Path, tmp_path: Path
) -> None:
    expected = gzip.decompress((golden / "export.jsonl.gz").read_bytes())
    other = tmp_path / "other.db"
    with Journal.open(other) as journal:
        import_lines(expected.splitlines(), journal)
    for path in (unpacked, other):
        out = io.BytesIO()
        with JournalReader.open(path) as reader:
            export(reader, out)
        assert out.getvalue() == expected
    with JournalReader.open(unpacked) as one, JournalReader.open(other) as two:
        assert fold(one.events()) == fold(two.events())


def test_a_journal_of_an_earlier_program_is_continued(unpacked: Path, drafts: Callable[[int], list[Draft]]) -> None:
    with JournalReader.open(unpacked) as reader:
        before = list(reader.events())
    with Journal.open(unpacked) as journal:
        assert journal.set_aside is None and not journal.created
        (event,) = journal.append(drafts(1), stream="committed", epoch="e", witness=True)
    with JournalReader.open(unpacked) as reader:
        assert list(reader.events()) == [*before, event]
        assert verify(reader) == ()


def test_every_type_of_event_is_in_the_newest_journal(path: Path) -> None:
    path.write_bytes(gzip.decompress((JOURNALS / VERSIONS[-1] / "journal.db.gz").read_bytes()))
    with JournalReader.open(path) as reader:
        assert {event.type for event in reader.events()} == {kind.value for kind in EventType}


# Payloads of other versions.


def _renamed(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "placement": content["where"]}


@pytest.fixture
def of_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Write a journal as a program would whose payloads are of that version."""

    def write(version: int) -> Path:
        monkeypatch.setattr(insert, "SCHEMA_VERSION", version)
        with Journal.open(path) as journal:
            drafts = [
                Draft(type=EventType.EPOCH_STARTED, round=0, payload={"initial_placement": "p"}),
                Draft(type=EventType.SERVING, round=0, payload={"where": "p", "decision": "gated"}),
            ]
            journal.append(drafts, stream="worker", epoch="e")
        monkeypatch.undo()
        return path

    return write


def test_an_older_payload_is_read_as_one_of_today_and_stays_as_it_was_written(
    of_version: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_version(0)
    before = path.read_bytes()
    monkeypatch.setitem(UPCASTERS, ("serving", 0), _renamed)
    with JournalReader.open(path) as reader:
        events = list(reader.events())
        (epoch,) = fold_stream(events, "worker").epochs
        assert epoch.serving == {"where": "p", "placement": "p", "decision": "gated"}
        # A type without a step means the same in both.
        assert epoch.started == {"initial_placement": "p"}
        assert [event.schema_version for event in events] == [0, 0]
        assert b"placement" not in events[1].payload
        assert verify(reader) == ()
    assert path.read_bytes() == before


def test_an_older_payload_that_a_step_cannot_read_is_an_error_that_names_it(
    of_version: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_version(0)
    monkeypatch.setitem(UPCASTERS, ("epoch.started", 0), _renamed)
    with JournalReader.open(path) as reader, pytest.raises(JournalCorrupt, match=r"event 1: a payload of version 0"):
        fold(reader.events())


def test_a_payload_of_a_newer_program_is_not_guessed_at(of_version: Callable[[int], Path]) -> None:
    with JournalReader.open(of_version(2)) as reader:
        with pytest.raises(JournalNewer, match="format 2 is newer than this program's 1") as caught:
            payload(next(reader.events()))
        assert caught.value.exit_code == 4
        assert verify(reader) == ()
