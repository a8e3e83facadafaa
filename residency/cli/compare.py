"""Two placements side by side: what moved, component by component, and what that takes in bytes. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from residency.gpu.placement import ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.specs import ComponentSpec, window_bytes
from residency.rendering import placement_text, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Specs = dict[str, ComponentSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One component that differs: before and after, None where a placement does not know it; and how, in words.

    *_bytes: of its weights on the device between requests, outside the window; None where its sizes are not known.
    """

    component: str
    before: ComponentPlacement | None
    after: ComponentPlacement | None
    what: tuple[str, ...]
    before_bytes: int | None
    after_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a placement takes between requests: device bytes of weights and window, and page-locked host bytes."""

    weight_bytes: int
    window_bytes: int
    pinned_bytes: int


def moved(before: Placement, after: Placement, specs: Specs) -> tuple[Moved, ...]:
    """Return the components that differ, by name; empty if the placements are equal."""
    names = sorted({*before.components, *after.components})
    pairs = ((name, before.components.get(name), after.components.get(name)) for name in names)
    return tuple(
        Moved(
            component=name,
            before=old,
            after=new,
            what=_what(old, new, specs.get(name)),
            before_bytes=_device_bytes(old, specs.get(name)),
            after_bytes=_device_bytes(new, specs.get(name)),
        )
        for name, old, new in pairs
        if old != new
    )


def footprint(placement: Placement, specs: Specs) -> Footprint | None:
    """Return what a placement takes; None if the sizes of a component are not known."""
    if not set(placement.components) <= set(specs):
        return None
    own = [specs[name] for name in placement.components]
    held = {spec.name: spec.device_bytes(placement.components[spec.name], in_use=False) for spec in own}
    pinned = [spec for spec in own if placement.components[spec.name].tier is HostTier.PINNED]
    return Footprint(
        weight_bytes=sum(held.values()),
        window_bytes=window_bytes(own, placement),
        pinned_bytes=sum(spec.total_bytes - held[spec.name] for spec in pinned),
    )


def _device_bytes(placement: ComponentPlacement | None, spec: ComponentSpec | None) -> int | None:
    return None if placement is None or spec is None else spec.device_bytes(placement, in_use=False)


def _what(
    old: ComponentPlacement | None, new: ComponentPlacement | None, spec: ComponentSpec | None
) -> tuple[str, ...]:
    """Return how one component's placement changes: as a whole with its mode, else its layers and then the rest."""
    if old is None or new is None:
        known = old or new
        return (f"only in {'B' if old is None else 'A'}: {placement_text(known)}",) if known is not None else ()
    if old.mode is not new.mode:
        return (f"{placement_text(old)} -> {placement_text(new)}",)
    words = _layers(old, new, spec) if old.mode is Mode.LAYERWISE_OFFLOAD else []
    if old.tier is not new.tier and old.tier is not None and new.tier is not None:
        words.append(f"host copy {old.tier.value} -> {new.tier.value}")
    if old.num_slots != new.num_slots and old.num_slots and new.num_slots:
        words.append(f"slots {old.num_slots} -> {new.num_slots}")
    for name, ours, theirs in (
        ("window", old.window_bytes, new.window_bytes),
        ("yields", old.yield_bytes, new.yield_bytes),
    ):
        if ours != theirs:
            words.append(f"{name} {size(ours)} -> {size(theirs)}")
    return tuple(words)


def _layers(old: ComponentPlacement, new: ComponentPlacement, spec: ComponentSpec | None) -> list[str]:
    """Return how many layers of each group changed, and from what to what; with their bytes, where known."""
    sizes = {group.name: group.layer_bytes for group in spec.groups} if spec is not None else {}
    parts = (old.resident_layers, old.held_layers, new.resident_layers, new.held_layers)
    words = []
    for group in sorted({name for part in parts for name in part}):
        indices = sorted({index for part in parts for index in part.get(group, ())})
        changed = [(_state(old, group, one), _state(new, group, one), one) for one in indices]
        counted: Counter[tuple[str, str]] = Counter()
        num_bytes: Counter[tuple[str, str]] = Counter()
        for before, after, index in changed:
            if before != after:
                counted[before, after] += 1
                num_bytes[before, after] += _layer_bytes(sizes.get(group, ()), index)
        for (before, after), count in sorted(counted.items()):
            weight = f" ({size(num_bytes[before, after])})" if num_bytes[before, after] else ""
            words.append(f"{group}: {count} {before} -> {after}{weight}")
    return words


def _layer_bytes(sizes: Sequence[int], index: int) -> int:
    return sizes[index] if index < len(sizes) else 0


def _state(placement: ComponentPlacement, group: str, index: int) -> str:
    """Return how a layer lives: always on the device, brought in once a request, or for every use."""
    states: Mapping[str, Mapping[str, tuple[int, ...]]] = {
        "resident": placement.resident_layers,
        "held": placement.held_layers,
    }
    return next((name for name, layers in states.items() if index in layers.get(group, ())), "streamed")
