"""Why a plan is what it is: what bound it, what memory is worth, and the cheapest change that more would allow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from residency.gpu.placement import Mode, Placement
from residency.gpu.specs import window_bytes
from residency.statemachine.planner.bound import stretches
from residency.statemachine.planner.options import host_bytes
from residency.statemachine.planner.plan import Binding, NextChange, Price
from residency.statemachine.policy import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from residency.gpu.placement import ComponentPlacement
    from residency.gpu.specs import ComponentSpec
    from residency.statemachine.planner.choice import Chooser, Chosen
    from residency.statemachine.planner.constraints import PhaseLimit
    from residency.statemachine.planner.options import Family, Option
    from residency.statemachine.planner.plan import PlanInputs
    from residency.statemachine.planner.weighing import Weighed

_SIMULATIONS_MAX = 4  # for each component, of changes that more memory would allow


def what_binds(
    inputs: PlanInputs, chooser: Chooser, found: Chosen, limits: Sequence[PhaseLimit], *, timed: bool
) -> tuple[NextChange | None, str]:
    """Return the cheapest change worth having that device memory forbids, and what bound the choice, for people."""
    best = found.best
    if best.request_ns <= inputs.enough_ns:
        return None, "nothing: it is as fast as the slowest rank"
    noise_ns = chooser.rules.tolerance(best.request_ns)
    if best.request_ns <= chooser.ideal_ns() + noise_ns:
        return None, "nothing: no placement is faster by more than the noise"
    # A change too small to be noticed is no advice, but memory is what binds all the same.
    noticeable_ns = max(inputs.noise_ns, best.request_ns * inputs.policy.noticeable_fraction)
    for least_ns in (noticeable_ns, noise_ns + 1):
        changes = [
            change
            for families in chooser.choices
            if (change := _cheapest(inputs, chooser, best, families, limits, least_ns=least_ns, timed=timed))
            is not None
        ]
        if changes:
            change = min(changes, key=lambda one: (one.extra_bytes, -one.gain_ns, one.component))
            is_worth = change.gain_ns >= noticeable_ns
            return change if is_worth else None, f"device memory in phase {change.phase!r}"
    return None, "host memory: every faster placement needs more of it, or is excluded"


def binding(inputs: PlanInputs, chooser: Chooser, best: Weighed, limits: Sequence[PhaseLimit]) -> tuple[Binding, ...]:
    """Return the limits in which less is left than the smallest thing would take that could still move in."""
    placement, current = best.placement, inputs.current
    away = [_smallest_away(spec, placement.components[spec.name]) for spec in inputs.specs]
    least = min((size for size in away if size), default=0)
    host = sum(
        host_bytes(spec, current.components[spec.name], placement.components[spec.name]) for spec in inputs.specs
    )
    found = [
        Binding(
            kind="device",
            name=limit.key,
            slack_bytes=limit.weight_limit(inputs) - limit.weight_bytes(inputs, placement),
        )
        for limit in limits
    ]
    found.append(Binding(kind="pinned", name="", slack_bytes=chooser.rules.pinned_bytes_max - best.pinned_bytes))
    found.append(Binding(kind="host", name="", slack_bytes=chooser.rules.host_bytes_max - host))
    return tuple(sorted((one for one in found if one.slack_bytes < least), key=lambda one: (one.slack_bytes, one.name)))


def prices(inputs: PlanInputs, chooser: Chooser, best: Weighed) -> tuple[Price, ...]:
    """Return what about a GiB less, and more, would change for each component, all else left as it is."""
    found = []
    for families in chooser.choices:
        if families[0].head.is_fixed:
            continue
        name = families[0].head.spec.name
        now = chooser.option(name, best.placement.components[name])
        loss, saving = (
            _change_ns(inputs, chooser, best, now, chooser.resized(now, families, num_bytes))
            for num_bytes in (-GIB, GIB)
        )
        found.append(
            Price(
                component=name,
                # A GiB less never helps, and a GiB more never harms: what says so is how rooms happen to lie.
                loss_ns_per_gib=None if loss is None else max(0, loss),
                gain_ns_per_gib=None if saving is None else max(0, -saving),
            )
        )
    return tuple(found)


def _change_ns(
    inputs: PlanInputs, chooser: Chooser, best: Weighed, now: Option, others: Sequence[Option]
) -> int | None:
    """Return by how much a request takes longer with the best of other options for one component, per GiB."""
    changes = [
        (weighed.request_ns - best.request_ns) * GIB // abs(other.idle_bytes - now.idle_bytes)
        for other in others
        if (weighed := chooser.weigh(_changed(inputs, best.placement, other))) is not None
    ]
    return min(changes, default=None)


def _smallest_away(spec: ComponentSpec, where: ComponentPlacement) -> int:
    """Return the bytes of the smallest layer that leaves the device, or of a whole component that does."""
    if where.mode is Mode.COMPONENT_OFFLOAD:
        return spec.total_bytes
    sizes = {group.name: group.slot_bytes for group in spec.groups}
    away = spec.away_layers(where) if where.mode is Mode.LAYERWISE_OFFLOAD else {}
    return min((sizes[name][index] for name, indices in away.items() for index in indices), default=0)


def _cheapest(
    inputs: PlanInputs,
    chooser: Chooser,
    best: Weighed,
    families: Sequence[Family],
    limits: Sequence[PhaseLimit],
    *,
    least_ns: float,
    timed: bool,
) -> NextChange | None:
    """Return the change of one component that saves `least_ns` with the least additional memory."""
    found = sorted(_forbidden(inputs, chooser, best, families, limits, least_ns=least_ns), key=lambda one: one[0])
    for extra_bytes, limit, target, option in found[:_SIMULATIONS_MAX]:
        weighed = chooser.weigh(target)
        if weighed is not None and best.request_ns - weighed.request_ns >= least_ns:
            return NextChange(
                component=option.spec.name,
                placement=option.placement,
                extra_bytes=extra_bytes,
                gain_ns=best.request_ns - weighed.request_ns,
                phase=limit.key,
                measured=limit.measured and timed,
            )
    return None


def _forbidden(
    inputs: PlanInputs,
    chooser: Chooser,
    best: Weighed,
    families: Sequence[Family],
    limits: Sequence[PhaseLimit],
    *,
    least_ns: float,
) -> Iterator[tuple[int, PhaseLimit, Placement, Option]]:
    """Yield the changes of one component that may save `least_ns` but do not fit: bytes, where, and the placement."""
    name = families[0].head.spec.name
    now = chooser.option(name, best.placement.components[name])
    windows = [window_bytes(inputs.specs, best.placement, active=phase.components) for phase in chooser.model.phases]
    others = [
        chooser.option(spec.name, best.placement.components[spec.name]).moved
        for spec in inputs.specs
        if spec.name != name
    ]
    beside = [
        limit.weight_bytes(inputs, best.placement)
        - now.idle_bytes
        - (now.extra_bytes if name in (*limit.active, limit.lingering) else 0)
        for limit in limits
    ]
    for option in [*(family.head for family in families), *chooser.grown(now, families)]:
        if option.idle_bytes + option.extra_bytes + option.held_bytes <= now.idle_bytes:
            continue
        lower_ns, _ = stretches(chooser.model, [*others, option.moved], windows, by_pass=True).total_ns()
        if best.request_ns - lower_ns < least_ns:
            continue
        needed = []
        for limit, other_bytes in zip(limits, beside, strict=True):
            if name in limit.whole:
                continue  # It is whole there anyway.
            loaded = option.extra_bytes if name in (*limit.active, limit.lingering) else 0
            held = other_bytes + option.idle_bytes + loaded
            if held > limit.weight_limit(inputs):
                needed.append((limit.cap_needed(inputs, held), limit))
        if needed:  # else forbidden by host memory or by exclusion
            cap, limit = max(needed, key=lambda one: one[0])
            yield cap - inputs.cap_bytes, limit, _changed(inputs, best.placement, option), option


def _changed(inputs: PlanInputs, placement: Placement, option: Option) -> Placement:
    """Return a placement with another option for one component, the window and what is yielded of it unchanged."""
    name, window = option.spec.name, window_bytes(inputs.specs, placement)
    where = replace(option.placement, yield_bytes=placement.components[name].yield_bytes)
    if where.mode is Mode.LAYERWISE_OFFLOAD:
        where = replace(where, window_bytes=window)
    return Placement(components={**placement.components, name: where})
