"""What weights take on the device in a memory phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.gpu.placement import HostTier, Mode
from residency.gpu.specs import window_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from residency.gpu.placement import ComponentPlacement, Placement
    from residency.gpu.specs import ComponentSpec


def held_bytes(
    spec: ComponentSpec, placement: ComponentPlacement, *, active: tuple[str, ...], lingering: str | None
) -> int:
    """Return the weight bytes of one component in a phase, outside the window."""
    # A whole component stays until another is entered; what is in the window does not.
    stays = placement.mode is Mode.COMPONENT_OFFLOAD and spec.name == lingering
    return spec.device_bytes(placement, in_use=spec.name in active or stays)


def weight_bytes(
    specs: Iterable[ComponentSpec],
    placement: Placement,
    *,
    active: tuple[str, ...],
    lingering: str | None,
    whole: tuple[str, ...] = (),
) -> int:
    """Return the bytes of all weights in a phase, with the window as far as it is not given back.

    whole: components that are whole on the device meanwhile, whatever their placement; then the window is not there.
    """
    specs = tuple(specs)
    held = sum(
        spec.total_bytes
        if spec.name in whole
        else held_bytes(spec, placement.components[spec.name], active=active, lingering=lingering)
        for spec in specs
    )
    return held if whole else held + window_bytes(specs, placement, active=active)


def idle_bytes(specs: Iterable[ComponentSpec], placement: Placement) -> int:
    """Return what weights take between requests, the window included."""
    return weight_bytes(specs, placement, active=(), lingering=None)


def pinned_bytes(specs: Iterable[ComponentSpec], placement: Placement) -> int:
    """Return the bytes of host copies that a placement has page-locked: of what leaves the device."""
    return sum(
        spec.total_bytes - spec.device_bytes(one, in_use=False)
        for spec in specs
        if (one := placement.components[spec.name]).tier is HostTier.PINNED
    )
