"""The placements that are weighed for each component, with what each holds and moves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from operator import add, ge
from typing import TYPE_CHECKING

from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode
from residency.gpu.specs import ComponentSpec
from residency.statemachine.planner.bound import PhaseTraffic, runs_of, traffic
from residency.statemachine.planner.layer_choice import Counts, Layers, layers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from residency.gpu.placement import Placement
    from residency.statemachine.planner.request_model import RequestModel

NUM_SLOTS = 2  # one layer computes while the next one comes
Section = tuple[list[int], list[int], list[int]]  # ns of computing, bytes that stream, ns of the link for them

HELD_LEVELS = 8  # amounts of held layers that are weighed for each amount of resident ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A placement of one component, but for its window and what it yields.

    resident, kept: how many layers of each group never leave, and how many of them and of held ones there are; None if
    it is not layerwise. is_fixed: it is taken exactly as it is. extra_bytes: on the device beside idle_bytes while it
    runs or lingers. held_bytes, slot_bytes: what its held and its streamed layers take in the window at least;
    away_bytes: what all that leave could take; layer_bytes: the largest of them, which takes layer_ns of the link.
    pinned_bytes: of its host copy; host_bytes: host memory that going there from the current placement takes anew.
    moved: by time phase. sections: of each what one pass computes and streams between one layer group and the next.
    """

    spec: ComponentSpec = field(repr=False)
    placement: ComponentPlacement
    resident: Counts | None
    kept: Counts | None
    is_fixed: bool
    idle_bytes: int
    extra_bytes: int
    held_bytes: int
    slot_bytes: int
    away_bytes: int
    layer_bytes: int
    layer_ns: int
    pinned_bytes: int
    host_bytes: int
    moved: tuple[PhaseTraffic, ...] = field(repr=False)
    sections: tuple[Section, ...] = field(repr=False)
    uneven_ns: dict[tuple[int, int], int] = field(default_factory=dict, repr=False, compare=False)  # of a search


class Family:
    """Options that differ only in what is held: `head`, in which nothing is, and others, made when asked for."""

    def __init__(self, head: Option, more: Sequence[Callable[[], Option]] = ()) -> None:
        self.head = head
        self._more = more
        self._members: list[Option] | None = None

    def __len__(self) -> int:
        return 1 + len(self._more)

    @property
    def members(self) -> list[Option]:
        """All of them."""
        if self._members is None:
            self._members = [self.head, *(make() for make in self._more)]
        return self._members


class Options:
    """Makes the options of every component of a request.

    num_levels: how finely the bytes of all weights are told apart. num_slots: how many streamed layers find room at
    once. tiers: of layers that are streamed or held. current: the placement in force, if there is one.
    """

    def __init__(
        self,
        model: RequestModel,
        *,
        num_levels: int,
        num_slots: int = NUM_SLOTS,
        tiers: Sequence[HostTier] = (HostTier.PINNED,),
        current: Placement | None = None,
    ) -> None:
        self._current = {} if current is None else current.components
        self.model, self._tiers, self._num_slots = model, tiers, num_slots
        self._runs = {spec.name: runs_of(model, spec.name) for spec in model.specs}
        self.layers: dict[str, Layers] = {spec.name: layers_of(model, spec) for spec in model.specs}
        self._paths = {name: layers.path() for name, layers in self.layers.items()}
        self._granule = max(1, sum(spec.total_bytes for spec in model.specs) // num_levels)
        self._looped = {name for phase in model.phases if phase.passes > 1 for name in phase.components}
        self._made: dict[tuple[str, Counts, Counts, HostTier], Option] = {}

    def of(
        self, spec: ComponentSpec, *, known: Iterable[ComponentPlacement] = (), mode: Mode | None = None
    ) -> list[Family]:
        """Return all options of a component: those `known`, and what is worth weighing of its modes, or of one."""
        found = {_key(one): Family(self.known(spec, one)) for one in known if mode in (None, one.mode)}
        layers = self.layers[spec.name]
        for one in spec.modes if mode is None else (mode,):
            simple: list[ComponentPlacement] = []
            if one is Mode.RESIDENT:
                simple.append(RESIDENT)
            elif one is Mode.COMPONENT_OFFLOAD:
                simple += [ComponentPlacement(mode=one, tier=tier) for tier in (HostTier.PINNED, HostTier.PAGEABLE)]
            elif layers.names:
                # Where memory is scarcest one layer at a time must do.
                simple += [ComponentPlacement(mode=one, tier=tier, num_slots=1) for tier in self._tiers]
            for placement in simple:
                found.setdefault(_key(placement), Family(self.known(spec, placement)))
            if one is Mode.LAYERWISE_OFFLOAD and layers.names:
                for tier in self._tiers:
                    for family in self._families(spec, tier):
                        found.setdefault(_key(family.head.placement), family)
        return list(found.values())

    def fixed(self, spec: ComponentSpec, placement: ComponentPlacement) -> Family:
        """Return the only option of a component that stays exactly where it is."""
        return Family(replace(self.known(spec, placement), placement=placement, is_fixed=True))

    def known(self, spec: ComponentSpec, placement: ComponentPlacement) -> Option:
        """Return a placement that somebody has made as an option, without its window and what it yields."""
        placement = bare(placement)
        names = self.layers[spec.name].names
        resident = tuple(len(placement.resident_layers.get(name, ())) for name in names)
        kept = tuple(map(add, resident, (len(placement.held_layers.get(name, ())) for name in names)))
        layerwise = placement.mode is Mode.LAYERWISE_OFFLOAD
        return self._option(spec, placement, resident if layerwise else None, kept if layerwise else None)

    def layerwise(self, spec: ComponentSpec, resident: Counts, kept: Counts, tier: HostTier) -> Option:
        """Return the option with so many layers of each group resident, and so many resident or held."""
        key = spec.name, resident, kept, tier
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._layerwise(spec, resident, kept, tier)
        return found

    def _layerwise(self, spec: ComponentSpec, resident: Counts, kept: Counts, tier: HostTier) -> Option:
        residents, held = self.layers[spec.name].split(resident, kept)
        placement = ComponentPlacement(
            mode=Mode.LAYERWISE_OFFLOAD,
            tier=tier,
            resident_layers=residents,
            held_layers=held,
            num_slots=self._num_slots,
        )
        return self._option(spec, placement, resident, kept)

    def moves(self, option: Option, step: int) -> Iterator[Option]:
        """Yield options that keep more or fewer layers resident or held, by `step` layers, as evenly as they can be."""
        tier = option.placement.tier
        if option.resident is None or option.kept is None or option.is_fixed or tier is None:
            return
        name = option.spec.name
        layers, hold = self.layers[name], name in self._looped
        for resident, kept in layers.moves(option.resident, option.kept, step, self._paths[name], hold=hold):
            yield self.layerwise(option.spec, resident, kept, tier)

    def shifted(self, option: Option, num_bytes: int) -> Option | None:
        """Return the option that keeps about so many bytes more (or fewer) resident; None if there is none."""
        tier = option.placement.tier
        if option.resident is None or option.kept is None or option.is_fixed or tier is None:
            return None
        path = self._paths[option.spec.name]
        away = self._away_bytes(option.spec)
        step = round(num_bytes / max(1, away) * (len(path) - 1)) or (1 if num_bytes > 0 else -1)
        resident = max(0, min(sum(option.resident) + step, len(path) - 2))
        if resident == sum(option.resident):
            return None
        held = sum(option.kept) - sum(option.resident)
        return self.layerwise(option.spec, path[resident], path[min(len(path) - 1, resident + held)], tier)

    def _away_bytes(self, spec: ComponentSpec) -> int:
        return sum(sum(group.layer_bytes) for group in spec.groups)

    def resized(self, option: Option, num_bytes: int) -> Iterator[Option]:
        """Yield layerwise options that hold about so many bytes more, or fewer."""
        spec = option.spec
        layers = sum(len(group.layer_bytes) for group in spec.groups)
        if layers:
            step = max(1, round(abs(num_bytes) * layers / max(1, self._away_bytes(spec))))
            yield from self.moves(option, step)

    def grown(self, option: Option) -> Iterator[Option]:
        """Yield options with ever more resident layers, and at least as many held ones."""
        tier = option.placement.tier
        if option.resident is None or option.kept is None or option.is_fixed or tier is None:
            return
        path = self._paths[option.spec.name]
        resident, kept = sum(option.resident), sum(option.kept)
        for more in range(1, len(path) - 1 - resident):
            last = min(len(path) - 1, kept + more) if kept > resident else resident + more
            yield self.layerwise(option.spec, path[resident + more], path[last], tier)

    def _families(self, spec: ComponentSpec, tier: HostTier) -> Iterator[Family]:
        """Yield options with ever more resident layers, by about a granule; in a loop also with ever more held ones."""
        layers = self.layers[spec.name]
        levels = layers.levels(self._granule)
        for resident in levels[:-1]:
            more: list[Counts] = []
            if spec.name in self._looped:
                more = [kept for kept in levels if kept != resident and all(map(ge, kept, resident))]
                step = max(1, len(more) // HELD_LEVELS)
                more = more[step - 1 :: step]
            yield Family(
                self.layerwise(spec, resident, resident, tier),
                [partial(self.layerwise, spec, resident, kept, tier) for kept in more],
            )

    def _option(
        self, spec: ComponentSpec, placement: ComponentPlacement, resident: Counts | None, kept: Counts | None
    ) -> Option:
        away = held = leaving = largest = largest_leaving = num_streamed = 0
        if placement.mode is Mode.LAYERWISE_OFFLOAD:
            for group in spec.groups:
                stays = set(placement.resident_layers.get(group.name, ()))
                holds = set(placement.held_layers.get(group.name, ()))
                for index, (size, slot) in enumerate(zip(group.layer_bytes, group.slot_bytes, strict=True)):
                    if index in stays:
                        continue
                    away, leaving, largest_leaving = away + size, leaving + slot, max(largest_leaving, slot)
                    if index in holds:
                        held += slot
                    else:
                        largest, num_streamed = max(largest, slot), num_streamed + 1
        elif placement.mode is Mode.COMPONENT_OFFLOAD:
            away = spec.total_bytes
        idle = spec.total_bytes - away
        current = self._current.get(spec.name)
        return Option(
            spec=spec,
            placement=placement,
            resident=resident,
            kept=kept,
            is_fixed=False,
            idle_bytes=idle,
            extra_bytes=away if placement.mode is Mode.COMPONENT_OFFLOAD else 0,
            held_bytes=held,
            slot_bytes=min(placement.num_slots, num_streamed) * largest,
            away_bytes=leaving,
            layer_bytes=largest_leaving,
            layer_ns=self.model.link_ns(largest_leaving, placement.tier),
            pinned_bytes=away if placement.tier is HostTier.PINNED else 0,
            host_bytes=away if _is_anew(current, placement) else 0,
            moved=traffic(self.model, spec, placement, self._runs[spec.name]),
            sections=self._sections(spec, placement),
        )

    def _sections(self, spec: ComponentSpec, placement: ComponentPlacement) -> tuple[Section, ...]:
        """Return what each pass of a loop computes and streams, layer group after layer group; nothing elsewhere."""
        if placement.mode is not Mode.LAYERWISE_OFFLOAD or spec.name not in self._looped:
            return ()
        sizes = {group.name: group.layer_bytes for group in spec.groups}
        kept = {
            name: {*placement.resident_layers.get(name, ()), *placement.held_layers.get(name, ())} for name in sizes
        }
        result = []
        for phase in self.model.phases:
            compute_ns: list[int] = []
            streamed: list[int] = []
            before = None
            for use in phase.uses if phase.passes > 1 else ():
                for layer in use.layers if use.component == spec.name else ():
                    if layer.group != before:
                        compute_ns.append(0)
                        streamed.append(0)
                        before = layer.group
                    compute_ns[-1] += layer.compute_ns
                    if layer.index not in kept[layer.group]:
                        streamed[-1] += sizes[layer.group][layer.index]
            result.append((compute_ns, streamed, [self.model.link_ns(one, placement.tier) for one in streamed]))
        return tuple(result)


def host_bytes(spec: ComponentSpec, current: ComponentPlacement, target: ComponentPlacement) -> int:
    """Return the host memory that going from one placement of a component to another takes anew."""
    return spec.total_bytes - spec.device_bytes(target, in_use=False) if _is_anew(current, target) else 0


def _is_anew(current: ComponentPlacement | None, target: ComponentPlacement) -> bool:
    if current is None or target.tier is None:
        return False
    # Pinned copies live in mappings of their own, and a resident component may have no host copy at all.
    return current.tier is None or (target.tier is HostTier.PINNED and current.tier is not HostTier.PINNED)


def _key(placement: ComponentPlacement) -> tuple[object, ...]:
    layers = [
        sorted((name, indices) for name, indices in layers.items() if indices)
        for layers in (placement.resident_layers, placement.held_layers)
    ]
    return placement.mode, placement.tier, str(layers), placement.num_slots


def bare(placement: ComponentPlacement) -> ComponentPlacement:
    """Return a placement without its window and what it yields."""
    return replace(placement, window_bytes=0, yield_bytes=0)
