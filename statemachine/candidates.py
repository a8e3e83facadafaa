"""The placements that are weighed for each component, with what each would hold and cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode
from residency.gpu.specs import ComponentSpec
from residency.statemachine.timing import Usage, exposed_transfer_ns, usage

if TYPE_CHECKING:
    from residency.gpu.records import RequestRecord
    from residency.gpu.specs import LayerGroupSpec
    from residency.statemachine.plan import PlanInputs

_TIERS = (HostTier.PINNED, HostTier.PAGEABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A complete placement of one component.

    idle_bytes, used_bytes: weights on the device between requests, and while it runs. pinned_bytes: of its host copy.
    host_bytes: host memory that applying it takes anew. changed: from the current.
    """

    spec: ComponentSpec = field(repr=False)
    placement: ComponentPlacement
    transfer_ns: int
    idle_bytes: int
    used_bytes: int
    pinned_bytes: int
    host_bytes: int
    changed: bool

    def held_bytes(self, active: tuple[str, ...], lingering: str | None) -> int:
        """Return the weight bytes on the device in a memory phase."""
        is_used = _is_used(self.spec, self.placement, active=active, lingering=lingering)
        return self.used_bytes if is_used else self.idle_bytes


def held_bytes(
    spec: ComponentSpec, placement: ComponentPlacement, *, active: tuple[str, ...], lingering: str | None
) -> int:
    """Return the weight bytes of a component in a phase."""
    return spec.device_bytes(placement, in_use=_is_used(spec, placement, active=active, lingering=lingering))


def _is_used(
    spec: ComponentSpec, placement: ComponentPlacement, *, active: tuple[str, ...], lingering: str | None
) -> bool:
    # A whole component stays until another is entered; slots do not.
    stays = placement.mode is Mode.COMPONENT_OFFLOAD and spec.name == lingering
    return spec.name in active or stays


def candidates(spec: ComponentSpec, inputs: PlanInputs, record: RequestRecord | None) -> tuple[Candidate, ...]:
    """Return the placements to weigh, the current one first; only that one if the component is never touched."""
    current = inputs.current.components[spec.name]
    use = usage(spec, record, inputs.workload)
    found = [current]
    if spec.name not in inputs.configured and spec.fixed_reason is None:
        if Mode.RESIDENT in spec.modes:
            found.append(RESIDENT)
        for tier in _TIERS:
            if Mode.COMPONENT_OFFLOAD in spec.modes:
                found.append(ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=tier))
            if Mode.LAYERWISE_OFFLOAD in spec.modes:
                found += _layerwise(spec, use, tier, inputs)
        initial = inputs.initial.components[spec.name]
        found.append(initial)
    unique: list[ComponentPlacement] = []
    for placement in found:
        if placement not in unique:
            unique.append(placement)
    return tuple(_candidate(spec, placement, current=current, use=use, inputs=inputs) for placement in unique)


def _candidate(
    spec: ComponentSpec, placement: ComponentPlacement, *, current: ComponentPlacement, use: Usage, inputs: PlanInputs
) -> Candidate:
    pinned = placement.tier is HostTier.PINNED
    # Only what leaves the device has a host copy that counts.
    idle_bytes = spec.device_bytes(placement, in_use=False)
    away_bytes = spec.total_bytes - idle_bytes
    # Pinned copies live in mappings of their own, and a resident component may have no host copy at all.
    anew = placement.tier is not None and (current.tier is None or (pinned and current.tier is not HostTier.PINNED))
    return Candidate(
        spec=spec,
        placement=placement,
        transfer_ns=exposed_transfer_ns(spec, placement, use, inputs.link),
        idle_bytes=idle_bytes,
        used_bytes=spec.device_bytes(placement, in_use=True),
        pinned_bytes=away_bytes if pinned else 0,
        host_bytes=away_bytes if anew else 0,
        changed=placement != current,
    )


def _layerwise(spec: ComponentSpec, use: Usage, tier: HostTier, inputs: PlanInputs) -> list[ComponentPlacement]:
    """Return layerwise placements with ever more resident layers: those that run most often first."""
    groups = [group for group in spec.groups if group.layer_bytes]
    num_layers = sum(len(group.layer_bytes) for group in groups)
    num_levels = min(inputs.policy.layer_levels_max, num_layers)
    found = []
    for level in range(num_levels):
        counts = _resident_counts(groups, use, round(level * num_layers / num_levels))
        resident = {
            group.name: spread(counts[group.name], len(group.layer_bytes)) for group in groups if counts[group.name]
        }
        found.append(
            ComponentPlacement(
                mode=Mode.LAYERWISE_OFFLOAD,
                tier=tier,
                resident_layers=resident,
                num_slots=inputs.policy.num_slots,
            )
        )
    return found


def _resident_counts(groups: list[LayerGroupSpec], use: Usage, num_resident: int) -> dict[str, int]:
    # A kept byte saves as often as it would have been fetched, so groups fill up in the order of their uses; groups
    # used equally often fill in proportion, which keeps their streamed layers apart.
    def often(group: LayerGroupSpec) -> int:
        return max(use.layer_uses[group.name], default=0)

    counts = {group.name: 0 for group in groups}
    left = num_resident
    for uses in sorted({often(group) for group in groups}, reverse=True):
        alike = [group for group in groups if often(group) == uses]
        capacity = sum(len(group.layer_bytes) for group in alike)
        taken = min(left, capacity)
        done = 0
        for group in alike:
            # Cumulative rounding: the shares add up to exactly what was taken.
            before = done * taken // capacity
            done += len(group.layer_bytes)
            counts[group.name] = done * taken // capacity - before
        left -= taken
    return counts


def spread(num_resident: int, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the resident layers, so that the streamed ones lie as evenly apart as they can."""
    return tuple(index * num_layers // num_resident for index in range(num_resident)) if num_resident else ()
