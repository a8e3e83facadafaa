"""The time that a placement cannot go below: compute against the link, with what memory lets the link run ahead."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from operator import add
from typing import TYPE_CHECKING, NamedTuple

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


class PhaseTraffic(NamedTuple):  # and no dataclass: a search makes and adds up tens of thousands of them
    """What one component moves in one time phase, or several together.

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


def together(one: Sequence[PhaseTraffic], other: Sequence[PhaseTraffic]) -> list[PhaseTraffic]:
    """Return what two move together, phase by phase."""
    return [
        mine if theirs is NO_TRAFFIC else theirs if mine is NO_TRAFFIC else PhaseTraffic._make(map(add, mine, theirs))
        for mine, theirs in zip(one, other, strict=True)
    ]


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
        return tuple(NO_TRAFFIC._replace(loads_ns=whole_ns * num) if num else NO_TRAFFIC for num in entries)
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
            if busy_ns > compute_ns:
                waits_ns += busy_ns - compute_ns
            link_ns += busy_ns
        # What crosses the link beside computing slows it down; longer waits would cost more than they save in that.
        slower_ns = int(max(0, link_ns - waits_ns) * self.busy_slowdown)
        return sum(self.compute_ns) + self.exposed_ns + waits_ns + slower_ns, link_ns


class Pieces:
    """The stretches into which the time phases of a request are cut.

    by_pass: loops are cut after the first and before the last pass; what is held must have come by the end of the
    first.
    """

    __slots__ = ("_busy_slowdown", "_compute_ns", "_pieces")

    def __init__(self, model: RequestModel, *, by_pass: bool) -> None:
        self._busy_slowdown = model.busy_slowdown
        self._compute_ns: list[int] = []
        self._pieces: list[tuple[int, int, int, int]] = []  # time phase, first and last pass, and how many it has
        for number, phase in enumerate(model.phases):
            passes, compute_ns = phase.passes, phase.compute_ns
            cuts = (0, 1, passes - 1, passes) if by_pass and passes > 1 else (0, passes)
            for first, last in pairwise(cuts):
                if first != last:
                    self._compute_ns.append(compute_ns * last // passes - compute_ns * first // passes)
                    self._pieces.append((number, first, last, passes))

    def stretches(self, moved: Sequence[PhaseTraffic], windows: Sequence[int]) -> Stretches:
        """Return the stretches of a request that moves so much, with so much of the window in every phase."""
        own_bytes, own_ns, room_bytes = [], [], []
        exposed_ns = 0
        for number, first, last, passes in self._pieces:
            streamed_bytes, streamed_ns, brought_bytes, brought_ns, during, beyond, loads_ns, _ = moved[number]
            if not first:
                exposed_ns += loads_ns
            if passes == 1:
                own_bytes.append(streamed_bytes + brought_bytes)
                own_ns.append(streamed_ns + brought_ns)
            else:
                num_bytes = streamed_bytes * last // passes - streamed_bytes * first // passes
                link_ns = streamed_ns * last // passes - streamed_ns * first // passes
                own_bytes.append(num_bytes if first else num_bytes + brought_bytes)
                own_ns.append(link_ns if first else link_ns + brought_ns)
            room = windows[number] - (beyond if last == passes else during)
            room_bytes.append(max(0, room))
        return Stretches(self._compute_ns, own_bytes, own_ns, room_bytes, exposed_ns, self._busy_slowdown)


def stretches(
    model: RequestModel, parts: Iterable[Sequence[PhaseTraffic]], windows: Sequence[int], *, by_pass: bool
) -> Stretches:
    """Return the stretches of a request whose components move `parts`; see `Pieces`."""
    moved: Sequence[PhaseTraffic] = (NO_TRAFFIC,) * len(model.phases)
    for part in parts:
        moved = together(moved, part)
    return Pieces(model, by_pass=by_pass).stretches(moved, windows)


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
