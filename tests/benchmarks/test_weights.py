"""The demo pipelines that are measured: what their classes hold, and that files bring back the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.request_time_weights import load_pipeline, make_weights
from residency.demo_pipeline import SIZES, build, drawn, request

if TYPE_CHECKING:
    from pathlib import Path

CPU, GIB = torch.device("cpu"), 2**30


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Tensors here are so small that waking a second thread costs more than it computes."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["small", "small-wan"])
def test_a_pipeline_loaded_from_files_gives_the_bits_of_the_one_drawn(tmp_path: Path, name: str) -> None:
    size = SIZES[name]
    made = make_weights(size, [tmp_path], device=CPU)
    loaded, plain = load_pipeline(size, tmp_path), build(size, device=CPU)

    outputs = [request(pipeline, size, size.workload, device=CPU) for pipeline in (loaded, plain)]

    assert torch.equal(*outputs)
    assert bool(torch.isfinite(outputs[0]).all())
    assert made["total_bytes"] == sum(made["component_bytes"].values())
    encoder = loaded.text_encoder if name == "small-wan" else loaded.text_encoder_2
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


def test_weights_without_room_are_refused_before_anything_is_drawn(tmp_path: Path, monkeypatch: Any) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)

    with pytest.raises(OSError, match="has 1000; name a folder that has room"):
        make_weights(SIZES["small"], [tmp_path], device=CPU)
    assert list(tmp_path.iterdir()) == []


def test_the_video_request_runs_the_transformer_once_a_step_and_repeats_exactly() -> None:
    size = SIZES["small-wan"]
    pipeline = build(size, device=CPU)
    passes = []
    pipeline.transformer.register_forward_pre_hook(lambda *_: passes.append(1))

    first, second = (request(pipeline, size, size.workload, device=CPU) for _ in range(2))

    assert torch.equal(first, second)
    assert tuple(first.shape) == (1, size.workload.frames, 3, size.workload.height, size.workload.width)
    assert len(passes) == 2 * size.workload.steps


@pytest.mark.parametrize(
    ("name", "component", "gib", "layers"),
    [
        ("flux", "transformer", 22.17, {"transformer_blocks": 19, "single_transformer_blocks": 38}),
        ("flux", "text_encoder_2", 8.87, {"encoder.block": 24}),
        ("wan", "transformer", 26.61, {"blocks": 40}),
        ("wan", "text_encoder", 10.58, {"encoder.block": 24}),
        ("wan", "vae", 0.24, {}),
    ],
)
def test_the_large_pipelines_have_the_dimensions_of_the_models_they_stand_for(
    name: str, component: str, gib: float, layers: dict[str, int]
) -> None:
    module = dict(drawn(SIZES[name], device=torch.device("meta")))[component]
    weights = list(module.parameters())

    assert sum(weight.nbytes for weight in weights) / GIB == pytest.approx(gib, abs=0.01)
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    assert {group: len(module.get_submodule(group)) for group in layers} == layers
