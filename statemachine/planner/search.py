"""Complete choices of one option per component, the most promising first: best first, with a bound for what is open."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from residency.statemachine.planner.beside import Beside
from residency.statemachine.planner.bound import PhaseTraffic, Pieces, together
from residency.statemachine.planner.flows import steady_flows
from residency.statemachine.planner.options import Family, Option

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from residency.gpu.placement import HostTier
    from residency.statemachine.planner.options import Section
    from residency.statemachine.planner.room import Room

Parts = tuple[Option, ...]
# Some parts, of the last of which it may be open how much is held: by a family. Before them what orders it, its bound.
_Found = tuple[int, int, Parts, Family | None]
_Node = tuple[int, int, int, Parts, Family | None]  # the same, with its number after what orders it
# Nodes by the parts and the family that they are: how many others they become, and those of them that fit.
Memo = dict[tuple[int, ...], tuple[int, list[tuple[int, _Found]]]]

# What decides between choices of nearly equal bounds, as parts of a request's time.
_LINK_SHARE = 256
_DEPTH_SHARE = 128
_ROOM_BITS = 26  # of bytes: 64 MiB


class Search:
    """Choices of one option per component, in order of a bound on their time.

    by_pass: with the tighter bound. pinned_bytes_max: of all host copies together. host_bytes_max: host memory that
    going there takes anew. device_bytes_max: of weights and window between requests. num_nodes_max: partial choices
    that are bounded at most. threshold_ns: may be lowered while it runs; what is bounded to take longer is left out.
    memo: of other searches among the same families within the same limits.
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
        memo: Memo | None = None,
    ) -> None:
        self._room, self._pieces = room, Pieces(room.model, by_pass=by_pass)
        self._pinned_bytes_max, self._host_bytes_max = pinned_bytes_max, host_bytes_max
        self.device_bytes_max = device_bytes_max
        self.threshold_ns, self.num_nodes, self._num_nodes_max = threshold_ns, 0, num_nodes_max
        # The largest first: what they leave decides everything after them.
        self._families = sorted(families, key=lambda found: (-found[0].head.spec.total_bytes, found[0].head.spec.name))
        self._heap: list[_Node] = []
        self.memo: Memo = {} if memo is None else memo
        self._is_cut_short = False

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing within the threshold is left out."""
        return not self._is_cut_short and not any(self._is_within(node[2]) for node in self._heap)

    @property
    def lower_ns(self) -> int | None:
        """What no choice that is still open can go below; None if none is open."""
        return min((node[2] for node in self._heap if self._is_within(node[2])), default=None)

    def run(self) -> Iterator[tuple[int, Parts]]:
        """Yield complete choices with their bound, in ns."""
        self._start()
        while self._heap:
            node = heappop(self._heap)
            _, _, lower_ns, parts, family = node
            if not self._is_within(lower_ns):
                continue
            if family is None and len(parts) == len(self._families):
                yield lower_ns, parts
                continue
            if self.num_nodes >= self._num_nodes_max:
                self._is_cut_short = True
                heappush(self._heap, node)
                return
            self._expand(parts, family)

    def beam(self, width: int, tiers: Mapping[str, HostTier]) -> list[Parts]:
        """Return up to `width` complete choices that look best, component by component; may miss the best.

        Whatever leaves no room for the rest in its smallest form is not followed. tiers: component -> the only host
        tier that is looked at.
        """
        forms = [_smallest(families, tiers) for families in self._families]
        level: list[_Found] = [(0, 0, (), None)]
        for number, families in enumerate(self._families):
            heads = [one for one in families if _is_of(one.head, tiers)]
            rests = list(zip(*forms[number + 1 :], strict=True)) or [()]
            found: list[_Found] = []
            for _, _, parts, _ in level:
                beside, rooms = self._beside(parts), [self._beside((*parts, *rest)) for rest in rests]
                for family in heads:
                    if any(self._leaves_room(one, family.head) for one in rooms):
                        found += self._counted(beside, family.head, family if len(family) > 1 else None)
            level = sorted(found, key=_by_key)[:width]
            found = [one for one in level if one[3] is None]
            for _, _, parts, open_family in level:
                if open_family is None:
                    continue
                beside, rooms = self._beside(parts[:-1]), [self._beside((*parts[:-1], *rest)) for rest in rests]
                for option in open_family.members:
                    if any(self._leaves_room(one, option) for one in rooms):
                        found += self._counted(beside, option, None)
            level = sorted(found, key=_by_key)[:width]
        return [parts for _, _, parts, _ in level]

    def bound_ns(self, parts: Parts) -> int | None:
        """Return a bound on the time of a choice, complete or not, in ns; None if it does not fit."""
        found = self._weighed(self._beside(parts[:-1]), parts[-1], None)
        return None if found is None else found[1]

    def _start(self) -> None:
        """Put on the heap that nothing is chosen yet, if anything fits."""
        self.num_nodes += 1
        beside = self._beside(())
        if beside.own_windows is not None:
            lower_ns, _ = self._pieces.stretches(beside.moved, beside.own_windows).total_ns()
            if self._is_within(lower_ns):
                heappush(self._heap, (lower_ns, self.num_nodes, lower_ns, (), None))

    def _expand(self, parts: Parts, family: Family | None) -> None:
        """Put on the heap what a node becomes; it may be known from another search."""
        key = (*map(id, parts), id(family))
        if key not in self.memo:
            self.memo[key] = self._expanded(parts, family)
        num, found = self.memo[key]
        for number, (order, lower_ns, chosen, still_open) in found:
            if self._is_within(lower_ns):
                # Of nearly equal ones the one that is more complete.
                depth = 2 * len(chosen) - (still_open is not None)
                order -= lower_ns * depth // _DEPTH_SHARE
                heappush(self._heap, (order, self.num_nodes + number, lower_ns, chosen, still_open))
        self.num_nodes += num

    def _expanded(self, parts: Parts, family: Family | None) -> tuple[int, list[tuple[int, _Found]]]:
        if family is not None:
            beside = self._beside(parts[:-1])
            made = [self._weighed(beside, option, None) for option in family.members]
        else:
            beside = self._beside(parts)
            made = [
                self._weighed(beside, one.head, one if len(one) > 1 else None) for one in self._families[len(parts)]
            ]
        return len(made), [(number, found) for number, found in enumerate(made, 1) if found is not None]

    def _beside(self, parts: Parts) -> Beside:
        return Beside(self._room, parts, self.device_bytes_max)

    def _leaves_room(self, beside: Beside, part: Option) -> bool:
        """Say whether a part fits with all others."""
        return self._has_host_memory(beside, part) and beside.has_room_for(part)

    def _has_host_memory(self, beside: Beside, part: Option) -> bool:
        pinned, host = self._pinned_bytes_max, self._host_bytes_max
        return (pinned is None or beside.pinned_bytes + part.pinned_bytes <= pinned) and (
            host is None or beside.host_bytes + part.host_bytes <= host
        )

    def _is_within(self, lower_ns: int) -> bool:
        return self.threshold_ns is None or lower_ns <= self.threshold_ns

    def _counted(self, beside: Beside, part: Option, family: Family | None) -> list[_Found]:
        """Return a choice if it fits and is within the threshold."""
        self.num_nodes += 1
        found = self._weighed(beside, part, family)
        return [] if found is None or not self._is_within(found[1]) else [found]

    def _weighed(self, beside: Beside, part: Option, family: Family | None) -> _Found | None:
        """Return a choice with its bound and what orders it; None if it does not fit.

        family: the part may hold whatever finds room.
        """
        if not self._has_host_memory(beside, part):
            return None
        is_last = len(beside.parts) + 1 == len(self._families)
        windows = beside.windows(part, is_open=family is not None, is_last=is_last)
        if windows is None:
            return None
        moved = part.moved if family is None else self._relaxed(part, windows)
        lower_ns, link_ns = self._pieces.stretches(together(beside.moved, moved), windows).total_ns()
        parts = (*beside.parts, part)
        # What is simulated waits more with little room and much on the link.
        return lower_ns + self._waits_ns(parts, windows) + link_ns // _LINK_SHARE, lower_ns, parts, family

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
                moved._replace(
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


def _uneven_ns(section: Section, room: int) -> int:
    """Return by how much a pass takes longer than if its layer groups were one, with so much room to run ahead."""
    compute_ns, streamed, link_ns = section
    flows = steady_flows(compute_ns, streamed, link_ns, [room] * len(streamed))
    apart_ns = sum(max(own_ns, busy_ns) for own_ns, (_, busy_ns, _) in zip(compute_ns, flows, strict=True))
    return apart_ns - max(sum(compute_ns), sum(link_ns))


def _by_key(found: _Found) -> int:
    return found[0]


def _is_of(option: Option, tiers: Mapping[str, HostTier]) -> bool:
    tier = option.placement.tier
    return tier is None or option.is_fixed or tier is tiers.get(option.spec.name, tier)


def _smallest(families: Sequence[Family], tiers: Mapping[str, HostTier]) -> tuple[Option, Option]:
    """Return the option that takes least while it runs, and the one that takes least while others run."""
    heads = [one.head for one in families if _is_of(one.head, tiers)]
    running = min(heads, key=lambda one: one.idle_bytes + one.extra_bytes + one.held_bytes + one.slot_bytes)
    return running, min(heads, key=lambda one: (one.idle_bytes, one.held_bytes + one.slot_bytes))
