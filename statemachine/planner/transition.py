"""What going from one placement to another takes on the way: more than before or after it, if releases cannot come
first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from residency.effects.place import growth_room, order_effects
from residency.effects.spec import EffectSpec
from residency.gpu.placement import Placement
from residency.statemachine.planner.holdings import pinned_bytes

if TYPE_CHECKING:
    from residency.effects.place import Described


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionPeak:
    """The most that weights take between two requests while effects are applied: on the device, and page-locked.

    The window is not there meanwhile. Host copies that are no longer needed stay, without their page locks, until the
    commit, and are in what the host had before.
    """

    device_bytes: int
    pinned_bytes: int


def transition_peak(described: Described, current: Placement, target: Placement, cap_bytes: int) -> TransitionPeak:
    """Return the peak of a transition under a cap, effect by effect in the order in which they are applied. Pure."""
    changes = (
        EffectSpec(index=0, component=name, before=current.components[name], after=target.components[name])
        for name in current.changes_to(target)
    )
    ordered = order_effects(changes, described, growth_bytes=growth_room(described, current, cap_bytes))
    now = dict(current.components)
    device, pinned = [], []
    for effect in (None, *ordered):
        if effect is not None:
            now[effect.component] = effect.after
        device.append(sum(spec.device_bytes(now[spec.name], in_use=False) for spec in described.specs))
        pinned.append(pinned_bytes(described.specs, Placement(components=now)))
    return TransitionPeak(device_bytes=max(device), pinned_bytes=max(pinned))
