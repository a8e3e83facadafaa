import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from residency.journal.events import Draft, EventType

COMMAND = [sys.executable, "-m", "residency"]


def test_an_export_is_imported_with_the_same_positions_and_hashes(
    crashed: Any, run: Callable[..., Any], tmp_path: Path
) -> None:
    exported = run("export", "-o", "journal.jsonl", "--journal", "journal.db")
    imported = run("import", "journal.jsonl", "--journal", "copy.db")

    assert (exported.code, exported.out, exported.err) == (0, "", "exported 13 events\n")
    assert stat.S_IMODE((tmp_path / "journal.jsonl").stat().st_mode) == 0o600
    assert imported.code == 0 and imported.err.startswith("imported 13 events into ")
    assert run("log", "--json", "--journal", "copy.db").out == run("log", "--json", "--journal", "journal.db").out
    assert run("verify", "--journal", "copy.db").code == 0


def test_an_export_goes_through_a_pipe(committed: Any, clean_environment: dict[str, str], tmp_path: Path) -> None:
    export = [*COMMAND, "export", "--journal", str(committed.path)]
    exported = subprocess.run(export, capture_output=True, check=True, env=clean_environment).stdout
    again = [*COMMAND, "import", "-", "--json", "--journal", str(tmp_path / "copy.db")]
    done = subprocess.run(again, input=exported, capture_output=True, check=True, env=clean_environment)

    assert msgspec.json.decode(done.stdout)["events"] == 9
    copied = [*COMMAND, "export", "--journal", str(tmp_path / "copy.db")]
    assert subprocess.run(copied, capture_output=True, check=True, env=clean_environment).stdout == exported


def test_one_stream_can_be_exported(committed: Any, run: Callable[..., Any]) -> None:
    committed.start(stream="other", epoch="epoch-9")

    done = run("export", "--stream", "other", "-o", "other.jsonl", "--journal", "journal.db")

    assert done.err == "exported 1 events of stream 'other'\n"
    assert run("export", "--stream", "nobody", "-o", "nobody.jsonl", "--journal", "journal.db").code == 2


def test_an_export_replaces_no_file_and_leaves_no_half_one(
    committed: Any, run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "there").write_text("mine")

    taken = run("export", "-o", "there", "--journal", "journal.db")
    nowhere = run("export", "-o", "missing/file", "--journal", "journal.db")

    assert (taken.code, nowhere.code) == (2, 2)
    assert (tmp_path / "there").read_text() == "mine"
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


@pytest.mark.parametrize(("options", "code"), [((), 5), (("--no-verify",), 0)])
def test_a_line_that_was_changed_is_found(
    options: tuple[str, ...], code: int, committed: Any, run: Callable[..., Any], tmp_path: Path
) -> None:
    run("export", "-o", "journal.jsonl", "--journal", "journal.db")
    lines = (tmp_path / "journal.jsonl").read_text()
    (tmp_path / "changed.jsonl").write_text(lines.replace("faster", "slower"))

    done = run("import", "changed.jsonl", *options, "--journal", "copy.db")

    assert done.code == code
    assert done.err.count("\n") == 1
    assert ("unverified" in done.err) == (code == 0)


def test_an_import_needs_an_empty_journal_and_a_file(committed: Any, run: Callable[..., Any]) -> None:
    run("export", "-o", "journal.jsonl", "--journal", "journal.db")

    assert run("import", "journal.jsonl", "--journal", "journal.db").code == 3
    assert run("import", "missing.jsonl", "--journal", "copy.db").code == 2


def test_a_backup_of_a_journal_in_use_is_a_journal(committed: Any, run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("backup", "backup.db", "--journal", "journal.db")
    again = run("backup", "backup.db", "--journal", "journal.db")
    (made,) = run("backup", "second.db", "--json", "--journal", "journal.db").json()

    assert done.code == 0 and done.err.startswith(f"copied to {tmp_path / 'backup.db'}, verified: ")
    assert (again.code, "is there already" in again.err) == (3, True)
    assert (made["last_position"], made["has_witness"]) == (9, True)
    assert run("verify", "--journal", "backup.db").code == 0
    assert run("log", "--json", "--journal", "backup.db").out == run("log", "--json", "--journal", "journal.db").out


@pytest.fixture
def many(committed: Any) -> Any:
    """Six lives, of which four only started and stopped between two that did something."""
    for number in range(2, 6):
        committed.start(epoch=f"epoch-{number}")
        stopped = Draft(type=EventType.STOPPED, round=0, payload={"reason": "exit", "signal": None})
        committed.write(stopped, epoch=f"epoch-{number}")
    committed.start(epoch="epoch-6")
    return committed


def test_a_dry_run_of_prune_changes_nothing(many: Any, run: Callable[..., Any], tmp_path: Path) -> None:
    many.journal.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    done = run("prune", "--keep-epochs", "1", "--keep-since", "now", "--dry-run", "--journal", "journal.db")

    assert (done.code, done.err) == (0, "nothing was removed: this is a dry run\n")
    assert done.out.splitlines()[1].split()[:2] == ["worker", "3"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_prune_removes_what_its_dry_run_said(many: Any, run: Callable[..., Any]) -> None:
    options = ("--keep-epochs", "1", "--keep-since", "now", "--json", "--journal", "journal.db")
    (planned,) = run("prune", "--dry-run", *options).json()
    (removed,) = run("prune", *options).json()

    assert {**removed, "num_blobs": 0} == planned
    assert run("verify", "--journal", "journal.db").code == 0
    assert run("prune", *options).err == "there is nothing to remove\n"
    assert "events of 3 lives, 0 rounds, are gone so far" in run("log", "-n", "1", "--journal", "journal.db").out
    # The moment asked for lies where something is missing: it is not told as if nothing had been there.
    at = str(planned["first_position"] + 1)
    assert run("at", at, "--json", "--journal", "journal.db").json()[0]["pruned_since"] == planned["num_events"]
    assert "were pruned" in run("placement", "--at", at, "--journal", "journal.db").err


def test_prune_keeps_the_young_by_itself(many: Any, run: Callable[..., Any]) -> None:
    assert run("prune", "--journal", "journal.db").err == "there is nothing to remove\n"


@pytest.mark.parametrize("options", [("--keep-epochs", "0"), ("--keep-since", "someday"), ("--stream", "nobody")])
def test_prune_refuses_bounds_that_are_none(options: tuple[str, ...], many: Any, run: Callable[..., Any]) -> None:
    done = run("prune", *options, "--journal", "journal.db")

    assert (done.code, done.err.count("\n")) == (2, 1)


@pytest.mark.parametrize("verb", [("prune",), ("prune", "--dry-run"), ("backup", "b.db"), ("export",)])
def test_where_there_is_no_journal_none_is_made(verb: tuple[str, ...], run: Callable[..., Any], tmp_path: Path) -> None:
    assert run(*verb, "--journal", "journal.db").code == 3
    assert not list(tmp_path.iterdir())
