"""What a demo pipeline of some size is, as a value: its classes, its request, and the shape it serves by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from residency.gpu.workload import Workload
from residency.statemachine.policy import Policy

SEED_WEIGHTS, SEED_PROMPT, SEED_NOISE = 0, 1, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSize:
    """One size of the demo's pipelines.

    cap: the default memory cap, smaller than the weights. vocab: of its text encoders, in order.
    makers: component -> makes that module, in torch's default dtype, on torch's default device.
    assemble: makes the pipeline of these modules. serve: runs one request on it and returns what was generated.
    """

    name: str
    dtype: torch.dtype
    workload: Workload
    cap: str
    text_tokens: int
    vocab: tuple[int, ...]
    makers: Mapping[str, Callable[[], Any]]
    assemble: Callable[[Mapping[str, Any]], Any]
    serve: Callable[[Any, DemoSize, Workload, torch.device], torch.Tensor]
    policy: Policy = field(default_factory=Policy)

    def prompt(self, index: int, *, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
        """Return the token ids that text encoder number `index` gets, shape (batch, tokens), always the same ones."""
        generator = torch.Generator().manual_seed(SEED_PROMPT + index)
        return torch.randint(0, self.vocab[index], (batch, tokens), generator=generator).to(device)
