"""The benchmark of a fan-out runs, and its lines add up."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fleet.py"
LINE = re.compile(r"(status|calibrate) of 5 replicas, (0|3) dead, 4 at a time: median [0-9.]+ s, worst [0-9.]+ s; (.*)")


def test_it_tells_for_both_verbs_what_a_fan_out_takes_and_comes_to() -> None:
    pytest.importorskip("uvicorn")
    few = ("--replicas", "5", "--repeat", "1", "--concurrency", "4")
    done = subprocess.run([sys.executable, SCRIPT, *few], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr

    told = [found.groups() for line in done.stdout.splitlines() if (found := LINE.fullmatch(line))]
    assert len(told) == len(done.stdout.splitlines())
    faults = "(connection-refused, timeout, died)"
    assert told == [
        ("status", "0", "answered: 5 answered"),
        ("status", "3", f"unknown: 3 unknown, 2 answered {faults}"),
        ("calibrate", "0", "committed: 5 committed"),
        ("calibrate", "3", f"refused: 3 refused, 2 committed {faults}"),
    ]
