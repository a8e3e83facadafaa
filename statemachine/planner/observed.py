"""From records of measured requests to the time phases of one request of the workload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from residency.gpu.placement import Mode
from residency.statemachine.planner.holdings import weight_bytes
from residency.statemachine.planner.slack import slack_bytes
from residency.statemachine.planner.time_phase import ComponentUse, LayerUse, TimePhase
from residency.statemachine.planner.timing import timing_record, transfer_ns, waits_known

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from residency.gpu.placement import Placement
    from residency.gpu.records import LinkReading, RequestRecord
    from residency.gpu.specs import ComponentSpec
    from residency.gpu.workload import Workload

_PERIOD_MAX = 8  # components that take turns in a loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What ran `passes` times in a record: component -> entries, in order. target_passes: in the workload."""

    pattern: tuple[tuple[str, int], ...]
    passes: int
    target_passes: int


def time_phases(
    specs: Sequence[ComponentSpec],
    records: Sequence[RequestRecord],
    workload: Workload,
    link: LinkReading,
    placements: Mapping[str, Placement],
) -> tuple[TimePhase, ...]:
    """Return the time phases of one request of a workload, in order; `placements`: digest -> placement of the records.

    Components that no record reached come last, as if they ran at every step: a short probe may miss a second stage.
    If no request succeeded, the one that came farthest says what runs, and nothing computes. Raises ValueError if a
    placement is missing.
    """
    for one in records:
        if one.placement_digest not in placements:
            raise ValueError(f"a record was measured under placement {one.placement_digest}, which is not given")
    timed = timing_record(records, workload)
    record = timed or max(records, key=lambda one: sum(num for _, num in one.uses), default=None)
    if record is None:
        return tuple(_unseen_phase(spec, workload, 0) for spec in specs if spec.total_bytes)
    found = loops(
        record.uses,
        steps=record.workload.steps,
        target_steps=workload.steps,
        by_shape=_by_shape(records),
    )
    beside = _beside(specs, records, workload, placements)
    entry_ns = dict.fromkeys((name for name, _ in record.uses), 0)
    if timed is not None:
        entry_ns = _entry_ns(specs, record, workload, link, placements[record.placement_digest])
    by_name = {spec.name: spec for spec in specs}
    phases = []
    for loop in found:
        names = dict.fromkeys(name for name, _ in loop.pattern)
        uses = tuple(
            _component_use(by_name[name], record, loop, workload, entry_ns)
            for name, entries in loop.pattern
            for _ in range(entries)
            if name in by_name
        )
        phases.append(
            TimePhase(
                name="+".join(names),
                uses=uses,
                passes=loop.target_passes,
                beside_bytes=max((beside.get(name, (0, 0))[0] for name in names), default=0),
                between_bytes=max((beside.get(name, (0, 0))[1] for name in names), default=0),
            )
        )
    worst = max((phase.beside_bytes for phase in phases), default=0)
    reached = {name for name, _ in record.uses}
    if timed is None and phases:
        # It failed there, nobody knows how often it would have run.
        phases[-1] = replace(phases[-1], passes=max(phases[-1].passes, workload.steps))
    unseen = [_unseen_phase(spec, workload, worst) for spec in specs if spec.name not in reached and spec.total_bytes]
    return (*phases, *unseen)


def loops(
    uses: Sequence[tuple[str, int]], *, steps: int, target_steps: int, by_shape: Collection[str] = ()
) -> tuple[Loop, ...]:
    """Return what repeats in the order of component entries: one component, or several that take turns.

    uses: as in a record of `steps` steps. What repeats about once or several times a step does so at the target, too;
    but not the components `by_shape`, which run as often as the shape wants.
    """
    found: list[tuple[tuple[tuple[str, int], ...], int]] = []
    index = 0
    while index < len(uses):
        period, turns = 1, 1
        for length in range(2, min(_PERIOD_MAX, (len(uses) - index) // 2) + 1):
            pattern, count = uses[index : index + length], 1
            while uses[index + count * length : index + (count + 1) * length] == pattern:
                count += 1
            if count > 1 and count * length > period * turns:
                period, turns = length, count
        if turns > 1:
            found.append((tuple(uses[index : index + period]), turns))
        else:
            name, entries = uses[index]
            found.append((((name, 1),), entries))
        index += period * turns
    if target_steps > steps and found and all(passes == 1 for _, passes in found):
        # Steps were run, but nothing tells what repeats with them; taken for one-shot, it would stream for little.
        return (Loop(pattern=tuple(uses), passes=1, target_passes=target_steps),)
    shared = _shared_steps([passes for _, passes in found], steps)
    return tuple(
        Loop(
            pattern=pattern,
            passes=passes,
            target_passes=passes
            if by_shape and {name for name, _ in pattern} <= set(by_shape)
            else -(-passes * target_steps // steps)
            if is_shared
            else _scaled(passes, steps, target_steps),
        )
        for (pattern, passes), is_shared in zip(found, shared, strict=True)
    )


def _by_shape(records: Sequence[RequestRecord]) -> set[str]:
    """Return the components that ran more often for another shape with as many steps: a decoder, tile by tile."""
    seen: dict[tuple[int, str], dict[int, int]] = {}
    for record in records:
        if record.succeeded:
            for name in {name for name, _ in record.uses}:
                entries = sum(num for other, num in record.uses if other == name)
                seen.setdefault((record.workload.steps, name), {})[record.workload.units] = entries
    return {name for (_, name), counts in seen.items() if len(set(counts.values())) > 1}


def _scaled(passes: int, steps: int, target_steps: int) -> int:
    """Return how often what ran `passes` times in some steps runs in others: k times a step, give or take one."""
    each = (passes + 1) // steps if steps > 2 else passes // steps
    extra = passes - each * steps
    if each < 1 or abs(extra) > 1:
        return passes if passes < steps else -(-passes * target_steps // steps)
    return max(1, each * target_steps + extra)


def _shared_steps(passes: Sequence[int], steps: int) -> list[bool]:
    """Say which loops share the steps of one denoising among them, as two experts do that follow each other."""
    found = [False] * len(passes)
    for first in range(len(passes)):
        total = 0
        for last in range(first, len(passes)):
            if not 2 <= passes[last] < steps - 1:
                break
            total += passes[last]
            if last > first and steps - 1 <= total <= steps + 1:
                found[first : last + 1] = [True] * (last + 1 - first)
    return found


def _beside(
    specs: Sequence[ComponentSpec],
    records: Sequence[RequestRecord],
    workload: Workload,
    placements: Mapping[str, Placement],
) -> dict[str, tuple[int, int]]:
    """Return component -> reserved bytes beside weights and window, at most: while it runs, and after it."""
    successes = [record for record in records if record.succeeded]
    covering = [record for record in successes if record.workload.units >= workload.units] or successes
    found: dict[str, tuple[int, int]] = {}
    for record in covering:
        placement = placements[record.placement_digest]
        for phase, slack in slack_bytes(record):
            if phase.whole:
                continue  # no part of a request that serves
            weights = weight_bytes(specs, placement, active=phase.active, lingering=phase.lingering)
            beside = max(0, phase.allocated_peak_bytes + slack - weights)
            first = record.uses[0][0] if record.uses else None
            for name in phase.active or tuple(one for one in (phase.lingering or first,) if one):
                running, idle = found.get(name, (0, 0))
                found[name] = (max(running, beside), idle) if phase.active else (running, max(idle, beside))
    return found


def _entry_ns(
    specs: Sequence[ComponentSpec],
    record: RequestRecord,
    workload: Workload,
    link: LinkReading,
    placement: Placement,
) -> dict[str, int]:
    """Return component -> what one entry computes, with what follows it, in ns at the size of the workload."""
    entries: dict[str, int] = {}
    for name, num in record.uses:
        entries[name] = entries.get(name, 0) + num
    total = dict.fromkeys(entries, 0)
    first = record.uses[0][0] if record.uses else None
    for phase in record.phases:
        owner = phase.active[-1] if phase.active else phase.lingering or first
        if owner in total:
            total[owner] += max(0, phase.duration_ns - phase.wait_ns)
    untracked = max(0, record.duration_ns - sum(phase.duration_ns for phase in record.phases))
    if first is not None:
        total[first] += untracked
    if not waits_known(record):
        for spec in specs:
            if spec.name in total:
                total[spec.name] -= transfer_ns(spec, placement.components[spec.name], record, link)
    ratio = max(1.0, workload.units / record.workload.units)
    return {name: round(max(0, total[name]) / num * ratio) for name, num in entries.items() if num}


def _component_use(
    spec: ComponentSpec, record: RequestRecord, loop: Loop, workload: Workload, entry_ns: Mapping[str, int]
) -> ComponentUse:
    entries = sum(num for name, num in record.uses if name == spec.name)
    counts = record.layer_uses.get(spec.name, {})
    order = record.layer_order.get(spec.name) or [
        (group.name, index) for group in spec.groups for index in range(len(group.layer_bytes))
    ]
    times = _layer_ns(spec, record, entry_ns[spec.name], workload)
    layers = []
    for group, index in order:
        # No counts at all: the layers were not observed, only the component; each then ran whenever it did.
        count = counts[group][index] if index < len(counts.get(group, ())) else (0 if counts.get(group) else entries)
        if count:
            runs = -(-count * loop.target_passes // entries)
            layers.append(
                LayerUse(
                    group=group,
                    index=index,
                    compute_ns=times[group, index],
                    num_runs=0 if runs == loop.target_passes else runs,
                )
            )
    return ComponentUse(component=spec.name, compute_ns=entry_ns[spec.name], layers=tuple(layers))


def _layer_ns(
    spec: ComponentSpec, record: RequestRecord, entry_ns: int, workload: Workload
) -> dict[tuple[str, int], int]:
    """Return (group, index) -> what a layer computes, in ns; by their bytes if nobody has measured it."""
    known = record.layer_ns.get(spec.name, {})
    ratio = max(1.0, workload.units / record.workload.units)
    sizes = {(g.name, index): size for g in spec.groups for index, size in enumerate(g.layer_bytes)}
    found = {
        (group, index): round(known[group][index] * ratio) if index < len(known.get(group, ())) else 0
        for group, index in sizes
    }
    whole = sum(sizes.values())
    if any(found.values()) or not whole:
        return found
    return {key: entry_ns * size // whole for key, size in sizes.items()}


def _unseen_phase(spec: ComponentSpec, workload: Workload, beside_bytes: int) -> TimePhase:
    layers = tuple(
        LayerUse(group=group.name, index=index, compute_ns=0)
        for group in spec.groups
        for index in range(len(group.layer_bytes))
        if Mode.LAYERWISE_OFFLOAD in spec.modes
    )
    use = ComponentUse(component=spec.name, compute_ns=0, layers=layers)
    return TimePhase(name=spec.name, uses=(use,), passes=workload.steps, beside_bytes=beside_bytes)
