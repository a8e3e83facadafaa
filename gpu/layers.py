"""Layer groups: the repeated ModuleLists of a component whose layers can be streamed one by one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from residency.gpu.inventory import named_weights, storage_bytes, storage_key

if TYPE_CHECKING:
    from collections.abc import Iterable


def find_layer_groups(component: nn.Module) -> dict[str, tuple[nn.Module, ...]]:
    """Return the layer groups of a component by name, outermost first and never one inside another.

    A group is a ModuleList of at least two children of one class. Not one: a list that holds a layer twice, whose
    layers share weights with anything outside themselves, that has no weights, or that is inside of something compiled
    (weights can be bound before a compiled region, not in it). Layers may be compiled themselves.
    """
    owners = _storage_owners(component)
    groups: dict[str, tuple[nn.Module, ...]] = {}
    compiled = [name for name, module in component.named_modules() if is_compiled(module)]
    for name, module in component.named_modules():
        if any(name.startswith(f"{outer}.") for outer in (*groups, *compiled)):
            continue
        if name and isinstance(module, nn.ModuleList) and _can_stream(module, owners):
            groups[name] = tuple(module)
    return groups


def _can_stream(layers: nn.ModuleList, owners: Counter[int]) -> bool:
    distinct = {id(layer) for layer in layers}
    if len(layers) < 2 or len(distinct) != len(layers) or len({type(layer) for layer in layers}) != 1:
        return False
    own = [Counter(storage_key(tensor) for _, tensor in named_weights(layer)) for layer in layers]
    if any(owners[key] != count for counter in own for key, count in counter.items()):
        return False
    return any(sum(storage_bytes(tensor for _, tensor in named_weights(layer)).values()) for layer in layers)


def _storage_owners(component: nn.Module) -> Counter[int]:
    """Count under how many names each storage is reachable in the whole component."""
    return Counter(storage_key(tensor) for _, tensor in named_weights(component))


def call_method(module: nn.Module) -> str:
    """Return which attribute of a module a call goes through: its forward, or what `module.compile()` made of it.

    A hook around it is outside of what torch.compile looks into.
    """
    return "forward" if getattr(module, "_compiled_call_impl", None) is None else "_compiled_call_impl"


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this very module go through torch.compile."""
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def modules_outside(component: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules of a component that are in none of the layers."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    return [module for module in component.modules() if id(module) not in inside]
