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
    little more than what must be is given back.

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
        idle = 0
        extra: dict[str, int] = {}
        for part in parts:
            idle += part.idle_bytes
            if part.extra_bytes:
                extra[part.spec.name] = part.extra_bytes
        caps: dict[str, int] = {}
        window: int | None = None if device_bytes is None else device_bytes - idle
        for limit in self.limits:
            room = limit.limit_bytes - idle
            if limit.whole:
                for part in parts:
                    room -= part.spec.total_bytes - part.idle_bytes if part.spec.name in limit.whole else 0
            for name, size in extra.items():
                if name not in limit.whole and (name in limit.active or name == limit.lingering):
                    room -= size
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
        for index, window in enumerate(windows):
            held = slots = 0
            for part in parts:
                held += part.moved[index].during_bytes
                if part.slot_bytes > slots and part.spec.name in self._phases[index]:
                    slots = part.slot_bytes
            if held + slots > window:
                return False
        return True

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
