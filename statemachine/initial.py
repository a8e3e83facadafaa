"""The placement that a worker serves if residency does nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.errors import ModeUnavailable, PlacementInfeasible, UnknownComponent
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.specs import window_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residency.gpu.specs import ComponentSpec
    from residency.statemachine.policy import Policy


def configured_placements(
    specs: Sequence[ComponentSpec], modes: Mapping[str, Mode | str], *, num_slots: int = 1
) -> dict[str, ComponentPlacement]:
    """Return component -> placement for the modes that a user fixed; offloaded ones with pageable host copies.

    Raises UnknownComponent for a name the pipeline does not have, ModeUnavailable for a mode it cannot take.
    """
    by_name = {spec.name: spec for spec in specs}
    found = {}
    for name, wanted in modes.items():
        spec = by_name.get(name)
        if spec is None:
            raise UnknownComponent(component=name, known=tuple(sorted(by_name)))
        possible = tuple(mode.value for mode in spec.modes)
        text = wanted.value if isinstance(wanted, Mode) else str(wanted)
        if text not in {mode.value for mode in Mode}:
            raise ModeUnavailable(component=name, mode=text, reason="there is no such mode", possible=possible)
        if text not in possible:
            reason = spec.fixed_reason or "it has no layers to stream"
            raise ModeUnavailable(component=name, mode=text, reason=reason, possible=possible)
        found[name] = _in_mode(Mode(text), num_slots)
    return found


def initial_placement(
    specs: Sequence[ComponentSpec], configured: Mapping[str, ComponentPlacement], cap_bytes: int, policy: Policy
) -> Placement:
    """Return the configured placements, and every other component resident if all fits, else component-offload.

    A component that cannot be offloaded whole stays as its first possible mode says. Raises UnknownComponent, and
    PlacementInfeasible if weights alone cannot fit under the cap in any placement.
    """
    names = tuple(sorted(spec.name for spec in specs))
    for name in configured:
        if name not in names:
            raise UnknownComponent(component=name, known=names)
    free = [spec for spec in specs if spec.name not in configured and spec.fixed_reason is None]
    fixed = {
        spec.name: _in_mode(spec.modes[0] if spec.modes else Mode.RESIDENT, policy.num_slots)
        for spec in specs
        if spec not in free
    } | dict(configured)
    _check_possible(specs, free, fixed, cap_bytes, policy)
    resident = {spec.name: RESIDENT for spec in free if Mode.RESIDENT in spec.modes}
    everything = Placement(components={**{s.name: _offloaded(s, policy) for s in free}, **resident, **fixed})
    room = cap_bytes - max(policy.measured_reserve(cap_bytes), policy.extrapolated_reserve(cap_bytes))
    # No request has run yet, so the reserve is that of a shape never measured.
    used = sum(spec.device_bytes(everything.components[spec.name], in_use=True) for spec in specs)
    if used + window_bytes(specs, everything) <= room:
        return everything
    return Placement(components={**{spec.name: _offloaded(spec, policy) for spec in free}, **fixed})


def _in_mode(mode: Mode, num_slots: int) -> ComponentPlacement:
    if mode is Mode.RESIDENT:
        return RESIDENT
    # Pinning costs time and locked memory that nobody has shown to pay yet.
    slots = num_slots if mode is Mode.LAYERWISE_OFFLOAD else 0
    return ComponentPlacement(mode=mode, tier=HostTier.PAGEABLE, num_slots=slots)


def _offloaded(spec: ComponentSpec, policy: Policy) -> ComponentPlacement:
    if Mode.COMPONENT_OFFLOAD in spec.modes:
        return _in_mode(Mode.COMPONENT_OFFLOAD, policy.num_slots)
    return _in_mode(spec.modes[0] if spec.modes else Mode.RESIDENT, policy.num_slots)


def _check_possible(
    specs: Sequence[ComponentSpec],
    free: Sequence[ComponentSpec],
    fixed: Mapping[str, ComponentPlacement],
    cap_bytes: int,
    policy: Policy,
) -> None:
    """Raise if even the smallest form of every component leaves no room for the largest one to run."""
    forms = {
        spec.name: [_in_mode(mode, 1) for mode in spec.modes] or [RESIDENT] if spec in free else [fixed[spec.name]]
        for spec in specs
    }
    idle = {spec.name: min(spec.device_bytes(one, in_use=False) for one in forms[spec.name]) for spec in specs}
    running = {
        spec.name: min(spec.device_bytes(one, in_use=True) + spec.window_bytes(one) for one in forms[spec.name])
        for spec in specs
    }
    for spec in specs:
        needed = sum(idle.values()) - idle[spec.name] + running[spec.name]
        if needed > cap_bytes:
            raise PlacementInfeasible(
                needed_bytes=needed,
                cap_bytes=cap_bytes,
                bound_by=f"component {spec.name!r} beside what cannot leave the device",
            )
