"""A small pipeline of two nets on an emulated device, and a journal-like list that effects are told to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from residency.gpu.emulated import EmulatedDevice
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from residency.effects.spec import EffectSpec


class Net(nn.Module):
    """Three layers that could be streamed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = block(value)
        return value


class Story:
    """What effects told, in order; raises at the call that `fail_at` numbers (from 1)."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.fail_at = 0
        self.error: BaseException = OSError("disk full")

    def on_intent(self, spec: EffectSpec, undo: bool) -> None:
        self._tell(f"{'undo' if undo else 'do'} {spec.component}")

    def on_outcome(self, spec: EffectSpec, result: str, error: BaseException | None, duration_ns: int) -> None:
        assert duration_ns >= 0 and (error is not None) == (result == "failed")
        self._tell(f"{result} {spec.component}")

    def _tell(self, line: str) -> None:
        self.lines.append(line)
        if len(self.lines) == self.fail_at:
            raise self.error


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.fixture
def pipeline() -> Iterator[ManagedPipeline]:
    """Two resident nets, `big` and `small`, of 3 x 1056 and 3 x 288 weight bytes, nothing to spare on the host."""
    device = EmulatedDevice(total_bytes=2**20)
    torch.manual_seed(0)
    modules = {"big": Net(16).requires_grad_(False), "small": Net(8).requires_grad_(False)}
    pipeline = ManagedPipeline(modules, device=device)
    for name in modules:
        pipeline.place(name, RESIDENT)
    yield pipeline
    pipeline.detach()
    device.close()


@pytest.fixture
def addresses(pipeline: ManagedPipeline) -> Callable[[], dict[str, int]]:
    """Return the address of every weight now."""

    def look() -> dict[str, int]:
        return {
            f"{name}.{key}": tensor.data_ptr()
            for name in pipeline.placement.components
            for key, tensor in pipeline.component(name).module.named_parameters()
        }

    return look
