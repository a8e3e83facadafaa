"""The demo's pipelines: diffusers' real classes with seeded random weights, and one seeded request to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from residency.demo_image import FLUX, SMALL
from residency.demo_size import SEED_WEIGHTS
from residency.demo_video import SMALL_WAN, WAN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.demo_size import DemoSize
    from residency.gpu.workload import Workload

SIZES = {size.name: size for size in (SMALL, FLUX, SMALL_WAN, WAN)}


def build(size: DemoSize, *, device: torch.device) -> Any:
    """Return a pipeline in host memory whose weights were drawn on `device` from a fixed seed.

    Each component is drawn on the device on its own and moved to the host, so that a cap on the device which
    holds the largest of them is never exceeded, and 31 GiB take seconds.
    """
    return assemble(size, {name: module.to("cpu") for name, module in drawn(size, device=device)})


def drawn(size: DemoSize, *, device: torch.device) -> Iterator[tuple[str, Any]]:
    """Yield (component, module on `device`) one by one, its weights drawn there from a fixed seed.

    On the meta device nothing is drawn, and nothing takes memory. Let go of a module before taking the next one.
    """
    for name, make in size.makers.items():
        torch.manual_seed(SEED_WEIGHTS)
        default = torch.get_default_dtype()
        torch.set_default_dtype(size.dtype)
        try:
            with device:
                module = make()
        finally:
            torch.set_default_dtype(default)
        yield name, module.eval().requires_grad_(False)
        del module
        if device.type == "cuda":
            torch.cuda.empty_cache()


def assemble(size: DemoSize, components: dict[str, Any]) -> Any:
    """Return the pipeline of these modules, quiet, without a tokenizer: requests bring their token ids."""
    pipeline = size.assemble(components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def identity(size: DemoSize) -> dict[str, str]:
    """Return for every component what is known of its weights' content: they are drawn from a seed."""
    return dict.fromkeys(size.makers, f"{size.name}, seed {SEED_WEIGHTS}")


def request(pipeline: Any, size: DemoSize, shape: Workload, *, device: torch.device) -> torch.Tensor:
    """Serve one seeded request of the given shape, encoders and decoder included.

    Returns images, shape (batch, 3, height, width), or videos, shape (batch, frames, 3, height, width).
    """
    with torch.no_grad():
        return size.serve(pipeline, size, shape, device)
