"""Whatever becomes of the journal, before a start or in the middle of a round: the worker serves where it began."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import residency
from residency.errors import JournalError
from residency.journal.file_store import FileStore
from residency.journal.location import lock_path
from residency.journal.locks import FileLock
from residency.journal.schema import FORMAT
from residency.journal.sqlite import connect, driver
from residency.journal.store import Journal
from residency.settings import KILL_SWITCHES
from residency.statemachine.deaths import closing

NOBODY = 65534
WAIT_S = 0.3
# One sample, so that a round is short; a small area, so that there is a probe.
POLICY = residency.Policy(image_area_max=64 * 64, samples_max=1, journal_wait_s=WAIT_S)

Lines = Callable[[], list[str]]


@pytest.fixture(autouse=True)
def _no_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KILL_SWITCHES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that another user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="residency-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write everything, so become nobody for a while."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@contextmanager
def failing(first: int) -> Iterator[list[int]]:
    """Have every append fail from the first-th on; counts them."""
    plain, counted = Journal.append, [0]

    def append(self: Journal, *args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        if counted[0] >= first:
            raise JournalError(journal=self.location, problem="the disk is full", remedy="free some space")
        return plain(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", append)
        yield counted


def files_of(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}


def is_left_alone(folder: Path, before: dict[str, bytes]) -> None:
    """Everything is where it was; beside it lies at most what opening a journal of ours for a look leaves there."""
    after = files_of(folder)
    assert {name: after.get(name) for name in before} == before
    assert {name.rpartition(".db")[2] for name in after.keys() - before} <= {".lock", "-shm", "-wal"}


# Before a start.


def a_directory(path: Path) -> str:
    path.mkdir()
    (path / "notes").write_text("mine")
    return "is a directory; name a file in it"


def a_text(path: Path) -> str:
    path.write_text("these are my notes\n" * 100)
    return "the file is not a residency journal; name another file; this one is left"


def a_database_of_somebody_else(path: Path) -> str:
    path.touch()
    connection = connect(path, mode="rw", wait_s=1)
    connection.execute("CREATE TABLE mine (a)")
    connection.close()
    return "the file is not a residency journal; name another file; this one is left"


def a_newer_format(path: Path) -> str:
    Journal.open(path).close()
    connection = connect(path, mode="rw", wait_s=1)
    connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    connection.close()
    return f"format {FORMAT + 1} is newer than this program's {FORMAT}; upgrade residency, or name another journal"


@pytest.mark.parametrize("make", [a_directory, a_text, a_database_of_somebody_else, a_newer_format])
def test_a_journal_that_cannot_be_used_is_told_in_one_line_and_left_alone(
    worker: Any, lines: Lines, serves_as_it_began: Any, make: Callable[[Path], str]
) -> None:
    problem = make(worker.journal)
    folder = worker.journal if worker.journal.is_dir() else worker.journal.parent
    before = files_of(folder)
    manager = worker.attach(policy=POLICY)
    report = manager.start()
    assert lines() == [f"journal {worker.journal}: {problem}"]
    assert report.reason == f"journal {worker.journal}: {problem}"
    assert worker.pipeline.calls == []
    serves_as_it_began(manager, report)
    manager.detach()
    is_left_alone(folder, before)
    assert not lines()


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_read_only_journal_is_told_in_one_line_and_left_alone(
    worker: Any, lines: Lines, serves_as_it_began: Any, shared_folder: Path, what: str
) -> None:
    journal = shared_folder / "journal" / "journal.db"
    Journal.open(journal).close()
    for entry in journal.parent.iterdir():
        entry.chmod(0o666 if entry.suffix == ".lock" and what == "file" else 0o444)
    journal.parent.chmod(0o555 if what == "folder" else 0o777)
    before = files_of(journal.parent)
    manager = worker.attach(journal=journal, policy=POLICY)
    with as_nobody():
        report = manager.start()
    (line,) = lines()
    assert line == report.reason
    assert "read-only" in line or "permission denied" in line
    serves_as_it_began(manager, report)
    is_left_alone(journal.parent, before)


def test_a_damaged_journal_of_ours_is_set_aside_and_the_worker_calibrates_on_a_new_one(
    worker: Any, lines: Lines
) -> None:
    worker.attach(warmup=None).start()
    worker.managers[-1].detach()
    content = bytearray(worker.journal.read_bytes())
    content[4096:-4096] = os.urandom(len(content) - 8192)
    worker.journal.write_bytes(content)
    report = worker.attach(policy=POLICY).start()
    assert report.decision is residency.Decision.COMMITTED
    told = [line for line in lines() if "set aside" in line]
    assert len(told) == 1
    (kept,) = worker.journal.parent.glob("journal.db.corrupt-*Z")
    assert str(kept) in told[0]
    assert kept.read_bytes() == content


# Locked by another writer.


@contextmanager
def by_our_own_lock(journal: Path) -> Iterator[None]:
    """Hold what every writer of ours holds around an append."""
    lock = FileLock(lock_path(journal))
    assert lock.try_acquire()
    try:
        yield
    finally:
        lock.close()


@contextmanager
def by_a_database_tool(journal: Path) -> Iterator[None]:
    """Hold a write transaction, as somebody's shell may who knows nothing of our lock."""
    connection: driver.Connection = connect(journal, mode="rw", wait_s=1)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.close()


@pytest.mark.parametrize("locked", [by_our_own_lock, by_a_database_tool])
def test_a_start_waits_for_another_writer_about_as_long_as_it_may(
    worker: Any, lines: Lines, serves_as_it_began: Any, locked: Any
) -> None:
    Journal.open(worker.journal).close()
    manager = worker.attach(policy=POLICY)
    with locked(worker.journal):
        begun = time.monotonic()
        report = manager.start()
        took_s = time.monotonic() - begun
        (line,) = lines()
        assert "another writer has kept it locked for longer than 0.3 s; end that process" in line
        assert WAIT_S <= took_s < WAIT_S + 2
        serves_as_it_began(manager, report)


@pytest.mark.parametrize("locked", [by_our_own_lock, by_a_database_tool])
def test_a_round_whose_journal_is_locked_for_too_long_is_rolled_back(
    worker: Any, on_leaving: Any, lines: Lines, serves_as_it_began: Any, locked: Any
) -> None:
    held = None

    def lock() -> None:
        nonlocal held
        held = locked(worker.journal)
        held.__enter__()

    manager = worker.attach(policy=POLICY, observer=on_leaving("applied", lock))
    report = manager.start()
    assert held is not None
    held.__exit__(None, None, None)
    (line,) = lines()
    assert "another writer has kept it locked" in line and line in report.reason
    # Once, and not again at each of the five events that the rollback would have written.
    assert report.journal_ms < 4 * WAIT_S * 1e3
    assert report.reason.startswith("rolled back, journal ")
    serves_as_it_began(manager, report)


# Failing in mid-round.


def test_an_append_that_fails_anywhere_in_a_round_ends_where_it_began(
    worker: Any, tiny: Any, lines: Lines, serves_as_it_began: Any, expected: torch.Tensor, tmp_path: Path
) -> None:
    with failing(10**6) as counted:
        assert worker.attach(policy=POLICY).start().decision is residency.Decision.COMMITTED
        worker.managers[-1].detach()
    # The last two, serving and stopped, come when everything is decided.
    num_appends = counted[0] - 2
    assert num_appends > 10
    for first in range(1, num_appends + 1):
        worker.journal = tmp_path / f"{first}.db"
        manager = worker.attach(policy=POLICY)
        with failing(first) as counted:
            report = manager.start()
            (line,) = lines()
            assert line.endswith("the disk is full; free some space"), first
            assert counted[0] == first, "nothing is written after a failure"
            serves_as_it_began(manager, report)
        manager.detach()
        worker.device.close()
        assert not lines(), first
        assert worker.is_sound()
        if first > 1:
            (epoch,) = worker.view().epochs
            assert epoch.stopped == {"reason": "detach", "signal": None}, "there was room again"
            blamed = [
                draft.payload["death"]["blames"]
                for one in closing(worker.view(), boot_id=epoch.boot_id, now_ns=time.time_ns(), by_epoch="next")
                for draft in one.drafts
                if draft.type.value == "recovered"
            ]
            assert "plan" not in blamed, first


def test_a_journal_that_fails_when_all_is_decided_changes_nothing_but_is_told(
    worker: Any, tiny: Any, lines: Lines, expected: torch.Tensor
) -> None:
    with failing(10**6) as counted:
        worker.attach(policy=POLICY).start()
    worker.managers[-1].detach()
    worker.journal = worker.journal.with_name("other.db")
    manager = worker.attach(policy=POLICY)
    with failing(counted[0]):
        report = manager.start()
        assert report.decision is residency.Decision.COMMITTED
        assert len(lines()) == 1
        assert torch.equal(worker.pipeline.request(tiny.WORKLOAD), expected)


def test_a_restore_whose_journal_fails_ends_on_the_initial_placement_and_is_tried_again_next_time(
    worker: Any, lines: Lines, serves_as_it_began: Any
) -> None:
    committed = worker.attach(policy=POLICY).start()
    worker.managers[-1].detach()
    # After the first intent: a death there would blame the placement, and two of them would banish it.
    for first in (4, 5):  # the second start closes the first before it begins
        manager = worker.attach(policy=POLICY)
        with failing(first):
            report = manager.start()
            assert len(lines()) == 1
            serves_as_it_began(manager, report)
        manager.detach()
        assert max(one.num_intents for one in worker.view().rounds if one.epoch == manager.epoch) > 0
    report = worker.attach(policy=POLICY).start()
    assert (report.decision, report.placement) == (residency.Decision.RESTORED, committed.placement)


@pytest.mark.parametrize("state", ["measuring", "planned"])
def test_a_disk_that_is_really_full_in_mid_round_rolls_it_back(
    worker: Any, on_leaving: Any, lines: Lines, serves_as_it_began: Any, state: str
) -> None:
    def fill() -> None:
        journal = manager._epoch.journal
        assert journal is not None and isinstance(journal._store, FileStore)
        connection = journal._store._connected()
        (pages,) = connection.exec_driver_sql("PRAGMA page_count").one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        connection.rollback()

    manager = worker.attach(policy=POLICY, observer=on_leaving(state, fill))
    report = manager.start()
    (line,) = lines()
    assert "the disk is full; free some space, then try again" in line
    serves_as_it_began(manager, report)


# The demo.


def test_the_demo_with_a_journal_that_cannot_be_used_says_so_in_one_line_and_exits_with_0(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "residency", "demo", "--device", "cpu", "--json", "--journal", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == f"journal {tmp_path}: is a directory; name a file in it\n"
    assert '"decision":"without-journal"' in ended.stdout
    assert list(tmp_path.iterdir()) == []
