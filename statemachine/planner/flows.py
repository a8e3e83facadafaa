"""A cycle of stretches in which computing and the link run side by side: what the link does in each, at best."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Flow = tuple[int, int, int]  # bytes that cross the link in a stretch, ns of the link, bytes in stock at its end


def steady_flows(
    compute_ns: Sequence[int], own_bytes: Sequence[int], own_ns: Sequence[int], room_bytes: Sequence[int]
) -> list[Flow]:
    """Return what crosses the link in every stretch of one of many equal requests, which runs ahead whenever it can.

    Of each stretch: what it computes, the bytes that must have crossed the link by its end and how long the link needs
    for them, and what room there is at its end for later ones. One entry of each per stretch.
    """
    rooms = _rooms(own_bytes, room_bytes)
    stock, flows = _cycle(compute_ns, own_bytes, own_ns, rooms, 0)
    if stock:
        again, flows = _cycle(compute_ns, own_bytes, own_ns, rooms, stock)
        if again != stock:
            # It grows with every request, until some room is full: that is where a full window leads at once.
            stock, _ = _cycle(compute_ns, own_bytes, own_ns, rooms, rooms[-1])
            _, flows = _cycle(compute_ns, own_bytes, own_ns, rooms, stock)
    return flows


def _rooms(own_bytes: Sequence[int], room_bytes: Sequence[int]) -> list[int]:
    """Return the most that may be in stock at the end of every stretch: what lies long must fit into later rooms."""
    rooms = list(room_bytes)
    for _ in range(2):
        # What follows the last one is the first one of the next request.
        most = rooms[0] + own_bytes[0] if rooms else 0
        for here in range(len(rooms) - 1, -1, -1):
            rooms[here] = min(rooms[here], most)
            most = rooms[here] + own_bytes[here]
    return rooms


def _cycle(
    compute_ns: Sequence[int], own_bytes: Sequence[int], own_ns: Sequence[int], rooms: Sequence[int], stock: int
) -> tuple[int, list[Flow]]:
    """Return the stock at the end of a request that begins with one, and what happens in it."""
    flows = []
    num = len(own_bytes)
    for index in range(num):
        own = own_bytes[index]
        if own > stock:
            link_bytes, stock = own - stock, 0
            link_ns = own_ns[index] * link_bytes // own
        else:
            link_bytes, link_ns, stock = 0, 0, stock - own
        spare_ns, room = compute_ns[index] - link_ns, rooms[index] - stock
        skipped, step = stock, index + 1
        while spare_ns > 0 and room > 0 and step < index + num:
            later = step if step < num else step - num
            step += 1
            left = own_bytes[later] - skipped
            if left <= 0:
                skipped = -left
                continue
            skipped = 0
            fetched = min(room, left)
            needed_ns = own_ns[later] * fetched // own_bytes[later]
            if needed_ns > spare_ns:
                fetched = fetched * spare_ns // needed_ns
                needed_ns = spare_ns
            stock += fetched
            room -= fetched
            spare_ns -= needed_ns
            link_bytes += fetched
            link_ns += needed_ns
        flows.append((link_bytes, link_ns, stock))
    return stock, flows
