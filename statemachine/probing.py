"""Request shapes to measure with: the bounded one, and the largest one that should fit."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING

from residency.statemachine.planner.holdings import weight_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from residency.gpu.placement import Placement
    from residency.gpu.records import RequestRecord
    from residency.gpu.specs import ComponentSpec
    from residency.gpu.workload import Workload
    from residency.statemachine.policy import Policy


def measured_steps(workload: Workload, policy: Policy) -> int:
    """Return how many steps every measured request runs: the floor, but never more than the worker was made for.

    Calibration and validation run the same number: a pipeline that takes four steps may refuse one.
    """
    return min(workload.steps, policy.step_floor)


def bounded_workload(workload: Workload, policy: Policy) -> Workload:
    """Return the small shape of a first, cold request: same proportions and multiples, few frames, one sample."""
    frames = _fewer_frames(workload.frames, policy.video_frames_max)
    area_max = policy.image_area_max if workload.frames == 1 else policy.video_area_max
    width, height = _smaller_area(workload.width, workload.height, area_max)
    return replace(workload, width=width, height=height, frames=frames, batch=1, steps=measured_steps(workload, policy))


def fit_probe(
    target: Workload,
    record: RequestRecord,
    specs: Sequence[ComponentSpec],
    placement: Placement,
    cap_bytes: int,
    policy: Policy,
) -> Workload:
    """Return the largest shape towards `target` that should fit, judged by a record taken under `placement`.

    Shrinks frames first, then the area, then the batch, and never below the recorded shape. Only what is beside the
    weights grows with the shape. A record of a failed request gives its own shape back.
    """
    steps = measured_steps(target, policy)
    smallest = replace(record.workload, steps=steps)
    if not record.succeeded:
        return smallest
    room = cap_bytes - policy.probe_margin(cap_bytes)
    for shape in _ladder(target):
        if shape.units <= smallest.units:
            break
        if _peak_bytes(shape, record, specs, placement, policy) <= room:
            return replace(shape, steps=steps)
    return smallest if target.units > smallest.units else replace(target, steps=steps)


def _peak_bytes(
    shape: Workload, record: RequestRecord, specs: Sequence[ComponentSpec], placement: Placement, policy: Policy
) -> int:
    ratio = shape.units / record.workload.units * policy.activation_margin if shape.units > record.workload.units else 1
    peaks = [0]
    for phase in record.phases:
        weights = weight_bytes(specs, placement, active=phase.active, lingering=phase.lingering, whole=phase.whole)
        peaks.append(weights + int(max(0, phase.allocated_peak_bytes - weights) * ratio))
    return max(peaks)


def _ladder(target: Workload) -> Iterator[Workload]:
    """Yield ever smaller shapes, from the target itself."""
    shape = target
    yield shape
    while (frames := _fewer_frames(shape.frames, (shape.frames + 1) // 2)) < shape.frames:
        shape = replace(shape, frames=frames)
        yield shape
    while True:
        width, height = _smaller_area(shape.width, shape.height, shape.width * shape.height // 2)
        if (width, height) == (shape.width, shape.height):
            break
        shape = replace(shape, width=width, height=height)
        yield shape
    while shape.batch > 1:
        shape = replace(shape, batch=shape.batch // 2)
        yield shape


def _fewer_frames(frames: int, frames_max: int) -> int:
    """Return at most `frames_max` frames (if any such count will do) in the pattern of `frames`: 8k + 1, 4k, ..."""
    if frames <= max(1, frames_max):
        return frames
    offset = frames % 2  # video models take a first frame and whole strides after it, or whole strides
    stride = _power_of_two(frames - offset, 8)
    # One stride at least: one frame is an image, which not every video model can make.
    return offset + stride * max(1, (frames_max - offset) // stride)


def _smaller_area(width: int, height: int, area_max: int) -> tuple[int, int]:
    """Return a size of at most `area_max` pixels, as far as its multiples allow, in nearly the same proportions."""
    if width * height <= area_max:
        return width, height
    scale = sqrt(area_max / (width * height))
    multiple = min(_power_of_two(width, 64), _power_of_two(height, 64))
    width, height = (max(multiple, int(side * scale) // multiple * multiple) for side in (width, height))
    return width, height


def _power_of_two(value: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides a value."""
    power = 1
    while power < most and value % (power * 2) == 0:
        power *= 2
    return power
