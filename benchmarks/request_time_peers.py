"""Other ways to serve a pipeline whose weights do not fit the device, as their documentation says to switch them on."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.request_time_shards import GROUP_BLOCK, GROUP_LEAF, MMGP_1, MMGP_2, MODEL_OFFLOAD

if TYPE_CHECKING:
    from collections.abc import Callable


def prepare_peer(kind: str, pipeline: Any, device: torch.device) -> None:
    """Put a pipeline in host memory under a peer's care. Raises whatever the peer raises."""
    _PREPARE[kind](pipeline, device)


def _model_offload(pipeline: Any, device: torch.device) -> None:
    pipeline.enable_model_cpu_offload(device=device)


def _group_block(pipeline: Any, device: torch.device) -> None:
    _group(pipeline, device, offload_type="block_level", num_blocks_per_group=1)


def _group_leaf(pipeline: Any, device: torch.device) -> None:
    _group(pipeline, device, offload_type="leaf_level")


def _group(pipeline: Any, device: torch.device, **options: Any) -> None:
    pipeline.enable_group_offload(
        onload_device=device, offload_device=torch.device("cpu"), use_stream=True, non_blocking=True, **options
    )


def _mmgp(profile: int) -> Callable[[Any, torch.device], None]:
    def prepare(pipeline: Any, device: torch.device) -> None:
        offload: Any = importlib.import_module("mmgp.offload")
        # It would quantize the transformer if not told otherwise, and then the outputs are other ones.
        offload.profile(pipeline, profile, quantizeTransformer=False, verboseLevel=0)

    return prepare


_PREPARE: dict[str, Callable[[Any, torch.device], None]] = {
    MODEL_OFFLOAD: _model_offload,
    GROUP_BLOCK: _group_block,
    GROUP_LEAF: _group_leaf,
    MMGP_1: _mmgp(1),
    MMGP_2: _mmgp(2),
}
