"""The effect of a plan's change: one component goes from one placement to another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from residency.gpu.placement import ComponentPlacement, HostTier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from residency.effects.spec import EffectSpec
    from residency.gpu.pipeline import ManagedPipeline
    from residency.gpu.specs import ComponentSpec


class PlaceComponent:
    """Moves one component of a pipeline, and back."""

    def __init__(self, pipeline: ManagedPipeline, spec: EffectSpec) -> None:
        self._pipeline, self._spec = pipeline, spec

    @property
    def spec(self) -> EffectSpec:
        """What it will do, as a value."""
        return self._spec

    def check(self) -> None:
        """Raise UnknownComponent or ModeUnavailable if the change, or the way back, cannot be made. Moves nothing."""
        self._pipeline.check(self._spec.component, self._spec.before)
        self._pipeline.check(self._spec.component, self._spec.after)

    def apply(self) -> None:
        """Move it. A second call is a no-op. On an exception the component is as it was before."""
        self._pipeline.place(self._spec.component, self._spec.after)

    def revert(self) -> None:
        """Move it back. A second call is a no-op."""
        self._pipeline.place(self._spec.component, self._spec.before)


def order_effects(specs: Iterable[EffectSpec], pipeline: ManagedPipeline) -> tuple[EffectSpec, ...]:
    """Return the changes numbered in a safe order: what frees device bytes and pins first, what takes them last."""
    components = {spec.name: spec for spec in pipeline.specs}
    ordered = sorted(specs, key=lambda spec: (*_growth(spec, components[spec.component]), spec.component))
    return tuple(replace(spec, index=index) for index, spec in enumerate(ordered))


def _growth(effect: EffectSpec, component: ComponentSpec) -> tuple[int, int]:
    """Sort key: pure releases, then moves that free device memory, then unpins, pins, and pure growth."""
    device = component.device_bytes(effect.after, in_use=False) - component.device_bytes(effect.before, in_use=False)
    pins = _pinned_bytes(effect.after, component) - _pinned_bytes(effect.before, component)
    if device <= 0:
        rank = 0 if pins <= 0 else (1 if device < 0 else 3)
    else:
        rank = 2 if pins <= 0 else 4
    return rank, device


def _pinned_bytes(placement: ComponentPlacement, component: ComponentSpec) -> int:
    if placement.tier is not HostTier.PINNED:
        return 0
    # Slots count as device bytes while in use only, so that what is not there when idle is what the host holds.
    return component.total_bytes - component.device_bytes(placement, in_use=False)
