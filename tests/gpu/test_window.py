"""Rooms in the window: never two over the same bytes, freed ones join, and the latest use of each is waited for."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.gpu.emulated import EmulatedDevice
from residency.gpu.window import Room, Window

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1024


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(total_bytes=2**24)
    yield device
    device.close()


def window(device: EmulatedDevice, num_bytes: int, *yields: int) -> Window:
    found = Window(device, num_bytes=num_bytes, yields=yields)
    found.grow()
    return found


def test_freed_rooms_join_and_what_used_any_of_them_is_waited_for(device: EmulatedDevice) -> None:
    rooms = window(device, 4 * KIB)
    parts = [rooms.take(KIB, yielded=0, is_held=False) for _ in range(4)]
    assert rooms.take(512, yielded=0, is_held=False) is None
    for part in (parts[2], parts[1]):
        assert part is not None
        device.now_ns()
        rooms.give(part, after=[device.mark()])
    joined = rooms.take(2 * KIB, yielded=0, is_held=False)
    assert joined is not None and joined.start == KIB and len(joined.after) == 1


def test_the_smallest_gap_that_will_do_is_taken(device: EmulatedDevice) -> None:
    rooms = window(device, 8 * KIB)
    sizes = [3 * KIB, KIB, KIB, 3 * KIB]
    taken = [rooms.take(size, yielded=0, is_held=False) for size in sizes]
    for index in (0, 2):
        room = taken[index]
        assert room is not None
        rooms.give(room, after=[device.mark()])
    small, large = rooms.take(KIB, yielded=0, is_held=False), rooms.take(3 * KIB, yielded=0, is_held=False)
    assert small is not None and large is not None
    assert (small.start, large.start) == (4 * KIB, 0)


def test_what_is_given_back_is_taken_from_the_device_and_returns(device: EmulatedDevice) -> None:
    rooms = window(device, 8 * KIB, 2 * KIB, 5 * KIB)
    assert device.memory().allocated_bytes == 8 * KIB
    for yielded, left in ((2 * KIB, 6 * KIB), (5 * KIB, 3 * KIB), (KIB, 3 * KIB)):
        rooms.shrink(yielded)
        assert rooms.held_bytes == device.memory().allocated_bytes == left
    assert rooms.take(4 * KIB, yielded=5 * KIB, is_held=True) is None
    rooms.grow(2 * KIB)
    assert rooms.held_bytes == 6 * KIB and not rooms.is_whole
    rooms.grow()
    assert rooms.is_whole


def test_a_block_with_a_room_taken_is_kept(device: EmulatedDevice) -> None:
    rooms = window(device, 8 * KIB, 4 * KIB)
    held = rooms.take(KIB, yielded=0, is_held=True)
    assert held is not None and not rooms.stays(held, 4 * KIB)
    assert rooms.shrink(4 * KIB) == [] and rooms.is_whole
    rooms.give(held, after=[device.mark()])
    assert len(rooms.shrink(4 * KIB)) == 1


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_rooms_never_overlap_and_lie_where_they_were_asked_for(data: st.DataObject) -> None:
    device = EmulatedDevice(total_bytes=2**24)
    amounts = st.integers(0, 9 * KIB)
    yields = data.draw(st.lists(amounts, max_size=2))
    rooms = window(device, data.draw(st.integers(KIB, 8 * KIB)), *yields)
    taken: list[Room] = []
    for _ in range(data.draw(st.integers(0, 30))):
        gives_back: bool = data.draw(st.booleans())
        if taken and gives_back:
            rooms.give(taken.pop(data.draw(st.integers(0, len(taken) - 1))), after=[device.mark()])
            continue
        yielded = data.draw(st.sampled_from([0, *yields]))
        size = 512 * data.draw(st.integers(1, 4))
        room = rooms.take(size, yielded=yielded, is_held=data.draw(st.booleans()))
        if room is not None:
            assert rooms.stays(room, yielded) and room.start % 512 == 0 and room.num_bytes == size
            taken.append(room)
    spans = sorted((room.block.data_ptr(), room.block.data_ptr() + room.num_bytes) for room in taken)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    room = None
    while taken:
        rooms.give(taken.pop(), after=[device.mark()])
    rooms.shrink(2**60)
    assert rooms.held_bytes == device.memory().allocated_bytes
    rooms.grow()
    assert device.memory().allocated_bytes == rooms.num_bytes
    device.close()
