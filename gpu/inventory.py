"""What a set of modules consists of: its weights, each once, and whether that has changed since it was looked at."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Replaced or grown by `register_parameter`, `register_buffer`, `add_module` and plain assignment.
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Inventory:
    """The distinct weight tensors (parameters and all buffers) of some modules, as they are now.

    `modules` is asked again at every `refresh`, because adapters add and replace children.
    """

    def __init__(self, modules: Callable[[], Iterable[nn.Module]]) -> None:
        self._modules = modules
        self._empty: list[dict[str, Any]] = []
        self._filled: list[dict[str, Any]] = []
        self._ids: list[int] = []
        self._values: list[Any] = []  # keeps alive what is known by its id
        self.tensors: tuple[torch.Tensor, ...] = ()
        self.refresh()

    def refresh(self) -> None:
        """Look again."""
        modules = tuple(self._modules())
        registries = [getattr(module, name) for module in modules for name in _REGISTRIES]
        self._empty = [registry for registry in registries if not registry]
        self._filled = [registry for registry in registries if registry]
        # By identity, which never asks tensors whether they are equal.
        self._values = [value for registry in self._filled for value in registry.values()]
        self._ids = list(map(id, self._values))
        self.tensors = tuple({id(tensor): tensor for module in modules for _, tensor in own_weights(module)}.values())

    def is_current(self) -> bool:
        """Whether no weight or child was added, removed or replaced since the last refresh. Read-only."""
        if any(self._empty):
            return False
        return [id(value) for registry in self._filled for value in registry.values()] == self._ids


def own_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers that a module itself holds, without its children's."""
    for registry in (module._parameters, module._buffers):
        for name, tensor in registry.items():
            if tensor is not None:
                yield name, tensor


def named_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer of a module tree under every name it has, non-persistent ones included."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, tensor in own_weights(child):
            yield (f"{prefix}.{name}" if prefix else name), tensor


def storage_key(tensor: torch.Tensor) -> int:
    """Identify the storage of a tensor: equal for ties and views, unique among storages that are alive."""
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return storage -> bytes, every storage once."""
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def weights_digest(module: nn.Module) -> str:
    """Return a SHA-256 over names, shapes, strides, dtypes and ties of all weights, wherever they are now."""
    digest = hashlib.sha256()
    first_name: dict[int, str] = {}
    for name, tensor in named_weights(module):
        if tensor.layout is torch.strided and not tensor.is_meta and _has_storage(tensor):
            tie, strides = first_name.setdefault(storage_key(tensor), name), tuple(tensor.stride())
        else:
            tie, strides = name, ()
        digest.update(repr((name, tuple(tensor.shape), strides, str(tensor.dtype), tie)).encode())
    return digest.hexdigest()


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return True
