"""Complete choices of one option per component, the most promising first: best first, with a bound for what is open."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from residency.gpu.placement import Mode
from residency.statemachine.planner.bound import NO_TRAFFIC, PhaseTraffic, stretches
from residency.statemachine.planner.flows import steady_flows
from residency.statemachine.planner.options import Family, Option

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from residency.gpu.placement import HostTier
    from residency.statemachine.planner.options import Section
    from residency.statemachine.planner.room import Room

Parts = tuple[Option, ...]

# What decides between choices of nearly equal bounds, as parts of a request's time.
_LINK_SHARE = 256
_DEPTH_SHARE = 128
_ROOM_BITS = 26  # of bytes: 64 MiB


@dataclass(order=True, slots=True)
class _Node:
    """Some parts; of the last one it may be open how much is held: `family`."""

    key: int
    number: int
    lower_ns: int = field(compare=False)
    parts: Parts = field(compare=False)
    family: Family | None = field(compare=False)


class Search:
    """Choices of one option per component, in order of a bound on their time.

    by_pass: with the tighter bound. pinned_bytes_max: of all host copies together. host_bytes_max: host memory that
    going there takes anew. device_bytes_max: of weights and window between requests. num_nodes_max: partial choices
    that are bounded at most. threshold_ns: may be lowered while it runs; what is bounded to take longer is left out.
    """

    def __init__(
        self,
        room: Room,
        families: Sequence[Sequence[Family]],
        *,
        by_pass: bool,
        num_nodes_max: int,
        pinned_bytes_max: int | None = None,
        host_bytes_max: int | None = None,
        device_bytes_max: int | None = None,
        threshold_ns: int | None = None,
    ) -> None:
        self._room, self._by_pass = room, by_pass
        self._pinned_bytes_max, self._host_bytes_max = pinned_bytes_max, host_bytes_max
        self.device_bytes_max = device_bytes_max
        self.threshold_ns, self.num_nodes, self._num_nodes_max = threshold_ns, 0, num_nodes_max
        # The largest first: what they leave decides everything after them.
        self._families = sorted(families, key=lambda found: (-found[0].head.spec.total_bytes, found[0].head.spec.name))
        self._heap: list[_Node] = []
        self._is_cut_short = False

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing within the threshold is left out."""
        return not self._is_cut_short and not any(self._is_within(node.lower_ns) for node in self._heap)

    @property
    def lower_ns(self) -> int | None:
        """What no choice that is still open can go below; None if none is open."""
        return min((node.lower_ns for node in self._heap if self._is_within(node.lower_ns)), default=None)

    def run(self) -> Iterator[tuple[int, Parts]]:
        """Yield complete choices with their bound, in ns."""
        self._push((), (NO_TRAFFIC,) * len(self._room.model.phases), None)
        while self._heap:
            node = heappop(self._heap)
            if not self._is_within(node.lower_ns):
                continue
            if node.family is None and len(node.parts) == len(self._families):
                yield node.lower_ns, node.parts
                continue
            if self.num_nodes >= self._num_nodes_max:
                self._is_cut_short = True
                heappush(self._heap, node)
                return
            self._expand(node)

    def beam(self, width: int, tiers: Mapping[str, HostTier]) -> list[Parts]:
        """Return up to `width` complete choices that look best, component by component; may miss the best.

        Whatever leaves no room for the rest in its smallest form is not followed. tiers: component -> the only host
        tier that is looked at.
        """
        forms = [_smallest(families, tiers) for families in self._families]
        level: list[tuple[int, int, Parts, Family | None]] = [(0, 0, (), None)]
        for number, families in enumerate(self._families):
            heads = [one for one in families if _is_of(one.head, tiers)]
            rests = list(zip(*forms[number + 1 :], strict=True)) or [()]
            found: list[tuple[int, int, Parts, Family | None]] = []
            for _, _, parts, _ in level:
                moved = self._moved(parts)
                for family in heads:
                    if any(self._leaves_room((*parts, family.head, *rest)) for rest in rests):
                        self._weigh((*parts, family.head), moved, family if len(family) > 1 else None, found)
            level = sorted(found, key=_by_key)[:width]
            found = [one for one in level if one[3] is None]
            for _, _, parts, open_family in level:
                moved = self._moved(parts[:-1])
                for option in open_family.members if open_family is not None else ():
                    if any(self._leaves_room((*parts[:-1], option, *rest)) for rest in rests):
                        self._weigh((*parts[:-1], option), moved, None, found)
            level = sorted(found, key=_by_key)[:width]
        return [parts for _, _, parts, _ in level]

    def bound_ns(self, parts: Parts) -> int | None:
        """Return a bound on the time of a choice, complete or not, in ns; None if it does not fit."""
        found = self._bounded(parts, self._moved(parts[:-1]), is_open=False) if self._has_host_memory(parts) else None
        return None if found is None else found[0]

    def _expand(self, node: _Node) -> None:
        if node.family is not None:
            parts = node.parts[:-1]
            moved = self._moved(parts)
            for option in node.family.members:
                self._push((*parts, option), moved, None)
            return
        moved = self._moved(node.parts)
        for family in self._families[len(node.parts)]:
            self._push((*node.parts, family.head), moved, family if len(family) > 1 else None)

    def _leaves_room(self, parts: Parts) -> bool:
        """Say whether complete parts fit."""
        found = self._room.caps(parts, device_bytes=self.device_bytes_max)
        if found is None or not self._has_host_memory(parts):
            return False
        return self._room.needed(parts) <= found[0] and self._room.fits(parts, self._room.windows(*found, at_most=True))

    def _has_host_memory(self, parts: Parts) -> bool:
        pinned, host = self._pinned_bytes_max, self._host_bytes_max
        return (pinned is None or sum(part.pinned_bytes for part in parts) <= pinned) and (
            host is None or sum(part.host_bytes for part in parts) <= host
        )

    def _is_within(self, lower_ns: int) -> bool:
        return self.threshold_ns is None or lower_ns <= self.threshold_ns

    def _push(self, parts: Parts, moved: Sequence[PhaseTraffic], family: Family | None) -> None:
        """Put a choice on the heap; `moved`: by all parts but the last together."""
        found: list[tuple[int, int, Parts, Family | None]] = []
        self._weigh(parts, moved, family, found)
        for key, lower_ns, _, _ in found:
            # Of nearly equal ones the one that is more complete.
            depth = 2 * len(parts) - (family is not None)
            key -= lower_ns * depth // _DEPTH_SHARE
            heappush(self._heap, _Node(key, self.num_nodes, lower_ns, parts, family))

    def _weigh(
        self,
        parts: Parts,
        moved: Sequence[PhaseTraffic],
        family: Family | None,
        found: list[tuple[int, int, Parts, Family | None]],
    ) -> None:
        """Add a choice that fits and is within the threshold: what orders it, its bound, and itself."""
        self.num_nodes += 1
        bounded = self._bounded(parts, moved, is_open=family is not None) if self._has_host_memory(parts) else None
        if bounded is not None and self._is_within(bounded[0]):
            lower_ns, link_ns, waits_ns = bounded
            # What is simulated waits more with little room and much on the link.
            found.append((lower_ns + waits_ns + link_ns // _LINK_SHARE, lower_ns, parts, family))

    def _bounded(self, parts: Parts, moved: Sequence[PhaseTraffic], *, is_open: bool) -> tuple[int, int, int] | None:
        """Return the bound, how long the link is busy in it, and a guess of waits; None if the choice does not fit.

        is_open: the last part may hold whatever finds room.
        """
        found = self._room.caps(parts, device_bytes=self.device_bytes_max)
        if found is None:
            return None
        window, caps = found
        complete = len(parts) == len(self._families)
        if complete and not any(part.placement.mode is Mode.LAYERWISE_OFFLOAD for part in parts):
            window = 0
        windows = self._room.windows(window, caps, at_most=True)
        if not self._room.fits(parts[:-1] if is_open else parts, windows):
            return None
        traffic = [moved]
        if parts:
            traffic.append(self._relaxed(parts[-1], windows) if is_open else parts[-1].moved)
        lower_ns, link_ns = stretches(self._room.model, traffic, windows, by_pass=self._by_pass).total_ns()
        return lower_ns, link_ns, self._waits_ns(parts, windows)

    def _relaxed(self, part: Option, windows: Sequence[int]) -> list[PhaseTraffic]:
        """Return what an option moves if it holds to the byte what finds room, at no one else's cost."""
        result = []
        before = 0
        for phase, window, moved in zip(self._room.model.phases, windows, part.moved, strict=True):
            if phase.passes == 1 or not moved.streamed_bytes:
                result.append(moved)
                continue
            held = min(part.away_bytes, window)
            streamed = max(0, moved.streamed_bytes - held * moved.num_runs)
            # Once a request, whichever phase of it comes first.
            brought, before = max(0, held - before), max(held, before)
            result.append(
                replace(
                    moved,
                    streamed_bytes=streamed,
                    streamed_ns=moved.streamed_ns * streamed // moved.streamed_bytes,
                    brought_bytes=brought,
                    brought_ns=moved.streamed_ns * brought // moved.streamed_bytes,
                )
            )
        return result

    def _waits_ns(self, parts: Parts, windows: Sequence[int]) -> int:
        """Guess how long computing waits in loops because what streams is uneven and the window small."""
        total = 0
        for part in parts:
            if not part.layer_bytes:
                continue
            for index, (phase, window, moved) in enumerate(
                zip(self._room.model.phases, windows, part.moved, strict=True)
            ):
                if moved.streamed_bytes or moved.during_bytes:
                    free = max(part.layer_bytes // 4, window - moved.during_bytes)
                    total += 2 * phase.passes * part.layer_ns * part.layer_bytes // free
                    if part.sections and len(part.sections[index][0]) > 1:
                        # A guess, which need not know the room to the byte: many choices share it so.
                        key = index, free >> _ROOM_BITS
                        if key not in part.uneven_ns:
                            part.uneven_ns[key] = _uneven_ns(part.sections[index], key[1] << _ROOM_BITS)
                        total += phase.passes * part.uneven_ns[key]
        return total

    def _moved(self, parts: Parts) -> Sequence[PhaseTraffic]:
        """Return what some components move together, by time phase."""
        if not parts:
            return (NO_TRAFFIC,) * len(self._room.model.phases)
        return tuple(
            PhaseTraffic(
                streamed_bytes=sum(one.streamed_bytes for one in phase),
                streamed_ns=sum(one.streamed_ns for one in phase),
                brought_bytes=sum(one.brought_bytes for one in phase),
                brought_ns=sum(one.brought_ns for one in phase),
                during_bytes=sum(one.during_bytes for one in phase),
                beyond_bytes=sum(one.beyond_bytes for one in phase),
                loads_ns=sum(one.loads_ns for one in phase),
            )
            for phase in zip(*(part.moved for part in parts), strict=True)
        )


def _uneven_ns(section: Section, room: int) -> int:
    """Return by how much a pass takes longer than if its layer groups were one, with so much room to run ahead."""
    compute_ns, streamed, link_ns = section
    flows = steady_flows(compute_ns, streamed, link_ns, [room] * len(streamed))
    apart_ns = sum(max(own_ns, busy_ns) for own_ns, (_, busy_ns, _) in zip(compute_ns, flows, strict=True))
    return apart_ns - max(sum(compute_ns), sum(link_ns))


def _by_key(found: tuple[int, int, Parts, Family | None]) -> int:
    return found[0]


def _is_of(option: Option, tiers: Mapping[str, HostTier]) -> bool:
    tier = option.placement.tier
    return tier is None or option.is_fixed or tier is tiers.get(option.spec.name, tier)


def _smallest(families: Sequence[Family], tiers: Mapping[str, HostTier]) -> tuple[Option, Option]:
    """Return the option that takes least while it runs, and the one that takes least while others run."""
    heads = [one.head for one in families if _is_of(one.head, tiers)]
    running = min(heads, key=lambda one: one.idle_bytes + one.extra_bytes + one.held_bytes + one.slot_bytes)
    return running, min(heads, key=lambda one: (one.idle_bytes, one.held_bytes + one.slot_bytes))
