"""Why a component must stay as it is, and what its user should know: found by looking, nothing is moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from residency.gpu.inventory import named_weights, storage_key
from residency.gpu.layers import is_compiled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Types whose whole content is the one storage that is moved.
_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_FOREIGN_MARKS = {
    "_hf_hook": "accelerate",
    "_diffusers_hook": "diffusers",
    "_is_fsdp_managed_module": "FSDP",
    "_fsdp_state": "FSDP",
}
_HOOK_REGISTRIES = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """Something about a component. `fixes`: it must stay as it is because of this; else it is only a note."""

    component: str
    text: str
    fixes: bool


def find_hazards(components: Mapping[str, nn.Module], *, device: torch.device) -> tuple[Hazard, ...]:
    """Return the hazards of every component, in the order of the components. Read-only."""
    shared = _shared_weights(components)
    hazards = []
    for name, module in components.items():
        texts = [*_unmovable(module, device), *_foreign(module), *shared.get(name, ()), *_cached_views(module)]
        texts += _untraced(module)
        hazards += [Hazard(component=name, text=text, fixes=True) for text in texts]
        hazards += [Hazard(component=name, text=text, fixes=False) for text in _notes(module)]
    return tuple(hazards)


def is_untouchable(module: nn.Module) -> bool:
    """Whether even the entry points of this module must stay as they are: compiled, or hooked by someone else."""
    return is_compiled(module) or any(_is_marked(module, mark) for mark in _FOREIGN_MARKS)


def _is_marked(module: nn.Module, mark: str) -> bool:
    found = vars(module).get(mark)
    # diffusers keeps an empty registry on a transformer that was only asked whether it has hooks.
    return found is not None and bool(getattr(found, "hooks", True))


def _unmovable(module: nn.Module, device: torch.device) -> Iterator[str]:
    weights = list(named_weights(module))
    if not weights:
        yield "it has no weights"
    for name, tensor in weights:
        problem = _tensor_problem(tensor, device)
        if problem is not None:
            yield f"weight {name!r} {problem}"
            return


def _tensor_problem(tensor: torch.Tensor, device: torch.device) -> str | None:
    if type(tensor) not in _PLAIN_TYPES:
        return f"is a {type(tensor).__name__}, whose content is more than one storage"
    if tensor.is_meta:
        return "is a meta tensor, which has no content; load it first"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return "is not plainly strided (sparse, quantized, or a lazy conjugate or negative view)"
    if tensor.is_inference():
        return "was made under torch.inference_mode, so that changes cannot be seen; load it outside"
    if tensor.device.type != "cpu" and tensor.device != device:
        return f"is on {tensor.device}, not on {device} or the CPU"
    return None


def _foreign(module: nn.Module) -> Iterator[str]:
    for name, child in module.named_modules():
        where = f"submodule {name!r}" if name else "it"
        for mark, owner in _FOREIGN_MARKS.items():
            if _is_marked(child, mark):
                yield f"{where} has hooks of {owner}; remove them (for instance pipe.remove_all_hooks()) before attach"
                return
        if any(getattr(child, registry, None) for registry in _HOOK_REGISTRIES):
            yield f"{where} has forward or backward hooks of someone else, which may hold on to its weights"
            return
        if not name and is_compiled(child):
            yield "it is compiled as a whole; compile its blocks instead"
            return


def _shared_weights(components: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    users: dict[int, dict[str, str]] = {}
    for component, module in components.items():
        for name, tensor in named_weights(module):
            if type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_meta:
                users.setdefault(storage_key(tensor), {}).setdefault(component, name)
    shared: dict[str, list[str]] = {}
    for names in users.values():
        if len(names) > 1:
            for component, name in names.items():
                others = ", ".join(sorted(other for other in names if other != component))
                shared.setdefault(component, [f"weight {name!r} is shared with {others}"])
    return shared


def _cached_views(module: nn.Module) -> Iterator[str]:
    keys = {
        storage_key(tensor)
        for _, tensor in named_weights(module)
        if type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_meta
    }
    for name, tensor in _plain_tensors(module):
        if _is_strided(tensor) and storage_key(tensor) in keys:
            yield f"attribute {name!r} is a view of a weight kept outside parameters and buffers, and would go stale"
            return


def _untraced(module: nn.Module) -> Iterator[str]:
    for name, child in module.named_modules():
        # Their kernels write running statistics without counting a version, so that the change would be lost.
        if child.training and getattr(child, "running_mean", None) is not None:
            where = f"submodule {name!r}" if name else "it"
            yield f"{where} updates running statistics in training mode without a trace; call eval() before attach"
            return


def _notes(module: nn.Module) -> Iterator[str]:
    keys = {id(tensor) for _, tensor in named_weights(module)}
    for name, tensor in _plain_tensors(module):
        if id(tensor) not in keys and tensor.numel() > 1:
            yield f"attribute {name!r} is a tensor outside parameters and buffers: it is never moved"
            break
    for name, child in module.named_modules():
        hidden = [key for key, value in vars(child).items() if key not in _REGISTRIES and _has_modules(value)]
        if hidden:
            yield f"attribute {_join(name, hidden[0])!r} holds modules in a plain container: they are never moved"
            break


def _plain_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, child in module.named_modules():
        for key, value in vars(child).items():
            if key not in _REGISTRIES:
                for tensor in _members(value):
                    if isinstance(tensor, torch.Tensor):
                        yield _join(prefix, key), tensor


def _members(value: object) -> tuple[object, ...]:
    if isinstance(value, dict):
        return tuple(value.values())
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _has_modules(value: object) -> bool:
    return isinstance(value, list | tuple | dict) and any(isinstance(item, nn.Module) for item in _members(value))


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and type(tensor) in _PLAIN_TYPES


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
