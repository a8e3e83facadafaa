"""A worker whose journal is on a server: its whole life, and whatever becomes of the server meanwhile."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import residency
from residency.cli import main
from residency.effects.place import PlaceComponent
from residency.journal.events import EventType
from residency.journal.location import shown_location
from residency.journal.pg_location import ServerLocation
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from residency.journal.verify import verify
from residency.settings import KILL_SWITCHES, sentinel_path, state_directory
from residency.statemachine.deaths import closing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Lines = Callable[[], list[str]]

WAIT_S = 0.5
# One sample, so that a round is short; a small area, so that there is a probe.
POLICY = residency.Policy(image_area_max=64 * 64, samples_max=1, journal_wait_s=WAIT_S)


@pytest.fixture(autouse=True)
def _no_kill_switch_and_a_state_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in KILL_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def schema(database: Any) -> Iterator[str]:
    name = database.new_schema()
    yield name
    database.drop_schema(name)


@pytest.fixture
def fleet(worker: Any, database: Any, schema: str) -> Any:
    """The worker with a journal on the server."""
    worker.journal = database.url(schema)
    return worker


def sentence(url: str, problem: str) -> str:
    return f"journal {shown_location(url)}: {problem}"


def test_a_worker_calibrates_and_restores_over_a_server(fleet: Any, tiny: Any, expected: torch.Tensor) -> None:
    first = fleet.attach(policy=POLICY).start()
    assert first.decision is residency.Decision.COMMITTED
    fleet.managers[-1].detach()
    second = fleet.attach(policy=POLICY).start()
    assert (second.decision, second.placement) == (residency.Decision.RESTORED, first.placement)
    assert torch.equal(fleet.pipeline.request(tiny.WORKLOAD), expected)
    assert 0 < second.journal_ms < second.ready_ms
    fleet.managers[-1].detach()
    with JournalReader.open(fleet.journal, state_folder=state_directory()) as reader:
        assert verify(reader) == ()
    assert len(list(state_directory().glob("postgresql-*.head"))) == 1


def test_a_password_is_told_by_no_report_no_log_and_no_event(fleet: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    manager = fleet.attach(policy=POLICY)
    report = manager.start()
    manager.detach()
    password = ServerLocation.parse(fleet.journal).password
    assert password is not None
    told = [repr(report), str(report.to_json()), repr(manager._setup), repr(vars(manager._epoch)), caplog.text]
    told += [repr(event) for event in fleet.events()]
    assert shown_location(fleet.journal) in told[0]
    assert not [text for text in told if password in text]


READING = (
    ["log", "-n", "5"],
    ["log", "--json"],
    ["rounds"],
    ["rounds", "--json"],
    ["show", "1"],
    ["placement"],
    ["placement", "--at", "9"],
    ["explain"],
    ["replay"],
    ["replay", "--dry-run"],
    ["at", "now"],
    ["stats"],
    ["quarantine", "list"],
    ["verify"],
    ["doctor"],
)


def test_reading_verbs_work_over_a_server_and_change_nothing(
    fleet: Any, schema: str, database: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.attach(policy=POLICY).start()
    fleet.managers[-1].detach()
    password = ServerLocation.parse(fleet.journal).password
    assert password is not None
    before = database.run(schema, "SELECT count(*), max(position) FROM events")
    for verb in READING:
        assert main([*verb, "--journal", fleet.journal]) == 0, verb
        told = capsys.readouterr()
        assert told.out + told.err and password not in told.out + told.err, verb
    assert database.run(schema, "SELECT count(*), max(position) FROM events") == before
    code = "import sys, residency.cli; residency.cli.main(sys.argv[1:]); print('torch' in sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, "log", "-n", "1", "--journal", fleet.journal]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == "False\n"


def test_an_export_of_a_server_is_a_journal_in_a_file_with_the_same_events(
    fleet: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.attach(policy=POLICY).start()
    fleet.managers[-1].detach()
    written, copy = tmp_path / "fleet.jsonl", str(tmp_path / "fleet.db")
    assert main(["export", "--journal", fleet.journal, "--output", str(written)]) == 0
    assert main(["import", str(written), "--journal", copy]) == 0
    with JournalReader.open(copy) as reader:
        assert list(reader.events()) == list(fleet.events())
        assert not [finding for finding in verify(reader) if not finding.is_note]
    capsys.readouterr()
    # What cannot be done says why.
    for verb, why in (
        (["backup", str(tmp_path / "backup.db")], "is on a server"),
        (["import", str(written)], "is not empty"),
    ):
        assert main([*verb, "--journal", fleet.journal]) == 3, verb
        assert why in capsys.readouterr().err, verb


# Before a start.


def a_wrong_password(database: Any, schema: str) -> tuple[str, str]:
    return database.url(schema, password="wrong"), "the server refuses the role or its password; correct the URL"


def a_missing_database(database: Any, schema: str) -> tuple[str, str]:
    return database.url(schema, database="not_there"), "the server has none of that name"


def a_server_that_is_away(database: Any, schema: str) -> tuple[str, str]:
    return database.url(schema, port=1), "the server cannot be reached (Connection refused); check that it is up"


def a_role_without_rights(database: Any, schema: str) -> tuple[str, str]:
    Journal.open(database.url(schema)).close()
    database.run(schema, f"REVOKE INSERT ON events FROM {database.role}")
    return database.url(schema), f"this role may not INSERT in {schema}.events; GRANT SELECT, INSERT"


def a_schema_of_somebody_else(database: Any, schema: str) -> tuple[str, str]:
    database.admin.execute(f"CREATE SCHEMA {schema} AUTHORIZATION {database.role}")
    database.run(schema, "CREATE TABLE mine (a int)")
    return database.url(schema), f"the schema {schema} holds something that is not a residency journal"


def a_newer_format(database: Any, schema: str) -> tuple[str, str]:
    Journal.open(database.url(schema)).close()
    database.run(schema, "INSERT INTO migrations (number) VALUES (99)")
    return database.url(schema), "format 99 is newer than this program's 1"


@pytest.mark.parametrize(
    "make",
    [
        a_wrong_password,
        a_missing_database,
        a_server_that_is_away,
        a_role_without_rights,
        a_schema_of_somebody_else,
        a_newer_format,
    ],
)
def test_a_journal_that_cannot_be_used_is_told_in_one_line(
    make: Callable[[Any, str], tuple[str, str]],
    worker: Any,
    database: Any,
    schema: str,
    lines: Lines,
    serves_as_it_began: Any,
) -> None:
    worker.journal, problem = make(database, schema)
    manager = worker.attach(policy=POLICY)
    started = time.monotonic()
    report = manager.start()
    assert time.monotonic() - started < 10
    (line,) = lines()
    assert line.startswith(sentence(worker.journal, problem)) and line == report.reason
    assert worker.pipeline.calls == []
    serves_as_it_began(manager, report)
    manager.detach()
    assert not lines()


def test_a_stream_that_another_worker_holds_gates_the_start(fleet: Any) -> None:
    with Journal.open(fleet.journal) as journal, journal.hold("tiny"):
        report = fleet.attach(policy=POLICY).start()
    assert report.decision is residency.Decision.GATED
    assert "stream-in-use" in report.reason
    assert fleet.pipeline.calls == []


# In mid-round.


def blamed(worker: Any) -> list[str]:
    """Whom the next start would blame."""
    view = worker.view()
    return [
        draft.payload["death"]["blames"]
        for one in closing(view, boot_id=view.epochs[-1].boot_id, now_ns=time.time_ns(), by_epoch="next")
        for draft in one.drafts
        if draft.type.value == "recovered"
    ]


@pytest.mark.parametrize("state", ["measuring", "planned", "applied", "validating"])
def test_a_session_that_is_ended_in_mid_round_rolls_it_back_and_blames_nobody(
    state: str, fleet: Any, database: Any, on_leaving: Any, lines: Lines, serves_as_it_began: Any
) -> None:
    manager = fleet.attach(policy=POLICY, observer=on_leaving(state, database.end_sessions))
    report = manager.start()
    (line,) = lines()
    assert "the connection was lost, and with it the hold on stream 'tiny'" in line
    assert report.reason.endswith(line)
    serves_as_it_began(manager, report)
    manager.detach()
    assert not lines()
    # The worker said at its end that it had ended: it could take its stream again.
    assert fleet.view().epochs[-1].stopped == {"reason": "detach", "signal": None}
    assert "plan" not in blamed(fleet)
    assert fleet.is_sound()
    assert fleet.attach(policy=POLICY).start().decision is residency.Decision.COMMITTED


@pytest.fixture
def doomed(own_server: Any, postgresql: Any, worker: Any) -> Iterator[Any]:
    """The worker with a journal on a server that is killed in the test, and runs again after it."""
    database = postgresql.Database(own_server.url())
    worker.journal = database.url("fleet")
    yield worker
    own_server.start()
    database.end_sessions()
    database.close()


def test_a_server_that_is_killed_in_mid_round_stops_it_before_the_next_effect(
    own_server: Any, doomed: Any, lines: Lines, serves_as_it_began: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_append, plain_apply = Journal.append, PlaceComponent.apply
    num_intents = 0
    moved: list[object] = []

    def append(self: Journal, drafts: Any, **options: Any) -> Any:
        nonlocal num_intents
        if any(draft.type is EventType.EFFECT_INTENT for draft in drafts):
            num_intents += 1
            if num_intents == 2:
                own_server.kill()
        return plain_append(self, drafts, **options)

    def apply(self: Any, *args: Any) -> Any:
        moved.append(self)
        return plain_apply(self, *args)

    manager = doomed.attach(policy=POLICY)
    monkeypatch.setattr(Journal, "append", append)
    monkeypatch.setattr(PlaceComponent, "apply", apply)
    started = time.monotonic()
    report = manager.start()
    assert time.monotonic() - started < 30
    (line,) = lines()
    assert "with it the hold on stream 'tiny'" in line
    serves_as_it_began(manager, report)
    assert len(moved) == 1, "the effect before the kill, and none after it"
    own_server.start()
    assert doomed.view().epochs[-1].rounds[-1].num_intents == 1
    manager.detach()
    assert doomed.view().epochs[-1].stopped is not None
    assert "plan" not in blamed(doomed)
    assert doomed.is_sound()


def test_a_server_that_stays_away_does_not_keep_a_worker_from_ending(own_server: Any, doomed: Any) -> None:
    manager = doomed.attach(policy=POLICY)
    assert manager.start().decision is residency.Decision.COMMITTED
    own_server.kill()
    started = time.monotonic()
    manager.detach()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("state", ["measuring", "planned", "applied"])
def test_a_server_whose_disk_is_full_in_mid_round_rolls_it_back(
    state: str, fleet: Any, database: Any, schema: str, on_leaving: Any, lines: Lines, serves_as_it_began: Any
) -> None:
    def fill() -> None:
        database.run(
            schema,
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$; "
            "CREATE TRIGGER full_disk BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION full_disk()",
        )

    manager = fleet.attach(policy=POLICY, observer=on_leaving(state, fill))
    report = manager.start()
    (line,) = lines()
    assert "the server's disk is full; free some space, then try again" in line
    serves_as_it_began(manager, report)


def test_another_writer_that_keeps_the_lock_for_too_long_rolls_the_round_back(
    fleet: Any, database: Any, schema: str, on_leaving: Any, lines: Lines, serves_as_it_began: Any
) -> None:
    held: list[Any] = []

    def lock() -> None:
        held.append(database.connect(schema))
        held[0].autocommit = False
        held[0].execute("LOCK TABLE events IN EXCLUSIVE MODE")

    manager = fleet.attach(policy=POLICY, observer=on_leaving("applied", lock))
    report = manager.start()
    held[0].close()
    (line,) = lines()
    assert f"another writer has kept it locked for longer than {WAIT_S} s" in line
    # Once, and not again at each of the five events that the rollback would have written.
    assert report.journal_ms < 4 * WAIT_S * 1e3 + 1e3
    serves_as_it_began(manager, report)


# While it serves.


def test_a_session_that_is_lost_while_the_worker_serves_is_made_anew_before_the_next_round(
    fleet: Any, database: Any
) -> None:
    manager = fleet.attach(policy=POLICY)
    report = manager.start()
    database.end_sessions()
    answer = manager.handle({"verb": "calibrate", "epoch": manager.epoch, "round": report.round})
    assert answer["outcome"] in ("committed", "kept")
    with Journal.open(fleet.journal) as journal, pytest.raises(residency.ResidencyError, match="is in use by"):
        journal.hold("tiny")
    manager.detach()
    assert fleet.is_sound()


def test_the_sentinel_in_the_state_directory_pins_a_start_and_takes_a_serving_worker_back(fleet: Any) -> None:
    sentinel = sentinel_path(fleet.journal)
    assert sentinel == state_directory() / "disable"
    manager = fleet.attach(policy=POLICY)
    assert manager.start().decision is residency.Decision.COMMITTED
    sentinel.parent.mkdir(parents=True, exist_ok=True)
    sentinel.touch()
    with manager.request(), torch.no_grad():
        pass
    assert manager.placement == manager._setup.initial
    manager.detach()
    assert fleet.attach(policy=POLICY).start().decision is residency.Decision.PINNED
    assert fleet.view().epochs[-1].pinned["by"] == "sentinel"
