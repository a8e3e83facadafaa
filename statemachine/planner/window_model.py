"""The window as the engine hands it out: blocks that are given back while somebody runs, and rooms in them."""

from __future__ import annotations

from bisect import bisect_left

Room = tuple[int, int, int]  # block, start, end


class WindowModel:
    """Which rooms are taken, of each block the smallest gap that will do, and when a gap may be written to; in ns.

    The block that is given back for little is given back for much, too: the first stays always, the last one least.
    """

    __slots__ = ("_backward", "_bounds", "_forward", "_gaps", "_largest")

    def __init__(self, num_bytes: int, yields: list[int]) -> None:
        steps = sorted({min(amount, num_bytes) for amount in yields if amount > 0})
        sizes = [(upper, upper - lower) for lower, upper in zip([0, *steps], steps, strict=False)]
        stays = num_bytes - (steps[-1] if steps else 0)
        if stays:
            sizes.append((num_bytes + 1, stays))
        sizes.reverse()
        # A block is there while less is given back than its bound.
        self._bounds = [bound for bound, _ in sizes]
        self._gaps: list[list[tuple[int, int, int]]] = [[(0, size, 0)] for _, size in sizes]
        self._largest = [size for _, size in sizes]  # gap of every block
        self._forward = range(len(sizes))
        self._backward = self._forward[::-1]

    def take(self, num_bytes: int, *, yielded: int, is_held: bool) -> tuple[Room, int] | None:
        """Return a room that stays while so much is given back, and when it is free; None if there is none."""
        largest, bounds = self._largest, self._bounds
        for block in self._backward if is_held else self._forward:
            if num_bytes > largest[block] or yielded >= bounds[block]:
                continue
            gaps = self._gaps[block]
            best, least = 0, -1
            for number, (start, end, _) in enumerate(gaps):
                left = end - start - num_bytes
                # Of equal ones the one that lies farther where held ones lie.
                if left >= 0 and (least < 0 or left < least or (is_held and left == least)):
                    best, least = number, left
            start, end, free_ns = gaps[best]
            if not least:
                del gaps[best]
                room = block, start, end
            elif is_held:
                gaps[best] = (start, end - num_bytes, free_ns)
                room = block, end - num_bytes, end
            else:
                gaps[best] = (start + num_bytes, end, free_ns)
                room = block, start, start + num_bytes
            if end - start == largest[block]:
                largest[block] = max([end - start for start, end, _ in gaps], default=0)
            return room, free_ns
        return None

    def give(self, room: Room, free_ns: int) -> None:
        """Return a room that may be written to from then on."""
        block, start, end = room
        gaps = self._gaps[block]
        place = bisect_left(gaps, (start,))
        if place < len(gaps) and gaps[place][0] == end:
            _, end, after_ns = gaps.pop(place)
            free_ns = max(free_ns, after_ns)
        if place and gaps[place - 1][1] == start:
            place -= 1
            start, _, before_ns = gaps[place]
            gaps[place] = (start, end, max(free_ns, before_ns))
        else:
            gaps.insert(place, (start, end, free_ns))
        self._largest[block] = max(self._largest[block], end - start)

    def stays(self, room: Room, yielded: int) -> bool:
        """Whether a room is kept while so much is given back."""
        return yielded < self._bounds[room[0]]

    def regrow(self, yielded: int, now_ns: int) -> None:
        """What was given back for `yielded` is there again, from now on."""
        for block, bound in enumerate(self._bounds):
            if yielded >= bound:
                self._gaps[block] = [(start, end, max(free, now_ns)) for start, end, free in self._gaps[block]]

    def shift(self, delta_ns: int) -> None:
        """Let time pass in which nothing changes."""
        self._gaps = [[(start, end, free + delta_ns) for start, end, free in gaps] for gaps in self._gaps]

    def state(self, now_ns: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Return everything that decides what comes, times as what is left of them."""
        return tuple(tuple((start, end, max(0, free - now_ns)) for start, end, free in gaps) for gaps in self._gaps)
