"""Workers over a tiny real pipeline."""

from __future__ import annotations

import logging
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import residency
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


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What a person is told about trouble since the last look, line by line."""

    def take() -> list[str]:
        told = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        caplog.clear()
        return [line for text in told for line in text.splitlines()]

    return take


@pytest.fixture(scope="module")
def expected(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """What the pipeline serves under its initial placement."""
    worker = tiny.Worker(tmp_path_factory.mktemp("expected") / "journal.db")
    manager = worker.attach(warmup=None)
    manager.start()
    output: torch.Tensor = worker.pipeline.request(tiny.WORKLOAD)
    manager.detach()
    worker.device.close()
    return output


@pytest.fixture
def serves_as_it_began(worker: Any, tiny: Any, expected: torch.Tensor) -> Callable[..., None]:
    def check(manager: residency.Manager, report: residency.Report) -> None:
        assert report.decision is residency.Decision.WITHOUT_JOURNAL
        assert report.error is not None
        assert report.placement == manager.placement == manager._setup.initial
        assert manager._pipeline.pinned_bytes == 0
        assert manager.ready
        assert torch.equal(worker.pipeline.request(tiny.WORKLOAD), expected)
        answer = manager.handle({"verb": "calibrate", "epoch": manager.epoch, "round": report.round})
        assert answer["outcome"] == "skipped"

    return check
