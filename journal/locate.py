"""Finds which column of an event was altered, by finding what it must have been for the hash to fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.journal.hashing import Column, hash_columns
from residency.journal.schema import EVENT_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from residency.journal.events import Event

# Bytes hashed at most for one event: a fraction of a second.
_BUDGET_BYTES = 24 * 2**20

# A hash that differs from the right one in more bytes was not damaged but replaced, or something else was altered.
_HASH_BYTES_MAX = 4

# What one byte may have been changed by. One bit first: that is the damage that happens by itself.
_BITS = tuple(1 << bit for bit in range(8))
_OTHERS = tuple(change for change in range(1, 256) if change not in _BITS)


def altered_column(event: Event, *, before: Event | None, previous_hash: bytes) -> str | None:
    """Return the column whose change explains that the event's hash does not fit; None if no small one does.

    Tried are, in any column but the payload, the value of the event before it in its stream, and in any column one
    byte. before: that event, if there is one. previous_hash: what the chain demands. Pure, and bounded.
    """
    columns = [getattr(event, name) for name in EVENT_COLUMNS[:-1]]
    right = hash_columns(columns)
    if sum(one != other for one, other in zip(right, event.hash, strict=False)) <= _HASH_BYTES_MAX:
        return "hash"
    size = sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in columns) + 9 * len(columns)
    left = _BUDGET_BYTES // size
    for index, value in _candidates(event, columns, before, previous_hash):
        left -= 1
        if left < 0:
            return None
        if hash_columns([*columns[:index], value, *columns[index + 1 :]]) == event.hash:
            return EVENT_COLUMNS[index]
    return None


def _candidates(
    event: Event, columns: Sequence[Column], before: Event | None, previous_hash: bytes
) -> Iterator[tuple[int, Column]]:
    """Yield what may have been in which column, the likeliest first."""
    for index, name in enumerate(EVENT_COLUMNS[:-1]):
        for likely in _likely(name, event, before, previous_hash):
            yield index, likely
    for changes in (_BITS, _OTHERS):
        for index, value in enumerate(columns):
            for near in _near(value, changes):
                yield index, near


def _likely(name: str, event: Event, before: Event | None, previous_hash: bytes) -> Sequence[Column]:
    if name == "previous_hash":
        return (previous_hash,)
    if name == "stream_version":
        return (before.stream_version + 1 if before is not None else 1,)
    if before is None or name == "payload":
        return ()
    if name == "position":
        return range(before.position + 1, before.position + 100)
    value: Column = getattr(before, name)
    return () if value == getattr(event, name) else (value,)


def _near(value: Column, changes: Sequence[int]) -> Iterator[Column]:
    """Yield what differs from the value in one byte."""
    if isinstance(value, int):
        yield from (value ^ (change << shift) for shift in range(0, 64, 8) for change in changes)
    elif isinstance(value, bytes):
        yield from _bytes_near(value, changes)
    elif isinstance(value, str):
        for near in _bytes_near(value.encode(), changes):
            try:
                yield near.decode()
            except UnicodeDecodeError:
                continue


def _bytes_near(content: bytes, changes: Sequence[int]) -> Iterator[bytes]:
    near = bytearray(content)
    for index, byte in enumerate(content):
        for change in changes:
            near[index] = byte ^ change
            yield bytes(near)
        near[index] = byte
