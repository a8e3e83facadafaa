"""What some components leave of memory for one more: most of what does not fit is seen by a single comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.gpu.placement import Mode
from residency.statemachine.planner.bound import NO_TRAFFIC, PhaseTraffic, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.statemachine.planner.options import Option
    from residency.statemachine.planner.room import Room


class Beside:
    """Some parts, and what another one finds beside them. device_bytes: for weights and window between requests.

    moved: by all parts together, by time phase. pinned_bytes, host_bytes: of all of them. own_windows: of every time
    phase without another part; None if they do not fit.
    """

    def __init__(self, room: Room, parts: tuple[Option, ...], device_bytes: int | None) -> None:
        self._room, self._device_bytes = room, device_bytes
        self.parts = parts
        self.pinned_bytes = sum(part.pinned_bytes for part in parts)
        self.host_bytes = sum(part.host_bytes for part in parts)
        self.moved: Sequence[PhaseTraffic] = (NO_TRAFFIC,) * len(room.model.phases)
        for part in parts:
            self.moved = together(self.moved, part.moved)
        self._idle_bytes = sum(part.idle_bytes for part in parts)
        self._rooms = room.left(parts)
        self._is_layerwise = any(part.placement.mode is Mode.LAYERWISE_OFFLOAD for part in parts)
        self._taken = room.taken(parts)
        found = room.caps_of(self._rooms, self._idle_bytes, device_bytes)
        self.own_windows = None if found is None else room.windows(*found, at_most=True)
        # Whether one more takes from the window what it has on the device: a limit of the window must be known.
        self._is_shared = device_bytes is not None or not all(limit.whole for limit in room.limits)
        # More than this on the device leaves too little for what is here, whoever it is.
        self._most_bytes = -1
        if found is not None and self.own_windows is not None:
            left = [there - here for there, here in zip(self.own_windows, self._taken, strict=True)]
            self._most_bytes = min(
                [*self._rooms, found[0], *left] if self._is_shared else self._rooms, default=room.total_bytes
            )

    def has_room_for(self, part: Option) -> bool:
        """Say whether another part fits with all that it asks of the window."""
        if self.own_windows is None or part.idle_bytes > self._most_bytes:
            return False
        room, parts = self._room, (*self.parts, part)
        found = room.caps_of(room.left_by(self._rooms, part), self._idle_bytes + part.idle_bytes, self._device_bytes)
        if found is None or room.needed(parts) > found[0]:
            return False
        return room.fits(parts, room.windows(*found, at_most=True))

    def windows(self, part: Option, *, is_open: bool, is_last: bool) -> list[int] | None:
        """Return the window of every time phase, at most, with one more part; None if that does not fit.

        is_open: it may hold whatever finds room. is_last: without layers that come there is no window.
        """
        if self.own_windows is None or part.idle_bytes > self._most_bytes:
            return None
        room, idle = self._room, part.idle_bytes
        name = part.spec.name
        has_window = not is_last or self._is_layerwise or part.placement.mode is Mode.LAYERWISE_OFFLOAD
        if part.extra_bytes or name in room.whole or not self._is_shared:
            found = room.caps_of(room.left_by(self._rooms, part), self._idle_bytes + idle, self._device_bytes)
            if found is None:
                return None
            windows = room.windows(found[0] if has_window else 0, found[1], at_most=True)
        elif has_window:
            # Every limit leaves so much less.
            windows = [one - idle for one in self.own_windows]
        else:
            windows = [0] * len(self.own_windows)
        if is_open:
            is_short = any(here > there for here, there in zip(self._taken, windows, strict=True))
        else:
            is_short = not room.fits((*self.parts, part), windows)
        return None if is_short else windows
