"""What keeps a component where it is: each case is found by looking, with its reason, and nothing is moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from residency.errors import ModeUnavailable
from residency.gpu.hazards import find_hazards
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from residency.gpu.emulated import EmulatedDevice

CPU = torch.device("cpu")


class Stubborn(torch.Tensor):
    """A weight with content beside its storage, which forbids moving, as quantized ones do."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this weight cannot be moved")


class Registry:
    """As diffusers keeps one on a module: with or without hooks in it."""

    def __init__(self, *hooks: str) -> None:
        self.hooks = dict.fromkeys(hooks)


def subclass_weight(net: Any) -> None:
    net.head.bias = nn.Parameter(torch.ones(8).as_subclass(Stubborn), requires_grad=False)


def meta_weight(net: Any) -> None:
    net.head.bias = nn.Parameter(torch.empty(8, device="meta"), requires_grad=False)


def inference_weight(net: Any) -> None:
    with torch.inference_mode():
        net.register_buffer("made", torch.ones(8))


def sparse_weight(net: Any) -> None:
    net.register_buffer("sparse", torch.eye(8).to_sparse())


def cached_view(net: Any) -> None:
    net.flat = net.head.weight.view(-1)


def cached_view_in_list(net: Any) -> None:
    net.flat = [net.head.weight[0]]


def foreign_hook(net: Any) -> None:
    net.blocks[0].register_forward_pre_hook(lambda module, args: None)


def accelerate_hook(net: Any) -> None:
    net.blocks[1]._hf_hook = object()


def diffusers_hook(net: Any) -> None:
    net._diffusers_hook = Registry("group_offloading")


def compiled(net: Any) -> None:
    net._compiled_call_impl = net._call_impl


def no_weights(net: Any) -> None:
    del net.head, net.tail, net.blocks


FIXING = {
    subclass_weight: "is a Stubborn",
    meta_weight: "meta tensor",
    inference_weight: "inference_mode",
    sparse_weight: "not plainly strided",
    cached_view: "'flat' is a view of a weight",
    cached_view_in_list: "'flat' is a view of a weight",
    foreign_hook: "'blocks.0' has forward or backward hooks",
    accelerate_hook: "hooks of accelerate",
    diffusers_hook: "hooks of diffusers",
    compiled: "compiled as a whole",
    no_weights: "no weights",
}


@pytest.mark.parametrize(("make", "reason"), FIXING.items())
def test_a_component_that_cannot_be_moved_is_fixed_with_its_reason(
    toys: Any, device: EmulatedDevice, make: Callable[[Any], None], reason: str
) -> None:
    net, other = toys.net(), toys.net(seed=1)
    make(net)
    before = {name: vars(module).copy() for name, module in net.named_modules()}
    pipeline = ManagedPipeline({"net": net, "other": other}, device=device, minimal=True)
    spec = pipeline.component("net").spec
    assert spec.fixed_reason is not None and reason in spec.fixed_reason
    assert pipeline.component("other").spec.fixed_reason is None
    with pytest.raises(ModeUnavailable, match=reason):
        pipeline.place("net", toys.offload)
    pipeline.place("net", RESIDENT)  # what it is already: nothing happens
    pipeline.place("other", RESIDENT)
    pipeline.detach()
    assert {name: vars(module) for name, module in net.named_modules()} == before


def test_a_distributed_tensor_is_fixed(toys: Any, tmp_path: Any) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net = toys.net()
        mesh = init_device_mesh("cpu", (1,))
        shard = DTensor.from_local(torch.ones(8), mesh, [Replicate()])
        net.head.bias = nn.Parameter(shard, requires_grad=False)
        hazards = find_hazards({"net": net}, device=CPU)
    finally:
        distributed.destroy_process_group()
    assert [hazard.fixes for hazard in hazards] == [True]
    assert "DTensor" in hazards[0].text


def test_components_that_share_a_weight_are_both_fixed(toys: Any) -> None:
    first, second = toys.net(), toys.net(seed=1)
    second.head.weight = first.head.weight
    hazards = find_hazards({"first": first, "second": second, "third": toys.net(seed=2)}, device=CPU)
    assert [(hazard.component, hazard.fixes) for hazard in hazards] == [("first", True), ("second", True)]
    assert hazards[0].text == "weight 'head.weight' is shared with second"


def test_a_view_of_another_components_weight_counts_as_shared(toys: Any) -> None:
    first, second = toys.net(), toys.net(seed=1)
    second.register_buffer("borrowed", first.head.weight.detach()[0])
    assert {hazard.component for hazard in find_hazards({"a": first, "b": second}, device=CPU)} == {"a", "b"}


def test_an_empty_registry_of_diffusers_is_no_hook(toys: Any) -> None:
    net = toys.net()
    net._diffusers_hook = Registry()
    assert find_hazards({"net": net}, device=CPU) == ()


def test_tensors_and_modules_that_are_never_moved_are_notes_only(toys: Any, device: EmulatedDevice) -> None:
    net = toys.net()
    net.scale = torch.ones(8)
    net.hidden = [nn.Linear(8, 8)]
    hazards = find_hazards({"net": net}, device=CPU)
    assert [(hazard.fixes, hazard.text.split("'")[1]) for hazard in hazards] == [(False, "scale"), (False, "hidden")]
    pipeline = ManagedPipeline({"net": net}, device=device)
    assert pipeline.component("net").spec.fixed_reason is None
    pipeline.detach()


def test_running_statistics_in_training_mode_fix_a_component() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    (hazard,) = find_hazards({"net": module}, device=torch.device("cpu"))
    assert hazard.fixes
    assert "submodule '1' updates running statistics" in hazard.text
    assert find_hazards({"net": module.eval()}, device=torch.device("cpu")) == ()
