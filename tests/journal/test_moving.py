"""A journal on a server and the verbs that move journals: what works, and what to do where it does not."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from residency.errors import JournalError
from residency.journal.backup import backup
from residency.journal.events import Draft, EventType
from residency.journal.export import export
from residency.journal.hashing import blob_digest
from residency.journal.importing import import_lines
from residency.journal.prune import prune
from residency.journal.store import Journal
from tests.journal.places import Place, findings, opened, reading

if TYPE_CHECKING:
    from pathlib import Path


def fill(place: Place) -> None:
    """Two lives of each of two workers."""
    with opened(place) as journal:
        for number in range(4):
            blob = b"%d" % number
            started = {"fingerprint_digest": "f", "initial_placement": blob_digest(blob)}
            life = [
                Draft(type=EventType.EPOCH_STARTED, round=0, payload=started, blobs=(blob,)),
                Draft(type=EventType.STOPPED, round=0, payload={"reason": "detach", "signal": None}),
            ]
            journal.append(life, stream="ab"[number % 2], epoch=f"e{number}", witness=True)


def exported(place: Place) -> bytes:
    out = io.BytesIO()
    with reading(place) as reader:
        export(reader, out)
    return out.getvalue()


def test_an_export_makes_the_same_journal_in_a_file(place: Place, tmp_path: Path) -> None:
    fill(place)
    content = exported(place)
    path = tmp_path / "imported.db"
    with Journal.open(path) as journal:
        assert import_lines(io.BytesIO(content), journal) == 8
        out = io.BytesIO()
        export(journal._store.reader(), out)
    assert out.getvalue() == content


def test_a_copy_is_made_of_a_file_and_a_server_says_what_to_do_instead(place: Place, tmp_path: Path) -> None:
    fill(place)
    content = exported(place)
    if place.kind == "sqlite":
        assert backup(place.url, tmp_path / "copy.db").last_position == 8
    else:
        with pytest.raises(JournalError, match="pg_dump -n") as caught:
            backup(place.url, tmp_path / "copy.db")
        assert caught.value.exit_code == 3
        assert not (tmp_path / "copy.db").exists()
    assert exported(place) == content


def test_a_journal_with_events_is_pruned_and_nothing_is_imported_into_it(place: Place) -> None:
    fill(place)
    content = exported(place)
    with opened(place) as journal:
        planned = prune(journal, keep_epochs=1, now_ns=2 * 10**18, dry_run=True)
        assert [one.num_epochs for one in planned] == [1, 1]
        with pytest.raises(JournalError, match="is not empty"):
            import_lines(io.BytesIO(content), journal)
        assert exported(place) == content
        removed = prune(journal, keep_epochs=1, now_ns=2 * 10**18)
    assert [(one.num_epochs, one.num_blobs) for one in removed] == [(1, 1), (1, 1)]
    assert findings(place) == ()
