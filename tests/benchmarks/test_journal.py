"""The journal's benchmark runs, and prints a ratio for everything that it compares."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "journal.py"


def test_it_prints_what_it_compares_with_its_ratio(tmp_path: Path) -> None:
    few = ["--events", "1000", "--appends", "10", "--rounds", "1", "--writers", "2", "--folder", str(tmp_path)]
    ended = subprocess.run([sys.executable, SCRIPT, *few], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(r"ratio \d+\.\d\d$", ended.stdout, re.MULTILINE)) == 7
    assert "fold of 1000 events" in ended.stdout and "2 processes, 10 appends each" in ended.stdout
    assert list(tmp_path.iterdir()) == []
