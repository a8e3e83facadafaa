"""The host pool of the emulated device: kernels on it fail, metadata and host-to-host copies do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from residency.gpu.emulated import EmulatedDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice()
    yield device
    device.close()


@pytest.fixture(params=[torch.no_grad, torch.inference_mode, torch.enable_grad])
def grad_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    context: AbstractContextManager[None] = request.param()
    with context:
        yield


@pytest.fixture
def weight(device: EmulatedDevice) -> torch.Tensor:
    weight = nn.Parameter(torch.arange(64.0).reshape(8, 8), requires_grad=False)
    device.claim_host(weight.untyped_storage())
    return weight


KERNELS: dict[str, Callable[[torch.Tensor], object]] = {
    "linear": lambda weight: F.linear(torch.ones(2, 8), weight),
    "matmul": lambda weight: torch.ones(2, 8) @ weight.T,
    "add": lambda weight: weight + 1,
    "out": lambda weight: torch.add(torch.ones(8, 8), 1, out=weight),
    "in-place": lambda weight: torch.ones(8, 8).add_(weight),
    "written": lambda weight: weight.detach().zero_(),
    "into-device": lambda weight: torch.ones(8, 8).copy_(weight),
    "from-device": lambda weight: weight.detach().copy_(torch.ones(8, 8)),
    "slice": lambda weight: torch.zeros(8, 8).__setitem__((slice(None), slice(0, 4)), weight[:, :4]),
    "list": lambda weight: torch.cat([torch.ones(8, 8), weight]),
    "stack-of-views": lambda weight: torch.stack([weight[0], weight[1]]),
    "item": lambda weight: weight[3, 3].item(),
    "embedding": lambda weight: F.embedding(torch.tensor([1, 2]), weight),
    "convolution": lambda weight: F.conv2d(torch.ones(1, 8, 4, 4), weight.reshape(8, 8, 1, 1)),
    "normalisation": lambda weight: F.layer_norm(torch.ones(2, 8), (8,), weight[0]),
    "attention": lambda weight: F.scaled_dot_product_attention(
        weight.view(1, 1, 8, 8), torch.ones(1, 1, 8, 8), torch.ones(1, 1, 8, 8)
    ),
    "through-a-cast": lambda weight: weight.to(torch.bfloat16).float().sum(),
    "through-a-clone": lambda weight: torch.ones(8, 8) * weight.clone(),
    "keyword": lambda weight: F.linear(torch.ones(2, 8), torch.ones(8, 8), bias=weight[0]),
    "foreach": lambda weight: torch.ops.aten._foreach_add.List([torch.ones(8, 8)], [weight]),
    "equal": lambda weight: torch.equal(weight, torch.ones(8, 8)),
    "like": lambda weight: torch.zeros_like(weight),
    "resize": lambda weight: weight.detach().resize_(100),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.usefixtures("grad_mode")
def test_a_kernel_on_a_host_weight_fails(device: EmulatedDevice, weight: torch.Tensor, name: str) -> None:
    before = weight.tolist()
    with pytest.raises(RuntimeError, match=r"same device.* aten\."), device.running():
        KERNELS[name](weight)
    assert weight.tolist() == before


def test_the_error_names_operator_argument_and_shape(device: EmulatedDevice, weight: torch.Tensor) -> None:
    text = r"'mat2' of aten\.mm\.default: a torch\.float32 weight of shape \(8, 8\)"
    with pytest.raises(RuntimeError, match=text), device.running(), torch.no_grad():
        F.linear(torch.ones(2, 8), weight)


METADATA: dict[str, Callable[[torch.Tensor], object]] = {
    "view": lambda weight: weight.view(-1)[3:].view(61),
    "strides": lambda weight: weight.as_strided((4, 4), (16, 2)).permute(1, 0).unsqueeze(0).expand(3, 4, 4),
    "detach": lambda weight: weight.detach().data,
    "clone": lambda weight: weight.clone(),
    "reshape": lambda weight: weight.T.reshape(-1),
    "contiguous": lambda weight: weight.T.contiguous(),
    "cast": lambda weight: weight.to(torch.float16),
    "host-to-host": lambda weight: weight.clone().copy_(weight),
    "chunks": lambda weight: weight.chunk(2)[1].unbind(0),
    "alias": lambda weight: torch.ops.aten.alias(weight),
    "in-place-view": lambda weight: weight.detach().t_().unsqueeze_(0).squeeze_(),
    "gradient-flag": lambda weight: weight.detach().requires_grad_(False),
    "facts": lambda weight: (
        weight.shape,
        weight.stride(),
        weight.is_contiguous(),
        weight.is_pinned(),
        str(weight.dtype),
    ),
}


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.usefixtures("grad_mode")
def test_metadata_and_copies_of_a_host_weight_stay_on_the_host_uncounted(
    device: EmulatedDevice, weight: torch.Tensor, name: str
) -> None:
    with device.running():
        result = METADATA[name](weight)
        assert device.memory().allocated_bytes == 0
        assert device.memory().allocated_peak_bytes == 0
        if isinstance(result, torch.Tensor):
            with pytest.raises(RuntimeError, match="same device"):
                result.sum()
