"""Which layers stay on the device, are held or are streamed: by how much, and spread so that computing hides copies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from residency.gpu.specs import ComponentSpec
    from residency.statemachine.planner.request_model import RequestModel

Counts = tuple[int, ...]  # per layer group of a component, in the order of its spec

_NEAR = 2  # layers of a group that a choice may be away from the even one, to fit more exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layer groups of a component.

    Of each group its name, the bytes of its layers, their room in the window, what they compute in one pass, and how
    often they run in one.
    """

    names: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    compute_ns: tuple[int, ...]
    frequency: tuple[float, ...]

    @property
    def num_layers(self) -> Counts:
        """How many layers each group has."""
        return tuple(map(len, self.sizes))

    def path(self) -> tuple[Counts, ...]:
        """Return ever larger counts of layers that are kept, the next one always where copies are hidden least."""
        kept = [0] * len(self.names)
        found = [tuple(kept)]
        while True:
            # What is left to stream, against the time that hides it; a kept layer saves as often as it would come.
            density = [
                (often * sum(sizes) * (len(sizes) - num) / len(sizes) / max(1, compute), -group)
                for group, (sizes, num, compute, often) in enumerate(
                    zip(self.sizes, kept, self.compute_ns, self.frequency, strict=True)
                )
                if num < len(sizes)
            ]
            if not density:
                return tuple(found)
            kept[-max(density)[1]] += 1
            found.append(tuple(kept))

    def levels(self, granule: int) -> list[Counts]:
        """Return counts of kept layers, from none to all, by about a granule, each as even as it can be.

        Where the link binds all the time only bytes count, but what streams in one run of large layers waits for room.
        """
        path = self.path()
        chosen: dict[int, tuple[int, Counts]] = {}
        for counts in _beside(path, self.num_layers):
            distance = min(sum(abs(a - b) for a, b in zip(counts, other, strict=True)) for other in path)
            size = sum(sum(sorted(sizes)[:num]) for sizes, num in zip(self.sizes, counts, strict=True)) // granule
            if size not in chosen or (distance, counts) < chosen[size]:
                chosen[size] = (distance, counts)
        none, everything = path[0], self.num_layers
        inner = [counts for _, (_, counts) in sorted(chosen.items()) if counts not in (none, everything)]
        return [none, *inner, everything]

    def moves(
        self, resident: Counts, kept: Counts, step: int, path: Sequence[Counts], *, hold: bool
    ) -> Iterator[tuple[Counts, Counts]]:
        """Yield (resident, kept) with up to `step` layers more or fewer, of all groups along a path, or of one group.

        hold: whether layers may be held, so that the two differ.
        """
        num_layers = self.num_layers
        directions = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1)) if hold else ((1, 1), (-1, -1))
        found = {(resident, kept): None}
        for more, also in directions:
            first, last = sum(resident) + more * step, sum(kept) + also * step
            if 0 <= first <= last < len(path):
                found[path[first], path[last]] = None
            for group, most in enumerate(num_layers if len(num_layers) > 1 else ()):
                one = list(resident), list(kept)
                one[0][group] = max(0, min(one[0][group] + more * step, most))
                one[1][group] = max(one[0][group], min(one[1][group] + also * step, most))
                found[tuple(one[0]), tuple(one[1])] = None
        for moved, keeping in found:
            if moved != num_layers and (moved, keeping) != (resident, kept):
                yield moved, keeping

    def split(self, resident: Counts, kept: Counts) -> tuple[Mapping[str, Counts], Mapping[str, Counts]]:
        """Return group -> resident layers, and group -> held ones: the streamed ones lie evenly apart."""
        residents, held = {}, {}
        for name, sizes, num_resident, num_kept in zip(self.names, self.sizes, resident, kept, strict=True):
            streamed = set(evenly(len(sizes) - num_kept, len(sizes)))
            rest = [index for index in range(len(sizes)) if index not in streamed]
            chosen = {rest[place] for place in evenly(num_kept - num_resident, len(rest))}
            if chosen:
                held[name] = tuple(sorted(chosen))
            if num_resident:
                residents[name] = tuple(index for index in rest if index not in chosen)
        return residents, held


def layers_of(model: RequestModel, spec: ComponentSpec) -> Layers:
    """Return the layer groups of a component; what they compute is that of the phase where it runs most often."""
    groups = [group for group in spec.groups if group.layer_bytes]
    compute = {group.name: 0 for group in groups}
    often = {group.name: 1.0 for group in groups}
    for phase in sorted(model.phases, key=lambda one: one.passes):
        layers = [layer for use in phase.uses if use.component == spec.name for layer in use.layers]
        for group in groups:
            ours = [layer for layer in layers if layer.group == group.name]
            if ours:
                compute[group.name] = sum(layer.compute_ns for layer in ours)
                often[group.name] = sum(phase.runs(layer) for layer in ours) / len(ours) / phase.passes
    return Layers(
        names=tuple(group.name for group in groups),
        sizes=tuple(group.layer_bytes for group in groups),
        slots=tuple(group.slot_bytes for group in groups),
        compute_ns=tuple(compute[group.name] for group in groups),
        frequency=tuple(often[group.name] for group in groups),
    )


def _beside(path: Sequence[Counts], num_layers: Counts) -> Iterator[Counts]:
    """Yield a path, and counts beside it that differ by few layers of the first two groups, each once."""
    found: dict[Counts, None] = dict.fromkeys(path)
    for counts in path if len(num_layers) > 1 else ():
        for first, second in product(range(-_NEAR, _NEAR + 1), repeat=2):
            other = (counts[0] + first, counts[1] + second, *counts[2:])
            if all(0 <= num <= most for num, most in zip(other, num_layers, strict=True)):
                found[other] = None
    yield from found


def evenly(num: int, length: int) -> Counts:
    """Return `num` of the indices up to `length`, as far apart from each other and from both ends as they can be."""
    return tuple((2 * index + 1) * length // (2 * num) for index in range(num))
