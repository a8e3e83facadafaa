"""The effect of a plan's change: one component goes from one placement to another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from residency.gpu.placement import ComponentPlacement, HostTier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from residency.effects.spec import EffectSpec
    from residency.gpu.pipeline import ManagedPipeline
    from residency.gpu.placement import Placement
    from residency.gpu.specs import ComponentSpec


class Described(Protocol):
    """Something that says which components it has: a pipeline, or what a plan is made from."""

    @property
    def specs(self) -> tuple[ComponentSpec, ...]:
        """What they are."""
        ...


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


_ROOM_PART = 8  # of the cap that stays free while weights move: what is beside them, and pieces that nobody can use


def order_effects(specs: Iterable[EffectSpec], pipeline: Described, *, growth_bytes: int = 0) -> tuple[EffectSpec, ...]:
    """Return the changes numbered in a safe order: what frees device bytes and pins first, what takes them last.

    growth_bytes: of the device, which may be taken before others have released theirs. As far as they go, page locks
    are released before others are taken.
    """
    components = {spec.name: spec for spec in pipeline.specs}
    waiting = sorted(specs, key=lambda spec: (*_growth(spec, components[spec.component]), spec.component))
    ordered: list[EffectSpec] = []
    left = growth_bytes
    while waiting:
        found = waiting[0]
        for one in waiting:
            component = components[one.component]
            if _pin_growth(one, component) < 0 and _device_growth(one, component) <= left:
                found = one
                break
        waiting.remove(found)
        left -= _device_growth(found, components[found.component])
        ordered.append(replace(found, index=len(ordered)))
    return tuple(ordered)


def growth_room(described: Described, now: Placement, cap_bytes: int) -> int:
    """Return the device bytes that may be taken before others are released, between two requests. Never negative."""
    held = sum(spec.device_bytes(now.components[spec.name], in_use=False) for spec in described.specs)
    return max(0, cap_bytes - cap_bytes // _ROOM_PART - held)


def _growth(effect: EffectSpec, component: ComponentSpec) -> tuple[int, int]:
    """Sort key: pure releases, then moves that free device memory, then unpins, pins, and pure growth."""
    device, pins = _device_growth(effect, component), _pin_growth(effect, component)
    if device <= 0:
        rank = 0 if pins <= 0 else (1 if device < 0 else 3)
    else:
        rank = 2 if pins <= 0 else 4
    return rank, device


def _device_growth(effect: EffectSpec, component: ComponentSpec) -> int:
    return component.device_bytes(effect.after, in_use=False) - component.device_bytes(effect.before, in_use=False)


def _pin_growth(effect: EffectSpec, component: ComponentSpec) -> int:
    return _pinned_bytes(effect.after, component) - _pinned_bytes(effect.before, component)


def _pinned_bytes(placement: ComponentPlacement, component: ComponentSpec) -> int:
    if placement.tier is not HostTier.PINNED:
        return 0
    # Slots count as device bytes while in use only, so that what is not there when idle is what the host holds.
    return component.total_bytes - component.device_bytes(placement, in_use=False)
