"""What a diffusers pipeline needs beyond its modules: a bracket around calls, and the right answer to `device`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from residency.errors import NotAModule

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def components_of(target: object) -> tuple[dict[str, nn.Module], object | None]:
    """Return the modules by name, and the pipeline object that owns them (None for a plain mapping or module).

    Raises NotAModule for a member of a mapping that is no module; a diffusers pipeline's other members
    (schedulers, tokenizers) are passed over.
    """
    if isinstance(target, nn.Module):
        return {"model": target}, None
    if isinstance(target, Mapping):
        for name, module in target.items():
            if not isinstance(module, nn.Module):
                raise NotAModule(component=str(name), found=type(module).__name__)
        return dict(target), None
    members = getattr(target, "components", None)
    if not isinstance(members, Mapping):
        raise NotAModule(component="pipeline", found=type(target).__name__)
    return {name: module for name, module in members.items() if isinstance(module, nn.Module)}, target


class Disguise:
    """One object's class swapped for a subclass of the same name; `remove` puts the class back."""

    def __init__(self, target: object, members: Mapping[str, object]) -> None:
        self._target, self._class = target, type(target)
        kind = type(target)
        naming = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        self._disguise = type(kind.__name__, (kind,), {**naming, **members})

    @property
    def is_installed(self) -> bool:
        """Whether the object has the subclass now."""
        return type(self._target) is self._disguise

    def install(self) -> None:
        """Swap the class. A second call is a no-op."""
        self._target.__class__ = self._disguise

    def remove(self) -> None:
        """Put the class back, unless someone else changed it since. A second call is a no-op."""
        if self.is_installed:
            self._target.__class__ = self._class


def disguise_pipeline(
    owner: object, *, request: Callable[[Mapping[str, object]], AbstractContextManager[None]], device: torch.device
) -> Disguise:
    """Make calls of a pipeline requests, and let it run on `device` wherever its weights are at the moment.

    request: enters one; it is given the named arguments of the call.
    """
    members = _device_members(owner, device)
    if callable(owner):
        plain_call = type(owner).__call__

        @functools.wraps(plain_call)
        def call(self: object, *args: Any, **kwargs: Any) -> Any:
            with request(kwargs):
                return plain_call(self, *args, **kwargs)

        members["__call__"] = call
    return Disguise(owner, members)


def disguise_module(module: nn.Module, device: torch.device) -> Disguise | None:
    """Let a module that says where it runs say `device`, even while its first weight is elsewhere."""
    members = _device_members(module, device)
    return Disguise(module, members) if members else None


def _device_members(target: object, device: torch.device) -> dict[str, object]:
    names = [
        name for name in ("device", "_execution_device") if isinstance(getattr(type(target), name, None), property)
    ]
    return {name: property(lambda self: device) for name in names}
