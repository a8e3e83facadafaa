"""Outputs of a request: what is found in them, their digests, and closeness."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_output import FluxPipelineOutput
from PIL import Image

from residency.errors import WarmupFailed
from residency.gpu.output import flatten_output, output_digest, outputs_close

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Video:
    frames: torch.Tensor
    sound: np.ndarray | None
    name: str = "moon"


def picture(value: int = 3) -> Image.Image:
    return Image.new("RGB", (4, 3), (value, 2, 1))


FULL: dict[str, Callable[[], object]] = {
    "tensor": lambda: torch.arange(6.0).reshape(2, 3),
    "half": lambda: torch.arange(6, dtype=torch.bfloat16),
    "view": lambda: torch.arange(12.0).reshape(3, 4).T[1:],
    "complex": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "scalar": lambda: torch.tensor(5),
    "array": lambda: np.arange(6, dtype=np.float32).reshape(2, 3),
    "words": lambda: np.array([1, 2, 3], dtype=np.uint16),
    "objects": lambda: np.array([np.ones(2), "a"], dtype=object),
    "dates": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
    "picture": picture,
    "pictures": lambda: [picture(1), picture(2)],
    "model-output": lambda: FluxPipelineOutput(images=[picture()]),
    "data-class": lambda: Video(frames=torch.ones(2), sound=None),
    "mapping": lambda: OrderedDict(images=torch.ones(2), flags=[False, None]),
    "tuple": lambda: ([picture()], None, {"seed": 2**80}),
    "text": lambda: "a cat",
    "number": lambda: 0.5,
}


@pytest.mark.parametrize("name", FULL)
def test_equal_outputs_have_one_digest_and_are_close(name: str) -> None:
    first, second = FULL[name](), FULL[name]()
    assert output_digest(first) == output_digest(second)
    assert outputs_close(first, second, 0.0)


def test_different_outputs_have_different_digests() -> None:
    # An array and a tensor of the same numbers are the same output.
    digests = {name: output_digest(make()) for name, make in FULL.items() if name not in {"model-output", "array"}}
    assert len(set(digests.values())) == len(digests)


def test_a_model_output_is_worth_what_it_holds() -> None:
    assert output_digest(FULL["model-output"]()) == output_digest(picture())


@pytest.mark.parametrize(
    "output", [None, [], (), {}, [None], torch.empty(0), np.empty((0, 3)), "", ([], {"images": None})]
)
def test_an_empty_output_is_a_failed_warmup(output: object) -> None:
    with pytest.raises(WarmupFailed, match="the warmup returned nothing; it must run one request"):
        flatten_output(output)


def test_an_output_that_holds_itself_ends() -> None:
    output: list[object] = [torch.ones(2)]
    output.append(output)
    assert flatten_output(output)


def test_arrays_come_in_order_and_are_not_shared_with_a_read_only_array() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    flat = flatten_output({"b": torch.ones(1), "a": [array, torch.zeros(2)]})
    assert [tuple(part.shape) for part in flat] == [(1,), (3,), (2,)]
    assert all(part.is_contiguous() and part.device.type == "cpu" for part in flat)


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, 2.0, 4.0]),
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        torch.tensor([1.0, 2.0, math.nextafter(3.0, 4.0)], dtype=torch.float64),
        [torch.tensor([1.0, 2.0, 3.0]), torch.ones(1)],
    ],
)
def test_any_change_of_bits_type_or_shape_changes_the_digest(other: object) -> None:
    assert output_digest(torch.tensor([1.0, 2.0, 3.0])) != output_digest(other)


def test_negative_zero_is_another_output_to_the_digest_but_close() -> None:
    first, second = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert output_digest(first) != output_digest(second)
    assert outputs_close(first, second, 0.0)


@pytest.mark.parametrize(
    ("first", "second", "tolerance", "close"),
    [
        ([100.0, 0.0], [100.0, 0.9], 0.01, True),
        ([100.0, 0.0], [100.0, 1.1], 0.01, False),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0, True),
        ([math.nan, 1.0], [1.0, 1.0], 1.0, False),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0, True),
        ([math.inf, 1.0], [-math.inf, 1.0], 1.0, False),
        ([math.nan], [math.inf], 1.0, False),
        ([math.nan], [math.nan], 0.0, True),
    ],
)
def test_closeness_is_relative_to_the_largest_value(
    first: list[float], second: list[float], tolerance: float, close: bool
) -> None:
    assert outputs_close(torch.tensor(first), torch.tensor(second), tolerance) is close


def test_pictures_are_close_by_their_pixels() -> None:
    assert outputs_close(picture(200), picture(201), 0.01)
    assert not outputs_close(picture(200), picture(220), 0.01)


def test_a_picture_has_the_shape_of_a_picture() -> None:
    assert [tuple(part.shape) for part in flatten_output(picture())] == [(3,), (3, 4, 3)]
    assert not outputs_close(picture(), picture().transpose(Image.Transpose.ROTATE_90), 1.0)
    assert tuple(flatten_output(Image.new("1", (10, 3), 1))[1].shape) == (3, 2)


def test_outputs_of_other_shapes_or_types_are_never_close() -> None:
    assert not outputs_close(torch.ones(2), torch.ones(3), 1.0)
    assert not outputs_close(torch.ones(2), torch.ones(2, dtype=torch.float64), 1.0)
    assert not outputs_close(torch.ones(2), [torch.ones(2), torch.ones(2)], 1.0)
