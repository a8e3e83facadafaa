"""The placement to aim for among all that fit: the fastest, and of those as fast the one that takes least."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from residency.statemachine.planner.bound import PhaseTraffic, stretches
from residency.statemachine.planner.climbing import Climber
from residency.statemachine.planner.weighing import Rules, Weighed, Weigher

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from residency.gpu.placement import ComponentPlacement, Placement
    from residency.statemachine.planner.options import Family, Option, Options
    from residency.statemachine.planner.room import Room
    from residency.statemachine.planner.search import Parts, Search

_RESIZED_MAX = 2  # ways to give a component more or less memory that are simulated
_FEW = 64  # of all combinations for each simulation that is allowed: most are ruled out by their bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What was chosen, and the fastest of all. weighed: what was simulated and fits, the fastest first.

    gap_ns: by how much another placement could still be faster than the fastest, at most; 0: none is. num_nodes:
    partial and complete placements that were looked at.
    """

    best: Weighed
    fastest: Weighed
    weighed: tuple[Weighed, ...]
    gap_ns: int
    num_nodes: int


class Chooser(Weigher):
    """Chooses among the options of every component; `choices`: component by component."""

    def __init__(
        self,
        room: Room,
        options: Options,
        choices: Sequence[Sequence[Family]],
        current: Placement,
        rules: Rules,
    ) -> None:
        super().__init__(room, current, rules)
        self._options, self.choices = options, choices

    def choose(self, known: Iterable[Placement]) -> Chosen | None:
        """Return the choice among everything that fits, and what is `known` among it; None if nothing fits.

        Where there are few, all that may matter are weighed. Where there are many, the best that is found with a
        limited number of simulations, and a proof of how much better it could be at most.
        """
        for placement in known:
            if self.fits(placement):
                self.consider(placement, None)
        search, num_nodes = self.search(self.choices), 0
        if self._are_few:
            self._weigh_all(search)
        else:
            climber = Climber(self, self._options, self.choices)
            climber.find_fastest(search)
            climber.save_memory()
            num_nodes = climber.num_nodes
        fitting = self.all
        if not fitting:
            return None
        fastest, lower_ns = fitting[0], search.lower_ns
        limit_ns = fastest.request_ns + self.rules.tolerance(fastest.request_ns)
        return Chosen(
            best=min((one for one in fitting if one.request_ns <= limit_ns), key=lambda one: one.thrift),
            fastest=fastest,
            weighed=tuple(fitting),
            gap_ns=0 if lower_ns is None else max(0, fastest.request_ns - lower_ns),
            num_nodes=num_nodes + search.num_nodes + self.num_weighed,
        )

    def option(self, component: str, placement: ComponentPlacement) -> Option:
        """Return a placement of one component as an option."""
        return self._options.known(self.model.spec(component), placement)

    def grown(self, option: Option, families: Sequence[Family]) -> list[Option]:
        """Return what a layerwise option becomes with ever more resident layers; nothing if the component is fixed."""
        is_free = len(families) > 1 or not families[0].head.is_fixed
        return [*self._options.grown(option)] if is_free else []

    def resized(self, option: Option, families: Sequence[Family], num_bytes: int) -> list[Option]:
        """Return options of a component that hold about so many bytes more, or fewer, those that move least first."""
        path = list(self._options.resized(option, num_bytes)) or [family.head for family in families]
        found = [one for one in path if (one.idle_bytes - option.idle_bytes) * num_bytes > 0]
        nearest = min((abs(one.idle_bytes - option.idle_bytes - num_bytes) for one in found), default=0)
        near = [one for one in found if abs(one.idle_bytes - option.idle_bytes - num_bytes) <= 2 * nearest]
        return sorted(near, key=lambda one: sum(map(_link_ns, one.moved)))[:_RESIZED_MAX]

    def ideal_ns(self) -> int:
        """Return what no placement can go below, however much memory there is."""
        heads = [[family.head for family in found] for found in self.choices]
        least = [min(options, key=lambda one: sum(map(_link_ns, one.moved))) for options in heads]
        everything = sum(spec.total_bytes for spec in self.model.specs)
        windows = [everything] * len(self.model.phases)
        return stretches(self.model, [one.moved for one in least], windows, by_pass=True).total_ns()[0]

    def fits_at_all(self) -> bool:
        """Say whether anything fits, as far as it is quickly found."""
        return any(
            placement is not None and self.rules.allowed(placement.digest)
            for _, parts in self.search(self.choices).run()
            for placement in (self.placement(parts),)
        )

    @property
    def _are_few(self) -> bool:
        """Whether everything that fits and may matter can be simulated."""
        num = prod(sum(map(len, found)) for found in self.choices) * (self.rules.num_windows + 1)
        return num <= self.rules.num_simulations_max * _FEW

    def _weigh_all(self, search: Search) -> None:
        """Weigh every placement that may be as fast as the fastest, with every size of the window."""
        search.threshold_ns = self.limit_ns
        complete: list[tuple[int, Parts]] = []
        for lower_ns, parts in search.run():
            complete.append((lower_ns, parts))
            self.consider(self.placement(parts), parts)
            search.threshold_ns = self.limit_ns
        for lower_ns, parts in complete:
            limit_ns = self.limit_ns
            for window in self.windows(parts) if limit_ns is None or lower_ns <= limit_ns else ():
                self.consider(self.room.placement(parts, window=window), parts)


def _link_ns(moved: PhaseTraffic) -> int:
    return moved.streamed_ns + moved.brought_ns + moved.loads_ns
