"""What an effect promises: reversible, idempotent, and it hands out what takes it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from residency.effects.spec import EffectSpec


class Effect(Protocol):
    """One reversible GPU action."""

    @property
    def spec(self) -> EffectSpec:
        """What it will do, as a value."""
        ...

    def check(self) -> None:
        """Raise if it cannot be applied now. Moves nothing."""

    def apply(self) -> None:
        """Do it. A second call is a no-op. On an exception the component is as it was before."""

    def revert(self) -> None:
        """Take it back exactly: devices, strides, hooks, data pointers of residents. A second call is a no-op."""
