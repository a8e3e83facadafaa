"""Workers over a tiny real pipeline."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The module with the pipeline, loaded as other processes load it."""
    spec = spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["tiny"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def worker(tiny: Any, tmp_path: Path) -> Iterator[Any]:
    made = tiny.Worker(tmp_path / "journal.db")
    # Kernels this small are slower on several threads, and much slower on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield made
    torch.set_num_threads(threads)
    for manager in made.managers:
        manager.detach()
