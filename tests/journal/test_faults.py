"""A driver and a disk that fail: the right error, nothing acknowledged lost, and a journal that goes on afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from residency.errors import JournalCorrupt, JournalError
from residency.journal import engine
from residency.journal.events import Draft, Event, EventType
from residency.journal.file_system import file_system, shared_file_system
from residency.journal.reader import JournalReader
from residency.journal.sqlite import connect, driver
from residency.journal.store import Journal
from residency.journal.verify import Finding, verify

if TYPE_CHECKING:
    from pathlib import Path

Start = Callable[..., subprocess.Popen[str]]

# What SQLite says, what a person is told, and the exit code.
FAULTS = {
    "an I/O error": ("disk I/O error", "the disk reported an I/O error", 3),
    "a full disk": ("database or disk is full", "the disk is full", 3),
    "a read-only disk": ("attempt to write a readonly database", "it is read-only", 3),
    "a lock": ("database is locked", "another writer has kept it locked", 3),
    "damage": ("database disk image is malformed", "the file is damaged", 5),
}


@dataclass
class Faults:
    """Fails the n-th call of the driver that a writer makes, before or after it was done; from there on, or once."""

    first: int = 10**9
    said: str = ""
    sticky: bool = False
    afterwards: bool = False
    calls: list[str] = field(default_factory=list)

    def run(self, sql: str, call: Callable[[], Any]) -> Any:
        self.calls.append(sql)
        number = len(self.calls)
        fails = number == self.first or (self.sticky and number > self.first)
        if fails and not self.afterwards:
            raise driver.OperationalError(self.said)
        result = call()
        if fails:
            raise driver.OperationalError(self.said)
        return result


class FaultyCursor:
    def __init__(self, cursor: Any, faults: Faults) -> None:
        self._cursor, self._faults = cursor, faults

    def execute(self, sql: str, *parameters: Any) -> Any:
        return self._faults.run(sql, lambda: self._cursor.execute(sql, *parameters))

    def executemany(self, sql: str, *parameters: Any) -> Any:
        return self._faults.run(sql, lambda: self._cursor.executemany(sql, *parameters))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


class FaultyConnection:
    def __init__(self, connection: Any, faults: Faults) -> None:
        self._connection, self._faults = connection, faults

    def cursor(self) -> FaultyCursor:
        return FaultyCursor(self._connection.cursor(), self._faults)

    def commit(self) -> None:
        self._faults.run("COMMIT", self._connection.commit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """The driver of every writer, which fails when it is told to."""
    told = Faults()
    monkeypatch.setattr(engine, "connect", lambda *args, **kwargs: FaultyConnection(connect(*args, **kwargs), told))
    return told


def draft(number: int) -> Draft:
    return Draft(type=EventType.MEASURED, round=1, payload={"number": number}, blobs=(b"%d" % number,))


def append(journal: Journal, number: int) -> Event:
    (event,) = journal.append([draft(number)], stream="worker", epoch="e", witness=True)
    return event


def read(path: Path) -> list[Event]:
    """Of a journal that has nothing wrong with it."""
    with JournalReader.open(path) as reader:
        assert [finding for finding in verify(reader) if not finding.is_note] == []
        return list(reader.events())


def num_calls(faults: Faults, journal: Journal) -> int:
    before = len(faults.calls)
    append(journal, 0)
    return len(faults.calls) - before


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("afterwards", [False, True], ids=["before it is done", "after it is done"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_driver_that_fails_anywhere_in_an_append_loses_nothing_acknowledged(
    fault: str, afterwards: bool, sticky: bool, path: Path, faults: Faults
) -> None:
    said, problem, exit_code = FAULTS[fault]
    acknowledged: list[Event] = []
    with Journal.open(path) as journal:
        faults.said, faults.sticky, faults.afterwards = said, sticky, afterwards
        for number in range(1, num_calls(faults, journal) + 1):
            acknowledged = read(path)
            faults.first = len(faults.calls) + number
            with pytest.raises(JournalError, match=problem) as caught:
                append(journal, 2 * number)
            assert caught.value.exit_code == exit_code
            assert str(path) in str(caught.value)
            if sticky:
                with pytest.raises(JournalError, match=problem):
                    append(journal, 2 * number)
            faults.first = 10**9
            # What was not acknowledged is there wholly or not at all.
            found = read(path)
            assert found[: len(acknowledged)] == acknowledged
            assert len(found) <= len(acknowledged) + 1
            # And the same journal goes on, whatever it was.
            acknowledged = [*found, append(journal, 2 * number + 1)]
            assert read(path) == acknowledged
    assert read(path) == acknowledged


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "damage"])
def test_a_driver_that_fails_while_a_journal_is_opened_is_told_and_leaves_it_alone(
    fault: str, path: Path, faults: Faults
) -> None:
    said, problem, _ = FAULTS[fault]
    with Journal.open(path) as journal:
        append(journal, 0)
    before = read(path)
    faults.said, faults.sticky, number = said, True, 0
    while True:
        number += 1
        faults.first = len(faults.calls) + number
        try:
            Journal.open(path).close()
        except JournalError as error:
            assert problem in str(error)
        else:
            break
        finally:
            faults.first = 10**9
        assert read(path) == before
        assert not list(path.parent.glob("*.corrupt-*"))
    assert number > 3


def test_a_journal_that_cannot_be_made_leaves_no_file_that_looks_like_one(path: Path, faults: Faults) -> None:
    faults.said, faults.sticky, number = "database or disk is full", True, 0
    while True:
        number += 1
        faults.first = len(faults.calls) + number
        try:
            Journal.open(path).close()
        except JournalError as error:
            assert "the disk is full" in str(error)
        else:
            break
        finally:
            faults.first = 10**9
        made = {entry.name for entry in path.parent.iterdir()} - {"journal.db.lock"}
        # Opening it may fail after it was made, and then it is whole.
        assert made <= {"journal.db", "journal.db-wal", "journal.db-shm"}
        if made:
            assert read(path) == []
        for name in made:
            path.with_name(name).unlink()
    assert number > 10


def damage(path: Path, *, after: int) -> None:
    """Overwrite what another process could: everything behind the first pages of the file."""
    with open(path, "r+b") as file:
        file.seek(after)
        file.write(os.urandom(path.stat().st_size - after))


# A writer in a process of its own: opening and closing the file here would drop its locks.
LIVE = """
import sys
from residency.errors import JournalError
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal
journal = Journal.open(sys.argv[1])
for number in range(300):
    journal.append([Draft(type=EventType.MEASURED, round=1, payload={"n": "x" * 300})], stream="w", epoch="e")
cursor = journal._store._connected().connection.cursor()
cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
cursor.execute("PRAGMA shrink_memory")
cursor.close()
print("ready", flush=True)
for line in sys.stdin:
    try:
        events = journal.append([Draft(type=EventType.MEASURED, round=1)], stream="w", epoch="e")
        print("acknowledged", events[0].position, flush=True)
    except JournalError as error:
        print(error.exit_code, error, flush=True)
"""


@pytest.fixture
def live(path: Path, start: Start) -> Iterator[Callable[[], str]]:
    """A writer that holds the journal open, and appends whenever it is asked to; returns what it says."""
    process = start(LIVE, path)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    def ask() -> str:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline().rstrip()

    yield ask
    process.kill()
    process.wait()


def test_pages_damaged_under_a_live_journal_stop_it_and_the_next_start_sets_it_aside(
    path: Path, live: Callable[[], str]
) -> None:
    assert live() == "acknowledged 301"
    damage(path, after=8 * 4096)
    # Until it comes to a page that it does not remember.
    said = next(line for line in iter(live, "") if not line.startswith("acknowledged"))
    assert said.startswith(f"5 journal {path}: the file is damaged"), said
    with Journal.open(path) as journal:
        assert journal.created and journal.set_aside is not None
        assert f"{path}.corrupt-" in journal.set_aside
        append(journal, 1)
    assert len(read(path)) == 1


@pytest.mark.parametrize(
    ("suffix", "problem"), [("", "no such file or directory"), ("-wal", "its WAL was removed or replaced")]
)
def test_a_file_removed_under_a_live_journal_stops_it_before_anything_is_lost(
    suffix: str, problem: str, path: Path, live: Callable[[], str]
) -> None:
    assert live() == "acknowledged 301"
    os.unlink(f"{path}{suffix}")
    assert live().startswith("3 journal") and problem in live()
    # Nor is it fooled by another file of that name.
    shutil.copy(__file__, f"{path}{suffix}")
    assert live().startswith("3 journal")


def test_a_journal_altered_before_a_start_is_not_believed(
    path: Path, drafts: Callable[[int], list[Draft]], tamper: Callable[..., None]
) -> None:
    with Journal.open(path) as journal:
        journal.append(drafts(3), stream="worker", epoch="e")
    tamper("UPDATE events SET payload = x'7b7d' WHERE position = 2")
    with Journal.open(path) as journal, pytest.raises(JournalCorrupt, match="event 2 is not what was written"):
        list(journal.events(stream="worker"))


# Real file systems, where the system lets a test mount one.

MOUNTED = """
import os, subprocess, sys
from residency.errors import JournalError
from residency.journal.events import Draft, EventType
from residency.journal.reader import JournalReader
from residency.journal.store import Journal
from residency.journal.verify import verify

folder, what = sys.argv[1:3]
path = os.path.join(folder, "journal.db")
small = Draft(type=EventType.MEASURED, round=1, payload={"filler": "x" * 1000})
journal, acknowledged = Journal.open(path, wait_s=0.5), []
try:
    for number in range(2000):
        acknowledged += journal.append([small], stream="worker", epoch="e", witness=number % 5 == 0)
        if what == "read-only" and number == 20:
            journal.close()
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
            journal = Journal.open(path, wait_s=0.5)
except JournalError as error:
    print(error.exit_code, error)
if what == "full":
    os.unlink(os.path.join(folder, "ballast"))
    acknowledged += journal.append([small], stream="worker", epoch="e", witness=True)
    journal.close()
with JournalReader.open(path) as reader:
    print([finding.text for finding in verify(reader)], [*reader.events()][: len(acknowledged)] == acknowledged)
print(len(acknowledged))
"""


def mounted(folder: Path, what: str) -> list[str]:
    """Run in a mount namespace of its own, on a small file system; skips where that is not allowed."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    folder.mkdir()
    # What can be removed again, when the disk is full.
    script = (
        'mount -t tmpfs -o size=1m none "$1" && dd if=/dev/zero of="$1/ballast" bs=1k count=300 2>/dev/null '
        '&& exec "$3" -c "$4" "$1" "$2"'
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(folder), what, sys.executable, MOUNTED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if "not permitted" in ended.stderr or "permission denied" in ended.stderr.lower():
        pytest.skip("mounting is not allowed here")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_disk_that_fills_up_stops_the_journal_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    said, checked, num = mounted(tmp_path / "small", "full")
    assert said == f"3 journal {tmp_path}/small/journal.db: the disk is full; free some space, then try again"
    assert checked == "[] True"
    assert int(num) > 20


def test_a_file_system_that_is_read_only_is_told_at_the_start_and_can_be_read(tmp_path: Path) -> None:
    said, checked, num = mounted(tmp_path / "small", "read-only")
    assert said.startswith(f"3 journal {tmp_path}/small/journal.db")
    assert "read-only" in said
    assert checked == "[] True"
    assert int(num) == 21


# Network file systems.

MOUNTS = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:21 / /proc rw - proc proc rw
24 22 0:30 / /mnt/share rw - nfs4 server:/share rw,vers=4.2
25 24 0:31 / /mnt/share/local rw - tmpfs none rw
26 22 0:32 / /mnt/with\040space rw - cifs //server/share rw
27 22 0:33 / /mnt/hidden rw - ext4 /dev/a rw
28 22 0:34 / /mnt/hidden rw shared:4 master:1 - fuse.sshfs host:/ rw
29 22 0:35 / /mnt/windows rw - fuseblk /dev/b rw
30 22 0:36 / /mnt/host rw - 9p host rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/home/journal.db", "ext4", False),
        ("/mnt/share/journal.db", "nfs4", True),
        ("/mnt/shared/journal.db", "ext4", False),
        ("/mnt/share/local/journal.db", "tmpfs", False),
        ("/mnt/with space/journal.db", "cifs", True),
        ("/mnt/hidden/journal.db", "fuse.sshfs", True),
        ("/mnt/windows/journal.db", "fuseblk", False),
        ("/mnt/host/a/b/journal.db", "9p", True),
    ],
)
def test_the_kind_of_a_file_system_is_read_from_the_table_of_mounts(
    path: str, kind: str, shared: bool, tmp_path: Path
) -> None:
    assert file_system(tmp_path.joinpath(path), mounts=MOUNTS) == kind
    assert shared_file_system(tmp_path.joinpath(path), mounts=MOUNTS) == (kind if shared else None)


def test_what_this_very_machine_says_can_be_read(tmp_path: Path) -> None:
    if not os.path.exists("/proc/self/mountinfo"):
        pytest.skip("there is no table of mounts here")
    assert file_system(tmp_path) is not None


def test_on_a_network_file_system_there_is_no_wal_and_one_warning(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    start: Start,
    findings: Callable[[], tuple[Finding, ...]],
) -> None:
    with Journal.open(path) as journal:
        append(journal, 0)  # before the file was moved there
    monkeypatch.setattr(engine, "shared_file_system", lambda _: "nfs4")
    for number in range(2):
        with Journal.open(path) as journal:
            append(journal, number)
            raw = journal._store._connected().connection.cursor()  # type: ignore[attr-defined]
            raw.execute("PRAGMA journal_mode")
            assert raw.fetchone() == ("delete",)
            raw.execute("PRAGMA synchronous")
            assert raw.fetchone() == (3,)
            raw.close()
            assert not path.with_name("journal.db-wal").exists()
            assert len(list(journal.events())) == number + 2
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "is on nfs4, which several hosts may share" in warning
    assert findings() == ()
