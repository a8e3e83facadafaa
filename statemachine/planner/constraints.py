"""What a placement must fit into: device memory in every phase, and host memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from residency.statemachine.planner.holdings import weight_bytes
from residency.statemachine.planner.slack import slack_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from residency.gpu.placement import Placement
    from residency.gpu.records import PhaseRecord, RequestRecord
    from residency.statemachine.planner.plan import PlanInputs

_Key = tuple[str, tuple[str, ...], "str | None", tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLimit:
    """A memory phase as a constraint on the weights held in it, the window included, in bytes.

    fixed_bytes: everything but weights. gap_bytes: reserved beyond it, as measured. ran_bytes: weights that it
    is known to have run with, under the current or the initial placement: that much is never forbidden; None: unknown.
    measured: at the target shape or a larger one. whole: components that are whole on the device meanwhile, whatever
    their placement, and the window is not there.
    """

    key: str
    active: tuple[str, ...]
    lingering: str | None
    fixed_bytes: int
    gap_bytes: int
    ran_bytes: int | None
    measured: bool
    whole: tuple[str, ...] = ()

    def weight_bytes(self, inputs: PlanInputs, placement: Placement) -> int:
        """Return the weights that lie on the device in it under a placement."""
        return weight_bytes(inputs.specs, placement, active=self.active, lingering=self.lingering, whole=self.whole)

    def reserve_bytes(self, inputs: PlanInputs, cap_bytes: int) -> int:
        """Return what must stay free under a cap."""
        policy = inputs.policy
        kept = self.gap_bytes + policy.measured_reserve(cap_bytes)
        if not self.measured:
            kept = policy.extrapolated_reserve(cap_bytes)
        return int(kept * inputs.reserve_factor)

    def weight_limit(self, inputs: PlanInputs) -> int:
        """Return the largest sum of weights that the phase may hold."""
        room = inputs.cap_bytes - self.reserve_bytes(inputs, inputs.cap_bytes) - self.fixed_bytes
        return room if self.ran_bytes is None else max(room, self.ran_bytes)

    def cap_needed(self, inputs: PlanInputs, weight_bytes: int) -> int:
        """Return the smallest cap under which the phase may hold so many weights."""
        cap = needed = weight_bytes + self.fixed_bytes
        # The reserve grows with the cap, but more slowly: from below, this ends at the least cap that will do.
        while (larger := needed + self.reserve_bytes(inputs, cap)) > cap:
            cap = larger
        return cap


def phase_limits(inputs: PlanInputs) -> tuple[PhaseLimit, ...]:
    """Return the device-memory constraints that the records imply, in order of first appearance.

    Successes at the target shape count as they are. Without one, what is beside the weights is extrapolated, and the
    phases that a failed request reached count, too: where it failed, the placement it ran under needed all there was.
    Of other shapes that must fit, the phases that ask for more than those of the first.
    """
    limits = _limits_of(inputs)
    for shape in inputs.workloads:
        least = {(one.key, one.active, one.lingering, one.whole): one.weight_limit(inputs) for one in limits}
        for one in _limits_of(replace(inputs, workload=shape)):
            known = least.get((one.key, one.active, one.lingering, one.whole))
            if known is None or one.weight_limit(inputs) < known:
                size = f"{shape.width}x{shape.height}x{shape.frames}, batch {shape.batch}"
                limits.append(replace(one, key=f"{one.key} at {size}"))
    return tuple(limits)


def _limits_of(inputs: PlanInputs) -> list[PhaseLimit]:
    """Return the constraints of one shape."""
    successes = [record for record in inputs.records if record.succeeded]
    covering = [record for record in successes if record.workload.units >= inputs.workload.units]
    if covering:
        limits = _measured(inputs, covering)
    else:
        limits = _extrapolated(inputs, successes) + _reached(inputs)
    return limits + _unobserved(inputs, limits)


def failed_digests(inputs: PlanInputs) -> frozenset[str]:
    """Return the placements known not to fit: they ran out of memory at the target shape or a smaller one."""
    if 0 < inputs.measured_cap_bytes < inputs.cap_bytes:
        return frozenset()
    return frozenset(
        record.placement_digest
        for record in inputs.records
        if record.out_of_memory
        and record.workload.units <= max(one.units for one in (inputs.workload, *inputs.workloads))
    )


def relaxed(limits: Iterable[PhaseLimit], inputs: PlanInputs) -> tuple[PhaseLimit, ...]:
    """Return the limits with whatever the current placement holds allowed: for estimates that nothing satisfies."""
    return tuple(
        replace(
            limit,
            ran_bytes=_most(limit.ran_bytes, limit.weight_bytes(inputs, inputs.current)),
        )
        for limit in limits
    )


def reached(limits: Iterable[PhaseLimit], inputs: PlanInputs) -> tuple[PhaseLimit, ...]:
    """Return the limits without a guess: where no request succeeded, phases that none reached hold their weights alone.

    The worst case of others is no reason to refuse every placement where nothing runs as it is.
    """
    if any(record.succeeded for record in inputs.records):
        return tuple(limits)
    observed = {name for record in inputs.records for phase in record.phases for name in phase.active}
    return tuple(limit if observed.issuperset(limit.active) else replace(limit, fixed_bytes=0) for limit in limits)


def _most(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _weights(inputs: PlanInputs, record: RequestRecord, phase: PhaseRecord) -> int:
    """Return the weights that lay on the device in a measured phase."""
    placement = inputs.measured_placements()[record.placement_digest]
    return weight_bytes(inputs.specs, placement, active=phase.active, lingering=phase.lingering, whole=phase.whole)


def _phases(record: RequestRecord) -> dict[_Key, PhaseRecord]:
    return {(phase.key, phase.active, phase.lingering, phase.whole): phase for phase in record.phases}


def _measured(inputs: PlanInputs, covering: list[RequestRecord]) -> list[PhaseLimit]:
    proven = {inputs.current.digest, inputs.initial.digest}
    found: dict[_Key, PhaseLimit] = {}
    for record in covering:
        for phase, slack in slack_bytes(record):
            key = (phase.key, phase.active, phase.lingering, phase.whole)
            weights = _weights(inputs, record, phase)
            earlier = found.get(key)
            # A record may be older than the cap.
            ran = record.placement_digest in proven and phase.reserved_peak_bytes <= inputs.cap_bytes
            found[key] = PhaseLimit(
                key=phase.key,
                active=phase.active,
                lingering=phase.lingering,
                fixed_bytes=max(phase.allocated_peak_bytes - weights, earlier.fixed_bytes if earlier else 0),
                gap_bytes=max(slack, earlier.gap_bytes if earlier else 0),
                ran_bytes=_most(earlier.ran_bytes if earlier else None, weights if ran else None),
                measured=True,
                whole=phase.whole,
            )
    return list(found.values())


def _extrapolated(inputs: PlanInputs, successes: list[RequestRecord]) -> list[PhaseLimit]:
    points: dict[_Key, dict[int, int]] = {}
    for record in successes:
        for key, phase in _phases(record).items():
            weights = _weights(inputs, record, phase)
            # Only what is beside the weights grows with the shape; scaling weights once made 183 GiB out of 30.
            beside = max(0, phase.allocated_peak_bytes - weights)
            sizes = points.setdefault(key, {})
            sizes[record.workload.units] = max(beside, sizes.get(record.workload.units, 0))
    return [
        PhaseLimit(
            key=name,
            active=active,
            lingering=lingering,
            fixed_bytes=extrapolate(sizes, target=inputs.workload.units, margin=inputs.policy.activation_margin),
            gap_bytes=0,
            ran_bytes=None,
            measured=False,
            whole=whole,
        )
        for (name, active, lingering, whole), sizes in points.items()
    ]


def extrapolate(sizes: dict[int, int], *, target: int, margin: float) -> int:
    """Return the bytes beside weights at `target` units, from units -> bytes of smaller shapes.

    Two shapes give a line, and the margin goes on its slope; one shape, or a falling line, gives a ratio.
    """
    (large, top), *others = sorted(sizes.items(), reverse=True)
    if others:
        small, bottom = others[0]
        slope = (top - bottom) / (large - small)
        constant = top - slope * large
        if slope >= 0 and constant >= 0:
            return int(constant + slope * target * margin)
    return int(max(size * target / units for units, size in sizes.items()) * margin)


def _reached(inputs: PlanInputs) -> list[PhaseLimit]:
    found = []
    for record in inputs.records:
        if record.succeeded or record.workload.units > inputs.workload.units:
            continue
        for phase in record.phases:
            peak = phase.allocated_peak_bytes
            if record.out_of_memory and _failed_in(phase, record):
                peak = max(inputs.measured_cap_bytes or inputs.cap_bytes, peak + _refused_bytes(record.error or ""))
            weights = _weights(inputs, record, phase)
            found.append(
                PhaseLimit(
                    key=phase.key,
                    active=phase.active,
                    lingering=phase.lingering,
                    fixed_bytes=max(0, peak - weights),
                    gap_bytes=0,
                    ran_bytes=None,
                    measured=False,
                    whole=phase.whole,
                )
            )
    return found


def _failed_in(phase: PhaseRecord, record: RequestRecord) -> bool:
    # While the last component to be entered ran, or after it: the record does not tell the two apart.
    return phase == record.phases[-1] or bool(record.uses and record.uses[-1][0] in phase.active)


def _refused_bytes(error: str) -> int:
    """Return the size that the allocator refused, as torch words it; 0 if the text does not say."""
    found = re.search(r"[Tt]ried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB|TiB)", error)
    if found is None:
        return 0
    return int(float(found[1]) * 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(found[2]))


def _unobserved(inputs: PlanInputs, limits: list[PhaseLimit]) -> list[PhaseLimit]:
    # A short probe may never reach a second stage; its memory must not be given away.
    observed = {name for limit in limits for name in limit.active}
    worst = max((limit.fixed_bytes for limit in limits), default=0)
    return [
        PhaseLimit(
            key=f"use:{spec.name} (not observed)",
            active=(spec.name,),
            lingering=None,
            fixed_bytes=worst,
            gap_bytes=0,
            ran_bytes=None,
            measured=False,
        )
        for spec in inputs.specs
        if spec.name not in observed and spec.total_bytes
    ]
