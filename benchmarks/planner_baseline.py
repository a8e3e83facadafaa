"""A planner that ranks bytes times uses, as planners do that know nothing of overlap; and what it costs, simulated.

    python -m benchmarks.planner_baseline

prints, for an image and a video pipeline at several caps, what a request takes under the placement that it chooses and
under ours, both in our simulator, which runs the same engine for both. Simulated, not measured: on a GPU the benchmark
of request times has a row of it (`--peers bytes-times-uses`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.planner_models import flux_model, wan_model
from residency.errors import PlacementInfeasible
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode
from residency.statemachine.planner.best import fastest_placement
from residency.statemachine.planner.options import Option, Options
from residency.statemachine.planner.room import Room
from residency.statemachine.planner.timeline import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from residency.gpu.placement import Placement
    from residency.gpu.specs import ComponentSpec
    from residency.statemachine.planner.request_model import RequestModel

NUM_SLOTS = 2
CAPS_GIB = (40, 36, 32, 28, 24, 20, 16, 12, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A placement of one component: what crosses the link for it in a request, and the device bytes it asks for."""

    option: Option
    moved_bytes: int
    needed_bytes: int


def bytes_times_uses(model: RequestModel) -> Placement:
    """Return the placement of the greedy planner: what saves the most copied bytes for a byte of memory comes first.

    A component is whole on the device, whole while it is used, or streamed with its first layers kept: for good or, if
    they run more than once, for the duration of a use. What is streamed has two slots, and waits are not looked at.
    Raises PlacementInfeasible if nothing fits.
    """
    room, options = Room(model), Options(model, num_levels=128)
    choices = {spec.name: list(_choices(model, options, spec)) for spec in model.specs}
    chosen = {name: min(found, key=lambda one: (one.needed_bytes, one.moved_bytes)) for name, found in choices.items()}
    placement = _placement(room, model, chosen)
    if placement is None:
        raise PlacementInfeasible(needed_bytes=model.cap_bytes + 1, cap_bytes=model.cap_bytes, bound_by="every phase")
    while True:
        better = [
            ((now.moved_bytes - one.moved_bytes) / max(1, one.needed_bytes - now.needed_bytes), name, number)
            for name, now in chosen.items()
            for number, one in enumerate(choices[name])
            if one.moved_bytes < now.moved_bytes
        ]
        for _, name, number in sorted(better, key=lambda one: (-one[0], one[1], one[2])):
            tried = {**chosen, name: choices[name][number]}
            found = _placement(room, model, tried)
            if found is not None:
                chosen, placement = tried, found
                break
        else:
            return placement


def _choices(model: RequestModel, options: Options, spec: ComponentSpec) -> Iterator[Choice]:
    entries = sum(model.num_entries[spec.name])
    yield _choice(options, spec, RESIDENT, 0)
    whole = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED)
    yield _choice(options, spec, whole, spec.total_bytes * entries)
    runs = [phase.passes for phase in model.phases if spec.name in phase.components]
    uses = sum(runs)
    layers = [(group.name, index) for group in spec.groups for index in range(len(group.layer_bytes))]
    sizes = {(group.name, index): size for group in spec.groups for index, size in enumerate(group.layer_bytes)}
    for num in range(len(layers) if uses > 1 else min(1, len(layers))):
        kept = _by_group(layers[:num])
        streamed = sum(sizes[one] for one in layers[num:]) * uses
        held = sum(sizes[one] for one in layers[:num])
        streaming = ComponentPlacement(mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PINNED, num_slots=NUM_SLOTS)
        yield _choice(options, spec, replace(streaming, resident_layers=kept), streamed)
        if num:
            yield _choice(options, spec, replace(streaming, held_layers=kept), streamed + held * len(runs))


def _choice(options: Options, spec: ComponentSpec, where: ComponentPlacement, moved_bytes: int) -> Choice:
    option = options.known(spec, where)
    needed = option.idle_bytes + option.extra_bytes + option.held_bytes + option.slot_bytes
    return Choice(option=option, moved_bytes=moved_bytes, needed_bytes=needed)


def _by_group(layers: Sequence[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for group, index in layers:
        found[group] = (*found.get(group, ()), index)
    return found


def _placement(room: Room, model: RequestModel, chosen: dict[str, Choice]) -> Placement | None:
    parts = tuple(chosen[spec.name].option for spec in model.specs)
    return room.placement(parts, window=room.needed(parts))


def compare(make: Callable[[float], RequestModel], caps_gib: Sequence[float]) -> Iterator[tuple[float, int, int]]:
    """Yield cap in GiB, and the simulated ns of a request by the greedy planner and by ours, wherever both find one."""
    for cap in caps_gib:
        model = make(cap)
        try:
            theirs = simulate(model, bytes_times_uses(model)).request_ns
            ours = fastest_placement(model)[1].request_ns
        except (PlacementInfeasible, ValueError) as error:
            sys.stderr.write(f"{cap:g} GiB: {error}\n")
            continue
        yield cap, theirs, ours


def main() -> None:
    """Print the comparison."""
    for name, make in (("image, 31 GiB", flux_model), ("video, 37 GiB", wan_model)):
        sys.stdout.write(f"{name}, 4 steps: simulated, not measured\n")
        sys.stdout.write(f"{'cap':>8}  {'bytes x uses':>12}  {'ours':>8}  faster by\n")
        for cap, theirs, ours in compare(make, CAPS_GIB):
            times = f"{theirs / 1e9:>10.3f} s  {ours / 1e9:>6.3f} s  {1 - ours / theirs:>8.1%}"
            sys.stdout.write(f"{cap:>4} GiB  {times}\n")


if __name__ == "__main__":
    main()
