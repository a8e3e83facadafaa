"""A real sticky error on a real device, in a process of its own: its exit code, its journal, and the next start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from residency.gpu.poison import find_poison
from residency.journal.fold import fold_stream
from residency.journal.reader import JournalReader

pytestmark = pytest.mark.gpu
ALLOWED_S = 240


def start(journal: Path, where: str) -> tuple[int, dict[str, Any]]:
    """Start a worker in a process of its own; return its exit code and what it printed."""
    script = Path(__file__).with_name("losing.py")
    done = subprocess.run(
        [sys.executable, script, str(journal), where], check=False, capture_output=True, text=True, timeout=ALLOWED_S
    )
    assert done.stdout, done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def view(journal: Path) -> Any:
    reader = JournalReader.open(journal)
    try:
        return fold_stream(reader.events("tiny"), "tiny")
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("where", "state", "blames"),
    [("validation", "validating", "plan"), ("baseline", "measuring", "infrastructure")],
)
def test_an_assertion_in_a_kernel_ends_the_worker_with_71_and_the_next_start_is_untouched(
    tmp_path: Path, where: str, state: str, blames: str
) -> None:
    journal = tmp_path / "journal.db"
    code, said = start(journal, where)
    assert code == 71, said
    assert "device-side assert triggered" in said["error"] and said["ready"] is False
    (epoch,) = view(journal).epochs
    assert (epoch.rounds[-1].state, epoch.poisoned["state"]) == (state, state)
    # Nothing was moved back.
    assert not any(move.undo for move in epoch.rounds[-1].moves)
    code, said = start(journal, "nowhere")
    assert code == 0, said
    assert said["decision"] in ("committed", "kept", "rolled-back") and said["is_finite"]
    dead, _ = view(journal).epochs
    assert dead.recovered["death"]["blames"] == blames


ERRORS = """
import torch
from residency.gpu.poison import find_poison
x = torch.zeros(4, device="cuda")
try:
    torch.empty(2**50, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    assert find_poison(error) is None, error
try:
    x[torch.tensor([9], device="cuda")]
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error.error_code, find_poison(error))
for call in (torch.cuda.synchronize, lambda: torch.zeros(1, device="cuda"), lambda: x.cpu()):
    try:
        call()
    except RuntimeError as error:
        print(getattr(error, "error_code", None), find_poison(error))
"""


def test_a_real_sticky_error_is_recognized_at_every_later_call(tmp_path: Path) -> None:
    assert find_poison(torch.OutOfMemoryError("CUDA out of memory")) is None
    done = subprocess.run(
        [sys.executable, "-c", ERRORS], check=False, capture_output=True, text=True, timeout=ALLOWED_S
    )
    lines = done.stdout.splitlines()
    assert lines == ["710 AcceleratorError: CUDA error: device-side assert triggered"] * 4, done.stderr[-2000:]
