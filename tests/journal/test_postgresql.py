"""What is of a server alone: its URL and password, roles and their rights, formats, retries, and lost connections."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from residency.errors import JournalCorrupt, JournalError, JournalNewer, StreamInUse
from residency.journal import pg_schema
from residency.journal.events import Draft, EventType
from residency.journal.location import shown_location
from residency.journal.pg_location import ServerLocation
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from residency.journal.verify import verify
from residency.settings import sentinel_path, state_directory
from tests.journal.places import OnServer, findings, opened, reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ONE = [Draft(type=EventType.MEASURED, round=1)]
SECRET = "pä55/w@rd"
QUOTED = "p%C3%A455%2Fw%40rd"


@pytest.fixture
def place(database: Any, tmp_path: Path) -> Iterator[OnServer]:
    made = OnServer(database, tmp_path)
    yield made
    made.close()


@pytest.fixture
def role(database: Any, place: OnServer) -> Iterator[str]:
    """Another role, without any right but to log in."""
    name = f"{database.role}_other"
    database.admin.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{SECRET}'")
    yield name
    database.end_sessions(name)
    place.close()
    database.admin.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def append(journal: Journal, stream: str = "worker") -> int:
    """Append one event and return its number in the stream."""
    return journal.append(ONE, stream=stream, epoch="e")[0].stream_version


def versions(place: OnServer, stream: str = "worker") -> list[int]:
    with reading(place) as reader:
        return [event.stream_version for event in reader.events(stream)]


# URL and password.


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql+psycopg://me:pw@host:5433/db", "postgresql+psycopg://me@host:5433/db"),
        ("postgresql://me@host/db", "postgresql+psycopg://me@host/db"),
        ("PostgreSQL://host/db", "postgresql+psycopg://host/db"),
        (
            f"postgresql://me:{QUOTED}@[::1]:1/d%20b?schema=fleet_2",
            "postgresql+psycopg://me@[::1]:1/d%20b?schema=fleet_2",
        ),
        ("postgresql:///db?host=/run/pg&sslmode=require", "postgresql+psycopg:///db?host=/run/pg"),
        ("postgresql://m%40e:a@b:c@host/db", "postgresql+psycopg://m%40e@host/db"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, expected: str) -> None:
    assert shown_location(url) == expected
    location = ServerLocation.parse(url)
    assert str(location) == expected
    assert location.password is None or location.password not in repr(location)


def test_the_parts_of_a_url_reach_the_driver() -> None:
    location = ServerLocation.parse(f"postgresql://m%40e:{QUOTED}@host:7/d%2Fb?sslmode=verify-full&schema=x")
    assert location.parameters() == {
        "user": "m@e",
        "password": SECRET,
        "host": "host",
        "port": 7,
        "dbname": "d/b",
        "sslmode": "verify-full",
    }


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:s3cret/x@host/db",
        "postgresql://me:s3cret?x@host/db",
        "postgresql://me:s3cret@host",
        "postgresql://me:s3cret@host/",
        "postgresql://me:s3cret@host/a/b",
        "postgresql://me:s3cret@host:port/db",
        "postgresql://me:s3cret@host:0/db",
        "postgresql://me:s3cret@host/db?options=-csynchronous_commit=off",
        "postgresql://me@host/db?password=s3cret",
        "postgresql://me:s3cret@host/db?schema=pg_catalog",
        "postgresql://me:s3cret@host/db?schema=Fleet;drop",
        "postgresql://me:s3cret@host/db?host=other",
        "postgresql://me:s3cret%00@host/db",
        "postgresql+psycopg2://me:s3cret@host/db",
        "postgres://me:s3cret@host/db",
    ],
)
def test_a_url_that_cannot_be_used_is_an_error_that_does_not_tell_its_password(url: str) -> None:
    for open_it in (Journal.open, JournalReader.open):
        with pytest.raises(JournalError) as caught:
            open_it(url)
        assert caught.value.exit_code == 3
        assert "s3cret" not in str(caught.value) + repr(caught.value.fields)
    assert "s3cret" not in shown_location(url)


def test_the_sentinel_of_a_journal_on_a_server_is_in_the_state_directory() -> None:
    assert sentinel_path("postgresql+psycopg://me:pw@host/db") == state_directory() / "disable"


def test_a_password_is_told_nowhere(database: Any, place: OnServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "s3cret-s3cret"
    told: list[str] = []
    for url in (
        database.url(place.schema, password=secret),
        database.url(place.schema, user="nobody_there", password=secret),
        database.url(place.schema, password=secret, database="not_there"),
        database.url(place.schema, password=secret, port=1),
    ):
        for open_it in (lambda url=url: Journal.open(url, wait_s=0.2), lambda url=url: JournalReader.open(url)):
            with pytest.raises(JournalError) as caught:
                open_it()
            told += traceback.format_exception(caught.value)
    with opened(place) as journal, reading(place) as reader, journal.hold("worker"):
        append(journal)
        with pytest.raises(JournalError) as caught:
            journal.append([Draft(type=EventType.MEASURED, round=-1)], stream="worker", epoch="e")
        told += traceback.format_exception(caught.value)
        told += [repr(journal), repr(journal._store), repr(vars(journal._store)), repr(reader), journal.location]
        told += [repr(event) for event in journal.events()]
    everything = "\n".join((*told, caplog.text))
    password = ServerLocation.parse(place.url).password
    assert password is not None
    assert secret not in everything and password not in everything
    assert str(place.head) and place.schema in everything


# Refusals.


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"password": "wrong"}, "the server refuses the role or its password"),
        ({"user": "nobody_there"}, "the server refuses the role or its password"),
        ({"database": "not_there"}, 'database "not_there" does not exist'),
        ({"port": 1}, "the server cannot be reached (Connection refused)"),
    ],
)
def test_a_server_that_refuses_is_an_error_in_one_line(
    change: dict[str, Any], expected: str, database: Any, place: OnServer
) -> None:
    url = database.url(place.schema, **change)
    started = time.monotonic()
    with pytest.raises(JournalError) as caught:
        Journal.open(url, wait_s=0.3)
    assert time.monotonic() - started < 3
    assert caught.value.exit_code == 3
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(JournalError) as caught:
        JournalReader.open(url)
    assert expected in str(caught.value)


def test_without_the_driver_the_error_says_what_to_install(place: OnServer) -> None:
    code = """
import sys
sys.modules["psycopg"] = None
from residency.errors import JournalError
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
for one in (Journal, JournalReader):
    try:
        one.open(sys.argv[1])
    except JournalError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, place.url], capture_output=True, text=True, check=True)
    assert done.stdout.count("needs psycopg") == done.stdout.count("pip install 'residency[postgresql]'") == 2
    assert "s3cret" not in done.stdout


def test_a_driver_that_could_wait_for_ever_is_refused(place: OnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_fine in (
        ("3.1.20", False),
        ("3.2.11", False),
        ("3.2.12", True),
        ("3.3.0.dev1", True),
        ("4.0", True),
    ):
        monkeypatch.setattr("psycopg.__version__", version)
        if is_fine:
            opened(place).close()
            continue
        for open_it in (opened, reading):
            with pytest.raises(JournalError, match=rf"psycopg {version} is older than 3\.2\.12"):
                open_it(place)


def test_a_role_without_rights_is_told_what_it_lacks(database: Any, place: OnServer, role: str) -> None:
    url = database.url(place.schema, user=role, password=QUOTED)

    def problem(open_it: Callable[[str], object] = Journal.open) -> str:
        with pytest.raises(JournalError) as caught:
            open_it(url)
        assert caught.value.exit_code == 3
        return str(caught.value)

    assert "it does not exist, and this role may not make it" in problem()
    assert "python -m residency.journal.pg_schema" in problem()
    opened(place).close()
    assert f"may not use the schema {place.schema}" in problem()
    assert f"may not use the schema {place.schema}" in problem(JournalReader.open)
    place.run(f"GRANT USAGE ON SCHEMA {place.schema} TO {role}")
    assert "this role may not do that" in problem()
    place.run(f"GRANT SELECT ON ALL TABLES IN SCHEMA {place.schema} TO {role}")
    assert f"this role may not INSERT in {place.schema}.events" in problem()
    JournalReader.open(url).close()
    place.run(f"GRANT INSERT ON events TO {role}")
    assert f"GRANT SELECT, INSERT ON {place.schema}.blobs TO it" in problem()
    place.run(f"GRANT INSERT ON blobs TO {role}")
    with Journal.open(url) as journal, journal.hold("worker"):
        assert append(journal) == 1


def test_a_worker_needs_no_more_than_to_insert_and_to_select(database: Any, place: OnServer, role: str) -> None:
    command = [sys.executable, "-m", "residency.journal.pg_schema", "--schema", place.schema, "--writer", role]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    place.run(made)
    url = database.url(place.schema, user=role, password=QUOTED)
    with Journal.open(url) as journal, journal.hold("worker"):
        assert not journal.created
        journal.append([Draft(type=EventType.MEASURED, round=1, blobs=(b"b",))], stream="worker", epoch="e")
        assert append(journal) == 2
    with JournalReader.open(url) as reader:
        assert verify(reader) == ()
    place.run(f"SET ROLE {role}")
    for attempt in (
        "UPDATE events SET round = 2",
        "DELETE FROM events",
        "TRUNCATE events",
        "DROP TABLE events",
        "ALTER TABLE events DISABLE TRIGGER ALL",
        "INSERT INTO meta VALUES ('a', 'b')",
        "INSERT INTO migrations VALUES (9)",
        f"CREATE TABLE {place.schema}.mine (a int)",
    ):
        with pytest.raises(Exception, match="permission denied|must be owner"):
            place.run(attempt)
    with JournalReader.open(url) as reader:
        assert [event.stream_version for event in reader.events()] == [1, 2]


def test_rows_are_kept_from_the_owner_of_the_tables_too(place: OnServer) -> None:
    with opened(place) as journal:
        append(journal)
    for attempt in (
        "TRUNCATE events",
        "TRUNCATE blobs, meta, migrations",
        "INSERT INTO events SELECT * FROM events ON CONFLICT (position) DO UPDATE SET round = 7",
        "DELETE FROM migrations",
        "SET session_replication_role = replica; DELETE FROM events",
    ):
        with pytest.raises(place.refusals, match="append-only|does not continue"):
            place.run(attempt)
    assert versions(place) == [1]


def test_what_is_not_ours_is_never_touched(database: Any, place: OnServer) -> None:
    database.admin.execute(f"CREATE SCHEMA {place.schema} AUTHORIZATION {database.role}")
    place.run("CREATE TABLE notes (a int)")
    for open_it in (opened, reading):
        with pytest.raises(JournalCorrupt, match="holds something that is not a residency journal") as caught:
            open_it(place)
        assert caught.value.exit_code == 5
    place.run("CREATE TABLE meta (key text, value text)")
    place.run("CREATE TABLE migrations (number int)")
    for open_it in (opened, reading):
        with pytest.raises(JournalCorrupt):
            open_it(place)
    tables = place.run("SELECT relname FROM pg_class WHERE relnamespace = ?::regnamespace", (place.schema,))
    assert sorted(tables) == [("meta",), ("migrations",), ("notes",)]


def test_an_empty_schema_that_an_administrator_made_is_used(database: Any, place: OnServer) -> None:
    database.admin.execute(f"CREATE SCHEMA {place.schema} AUTHORIZATION {database.role}")
    with opened(place) as journal:
        assert journal.created and append(journal) == 1


def test_damaged_tables_are_an_error_and_left_alone(place: OnServer) -> None:
    with opened(place) as journal:
        append(journal)
    place.run("ALTER TABLE events DROP COLUMN payload CASCADE")
    for open_it in (opened, reading):
        with pytest.raises(JournalCorrupt, match="it is damaged") as caught:
            open_it(place)
        assert caught.value.exit_code == 5
    place.run("DROP TABLE events")
    for open_it in (opened, reading):
        with pytest.raises(JournalCorrupt, match="missing tables: events"):
            open_it(place)


def test_altered_tables_are_findings_and_told_at_the_next_open(
    place: OnServer, caplog: pytest.LogCaptureFixture
) -> None:
    opened(place).close()
    place.run("ALTER TABLE events ALTER COLUMN epoch DROP NOT NULL")
    place.run("ALTER TABLE events DROP CONSTRAINT events_event_id_key")
    place.run("ALTER TABLE events ENABLE TRIGGER events_no_delete")
    place.run(
        "CREATE OR REPLACE FUNCTION events_in_order() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'"
    )
    expected = {
        "table events is not as it was made",
        "constraint events_event_id_key is missing",
        "trigger events_no_delete is not as it was made",
        "trigger events_in_order is not as it was made",
    }
    assert {finding.text for finding in findings(place)} == expected
    opened(place).close()
    assert all(text in caplog.text for text in expected)


def test_a_newer_journal_is_refused_and_left_alone(place: OnServer) -> None:
    opened(place).close()
    place.run("INSERT INTO migrations (number) VALUES (?)", (pg_schema.known_format() + 1,))
    for open_it in (opened, reading):
        with pytest.raises(JournalNewer, match="is newer than this program's") as caught:
            open_it(place)
        assert caught.value.exit_code == 4


def test_a_database_of_another_encoding_is_refused(database: Any, place: OnServer) -> None:
    name = f"{database.name}_ascii"
    database.admin.execute(
        f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    )
    try:
        with pytest.raises(JournalError, match="encoding is SQL_ASCII"):
            Journal.open(database.url(place.schema, database=name))
    finally:
        database.admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


# Formats.


def second(schema: str) -> list[str]:
    """A second format, for tests: one more table."""
    return [f"CREATE TABLE {schema}.more (a int)"]


def test_an_older_journal_is_migrated_once_and_the_older_program_then_refuses(
    place: OnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(place) as journal:
        append(journal)
    monkeypatch.setattr(pg_schema, "MIGRATIONS", (*pg_schema.MIGRATIONS, second))
    problems: list[JournalError] = []

    def start() -> None:
        try:
            with opened(place) as journal:
                append(journal, "other")
        except JournalError as error:
            problems.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert place.run("SELECT number FROM migrations ORDER BY number") == [(1,), (2,)]
    assert place.run("SELECT count(*) FROM more") == [(0,)]
    assert (versions(place), versions(place, "other")) == ([1], [1, 2, 3, 4])
    monkeypatch.undo()
    with pytest.raises(JournalNewer, match="format 2 is newer than this program's 1"):
        opened(place)


def test_a_migration_that_this_role_may_not_make_says_who_may(
    database: Any, place: OnServer, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(place).close()
    for statement in pg_schema.grants(place.schema, writer=role):
        place.run(statement)
    monkeypatch.setattr(pg_schema, "MIGRATIONS", (*pg_schema.MIGRATIONS, second))
    with pytest.raises(JournalError, match="format 2 is needed, 1 is there") as caught:
        Journal.open(database.url(place.schema, user=role, password=QUOTED))
    assert "pg_schema --found 1" in str(caught.value)


def test_a_migration_that_fails_leaves_the_journal_as_it_was(place: OnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(place) as journal:
        append(journal)
    broken = (*pg_schema.MIGRATIONS, lambda schema: [*second(schema), "SELECT 1 / 0"])
    monkeypatch.setattr(pg_schema, "MIGRATIONS", broken)
    with pytest.raises(JournalError, match="division by zero"):
        opened(place)
    monkeypatch.undo()
    with opened(place) as journal:
        assert append(journal) == 2
    assert place.run("SELECT to_regclass('more')") == [(None,)]


# Durable, and bounded.


def test_a_commit_is_durable_whatever_the_servers_default(database: Any, place: OnServer) -> None:
    database.admin.execute(f"ALTER ROLE {database.role} SET synchronous_commit = off")
    database.admin.execute(f"ALTER ROLE {database.role} SET default_transaction_read_only = on")
    database.admin.execute(f"ALTER ROLE {database.role} SET default_transaction_isolation = 'serializable'")
    try:
        with opened(place) as journal:
            store: Any = journal._store
            with store._session.using() as connection:
                for name, expected in (
                    ("synchronous_commit", "on"),
                    ("transaction_isolation", "read committed"),
                    ("lock_timeout", "10s"),
                    ("statement_timeout", "11s"),
                    ("idle_in_transaction_session_timeout", "5s"),
                    ("idle_session_timeout", "0"),
                ):
                    assert connection.exec_driver_sql(f"SHOW {name}").scalar_one() == expected, name
            assert append(journal) == 1
            # Read back in every append, not once.
            store._session._raw.execute("SET SESSION synchronous_commit = off")
            store._session._raw.commit()
            with pytest.raises(JournalError, match="commits are not durable there"):
                append(journal)
    finally:
        database.admin.execute(f"ALTER ROLE {database.role} RESET ALL")
    assert versions(place) == [1]


def refuse(place: OnServer, code: str, *, times: int) -> None:
    """Have the server fail the next inserts of events with an error code, as it would by itself."""
    place.run("CREATE SEQUENCE IF NOT EXISTS failures")
    place.run(
        "CREATE OR REPLACE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN "
        f"IF nextval('{place.schema}.failures') <= {times} THEN RAISE EXCEPTION 'no room' USING ERRCODE = '{code}'; "
        "END IF; RETURN NEW; END $$"
    )
    place.run("CREATE OR REPLACE TRIGGER fail BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION fail()")


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_conflict_is_tried_again_a_few_times(code: str, place: OnServer) -> None:
    with opened(place) as journal, journal.hold("worker"):
        refuse(place, code, times=2)
        assert append(journal) == 1
        place.run("ALTER SEQUENCE failures RESTART")
        refuse(place, code, times=1000)
        with pytest.raises(JournalError):
            append(journal)
        assert place.run("SELECT last_value FROM failures") == [(3,)]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("53100", "the server's disk is full; free some space"),
        ("58030", "the server reports an I/O error (no room)"),
        ("53200", "the server has no memory left"),
        ("42501", "this role may not do that (no room)"),
        ("57014", "a statement took longer than"),
        ("25006", "it is read-only there"),
        ("XX001", "it is damaged (no room)"),
        ("22000", "PostgreSQL reports 'no room' (22000)"),
    ],
)
def test_an_error_of_the_server_writes_nothing_is_not_tried_again_and_keeps_the_hold(
    code: str, said: str, place: OnServer
) -> None:
    with opened(place) as journal, opened(place) as other, journal.hold("worker"):
        refuse(place, code, times=1)
        with pytest.raises(JournalError) as caught:
            append(journal)
        assert said in str(caught.value)
        assert isinstance(caught.value, JournalCorrupt) == (code == "XX001")
        with pytest.raises(StreamInUse):
            other.hold("worker")
        assert append(journal) == 1


# Lost connections.


def test_an_append_to_a_stream_that_nobody_holds_survives_a_lost_connection(database: Any, place: OnServer) -> None:
    with opened(place) as journal:
        for number in (1, 2):
            assert database.end_sessions() == 1
            assert append(journal) == number
        assert list(journal.events())[-1].stream_version == 2
    assert findings(place) == ()


def test_a_lost_connection_is_a_lost_hold_and_the_append_that_finds_out_writes_nothing(
    database: Any, place: OnServer
) -> None:
    with opened(place) as journal, journal.hold("worker"):
        append(journal)
        database.end_sessions()
        with pytest.raises(JournalError, match="the connection was lost, and with it the hold on stream 'worker'"):
            append(journal)
        assert versions(place) == [1]
        # The next one takes the stream again: nobody else has been there.
        assert append(journal) == 2
        with opened(place) as other, pytest.raises(StreamInUse):
            other.hold("worker")
    assert findings(place) == ()


def test_a_stream_that_somebody_else_took_or_wrote_to_meanwhile_is_not_taken_again(
    database: Any, place: OnServer
) -> None:
    with opened(place, wait_s=0.3) as journal, journal.hold("worker"):
        append(journal)
        database.end_sessions()
        with opened(place) as other:
            with other.hold("worker"):
                for _ in range(2):
                    with pytest.raises(JournalError):
                        append(journal)
                with pytest.raises(StreamInUse):
                    append(journal)
                append(other)
            for _ in range(2):
                with pytest.raises(JournalError, match="another process wrote to stream 'worker'"):
                    append(journal)
            other.hold("worker").release()
    assert versions(place) == [1, 2]


def test_what_was_held_is_held_again_before_a_round(database: Any, place: OnServer) -> None:
    with opened(place) as journal, journal.hold("worker"):
        append(journal)
        database.end_sessions()
        journal.keep()
        assert append(journal) == 2
        with opened(place) as other, pytest.raises(StreamInUse):
            other.hold("worker")


@pytest.mark.parametrize("loosen", ["SELECT pg_advisory_unlock_all()", "DISCARD ALL"])
def test_a_pool_that_shares_sessions_is_noticed_before_anything_is_written(loosen: str, place: OnServer) -> None:
    with opened(place) as journal, journal.hold("worker"):
        append(journal)
        raw = journal._store._session._raw  # type: ignore[attr-defined]
        raw.autocommit = True
        raw.execute(loosen)
        raw.autocommit = False
        with pytest.raises(JournalError):
            append(journal)
    assert versions(place) == [1]


@pytest.fixture
def proxy(database: Any, postgresql: Any) -> Iterator[Any]:
    made = postgresql.Proxy(database.host, database.port)
    yield made
    made.close()


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_commit_without_an_answer_is_looked_up_before_it_is_tried_again(
    cut: str, database: Any, place: OnServer, proxy: Any
) -> None:
    with Journal.open(database.url(place.schema, port=proxy.port)) as journal:
        append(journal)
        proxy.cut = cut
        (event,) = journal.append(ONE, stream="worker", epoch="e")
        assert proxy.num_cuts == 1 and event.stream_version == 2
        assert append(journal) == 3
        assert list(journal.events())[1] == event
    assert versions(place) == [1, 2, 3]
    assert findings(place) == ()


@pytest.mark.parametrize(("cut", "expected"), [("before", [1, 2]), ("after", [1, 2, 3])])
def test_of_a_held_stream_a_commit_without_an_answer_is_an_error_and_the_stream_goes_on(
    cut: str, expected: list[int], database: Any, place: OnServer, proxy: Any
) -> None:
    with Journal.open(database.url(place.schema, port=proxy.port)) as journal, journal.hold("worker"):
        append(journal)
        proxy.cut = cut
        with pytest.raises(JournalError, match="with it the hold on stream 'worker'"):
            append(journal)
        assert append(journal) == expected[-1]
    assert versions(place) == expected
    assert findings(place) == ()


def test_a_server_that_falls_silent_is_an_error_in_a_bounded_time(database: Any, place: OnServer, proxy: Any) -> None:
    url = database.url(place.schema, port=proxy.port)
    with Journal.open(url, wait_s=0.5) as journal, journal.hold("worker"):
        append(journal)
        proxy.cut = "silent"
        started = time.monotonic()
        with pytest.raises(JournalError, match="the server has stopped answering"):
            append(journal)
        assert time.monotonic() - started < 5
        started = time.monotonic()
        with pytest.raises(JournalError, match="cannot be reached"):
            append(journal)
        assert time.monotonic() - started < 8
        with pytest.raises(JournalError, match="cannot be reached"):
            Journal.open(url, wait_s=0.5)
        proxy.cut = None
        assert append(journal) == 2


def test_a_worker_that_stops_in_mid_append_does_not_hold_up_the_others_for_long(place: OnServer) -> None:
    stopped, goes_on = threading.Event(), threading.Event()

    def clock() -> int:
        if armed:
            stopped.set()
            goes_on.wait(20)
        return 1

    armed: list[bool] = []
    problems: list[JournalError] = []

    def append_slowly() -> None:
        try:
            append(journal)
        except JournalError as error:
            problems.append(error)

    with opened(place, clock_ns=clock, wait_s=1.0) as journal, journal.hold("worker"), opened(place) as other:
        armed.append(True)
        slow = threading.Thread(target=append_slowly)
        slow.start()
        assert stopped.wait(10)
        started = time.monotonic()
        assert append(other, "other") == 1
        assert time.monotonic() - started < 5
        armed.clear()
        goes_on.set()
        slow.join()
    assert len(problems) == 1 and "the connection was lost" in str(problems[0])
    assert versions(place) == []


def test_an_interrupt_while_the_server_works_keeps_journal_and_hold_usable(place: OnServer) -> None:
    class Terminated(BaseException):
        pass

    def terminate(*_: object) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGALRM, terminate)
    try:
        with opened(place) as journal, opened(place) as other, journal.hold("worker"):
            append(journal)
            place.run("SELECT pg_advisory_lock(?)", (pg_schema.append_key(place.schema),))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Terminated):
                append(journal)
            place.run("SELECT pg_advisory_unlock_all()")
            assert append(journal) == 2
            with pytest.raises(StreamInUse):
                other.hold("worker")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert versions(place) == [1, 2]


def test_a_journal_that_was_replaced_on_the_server_is_not_written_to(database: Any, place: OnServer) -> None:
    with opened(place) as journal:
        append(journal)
        place.move()
        with pytest.raises(JournalError, match="does not exist"):
            append(journal)
        with opened(place) as other:
            append(other)
        database.end_sessions()
        with pytest.raises(JournalError, match="there is another journal now"):
            append(journal)
    assert versions(place) == [1]


# A server of our own, which may be stopped and killed.


@pytest.fixture
def fleet(own_server: Any, postgresql: Any, tmp_path: Path) -> Iterator[OnServer]:
    made = postgresql.Database(own_server.url())
    yield OnServer(made, tmp_path)
    made.close()


def test_a_server_that_is_killed_is_an_error_and_keeps_what_it_acknowledged(own_server: Any, fleet: OnServer) -> None:
    with opened(fleet, wait_s=0.5) as journal, journal.hold("worker"), reading(fleet) as reader:
        for _ in range(5):
            append(journal)
        own_server.kill()
        try:
            started = time.monotonic()
            for _ in range(2):
                with pytest.raises(JournalError, match="the connection was lost|cannot be reached"):
                    append(journal)
            with pytest.raises(JournalError, match="cannot be reached"):
                list(reader.events())
            assert time.monotonic() - started < 20
        finally:
            own_server.start()
        assert append(journal) == 6
        assert [event.stream_version for event in reader.events()] == [*range(1, 7)]
    assert findings(fleet) == ()


def test_a_backend_that_is_killed_takes_the_hold_with_it(own_server: Any, fleet: OnServer) -> None:
    with opened(fleet) as journal, journal.hold("worker"):
        append(journal)
        ((pid,),) = fleet.run(
            "SELECT pid FROM pg_stat_activity WHERE application_name = ?",
            (f"residency process {os.getpid()} on {os.uname().nodename}"[:63],),
        )
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(JournalError, match="with it the hold on stream 'worker'"):
            append(journal)
        # The server ends all its sessions after that, and recovers.
        fleet.forget()
        assert append(journal) == 2


def test_a_server_that_comes_up_meanwhile_is_waited_for(own_server: Any, fleet: OnServer) -> None:
    opened(fleet).close()
    own_server.stop()
    found: list[int] = []

    def start() -> None:
        with opened(fleet, wait_s=20) as journal:
            found.append(append(journal))

    waiting = threading.Thread(target=start)
    waiting.start()
    time.sleep(1)
    own_server.start()
    waiting.join()
    assert found == [1]


def test_a_server_that_is_stopped_by_a_signal_does_not_keep_an_append_waiting(own_server: Any, fleet: OnServer) -> None:
    with opened(fleet, wait_s=0.5) as journal, journal.hold("worker"):
        append(journal)
        pid = journal._store._session._raw.info.backend_pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(JournalError, match="the server has stopped answering"):
                append(journal)
            assert time.monotonic() - started < 5
        finally:
            os.kill(pid, signal.SIGCONT)
        assert append(journal) == 2


def test_a_server_that_does_not_write_durably_is_refused(own_server: Any, fleet: OnServer) -> None:
    own_server.stop()
    own_server.start(fsync="off")
    try:
        with pytest.raises(JournalError, match="does not write durably"):
            opened(fleet)
    finally:
        own_server.stop()
        own_server.start()
    opened(fleet).close()
