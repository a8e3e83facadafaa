"""What must hold of measurements before anything is planned from them."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from residency.errors import MeasurementRefused
from residency.gpu.placement import Mode
from residency.statemachine.planner.holdings import held_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.gpu.records import PhaseRecord, RequestRecord
    from residency.gpu.specs import ComponentSpec
    from residency.statemachine.planner.plan import PlanInputs

_BYTES_MAX = 2**60  # an exbibyte: no device, host or file holds more
_NS_MAX = 10**18  # thirty years


def check_inputs(inputs: PlanInputs) -> None:
    """Raise MeasurementRefused, which names what is wrong, if the inputs are absurd or contradict themselves."""
    for subject, problem in _problems(inputs):
        raise MeasurementRefused(subject=subject, problem=problem)


def _problems(inputs: PlanInputs) -> Iterator[tuple[str, str]]:
    yield from _machine(inputs)
    names = [spec.name for spec in inputs.specs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield "the components", f"two are named {name!r}"
    for spec in inputs.specs:
        for problem in _component(spec):
            yield f"component {spec.name!r}", problem
    by_name = {spec.name: spec for spec in inputs.specs}
    for number, record in enumerate(inputs.records, start=1):
        for problem in _record(record, by_name):
            yield f"record {number} ({record.kind.value})", problem
    yield from _contradictions(inputs)


def _machine(inputs: PlanInputs) -> Iterator[tuple[str, str]]:
    link, host = inputs.link, inputs.host
    speeds = {
        "to the device from pinned memory": link.to_device_pinned,
        "to the device from pageable memory": link.to_device_pageable,
    }
    for direction, speed in speeds.items():
        if not isfinite(speed) or not 1 <= speed <= _BYTES_MAX:
            yield "the link", f"it moves {speed!r} bytes a second {direction}"
    if not _is_size(inputs.cap_bytes) or not inputs.cap_bytes:
        yield "the device", f"its cap is {inputs.cap_bytes!r} bytes"
    if not _is_size(host.available_bytes) or not _is_size(host.pin_budget_bytes):
        yield "the host", f"{host.available_bytes!r} bytes are available, {host.pin_budget_bytes!r} may be pinned"
    share = inputs.host_share
    if share is not None and not (_is_size(share.pinned_bytes) and _is_size(share.new_bytes)):
        yield "the host", f"a rank's share is {share.pinned_bytes!r} bytes pinned and {share.new_bytes!r} bytes anew"
    if not _is_time(inputs.enough_ns):
        yield "the time", f"{inputs.enough_ns!r} ns are said to be enough"
    if not _is_time(inputs.noise_ns):
        yield "the noise", f"it is {inputs.noise_ns!r} ns"
    if not isfinite(inputs.reserve_factor) or inputs.reserve_factor <= 0:
        yield "the reserve", f"its factor is {inputs.reserve_factor!r}"


def _component(spec: ComponentSpec) -> Iterator[str]:
    layers = [size for group in spec.groups for size in (*group.layer_bytes, *group.packed_bytes)]
    if not all(map(_is_size, (spec.total_bytes, *layers))):
        yield f"it has {spec.total_bytes!r} bytes in layers of {sorted(set(layers))!r}"
    elif spec.outside_bytes < 0:
        yield f"its layers have {-spec.outside_bytes} bytes more than all of it"
    for group in spec.groups:
        if len(group.slot_bytes) != len(group.layer_bytes):
            yield f"layer group {group.name!r} has {len(group.layer_bytes)} layers and {len(group.slot_bytes)} blocks"
    if Mode.LAYERWISE_OFFLOAD in spec.modes and not any(group.layer_bytes for group in spec.groups):
        yield "it can be offloaded layer by layer, but has no layers"


def _record(record: RequestRecord, specs: dict[str, ComponentSpec]) -> Iterator[str]:
    if not _is_time(record.duration_ns):
        yield f"it took {record.duration_ns!r} ns"
    if not all(map(_is_size, (record.baseline_allocated_bytes, record.baseline_reserved_bytes))):
        yield f"{record.baseline_allocated_bytes!r} bytes were allocated before it"
    for phase in record.phases:
        for problem in _phase(phase, specs):
            yield f"phase {phase.key!r} {problem}"
    for name, num in record.uses:
        if name not in specs:
            yield f"it ran {name!r}, which is no component"
        if isinstance(num, bool) or not isinstance(num, int) or num < 1:
            yield f"it ran {name!r} {num!r} times"
    ran = {name for phase in record.phases for name in phase.active}
    missing = sorted({name for name, _ in record.uses} - ran)
    if record.succeeded and missing:
        yield f"it has no memory phase of {', '.join(missing)}, which ran"
    for name, groups in record.layer_uses.items():
        yield from _layers(name, {group: tuple(counts) for group, counts in groups.items()}, specs, "uses")
    for name, times in record.layer_ns.items():
        yield from _layers(name, {group: tuple(found) for group, found in times.items()}, specs, "ns")


def _layers(name: str, groups: dict[str, tuple[int, ...]], specs: dict[str, ComponentSpec], what: str) -> Iterator[str]:
    sizes = {group.name: len(group.layer_bytes) for group in specs[name].groups} if name in specs else {}
    for group, values in groups.items():
        if len(values) > sizes.get(group, 0):
            yield f"it has {what} of {len(values)} layers in {name!r}, {group!r}, which has {sizes.get(group, 0)}"
        if not all(map(_is_time, values)):
            yield f"it has {what} of {values!r} in {name!r}, {group!r}"


def _phase(phase: PhaseRecord, specs: dict[str, ComponentSpec]) -> Iterator[str]:
    strangers = sorted({*phase.active, *phase.whole, *((phase.lingering,) if phase.lingering else ())} - set(specs))
    if strangers:
        yield f"is of {', '.join(strangers)}, which is no component"
    if not _is_time(phase.duration_ns) or not _is_time(phase.wait_ns):
        yield f"took {phase.duration_ns!r} ns, of which {phase.wait_ns!r} ns of waiting"
    if not _is_size(phase.allocated_peak_bytes) or not _is_size(phase.reserved_peak_bytes):
        yield f"has peaks of {phase.allocated_peak_bytes!r} and {phase.reserved_peak_bytes!r} bytes"


def _contradictions(inputs: PlanInputs) -> Iterator[tuple[str, str]]:
    """Yield where a record cannot have been taken under the placement that it names."""
    placements = inputs.measured_placements()
    for number, record in enumerate(inputs.records, start=1):
        placement = placements[record.placement_digest]
        for phase in record.phases if record.succeeded else ():
            weights = sum(
                spec.total_bytes
                if spec.name in phase.whole
                else held_bytes(spec, placement.components[spec.name], active=phase.active, lingering=phase.lingering)
                for spec in inputs.specs
            )
            # Sizes may be a little off for weights that cannot be looked into, but not by half.
            if 2 * phase.allocated_peak_bytes < weights:
                found = f"a peak of {phase.allocated_peak_bytes} bytes under a placement that holds {weights} in it"
                yield f"record {number} ({record.kind.value})", f"phase {phase.key!r} has {found}"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _BYTES_MAX


def _is_time(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _NS_MAX
