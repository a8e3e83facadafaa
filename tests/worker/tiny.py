"""A tiny real pipeline on the emulated device, and workers attached to it; loaded by file, also in other processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import residency
from residency.gpu.emulated import EmulatedDevice
from residency.journal.fold import fold_stream
from residency.journal.reader import JournalReader
from residency.journal.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

    from residency.journal.views import StreamView

WIDTH = 256
WORKLOAD = residency.Workload(width=128, height=128, frames=1, steps=6, batch=1)


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.project(tokens))


class Denoiser(nn.Module):
    scale: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            latents = latents + torch.tanh(block(latents)) * self.scale
        return latents


class Decoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3 * width)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decode(latents)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.layer(latents))


@dataclass
class Pipeline:
    """Three components and a request; `calls` counts requests, `fail` is raised in the middle of each."""

    modules: dict[str, nn.Module]
    width: int
    device: torch.device
    calls: list[Any] = field(default_factory=list)
    fail: Callable[[Any], None] | None = None

    def request(self, shape: Any) -> torch.Tensor:
        self.calls.append(shape)
        num_tokens = shape.width * shape.height // 256
        tokens = torch.ones(shape.batch, num_tokens, self.width, device=self.device) / self.width
        latents = self.modules["encoder"](tokens)
        for _ in range(shape.steps):
            latents = self.modules["denoiser"](latents)
            if self.fail is not None:
                self.fail(shape)
        decoded: torch.Tensor = self.modules["decoder"].decode(latents)  # type: ignore[operator]
        return decoded


def make_pipeline(width: int = WIDTH, device: str = "cpu") -> Pipeline:
    torch.manual_seed(0)
    modules = {"encoder": Encoder(width), "denoiser": Denoiser(width), "decoder": Decoder(width)}
    for module in modules.values():
        module.eval().requires_grad_(False)
    return Pipeline(modules, width, torch.device(device))


class Worker:
    """Starts managers over fresh pipelines on fresh devices, one journal for all of them."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.pipeline = make_pipeline()
        self.device = EmulatedDevice(cap_bytes=CAP_BYTES)
        self.managers: list[residency.Manager] = []

    def attach(self, *, fresh: bool = True, **options: Any) -> residency.Manager:
        if fresh:
            self.pipeline, self.device = make_pipeline(), EmulatedDevice(cap_bytes=options.pop("cap", CAP_BYTES))
        pipeline = self.pipeline
        defaults: dict[str, Any] = {
            "journal": self.journal,
            "workload": WORKLOAD,
            "warmup": pipeline.request,
            "name": "tiny",
            "device": self.device,
            "identity": dict.fromkeys(pipeline.modules, "seed 0"),
            "policy": POLICY,
        }
        manager = residency.attach(pipeline.modules, **{**defaults, **options})
        self.managers.append(manager)
        return manager

    def view(self) -> StreamView:
        reader = JournalReader.open(self.journal)
        try:
            return fold_stream(reader.events("tiny"), "tiny")
        finally:
            reader.close()

    def events(self) -> list[Any]:
        reader = JournalReader.open(self.journal)
        try:
            return list(reader.events("tiny"))
        finally:
            reader.close()

    def is_sound(self) -> bool:
        """Whether the journal verifies."""
        reader = JournalReader.open(self.journal)
        try:
            return not [finding for finding in verify(reader) if not finding.is_note]
        finally:
            reader.close()


# The three components weigh 0.25, 1.5 and 0.75 MiB: with a reserve all of them together do not fit, any two do.
CAP_BYTES = 2 * 2**20 + 5 * 2**17
POLICY = residency.Policy(image_area_max=64 * 64, sample_budget_s=5.0, samples_max=3)
