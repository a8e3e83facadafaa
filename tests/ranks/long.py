"""The long form: every rank killed, hung and raising before and after every step; then all pairs of such faults.

`python -m tests.ranks.long single` takes minutes, `python -m tests.ranks.long pairs` many hours; --limit takes so many
of them at random, --seed others. Prints what is wrong, and ends with 1 if anything is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.ranks import outcomes

BATCH = 24
RANKS = 4


def main() -> int:
    """Live all cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("form", choices=("single", "pairs"))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    script = Path(__file__).with_name("preloaded.py")
    server = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory(prefix="residency-ranks-") as folder:
        found = run(server, Path(folder), asked)
    assert server.stdin is not None
    server.stdin.close()
    server.wait(timeout=60)
    return found


def run(server: subprocess.Popen[str], folder: Path, asked: argparse.Namespace) -> int:
    """Live them in batches; returns the exit code."""
    steps = live(server, folder, [[{}]])[0][0][0]["seen"]["before"]
    kinds = itertools.product(range(1, steps + 1), range(RANKS), ("kill", "hang", "raise"), ("before", "after"))
    single: list[dict[str, Any]] = [
        {"rank": rank, "what": what, "at": at, "number": number} for number, rank, what, at in kinds
    ]
    cases = [[one] for one in single]
    if asked.form == "pairs":
        cases = [[one, two] for one, two in itertools.combinations(single, 2) if one["rank"] != two["rank"]]
    if asked.limit is not None:
        cases = random.Random(asked.seed).sample(cases, min(asked.limit, len(cases)))
    wrong, begun = 0, time.monotonic()
    for first in range(0, len(cases), BATCH):
        batch = cases[first : first + BATCH]
        answers = live(server, folder, [[{"faults": faults}, {}] for faults in batch])
        for faults, answer in zip(batch, answers, strict=True):
            if problems := outcomes.problems(answer, {one["rank"] for one in faults}):
                wrong += 1
                sys.stdout.write(f"{faults}: {problems}\n")
        done = first + len(batch)
        sys.stdout.write(f"{done} of {len(cases)}, {wrong} wrong, {time.monotonic() - begun:.0f} s\n")
        sys.stdout.flush()
    return 1 if wrong else 0


def live(server: subprocess.Popen[str], folder: Path, cases: list[list[dict[str, Any]]]) -> list[Any]:
    """Live one batch."""
    assert server.stdin is not None and server.stdout is not None
    asked = [{"folder": tempfile.mkdtemp(dir=folder), "lives": lives} for lives in cases]
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    found: list[Any] = json.loads(server.stdout.readline())
    return found


if __name__ == "__main__":
    sys.exit(main())
