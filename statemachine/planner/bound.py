"""The time that a placement cannot go below: compute against the link, with what memory lets the link run ahead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from residency.gpu.placement import ComponentPlacement, Mode
from residency.gpu.specs import window_bytes
from residency.statemachine.planner.flows import steady_flows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from residency.gpu.placement import Placement
    from residency.gpu.specs import ComponentSpec
    from residency.statemachine.planner.request_model import RequestModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBound:
    """A time phase under a placement: total_ns = exposed_ns + max(compute_ns, link_ns).

    own_bytes: of weights that the phase uses and that cross the link, whenever. link_bytes, link_ns: of those that
    cross it during the phase, for this phase or a later one. exposed_ns: loads of whole components. ahead_bytes:
    fetched for later phases and in the window when the phase ends; room_bytes: the most that could be.
    """

    name: str
    total_ns: int
    compute_ns: int
    exposed_ns: int
    own_bytes: int
    link_bytes: int
    link_ns: int
    ahead_bytes: int
    room_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least time of one of many back-to-back requests under a placement, phase by phase."""

    total_ns: int
    phases: tuple[PhaseBound, ...]

    @property
    def link_bytes(self) -> int:
        """What crosses the link's queue in one request."""
        return sum(phase.link_bytes for phase in self.phases)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTraffic:
    """What one component moves in one time phase.

    streamed_*: of layers that come for every run. brought_*: of held layers that the phase is the first to use; of
    these and of earlier ones `during_bytes` must stay while it runs and `beyond_bytes` after it. num_runs: of the layer
    that runs most often. loads_ns: of the whole component. *_ns: of the link.
    """

    streamed_bytes: int
    streamed_ns: int
    brought_bytes: int
    brought_ns: int
    during_bytes: int
    beyond_bytes: int
    loads_ns: int
    num_runs: int = 0


Runs = tuple[dict[tuple[str, int], int], ...]  # of each time phase: (group, index) -> runs of a component's layers


NO_TRAFFIC = PhaseTraffic(
    streamed_bytes=0,
    streamed_ns=0,
    brought_bytes=0,
    brought_ns=0,
    during_bytes=0,
    beyond_bytes=0,
    loads_ns=0,
)


def runs_of(model: RequestModel, component: str) -> Runs:
    """Return how often each layer of a component runs in every time phase."""
    result: list[dict[tuple[str, int], int]] = []
    for phase in model.phases:
        found: dict[tuple[str, int], int] = {}
        for use in phase.uses:
            if use.component == component:
                for layer in use.layers:
                    key = layer.group, layer.index
                    found[key] = found.get(key, 0) + phase.runs(layer)
        result.append(found)
    return tuple(result)


def traffic(
    model: RequestModel, spec: ComponentSpec, where: ComponentPlacement, runs: Runs
) -> tuple[PhaseTraffic, ...]:
    """Return what a component moves in every time phase under a placement of it. runs: of its layers."""
    whole_ns = model.link_ns(spec.total_bytes, where.tier) if where.mode is Mode.COMPONENT_OFFLOAD else 0
    entries = model.num_entries[spec.name]
    if where.mode is not Mode.LAYERWISE_OFFLOAD:
        return tuple(NO_TRAFFIC if not num else replace(NO_TRAFFIC, loads_ns=whole_ns * num) for num in entries)
    sizes = {group.name: group.layer_bytes for group in spec.groups}
    slots = {group.name: group.slot_bytes for group in spec.groups}
    held = {(group, index) for group, indices in where.held_layers.items() for index in indices}
    kept = {(group, index) for group, indices in where.resident_layers.items() for index in indices} | held
    brought: set[tuple[str, int]] = set()
    result = []
    for number, found in enumerate(runs):
        streamed = 0
        for key, num in found.items():
            if key not in kept:
                streamed += sizes[key[0]][key[1]] * num
        new = held & found.keys() - brought
        brought |= new
        moved = sum(sizes[group][index] for group, index in new)
        later: set[tuple[str, int]] = set().union(*runs[number + 1 :]) if brought else set()
        beyond = brought & later
        result.append(
            PhaseTraffic(
                streamed_bytes=streamed,
                streamed_ns=model.link_ns(streamed, where.tier),
                brought_bytes=moved,
                brought_ns=model.link_ns(moved, where.tier),
                during_bytes=sum(slots[group][index] for group, index in beyond | brought & found.keys()),
                beyond_bytes=sum(slots[group][index] for group, index in beyond),
                loads_ns=0,
                num_runs=max(found.values(), default=0),
            )
        )
    return tuple(result)


@dataclass(slots=True)
class Stretches:
    """A request for `steady_flows`: whole time phases, or first, inner and last passes."""

    compute_ns: list[int]
    own_bytes: list[int]
    own_ns: list[int]
    room_bytes: list[int]
    exposed_ns: int
    busy_slowdown: float

    def total_ns(self) -> tuple[int, int]:
        """Return what a request takes at least, and how long its link is busy in that, in ns."""
        flows = steady_flows(self.compute_ns, self.own_bytes, self.own_ns, self.room_bytes)
        waits_ns, link_ns = 0, 0
        for compute_ns, (_, busy_ns, _) in zip(self.compute_ns, flows, strict=True):
            waits_ns += max(0, busy_ns - compute_ns)
            link_ns += busy_ns
        # What crosses the link beside computing slows it down; longer waits would cost more than they save in that.
        slower_ns = int(max(0, link_ns - waits_ns) * self.busy_slowdown)
        return sum(self.compute_ns) + self.exposed_ns + waits_ns + slower_ns, link_ns


def stretches(
    model: RequestModel, parts: Iterable[Sequence[PhaseTraffic]], windows: Sequence[int], *, by_pass: bool
) -> Stretches:
    """Return the stretches of a request whose components move `parts`, with so much of the window in every phase.

    by_pass: loops are cut after the first and before the last pass; what is held must have come by the end of the
    first.
    """
    result = Stretches(
        compute_ns=[], own_bytes=[], own_ns=[], room_bytes=[], exposed_ns=0, busy_slowdown=model.busy_slowdown
    )
    for phase, window, *moved in zip(model.phases, windows, *parts, strict=True):
        streamed_bytes = streamed_ns = brought_bytes = brought_ns = during = beyond = 0
        for one in moved:
            streamed_bytes += one.streamed_bytes
            streamed_ns += one.streamed_ns
            brought_bytes += one.brought_bytes
            brought_ns += one.brought_ns
            during += one.during_bytes
            beyond += one.beyond_bytes
            result.exposed_ns += one.loads_ns
        passes, compute_ns = phase.passes, phase.compute_ns
        cuts = (0, 1, passes - 1, passes) if by_pass and passes > 1 else (0, passes)
        for first, last in pairwise(cuts):
            if first == last:
                continue
            own_bytes = streamed_bytes * last // passes - streamed_bytes * first // passes
            own_ns = streamed_ns * last // passes - streamed_ns * first // passes
            room = window - (beyond if last == passes else during)
            result.compute_ns.append(compute_ns * last // passes - compute_ns * first // passes)
            result.own_bytes.append(own_bytes if first else own_bytes + brought_bytes)
            result.own_ns.append(own_ns if first else own_ns + brought_ns)
            result.room_bytes.append(max(0, room))
    return result


def placement_bound(model: RequestModel, placement: Placement) -> Bound:
    """Return the bound of a placement for back-to-back requests; it need not fit.

    Every repeated loop counts as one phase. The link runs ahead into the next phases as far as the window, less what
    the phase yields and what is held beyond it, has room at the end of the phase.
    """
    parts = [traffic(model, spec, placement.components[spec.name], runs_of(model, spec.name)) for spec in model.specs]
    found = stretches(model, parts, _windows(model, placement), by_pass=False)
    flows = steady_flows(found.compute_ns, found.own_bytes, found.own_ns, found.room_bytes)
    phases = []
    for index, (phase, (link_bytes, link_ns, ahead_bytes)) in enumerate(zip(model.phases, flows, strict=True)):
        exposed_ns = sum(part[index].loads_ns for part in parts)
        phases.append(
            PhaseBound(
                name=phase.name,
                total_ns=exposed_ns + max(phase.compute_ns, link_ns),
                compute_ns=phase.compute_ns,
                exposed_ns=exposed_ns,
                own_bytes=found.own_bytes[index],
                link_bytes=link_bytes,
                link_ns=link_ns,
                ahead_bytes=ahead_bytes,
                room_bytes=found.room_bytes[index],
            )
        )
    return Bound(total_ns=sum(phase.total_ns for phase in phases), phases=tuple(phases))


def pass_bound_ns(model: RequestModel, placement: Placement) -> int:
    """Return a tighter bound, in ns: what is held must have come by the end of the first pass of its loop.

    It also counts by how much computing is slower while copies run beside it.
    """
    parts = [traffic(model, spec, placement.components[spec.name], runs_of(model, spec.name)) for spec in model.specs]
    return stretches(model, parts, _windows(model, placement), by_pass=True).total_ns()[0]


def _windows(model: RequestModel, placement: Placement) -> list[int]:
    return [window_bytes(model.specs, placement, active=phase.components) for phase in model.phases]
