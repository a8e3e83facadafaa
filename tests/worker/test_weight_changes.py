"""Weights that change while a worker serves: kept, whatever the placement, and seen by the next request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import residency
from residency.errors import UnknownComponent

if TYPE_CHECKING:
    from collections.abc import Callable


def on_the_device(manager: residency.Manager, pipeline: Any) -> None:
    with manager.whole("denoiser") as denoiser, torch.no_grad():
        assert denoiser is pipeline.modules["denoiser"]
        for block in denoiser.blocks:
            block.weight.mul_(0.5)


def from_new_ones(manager: residency.Manager, pipeline: Any) -> None:
    with torch.no_grad():
        for block in pipeline.modules["denoiser"].blocks:
            block.weight.copy_(torch.full(block.weight.shape, 0.01))


@pytest.mark.parametrize("modes", [{}, {"denoiser": "layerwise-offload"}, {"denoiser": "component-offload"}])
@pytest.mark.parametrize("change", [on_the_device, from_new_ones])
def test_a_change_of_weights_is_what_the_next_request_computes_with(
    worker: Any, modes: dict[str, str], change: Callable[[residency.Manager, Any], None]
) -> None:
    workload = residency.Workload(width=128, height=128, frames=1, steps=6, batch=1)
    manager = worker.attach(modes=modes)
    manager.start()
    before = worker.pipeline.request(workload).clone()
    change(manager, worker.pipeline)
    after = worker.pipeline.request(workload).clone()
    again = worker.pipeline.request(workload).clone()
    assert torch.equal(after, again) and not torch.equal(after, before)
    manager.detach()
    assert torch.equal(worker.pipeline.request(workload), after)


def test_an_unknown_component_is_refused_by_name(worker: Any) -> None:
    manager = worker.attach()
    manager.start()
    with pytest.raises(UnknownComponent, match="decodr"), manager.whole("decodr"):
        raise AssertionError
