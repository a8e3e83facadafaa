"""The benchmark of ranks runs without cards, says what it says of every rank, and of a rank that was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ranks.py"
SMALL = ("--pipeline", "small", "--device", "cpu", "--spawn", "2", "--requests", "1")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


def test_two_ranks_are_timed_with_what_they_wait_for(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    output = tmp_path / "found.json"
    done = run("--journal", str(tmp_path / "journal.db"), "--output", str(output))
    assert done.returncode == 0, done.stderr

    found = json.loads(output.read_text(encoding="utf-8"))
    assert json.loads(done.stdout) == found
    assert found["exchange_ms"].keys() == {"store", "gloo"} and min(found["exchange_ms"].values()) > 0
    first, second = found["ranks"]
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert (first["round"], second["round"]) == (1, 1)
    assert {first["decision"], second["decision"]} <= {"committed", "kept"}
    assert first["output"] == second["output"]
    assert first["waited_s"].keys() >= {"start", "plan", "vote"} and "emulated" in first["device"]


def test_a_killed_rank_takes_the_other_back_which_says_so(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    killed = run("--journal", str(tmp_path / "journal.db"), "--kill", "shape")
    survivor, ended = (json.loads(line) for line in killed.stdout.splitlines())
    assert (survivor["rank"], survivor["decision"]) == (0, "rolled-back")
    assert "rank 1" in survivor["reason"] and survivor["start_s"] > 0
    assert ended == {"killed": 1, "at": "shape", "exit_codes": [0, -9]}
