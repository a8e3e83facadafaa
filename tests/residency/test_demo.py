"""The demo as a stranger starts it: what it prints, how it ends, and what survives a SIGKILL."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from residency.journal.reader import JournalReader
from residency.journal.verify import verify

Start = Callable[..., dict[str, Any]]
CRASH_POINTS = ("measuring", "planned", "applied", "validating")


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Start the demo in a forked child, since every import of diffusers takes seconds."""
    script = Path(__file__).with_name("demo_starts.py")
    server = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None

    def ask(*arguments: str, terminal: bool = False, **environment: str) -> dict[str, Any]:
        assert server.stdin is not None and server.stdout is not None
        request = {"arguments": ["--device", "cpu", *arguments], "environment": environment, "terminal": terminal}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer: dict[str, Any] = json.loads(server.stdout.readline())
        return answer

    yield ask
    server.stdin.close()
    server.wait(timeout=60)
    server.stdout.close()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The first start on a fresh journal, as a process of its own."""
    journal = tmp_path_factory.mktemp("demo") / "journal.db"
    command = [sys.executable, "-m", "residency", "demo", "--json", "--device", "cpu", "--journal", str(journal)]
    return journal, subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def committed(first: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A copy of the journal that the first start left, and what that start said."""
    journal, done = first
    for path in journal.parent.iterdir():
        shutil.copy(path, tmp_path / path.name)
    return str(tmp_path / journal.name), json.loads(done.stdout)


def test_a_first_start_calibrates_and_says_so_in_one_line_of_json(
    first: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    done = first[1]

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    said = json.loads(done.stdout)
    assert said["decision"] in {"committed", "kept"}
    assert said["num_probes"] == 1
    assert said["output"]["shape"] == [1, 3, 128, 128]
    assert 0 < said["journal_ms"] < said["ready_ms"]


@pytest.mark.parametrize("state", CRASH_POINTS)
def test_a_start_that_is_killed_in_a_state_is_recovered_by_the_next(
    start: Start, committed: tuple[str, dict[str, Any]], state: str
) -> None:
    journal, before = committed

    killed = start("--json", "--journal", journal, "--crash-at", state)
    restored = start("--json", "--journal", journal)

    assert (killed["status"], killed["out"]) == (-9, "")
    assert killed["err"] == f"  !! SIGKILL in state '{state}'\n"
    assert (restored["status"], restored["err"]) == (0, "")
    said = json.loads(restored["out"])
    assert (said["decision"], said["num_probes"]) == ("restored", 0)
    assert said["placement"] == before["placement"]
    assert said["output"] == before["output"]
    reader = JournalReader.open(journal)
    try:
        assert [finding for finding in verify(reader) if not finding.is_note] == []
        assert sum(event.type == "recovered" for event in reader.events()) == 1
    finally:
        reader.close()


@pytest.mark.parametrize("vram", ["24", "24GB.", "lots"])
def test_a_cap_without_a_unit_is_exit_code_2_in_one_line(run: Callable[..., Any], vram: str) -> None:
    done = run("demo", "--vram", vram)

    assert (done.code, done.out) == (2, "")
    assert (
        done.err == f"error: --vram is {vram!r}; write a size with its unit, such as '24GiB', '512MiB' or '8000000B'\n"
    )


def test_a_cap_far_too_small_is_exit_code_72_in_one_line(start: Start, tmp_path: Path) -> None:
    ended = start("--json", "--vram", "1MiB", "--journal", str(tmp_path / "journal.db"))

    assert (ended["status"], ended["out"]) == (72, "")
    assert ended["err"].startswith("error: no placement fits: ") and "the cap is 1.0 MiB; raise" in ended["err"]
    assert ended["err"].count("\n") == 1


def test_a_cap_under_which_the_pinned_placement_cannot_serve_is_exit_code_72_in_one_line(
    start: Start, tmp_path: Path
) -> None:
    ended = start("--json", "--vram", "21MiB", "--journal", str(tmp_path / "journal.db"), RESIDENCY_DISABLE="1")

    assert (ended["status"], ended["out"]) == (72, "")
    assert ended["err"].startswith("error: not even one request fits: emulated device out of memory. Tried to")
    assert ended["err"].count("\n") == 1


def test_a_kill_switch_pins_the_start_which_serves_all_the_same(
    start: Start, committed: tuple[str, dict[str, Any]]
) -> None:
    journal, before = committed

    pinned = start("--json", "--journal", journal, RESIDENCY_DISABLE="1")

    assert (pinned["status"], pinned["err"]) == (0, "")
    said = json.loads(pinned["out"])
    assert (said["decision"], said["num_requests"]) == ("pinned", 0)
    assert "RESIDENCY_DISABLE" in said["reason"]
    assert {one["mode"] for one in said["placement"]["components"].values()} == {"component-offload"}
    assert said["output"] == before["output"]


def test_a_kill_switch_set_to_an_unknown_word_pins_and_warns(start: Start, tmp_path: Path) -> None:
    pinned = start("--json", "--journal", str(tmp_path / "journal.db"), RESIDENCY_DISABLE="maybe")

    assert json.loads(pinned["out"])["decision"] == "pinned"
    assert pinned["err"] == "RESIDENCY_DISABLE is 'maybe', which is neither on nor off; taken as on, write 1 or 0\n"


def test_a_journal_that_cannot_be_used_is_told_in_one_line_and_the_start_serves_without_it(
    start: Start, first: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    ended = start("--json", "--journal", str(tmp_path))

    assert ended["status"] == 0
    said = json.loads(ended["out"])
    assert (said["decision"], said["num_requests"]) == ("without-journal", 0)
    assert said["output"] == json.loads(first[1].stdout)["output"]
    assert str(tmp_path) in ended["err"] and ended["err"].count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_progress_is_told_to_a_person_at_a_terminal(start: Start, committed: tuple[str, dict[str, Any]]) -> None:
    journal = committed[0]

    at_a_terminal = start("--json", "--journal", journal, terminal=True)
    as_text = start("--journal", journal, RESIDENCY_DISABLE="1")

    assert at_a_terminal["out"].count("\n") == 1
    assert "  .. building the small pipeline" in at_a_terminal["err"]
    assert "  .. validation request" in at_a_terminal["err"]
    assert "  .. building the small pipeline" in as_text["err"]
    assert as_text["out"].startswith("decision   pinned: the kill switch RESIDENCY_DISABLE is on")
