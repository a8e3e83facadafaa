"""Good placements where there are too many to weigh all: seeds that look best, and walks to ever faster neighbours."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from residency.gpu.placement import HostTier, Mode
from residency.statemachine.planner.options import Family

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from residency.statemachine.planner.options import Option, Options
    from residency.statemachine.planner.search import Parts, Search
    from residency.statemachine.planner.weighing import Weighed, Weigher

_BEAM = 12  # partial placements that are kept for each component
_SEEDS = 8  # placements that look best, of which the fastest are improved
_STARTS = 2  # so many of them
_STEPS = (8, 4, 2, 1)  # layers that are kept more or fewer at once, while one is improved
_SHARED_MAX = 4  # components between which scarce pinned memory is shared in every way
_SEED_NODES_MAX = 2_000
_EXTREMES_MAX = 20_000
_SAVINGS = (8, 16, 32)  # parts of the memory that an equally fast placement may do without


class Climber:
    """Weighs placements until none that is faster is found with so many simulations."""

    def __init__(self, weigher: Weigher, options: Options, choices: Sequence[Sequence[Family]]) -> None:
        self._weigher, self._options, self._choices = weigher, options, choices
        self._num_left = 0
        self.num_nodes = 0

    def find_fastest(self, search: Search) -> None:
        """Weigh what looks best, improve the fastest of it, and go on in a search among what may still be faster."""
        self._num_left = self._weigher.rules.num_simulations_max
        for seed in sorted(self._seeds(search), key=lambda one: one.by_time)[:_STARTS]:
            self._improve(seed, enough_ns=0)
        if self._weigher.least_ns is None:
            self._find_any()
        search.threshold_ns = _before(self._weigher.least_ns)
        for _, parts in search.run():
            found = self._consider(parts, None)
            if found is not None and found.request_ns == self._weigher.least_ns:
                self._improve(found, enough_ns=0)
            search.threshold_ns = _before(self._weigher.least_ns)
            if self._num_left <= 0:
                break

    def save_memory(self) -> None:
        """Weigh placements that are as fast as the fastest with less and less memory."""
        limit_ns = self._weigher.limit_ns
        if limit_ns is None:
            return
        self._num_left = self._weigher.rules.num_simulations_max
        for share in _SAVINGS:
            while self._num_left > 0:
                most = min(one.device_bytes for one in self._weigher.all if one.request_ns <= limit_ns)
                if not self._is_as_fast(limit_ns, most - most // share - 1):
                    break

    def _find_any(self) -> None:
        """Weigh the extremes of every component: out of nodes, nothing else may be complete."""
        search = self._weigher.search([_extremes(found) for found in self._choices], num_nodes_max=_EXTREMES_MAX)
        for _, parts in search.run():
            if self._consider(parts, None) is not None:
                break
        self.num_nodes += search.num_nodes

    def _is_as_fast(self, limit_ns: int, device_bytes: int) -> bool:
        """Say whether a placement was found that is fast enough with so much memory."""
        search = self._weigher.search(self._choices, device_bytes_max=device_bytes, threshold_ns=limit_ns)
        seeds = self._seeds(search)
        self.num_nodes += search.num_nodes
        if not seeds:
            return False
        best = min(seeds, key=lambda one: one.by_time)
        best = self._improve(best, enough_ns=limit_ns, device_bytes_max=device_bytes)
        return best.request_ns <= limit_ns and best.device_bytes <= device_bytes

    def _seeds(self, search: Search) -> list[Weighed]:
        """Weigh what looks best component by component, for several ways to share the pinned memory if it is scarce."""
        ways = list(self._tiers())
        promising = [
            parts
            for tiers in ways
            for parts in search.beam(_BEAM if len(ways) == 1 else _BEAM // 4, tiers)[: max(1, _SEEDS // len(ways))]
        ]
        few = self._weigher.search(
            self._choices,
            device_bytes_max=search.device_bytes_max,
            threshold_ns=search.threshold_ns,
            num_nodes_max=min(_SEED_NODES_MAX, self._weigher.rules.num_nodes_max),
            memo=search.memo,
        )
        promising += [parts for _, (_, parts) in zip(range(_SEEDS // 2), few.run(), strict=False)]
        self.num_nodes += few.num_nodes
        found = [self._consider(parts, search.device_bytes_max) for parts in promising]
        return [one for one in found if one is not None]

    def _consider(self, parts: Parts, device_bytes_max: int | None) -> Weighed | None:
        self._num_left -= 1
        return self._weigher.consider(self._weigher.placement(parts, device_bytes_max), parts)

    def _improve(self, start: Weighed, *, enough_ns: int, device_bytes_max: int | None = None) -> Weighed:
        """Return the end of a walk from a placement to ever faster ones: by many layers at first, by single ones last.

        It ends early at a time that is good enough.
        """
        best = start
        search = self._weigher.search(self._choices, device_bytes_max=device_bytes_max)
        for step in _STEPS:
            is_better = True
            while is_better and self._num_left > 0 and best.request_ns > enough_ns:
                is_better = False
                for parts in self._moves(best.parts or (), step):
                    lower_ns = search.bound_ns(parts)
                    if lower_ns is None or lower_ns >= best.request_ns:
                        continue
                    placement = self._weigher.placement(parts, device_bytes_max)
                    if placement is None or self._weigher.is_known(placement):
                        continue
                    found = self._consider(parts, device_bytes_max)
                    if found is not None and found.request_ns < best.request_ns:
                        best, is_better = found, True
        return best

    def _moves(self, parts: Parts, step: int) -> Iterator[Parts]:
        for place, part in enumerate(parts):
            for option in self._options.moves(part, step):
                yield (*parts[:place], option, *parts[place + 1 :])
        for place, part in enumerate(parts):
            # What one component gives up another one may keep.
            fewer = self._options.shifted(part, -step * part.layer_bytes)
            for other, taker in enumerate(parts if fewer is not None else ()):
                more = None if other == place else self._options.shifted(taker, step * part.layer_bytes)
                if more is not None and fewer is not None:
                    both = {place: fewer, other: more}
                    yield tuple(both.get(index, one) for index, one in enumerate(parts))

    def _tiers(self) -> Iterator[dict[str, HostTier]]:
        """Yield ways to give host tiers to the largest components; one without any if there is but one tier."""
        several = [
            found[0].head.spec
            for found in self._choices
            if len({one.head.placement.tier for one in found if one.head.placement.mode is Mode.LAYERWISE_OFFLOAD}) > 1
        ]
        names = [spec.name for spec in sorted(several, key=lambda spec: -spec.total_bytes)[:_SHARED_MAX]]
        for tiers in product((HostTier.PINNED, HostTier.PAGEABLE), repeat=len(names)):
            yield dict(zip(names, tiers, strict=True))


def _before(time_ns: int | None) -> int | None:
    return None if time_ns is None else time_ns - 1


def _extremes(found: Sequence[Family]) -> list[Family]:
    """Return of every mode and tier the option that holds least, and the one that holds most."""
    by_mode: dict[object, list[Option]] = {}
    for family in found:
        where = family.head.placement
        by_mode.setdefault((where.mode, where.tier), []).append(family.head)
    most = [max(options, key=lambda one: (one.idle_bytes, -one.slot_bytes)) for options in by_mode.values()]
    least = [
        min(options, key=lambda one: (one.idle_bytes, one.held_bytes + one.slot_bytes)) for options in by_mode.values()
    ]
    return [Family(one) for one in (*most, *(other for other in least if other not in most))]
