"""Lives of all ranks of a worker, in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

Live = Callable[[list[list[dict[str, Any]]]], list[Any]]


@pytest.fixture(scope="session")
def rank_folder() -> Iterator[Path]:
    """A folder in memory, where there is one: what a crash of the machine leaves is not what is tested."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="residency-ranks-", dir=memory if os.access(memory, os.W_OK) else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def live(rank_folder: Path) -> Iterator[Live]:
    """Live cases, each a list of lives one after the other; several cases at a time. Returns all answers of each."""
    script = Path(__file__).with_name("preloaded.py")
    environment = {**os.environ, "XDG_STATE_HOME": str(rank_folder / "state")}
    server = subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )

    def ask(cases: list[list[dict[str, Any]]]) -> list[Any]:
        assert server.stdin is not None and server.stdout is not None
        asked = [{"folder": tempfile.mkdtemp(dir=rank_folder), "lives": lives} for lives in cases]
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        found: list[Any] = json.loads(server.stdout.readline())
        for one, answer in zip(asked, found, strict=True):
            for life in answer:
                for rank in life:
                    rank["folder"] = one["folder"]
        return found

    yield ask
    assert server.stdin is not None and server.stdout is not None
    server.stdin.close()
    server.wait(timeout=60)
    server.stdout.close()


@pytest.fixture(scope="session")
def model() -> Any:
    """The module with the model of the protocol."""
    spec = spec_from_file_location("ranks_model", Path(__file__).with_name("model.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["ranks_model"] = module
    spec.loader.exec_module(module)
    return module
