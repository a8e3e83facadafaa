"""The lock between processes of one host: it excludes, it cannot be abused through links, it never blocks for good."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from residency.gpu.host_lock import HostLock, default_lock_path

PROCESS = """
import os, sys, time
from pathlib import Path
from residency.gpu.host_lock import HostLock

lock = HostLock(Path(sys.argv[1]), wait_s=20)
for _ in range(30):
    with lock.held() as is_held:
        assert is_held
        os.close(os.open(sys.argv[2], os.O_CREAT | os.O_EXCL))
        time.sleep(0.002)
        os.unlink(sys.argv[2])
"""


def can_be_taken(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_processes_exclude_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "lock"), str(tmp_path / "inside")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors


def test_the_lock_is_private_held_inside_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = HostLock(path, wait_s=1)
    for _ in range(2):
        with lock.held() as is_held:
            assert is_held
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert not can_be_taken(path)
        assert can_be_taken(path)
    with pytest.raises(KeyError), lock.held():
        raise KeyError
    assert can_be_taken(path)
    lock.close()
    lock.close()


def test_a_child_that_was_forked_inside_does_not_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = HostLock(path, wait_s=1)
    with lock.held():
        (mine,) = (int(link.name) for link in Path("/proc/self/fd").iterdir() if link.resolve() == path)
        copy = os.dup(mine)  # What a forked child has.
    assert can_be_taken(path)
    os.close(copy)
    lock.close()


def test_another_holder_is_waited_for_once_and_then_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lock"
    lock = HostLock(path, wait_s=0.2)
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        started_s = time.monotonic()
        for _ in range(50):
            with lock.held() as is_held:
                assert not is_held
        assert 0.2 <= time.monotonic() - started_s < 2
    assert caplog.text.count("another has kept it for 0.2 s") == 1
    with lock.held() as is_held:
        assert is_held
    lock.close()


def test_a_lock_that_is_not_wanted_any_more_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = HostLock(path, wait_s=60)
    started_s = time.monotonic()
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with lock.held(is_wanted=lambda: False) as is_held:
            assert not is_held
    assert time.monotonic() - started_s < 5
    lock.close()


@pytest.mark.parametrize("kind", ["symbolic link", "dangling link", "hard link", "pipe", "folder", "no folder"])
def test_only_a_plain_file_of_ones_own_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    path, target = tmp_path / "lock", tmp_path / "target"
    if kind != "dangling link":
        target.write_text("precious", encoding="utf-8")
    if kind.endswith("hard link"):
        path.hardlink_to(target)
    elif kind.endswith("link"):
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = tmp_path / "none" / "lock"
    lock = HostLock(path, wait_s=1)
    for _ in range(2):
        with lock.held() as is_held:
            assert not is_held
    assert caplog.text.count("going on without the lock") == 1
    assert target.exists() == (kind != "dangling link")
    if target.exists():
        assert target.read_text(encoding="utf-8") == "precious"
        assert can_be_taken(target)
    lock.close()


def test_a_file_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lock").touch()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with HostLock(tmp_path / "lock", wait_s=1).held() as is_held:
        assert not is_held
    assert "not a plain file of this user's own" in caplog.text


def test_every_user_has_a_lock_file_among_the_temporary_ones() -> None:
    assert default_lock_path().parent == Path(tempfile.gettempdir())
    assert str(os.geteuid()) in default_lock_path().name
