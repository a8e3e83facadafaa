"""Device memory for options of all components together: what fits, how large the window is, and who yields of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from residency.gpu.placement import Mode, Placement

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from residency.statemachine.planner.options import Option
    from residency.statemachine.planner.request_model import MemoryLimit, RequestModel


_GIVEN_PART = 8  # at least so much more is given back: without it an allocator had to tidy up in every request


class Room:
    """The memory limits of a request. unyielding: components whose placement may not change at all. has_slack: a
    little more than what must be is given back. limits: those that imply all others; whole: who is whole in one of
    them.

    What runs in a loop yields nothing: it would be given back and taken again at every pass.
    """

    def __init__(self, model: RequestModel, *, unyielding: Collection[str] = (), has_slack: bool = True) -> None:
        self.model, self._has_slack = model, has_slack
        # Limits with the same users differ in nothing but their size: the least one implies the others.
        least: dict[tuple[frozenset[str], str | None, frozenset[str]], MemoryLimit] = {}
        for limit in model.memory_limits:
            users = frozenset(limit.active), limit.lingering, frozenset(limit.whole)
            if users not in least or limit.limit_bytes < least[users].limit_bytes:
                least[users] = limit
        self.limits = tuple(least.values())
        self.total_bytes = sum(spec.total_bytes for spec in model.specs)
        self.whole = frozenset(name for limit in self.limits for name in limit.whole)
        # What running a component takes beside weights and window.
        self._needs: dict[str, int] = {}
        for limit in self.limits:
            for name in limit.active:
                beside = model.cap_bytes - model.reserve_bytes - limit.limit_bytes
                self._needs[name] = max(self._needs.get(name, 0), beside)
        looped = {name for phase in model.phases if phase.passes > 1 for name in phase.components}
        self._rigid = looped | set(unyielding)
        self._phases = [frozenset(phase.components) for phase in model.phases]

    def caps(self, parts: Sequence[Option], *, device_bytes: int | None = None) -> tuple[int, dict[str, int]] | None:
        """Return the largest window beside some parts, and what of it may be there while a component runs.

        Components that are in no part take nothing. device_bytes: for weights and window together, between requests.
        None: the weights alone do not fit.
        """
        idle = sum(part.idle_bytes for part in parts)
        return self.caps_of(self.left(parts), idle, device_bytes)

    def left(self, parts: Sequence[Option]) -> list[int]:
        """Return what some parts leave of every limit; less than nothing where they do not fit."""
        rooms = [limit.limit_bytes for limit in self.limits]
        for part in parts:
            rooms = self.left_by(rooms, part)
        return rooms

    def left_by(self, rooms: Sequence[int], part: Option) -> list[int]:
        """Return what one more part leaves of every limit."""
        name, idle = part.spec.name, part.idle_bytes
        found = []
        for room, limit in zip(rooms, self.limits, strict=True):
            if name in limit.whole:
                room -= part.spec.total_bytes
            elif part.extra_bytes and (name in limit.active or name == limit.lingering):
                room -= idle + part.extra_bytes
            else:
                room -= idle
            found.append(room)
        return found

    def caps_of(
        self, rooms: Sequence[int], idle_bytes: int, device_bytes: int | None
    ) -> tuple[int, dict[str, int]] | None:
        """Return the same as `caps` for parts that leave so much of every limit and have so much on the device."""
        caps: dict[str, int] = {}
        window: int | None = None if device_bytes is None else device_bytes - idle_bytes
        for limit, room in zip(self.limits, rooms, strict=True):
            if room < 0:
                return None
            if limit.whole:
                continue  # The window is not there.
            is_rigid = not limit.active
            for name in limit.active:
                if name not in caps or room < caps[name]:
                    caps[name] = room
                is_rigid = is_rigid or name in self._rigid
            if is_rigid and (window is None or room < window):
                window = room
        if window is None:
            window = max(caps.values(), default=0)
        return (window, caps) if window >= 0 else None

    def windows(self, window: int, caps: dict[str, int], *, at_most: bool) -> list[int]:
        """Return how much of a window is there in each time phase; `at_most`: as a bound for all smaller ones, too."""
        kept = caps if at_most else {name: self._kept(window, name, caps) for name in caps}
        return [min([window, *(kept[name] for name in names if name in kept)]) for names in self._phases]

    def fits(self, parts: Sequence[Option], windows: Sequence[int]) -> bool:
        """Say whether the layers of some parts find room in what every time phase leaves of the window."""
        return not any(taken > window for taken, window in zip(self.taken(parts), windows, strict=True))

    def taken(self, parts: Sequence[Option]) -> list[int]:
        """Return what some parts take of the window at least, by time phase."""
        found = []
        for index, names in enumerate(self._phases):
            held = slots = 0
            for part in parts:
                held += part.moved[index].during_bytes
                if part.slot_bytes > slots and part.spec.name in names:
                    slots = part.slot_bytes
            found.append(held + slots)
        return found

    def needed(self, parts: Sequence[Option]) -> int:
        """Return the smallest window that the parts ask for."""
        asked = [part.held_bytes + part.slot_bytes for part in parts]
        return max([*asked, *(part.placement.window_bytes for part in parts)])

    def placement(self, parts: Sequence[Option], *, window: int | None = None) -> Placement | None:
        """Return the placement that all parts make with a window, by default the largest; None if it does not fit."""
        found = self.caps(parts)
        if found is None:
            return None
        most, caps = found
        needed = self.needed(parts)
        is_ours = any(part.away_bytes and not part.is_fixed for part in parts)
        if is_ours:
            # More than all that leaves at once, or than any phase has, is of no use.
            useful = max(needed, min(sum(part.away_bytes for part in parts), max(caps.values(), default=0)))
            window = min(most, useful if window is None else window)
        else:
            window = needed
        if not needed <= window <= most or not self.fits(parts, self.windows(window, caps, at_most=False)):
            return None
        components = {}
        for part in parts:
            where, name = part.placement, part.spec.name
            if where.mode is Mode.LAYERWISE_OFFLOAD and not part.is_fixed:
                where = replace(where, window_bytes=window)
            given = max(where.yield_bytes, window - self._kept(window, name, caps))
            if given != where.yield_bytes:
                where = replace(where, yield_bytes=given)
            components[name] = where
        return Placement(components={spec.name: components[spec.name] for spec in self.model.specs})

    def _kept(self, window: int, name: str, caps: Mapping[str, int]) -> int:
        """Return what is kept of a window while a component runs, so much of it as may be there at most."""
        given = max(0, window - caps.get(name, window))
        if given and self._has_slack:
            # It lies in one piece, and what is allocated in it does not fit it exactly. Whatever the component needs
            # finds room there, and nothing has to be found beside it, where pieces are smaller.
            given = max(given + given // _GIVEN_PART, self._needs.get(name, 0))
        return max(0, window - given)
