"""Imports into a journal on a server, and prunes of one: the same as with a file, by the owner of its tables alone."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest

from residency.errors import JournalError
from residency.journal.events import Draft, EventType
from residency.journal.export import export
from residency.journal.importing import import_lines
from residency.journal.pg_schema import grants
from residency.journal.prune import prune
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from tests.journal.places import OnServer, findings, opened, reading, witness_aside
from tests.journal.test_prune import STREAM, Past

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ONE = [Draft(type=EventType.MEASURED, round=1)]


@pytest.fixture
def place(database: Any, tmp_path: Path) -> Iterator[OnServer]:
    made = OnServer(database, tmp_path)
    yield made
    made.close()


@pytest.fixture
def past(path: Path) -> Past:
    """Six lives in a file, of which a prune removes three."""
    made = Past(path)
    made.live("commit p", "serve p", "stop")
    for _ in range(5):
        made.live("restore p", "serve p", "stop")
    return made


def exported(source: str | Path, *, streams: tuple[str, ...] | None = None) -> bytes:
    out = io.BytesIO()
    with JournalReader.open(source) as reader:
        export(reader, out, streams=streams)
    return out.getvalue()


def imported(place: OnServer, past: Past) -> None:
    """Make the server's journal the one in the file."""
    with opened(place) as journal:
        import_lines(exported(past.path).splitlines(), journal)


def removed(journal: Journal, past: Past) -> Any:
    return prune(journal, keep_epochs=2, now_ns=past.now_ns)


def test_a_journal_is_moved_from_a_file_to_a_server_and_goes_on_there(place: OnServer, past: Past) -> None:
    # With a hole in it, and numbers that no trigger would take.
    past.prune()
    imported(place, past)

    assert exported(place.url) == exported(past.path)
    assert findings(place) == ()
    with opened(place) as journal, JournalReader.open(past.path) as file:
        last = file.last_position()
        (event,) = journal.append(ONE, stream=STREAM, epoch="e", witness=True)
        assert event.position == last + 1
    assert (findings(place), witness_aside(place)) == ((), [])
    with pytest.raises(place.refusals, match="append-only"):
        place.run("DELETE FROM events")


def test_an_import_is_whole_or_not_there(place: OnServer, past: Past) -> None:
    lines = exported(past.path).splitlines()
    with opened(place) as journal, pytest.raises(JournalError, match="cut short"):
        import_lines(lines[:-1], journal)

    assert place.run("SELECT count(*) FROM events") == [(0,)]
    assert findings(place) == ()
    with opened(place) as journal:
        journal.append(ONE, stream=STREAM, epoch="e")
        with pytest.raises(JournalError, match="not empty"):
            import_lines(lines, journal)


def test_an_export_whose_next_number_a_server_would_give_twice_is_refused(place: OnServer, past: Past) -> None:
    other = Past(past.path, stream="other")
    other.live("commit q", "serve q", "stop")
    some = exported(past.path, streams=(STREAM,)).splitlines()
    with opened(place) as journal, pytest.raises(JournalError, match=r"position \d+ was the last .* file"):
        import_lines(some, journal)

    assert place.run("SELECT count(*) FROM events") == [(0,)]


def test_a_prune_removes_from_a_server_what_it_removes_from_a_file(place: OnServer, past: Past) -> None:
    imported(place, past)
    with opened(place, clock_ns=lambda: past.now_ns) as journal:
        on_server = removed(journal, past)
        assert removed(journal, past) == ()
    assert on_server == past.prune()
    assert on_server[0].num_epochs == 3

    with reading(place) as server, JournalReader.open(past.path) as file:
        # The last one says what was removed, under an id and by a process of its own.
        kept, wanted = list(server.events())[:-1], list(file.events())[:-1]
        assert kept == wanted
        assert list(server.blobs()) == list(file.blobs())
    assert findings(place) == ()
    with pytest.raises(place.refusals, match="append-only"):
        place.run("DELETE FROM events")


def test_a_prune_that_fails_leaves_everything(place: OnServer, past: Past) -> None:
    imported(place, past)
    before = exported(place.url)
    with opened(place) as journal, pytest.raises(ZeroDivisionError), journal.rewriting() as rewrite, rewrite.lifted():
        assert rewrite.delete_events(STREAM, first_version=1, last_version=3) == 3
        _ = 1 / 0

    assert exported(place.url) == before
    assert findings(place) == ()


def test_a_role_that_does_not_own_the_tables_is_told_who_does(database: Any, place: OnServer, past: Past) -> None:
    imported(place, past)
    before = exported(place.url)
    name = f"{database.role}_worker"
    database.admin.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'x'")
    try:
        for statement in grants(place.schema, writer=name):
            place.run(statement)
        with (
            Journal.open(database.url(place.schema, user=name, password="x")) as journal,
            pytest.raises(JournalError) as caught,
        ):
            removed(journal, past)
    finally:
        database.end_sessions(name)
        place.run(f"DROP OWNED BY {name}")
        database.admin.execute(f"DROP ROLE {name}")

    assert "does not own the tables blobs, events, meta, migrations" in str(caught.value)
    assert f"name the role {database.role} in the URL" in str(caught.value)
    assert exported(place.url) == before


def test_tables_that_were_altered_are_not_pruned(place: OnServer, past: Past) -> None:
    imported(place, past)
    place.run("ALTER TABLE events DISABLE TRIGGER events_no_delete")
    with opened(place) as journal, pytest.raises(JournalError, match="events_no_delete is not as it was made"):
        removed(journal, past)


def test_the_witness_of_another_host_accepts_that_its_event_was_pruned_and_no_other_loss(
    place: OnServer, past: Past, tmp_path: Path
) -> None:
    imported(place, past)
    here = place.state
    # A host whose worker has gone elsewhere since.
    place.state = tmp_path / "elsewhere"
    with opened(place) as journal, journal.rewriting() as rewrite:
        rewrite.witnesses += [event for event in rewrite.events(STREAM, first=1, last=30) if event.position == 20]
    place.state = here
    with opened(place) as journal:
        assert removed(journal, past)
    place.state = tmp_path / "elsewhere"
    assert place.run("SELECT 1 FROM events WHERE position = 20") == []
    assert findings(place) == ()
    opened(place).close()
    assert witness_aside(place) == []

    # An older copy of the journal has no such prune.
    place.lift(lambda: place.run("DELETE FROM events WHERE type = ?", ("pruned",)))
    assert any("lost its tail" in finding.text for finding in findings(place))


def test_a_prune_meanwhile_does_not_keep_a_worker_from_its_stream(database: Any, place: OnServer, past: Past) -> None:
    imported(place, past)
    with opened(place) as worker, worker.hold(STREAM):
        worker.append(ONE, stream=STREAM, epoch="e")
        with opened(place) as journal:
            assert removed(journal, past)
        database.end_sessions()
        place.forget()
        worker.keep()
        worker.append(ONE, stream=STREAM, epoch="e", witness=True)
    assert (findings(place), place.head.exists()) == ((), True)
