"""The window: device memory that the streamed layers of a pipeline share, allocated once and handed out in rooms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from residency.gpu.cells import aligned
from residency.gpu.device import Mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from residency.gpu.device import Device


@dataclass(slots=True, eq=False)
class Room:
    """A part of the window. `after`: what must be reached before it may be written to."""

    segment: _Segment
    start: int
    block: torch.Tensor
    after: tuple[Mark, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.block.numel()


@dataclass(slots=True)
class _Gap:
    """Unused bytes [start, end) of a segment, and what may still be using them, the latest of every queue."""

    start: int
    end: int
    marks: dict[int, Mark]


@dataclass(slots=True, eq=False)
class _Segment:
    """One block of the window. `stays_below`: it is given back while a component runs that yields at least so much."""

    num_bytes: int
    stays_below: int | None
    block: torch.Tensor | None = None
    gaps: list[_Gap] = field(default_factory=list)

    def stays_for(self, yielded: int) -> bool:
        return self.stays_below is None or aligned(yielded) < self.stays_below


class Window:
    """Rooms in one block that stays, and in blocks that are given back while some component runs.

        | stays .......................| yielded to vae ....| yielded to vae and encoder |
        | gap | room | room | gap      | room | gap         | gap                        |

    num_bytes: of all of it, rounded up to the alignment of weights. yields: how much is given back by whoever gives
    any back. For one thread at a time.
    """

    def __init__(self, device: Device, *, num_bytes: int, yields: Iterable[int]) -> None:
        self._device = device
        # Rooms are cut from either end of a block, so that both must be where a weight may begin.
        self.num_bytes = num_bytes = aligned(num_bytes)
        # The block that is given back for little is given back for much, too: from the last one to the first.
        steps = sorted({min(aligned(amount), num_bytes) for amount in yields if amount > 0})
        bounds = [0, *steps]
        self._segments = [
            _Segment(num_bytes=upper - lower, stays_below=upper) for lower, upper in zip(bounds, steps, strict=False)
        ]
        if num_bytes > bounds[-1]:
            self._segments.append(_Segment(num_bytes=num_bytes - bounds[-1], stays_below=None))
        self._segments.reverse()

    @property
    def is_whole(self) -> bool:
        """Whether every block is there."""
        return all(segment.block is not None for segment in self._segments)

    @property
    def held_bytes(self) -> int:
        """Device bytes that it has now."""
        return sum(segment.num_bytes for segment in self._segments if segment.block is not None)

    def grow(self, yielded: int = 0) -> None:
        """Have every block that need not be given back. Raises torch.OutOfMemoryError; what was there stays."""
        for segment in self._segments:
            if segment.block is None and segment.stays_for(yielded):
                segment.block = self._device.allocate(segment.num_bytes)
                now = self._device.mark()
                segment.gaps = [_Gap(0, segment.num_bytes, {now.queue: now})]

    def shrink(self, yielded: int) -> list[torch.Tensor]:
        """Give back the blocks that do not stay, and return them; those that have a room taken are kept.

        Later work of this thread waits for copies into them, because the allocator hands the memory to it.
        """
        given: list[torch.Tensor] = []
        for segment in self._segments:
            whole = len(segment.gaps) == 1 and segment.gaps[0].end - segment.gaps[0].start == segment.num_bytes
            if segment.block is not None and whole and not segment.stays_for(yielded):
                for mark in segment.gaps[0].marks.values():
                    self._device.wait_for(mark)
                given.append(segment.block)
                segment.block, segment.gaps = None, []
        return given

    def stays(self, room: Room, yielded: int) -> bool:
        """Whether a room is in a block that is kept while so much is yielded. Read-only."""
        return room.segment.stays_for(yielded)

    def take(self, num_bytes: int, *, yielded: int, is_held: bool) -> Room | None:
        """Return a room in a block that stays while so much is yielded, or None if there is none.

        What is held lies where little stays, and at the far end: streamed layers come and go at the near one. Of the
        gaps of one block the smallest that will do is taken, so that large layers find room beside small ones.
        """
        usable = [one for one in self._segments if one.block is not None and one.stays_for(yielded)]
        for segment in reversed(usable) if is_held else usable:
            gaps = [gap for gap in segment.gaps if gap.end - gap.start >= num_bytes]
            if gaps:
                best = min(reversed(gaps) if is_held else gaps, key=lambda gap: gap.end - gap.start)
                return _cut(segment, best, num_bytes, from_end=is_held)
        return None

    def give(self, room: Room, *, after: Sequence[Mark]) -> None:
        """Return a room that is free once the marks are reached."""
        gaps = room.segment.gaps
        end = room.start + room.num_bytes
        position = sum(gap.start < room.start for gap in gaps)
        gaps.insert(position, _Gap(room.start, end, {mark.queue: mark for mark in after}))
        for left in (position, position - 1):
            if 0 <= left < len(gaps) - 1 and gaps[left].end == gaps[left + 1].start:
                gaps[left : left + 2] = [_merged(gaps[left], gaps[left + 1])]


def _merged(left: _Gap, right: _Gap) -> _Gap:
    marks = dict(left.marks)
    for queue, mark in right.marks.items():
        # In one queue the later mark implies the earlier.
        if queue not in marks or marks[queue].order < mark.order:
            marks[queue] = mark
    return _Gap(left.start, right.end, marks)


def _cut(segment: _Segment, gap: _Gap, num_bytes: int, *, from_end: bool) -> Room:
    assert segment.block is not None
    start = gap.end - num_bytes if from_end else gap.start
    if from_end:
        gap.end = start
    else:
        gap.start = start + num_bytes
    if gap.start == gap.end:
        segment.gaps.remove(gap)
    block = segment.block[start : start + num_bytes]
    return Room(segment=segment, start=start, block=block, after=tuple(gap.marks.values()))
