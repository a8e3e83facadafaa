"""A journal whose file is harmed under a worker, or before its start: the worker serves where it began."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import residency
from residency.journal.sqlite import connect
from residency.journal.store import Journal
from residency.settings import KILL_SWITCHES

if TYPE_CHECKING:
    from pathlib import Path

POLICY = residency.Policy(image_area_max=64 * 64, samples_max=1, journal_wait_s=0.3)

Lines = Callable[[], list[str]]

# In a process of its own: opening and closing the file in this one would drop the worker's locks.
DAMAGE = """
import os, sys
with open(sys.argv[1], "r+b") as file:
    size = os.fstat(file.fileno()).st_size
    file.seek(4096 * 4)
    file.write(os.urandom(size - 4096 * 4))
"""


@pytest.fixture(autouse=True)
def _no_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KILL_SWITCHES:
        monkeypatch.delenv(name, raising=False)


def harm_pages(path: Path) -> str:
    subprocess.run([sys.executable, "-c", DAMAGE, str(path)], check=True)
    return "the file is damaged"


def remove_wal(path: Path) -> str:
    path.with_name(path.name + "-wal").unlink()
    return "its WAL was removed or replaced since it was opened"


def remove_file(path: Path) -> str:
    path.unlink()
    return "no such file or directory"


@pytest.mark.parametrize("harm", [harm_pages, remove_wal, remove_file])
@pytest.mark.parametrize("state", ["measuring", "planned", "applied", "validating"])
def test_a_journal_that_is_harmed_in_mid_round_stops_the_round_before_the_next_effect(
    worker: Any,
    on_leaving: Any,
    lines: Lines,
    serves_as_it_began: Any,
    harm: Callable[[Path], str],
    state: str,
) -> None:
    told: list[str] = []

    def act() -> None:
        journal = manager._epoch.journal
        assert journal is not None
        # Else what SQLite remembers of the file would last for the whole round.
        cursor = journal._store._connected().connection.cursor()
        for statement in ("PRAGMA wal_checkpoint(TRUNCATE)", "PRAGMA shrink_memory"):
            cursor.execute(statement)
        cursor.close()
        told.append(harm(worker.journal))

    manager = worker.attach(policy=POLICY, observer=on_leaving(state, act))
    report = manager.start()
    (line,) = lines()
    assert told[0] in line
    serves_as_it_began(manager, report)


def test_a_journal_that_was_damaged_in_mid_round_is_set_aside_by_the_next_start_and_named(
    worker: Any, lines: Lines
) -> None:
    worker.attach(policy=POLICY).start()
    worker.managers[-1].detach()
    harm_pages(worker.journal)
    report = worker.attach(policy=POLICY).start()
    assert report.decision is residency.Decision.COMMITTED
    (line,) = lines()
    (kept,) = worker.journal.parent.glob("journal.db.corrupt-*Z")
    assert f"it was set aside as {kept} and a new one is begun" in line
    assert worker.is_sound()


def test_a_journal_that_was_altered_is_not_believed_and_not_written_to(
    worker: Any, lines: Lines, serves_as_it_began: Any
) -> None:
    worker.attach(policy=POLICY).start()
    worker.managers[-1].detach()
    connection = connect(worker.journal, mode="rw", wait_s=1)
    sql = dict(connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall())
    connection.execute("DROP TRIGGER events_no_update")
    connection.execute("UPDATE events SET pid = 1 WHERE type = 'epoch.started'")
    connection.execute(sql["events_no_update"])
    connection.close()
    before = [event.hash for event in worker.events()]
    manager = worker.attach(policy=POLICY)
    report = manager.start()
    (line,) = lines()
    assert "event 1 is not what was written; see 'residency verify'" in line
    serves_as_it_began(manager, report)
    manager.detach()
    assert [event.hash for event in worker.events()] == before


def test_a_file_system_that_several_hosts_share_is_told_and_used_without_a_wal(
    worker: Any, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("residency.journal.engine.shared_file_system", lambda _: "nfs4")
    assert worker.attach(policy=POLICY).start().decision is residency.Decision.COMMITTED
    (line,) = lines()
    assert "is on nfs4, which several hosts may share" in line
    worker.managers[-1].detach()
    assert worker.attach(policy=POLICY).start().decision is residency.Decision.RESTORED
    assert not lines()
    assert worker.is_sound()
    with Journal.open(worker.journal) as journal:
        assert len(list(journal.events())) > 10
