import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from residency.doctor import FREE_DISK_BYTES_MIN, Check, Health, examine


def check_of(checks: list[Check], subject: str) -> Check:
    return next(one for one in checks if one.subject == subject)


@pytest.fixture(autouse=True)
def _bare_environment(clean_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(clean_environment):
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", clean_environment["XDG_STATE_HOME"])


def test_doctor_looks_at_libraries_host_device_and_journal(committed: Any) -> None:
    checks = examine(str(committed.path))

    subjects = [one.subject for one in checks]
    for subject in ("python", "torch", "host memory", "device", "kill switch", "sqlite", "file system", "journal"):
        assert any(one.startswith(subject) for one in subjects), subject
    assert check_of(checks, "journal").found.endswith("events: 9, streams: 1")
    assert all(one.remedy for one in checks if one.health is not Health.OK)
    assert not [one for one in checks if one.health is Health.PROBLEM]


def test_doctor_makes_no_journal_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "journal.db"

    checks = examine(str(path))

    assert check_of(checks, "journal") == Check(
        subject="journal", health=Health.OK, found=f"none at {path} yet; a worker makes it"
    )
    assert not path.parent.exists()


def test_doctor_warns_of_a_thrown_kill_switch_and_says_how_to_take_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESIDENCY_DISABLE", "yes")

    found = check_of(examine(str(tmp_path / "journal.db")), "kill switch")

    assert (found.health, found.found) == (Health.WARNING, "on by RESIDENCY_DISABLE=yes")
    assert found.remedy == "unset RESIDENCY_DISABLE to let workers calibrate"


def test_doctor_warns_of_a_journal_that_others_may_use(committed: Any) -> None:
    committed.path.chmod(0o644)

    found = check_of(examine(str(committed.path)), "journal's mode")

    assert (found.health, found.remedy) == (Health.WARNING, f"chmod 600 {committed.path}")


def test_a_file_that_is_no_journal_is_a_problem_and_a_finding(tmp_path: Path, run: Callable[..., Any]) -> None:
    (tmp_path / "notes.db").write_text("not a database")

    done = run("doctor", "--json", "--journal", "notes.db")

    (found,) = [one for one in done.json() if one["subject"] == "journal"]
    assert (done.code, found["health"]) == (1, "problem")


def test_a_url_of_another_database_is_a_problem() -> None:
    found = check_of(examine("postgresql://host/fleet"), "journal")

    assert found.health is Health.PROBLEM


def test_doctor_in_words_names_what_was_found(committed: Any, run: Callable[..., Any]) -> None:
    done = run("doctor", "--journal", "journal.db")

    assert done.code == 0
    assert any(line.split()[:2] == ["ok", "python"] for line in done.out.splitlines())


def test_the_file_system_of_the_journal_is_named(tmp_path: Path) -> None:
    found = check_of(examine(str(tmp_path / "journal.db")), "file system")

    assert f"free at {tmp_path}" in found.found
    assert not found.found.startswith("unknown type") or not Path("/proc/self/mounts").exists()
    assert FREE_DISK_BYTES_MIN < 2**30
