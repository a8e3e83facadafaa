"""Workers over a tiny real pipeline."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from residency.gpu.emulated import EmulatedDevice
from residency.statemachine.worker import Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Acting(Silent):
    """An observer that acts once, when a state is about to be left."""

    def __init__(self, state: str, act: Callable[[], object]) -> None:
        self._state, self._act = state, act
        self._is_done = False

    def leaving(self, state: str) -> None:
        if state == self._state and not self._is_done:
            self._is_done = True
            self._act()


@pytest.fixture
def on_leaving() -> Callable[[str, Callable[[], object]], Silent]:
    """Make an observer that acts once, when a state is about to be left."""
    return _Acting


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
    for manager in reversed(made.managers):
        manager.detach()
        device = manager._pipeline.device
        if isinstance(device, EmulatedDevice):
            # Else the guards of all earlier tests would look at every operator of the later ones.
            device.close()
