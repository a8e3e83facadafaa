"""Placements that were simulated, each once, and the limits within which one may be chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from residency.gpu.placement import Placement
from residency.statemachine.planner.holdings import idle_bytes, pinned_bytes, weight_bytes
from residency.statemachine.planner.options import host_bytes
from residency.statemachine.planner.search import Memo, Parts, Search
from residency.statemachine.planner.timeline import Timeline, simulate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from residency.statemachine.planner.options import Family
    from residency.statemachine.planner.request_model import RequestModel
    from residency.statemachine.planner.room import Room

_SLOWER = 0.01  # what is slower by so much than the fastest need not be simulated to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """A placement that was simulated. parts: None for one that somebody else has made.

    device_bytes: of weights and window between requests; pinned_bytes: of host copies; num_changes: components that
    differ from the current placement.
    """

    placement: Placement
    parts: Parts | None
    timeline: Timeline
    device_bytes: int
    pinned_bytes: int
    num_changes: int
    digest: str

    @property
    def request_ns(self) -> int:
        """What a request takes."""
        return self.timeline.request_ns

    @property
    def thrift(self) -> tuple[int, int, int, str]:
        """What decides between equally fast ones, the less the better."""
        return self.device_bytes, self.pinned_bytes, self.num_changes, self.digest

    @property
    def by_time(self) -> tuple[int, tuple[int, int, int, str]]:
        """What decides between any two."""
        return self.request_ns, self.thrift


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What may be chosen beside what fits on the device.

    tolerance: of a least time the ns by which another may exceed it and still count as equally fast. pinned_bytes_max:
    of all host copies. host_bytes_max: host memory that going there takes anew. allowed: by digest.
    reachable: whether there is room for the way there, too.
    """

    tolerance: Callable[[int], int]
    pinned_bytes_max: int
    host_bytes_max: int
    allowed: Callable[[str], bool]
    reachable: Callable[[Placement], bool]
    num_nodes_max: int
    num_simulations_max: int
    num_windows: int


class Weigher:
    """Simulates placements of one request and remembers those that may be chosen."""

    def __init__(self, room: Room, current: Placement, rules: Rules) -> None:
        self.room, self.rules, self._current = room, rules, current
        self.model: RequestModel = room.model
        self._found: dict[str, Weighed] = {}
        self._refused: set[str] = set()
        self._others: dict[str, Weighed | None] = {}  # that need not fit
        self.num_weighed = 0

    @property
    def all(self) -> list[Weighed]:
        """Everything that may be chosen, the fastest first."""
        return sorted(self._found.values(), key=lambda one: one.by_time)

    @property
    def least_ns(self) -> int | None:
        """The least time so far."""
        return min((one.request_ns for one in self._found.values()), default=None)

    @property
    def limit_ns(self) -> int | None:
        """What counts as as fast as the fastest so far."""
        least_ns = self.least_ns
        return None if least_ns is None else least_ns + self.rules.tolerance(least_ns)

    def weigh(
        self, placement: Placement, parts: Parts | None = None, *, enough_ns: int | None = None
    ) -> Weighed | None:
        """Simulate a placement that need not fit; None if its window is too small for a layer, or it is too slow."""
        digest = placement.digest
        if enough_ns is None:
            if digest not in self._others:
                self._others[digest] = self._found.get(digest) or self._simulated(placement, parts, None)
            return self._others[digest]
        return self._simulated(placement, parts, enough_ns)

    def _simulated(self, placement: Placement, parts: Parts | None, enough_ns: int | None) -> Weighed | None:
        try:
            timeline = simulate(self.model, placement, enough_ns=enough_ns)
        except ValueError:
            return None
        if enough_ns is not None and timeline.request_ns > enough_ns:
            return None
        return Weighed(
            placement=placement,
            parts=parts,
            timeline=timeline,
            device_bytes=idle_bytes(self.model.specs, placement),
            pinned_bytes=pinned_bytes(self.model.specs, placement),
            num_changes=len(self._current.changes_to(placement)),
            digest=placement.digest,
        )

    def consider(self, placement: Placement | None, parts: Parts | None) -> Weighed | None:
        """Weigh a placement that fits, once; None if it may not be chosen, or is clearly slower than the fastest."""
        if placement is None:
            return None
        digest = placement.digest
        if digest in self._found or digest in self._refused:
            return self._found.get(digest)
        self.num_weighed += 1
        limit_ns = self.limit_ns
        enough_ns = None if limit_ns is None else round(limit_ns * (1 + _SLOWER))
        may_be = self.rules.allowed(digest) and self.rules.reachable(placement)
        found = self.weigh(placement, parts, enough_ns=enough_ns) if may_be else None
        if found is None:
            self._refused.add(digest)
        else:
            self._found[digest] = found
        return found

    def is_known(self, placement: Placement) -> bool:
        """Whether a placement was weighed before."""
        return placement.digest in self._found or placement.digest in self._refused

    def fits(self, placement: Placement) -> bool:
        """Say whether a placement is within the limits of device and host memory."""
        specs, components = self.model.specs, placement.components
        host = sum(host_bytes(spec, self._current.components[spec.name], components[spec.name]) for spec in specs)
        return (
            pinned_bytes(self.model.specs, placement) <= self.rules.pinned_bytes_max
            and host <= self.rules.host_bytes_max
            and all(
                weight_bytes(specs, placement, active=limit.active, lingering=limit.lingering, whole=limit.whole)
                <= limit.limit_bytes
                for limit in self.room.limits
            )
        )

    def search(
        self,
        choices: Sequence[Sequence[Family]],
        *,
        device_bytes_max: int | None = None,
        threshold_ns: int | None = None,
        num_nodes_max: int | None = None,
        memo: Memo | None = None,
    ) -> Search:
        """Return a search within the limits. memo: of another one among the same choices with the same memory."""
        return Search(
            self.room,
            choices,
            by_pass=True,
            num_nodes_max=num_nodes_max or self.rules.num_nodes_max,
            pinned_bytes_max=self.rules.pinned_bytes_max,
            host_bytes_max=self.rules.host_bytes_max,
            device_bytes_max=device_bytes_max,
            threshold_ns=threshold_ns,
            memo=memo,
        )

    def placement(self, parts: Parts, device_bytes_max: int | None = None) -> Placement | None:
        """Return the placement that parts make with the largest window, or with what a total leaves for it.

        None if device or host have no room for it.
        """
        pinned, host = sum(part.pinned_bytes for part in parts), sum(part.host_bytes for part in parts)
        if pinned > self.rules.pinned_bytes_max or host > self.rules.host_bytes_max:
            return None
        window = None
        if device_bytes_max is not None:
            window = max(device_bytes_max - sum(part.idle_bytes for part in parts), self.room.needed(parts))
        return self.room.placement(parts, window=window)

    def windows(self, parts: Parts) -> Iterator[int]:
        """Yield the sizes of the window that are weighed beside the largest, down to the least."""
        found = self.room.caps(parts)
        if found is None:
            return
        least, most = self.room.needed(parts), found[0]
        num = self.rules.num_windows
        for index in range(num - 1, -1, -1):
            yield least + max(0, most - least) * index // num
