"""Pipelines and modules say where they run, not where their first weight happens to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from residency.errors import NotAModule
from residency.gpu.adapters import components_of
from residency.gpu.emulated import EmulatedDevice
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT


class Model(nn.Module):
    """Reads its device off its first parameter, as diffusers and transformers models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(value)
        return result


class Pipe:
    """Has components like a diffusers pipeline: modules, and things that are none."""

    def __init__(self) -> None:
        self.components = {"model": Model().requires_grad_(False), "scheduler": object(), "absent": None}

    @property
    def device(self) -> torch.device:
        model: Any = self.components["model"]
        return torch.device(model.device)

    _execution_device = device

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """Run the model twice."""
        model: Any = self.components["model"]
        with torch.no_grad():
            result: torch.Tensor = model(model(value))
            return result


class NumberedDevice(EmulatedDevice):
    """An emulated device that does not call itself the CPU."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 3)


def test_pipeline_and_models_run_where_the_device_is_while_weights_are_away() -> None:
    pipe: Any = Pipe()
    modules, owner = components_of(pipe)
    before = (type(pipe), type(modules["model"]))
    device = NumberedDevice(total_bytes=2**20)
    pipeline = ManagedPipeline(modules, device=device, owner=owner)
    assert pipe.device == pipe._execution_device == pipe.components["model"].device == torch.device("cuda", 3)
    assert isinstance(pipe, Pipe) and isinstance(pipe.components["model"], Model)
    assert (type(pipe).__name__, type(pipe).__qualname__, type(pipe).__module__) == ("Pipe", "Pipe", __name__)
    pipeline.detach()
    assert (type(pipe), type(modules["model"])) == before
    assert pipe.device == torch.device("cpu")


def test_a_call_of_the_pipeline_is_one_request(device: EmulatedDevice) -> None:
    pipe = Pipe()
    modules, owner = components_of(pipe)
    pipeline = ManagedPipeline(modules, device=device, owner=owner)
    pipe(torch.ones(1, 4))
    assert device.moved_bytes()[0] == pipeline.component("model").spec.total_bytes  # one load, two uses
    assert Pipe.__call__.__doc__ == type(pipe).__call__.__doc__
    pipeline.detach()


def test_a_minimal_resident_pipeline_keeps_its_class(device: EmulatedDevice) -> None:
    pipe = Pipe()
    modules, owner = components_of(pipe)
    pipeline = ManagedPipeline(modules, device=device, owner=owner, minimal=True)
    pipeline.place("model", RESIDENT)
    assert type(pipe) is Pipe and type(modules["model"]) is Model
    pipeline.detach()


def test_a_mapping_and_a_single_module_are_taken_as_they_are() -> None:
    model = Model()
    assert components_of({"model": model}) == ({"model": model}, None)
    assert components_of(model) == ({"model": model}, None)


def test_what_is_no_module_is_refused_by_name() -> None:
    with pytest.raises(NotAModule, match="component 'scheduler' is a object"):
        components_of({"model": Model(), "scheduler": object()})
    with pytest.raises(NotAModule, match="component 'pipeline' is a int"):
        components_of(3)
