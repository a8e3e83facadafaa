"""What an event of type `pruned` says: which events of its stream were removed, and what the chain was around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Events of one stream that were removed together, without one left between them.

    first_version to last_version: their numbers in the stream; first_position, last_position: of the first and the
    last of them. previous_hash: of the event before the first one; hash: of the last one. Both in hex.
    """

    first_version: int
    last_version: int
    first_position: int
    last_position: int
    previous_hash: str
    hash: str

    def __post_init__(self) -> None:
        num = self.last_version - self.first_version
        if not (1 <= self.first_version <= self.last_version and num <= self.last_position - self.first_position):
            raise ValueError(f"events {self.first_version} to {self.last_version} are no range that was removed")

    @property
    def num_events(self) -> int:
        """How many events it stands for."""
        return self.last_version - self.first_version + 1

    def joined(self, later: Range) -> Range | None:
        """Return this and the range right after it as one; None if events are left between them."""
        if later.first_version != self.last_version + 1 or later.previous_hash != self.hash:
            return None
        return Range(
            first_version=self.first_version,
            last_version=later.last_version,
            first_position=self.first_position,
            last_position=later.last_position,
            previous_hash=self.previous_hash,
            hash=later.hash,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Everything that was ever removed from a stream, and what of it still counts.

    removed: in the order of the stream. num_epochs, num_rounds: that were removed. highest_round: the highest number
    among them, so that it is never given again. first_at, last_at: when the first and the last removed event were
    recorded, ns since the Unix epoch. Each event of this type says all of it; the last one holds.
    """

    removed: tuple[Range, ...]
    num_epochs: int
    num_rounds: int
    highest_round: int
    first_at: int
    last_at: int

    @property
    def num_events(self) -> int:
        """How many events were removed."""
        return sum(one.num_events for one in self.removed)


def read_pruned(payload: Mapping[str, Any]) -> Pruned:
    """Return what the payload of such an event says.

    Raises:
        ValueError: it is not one.
    """
    try:
        return msgspec.convert(payload, Pruned)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def joined(ranges: list[Range]) -> tuple[Range, ...]:
    """Return the ranges in the order of the stream, those that meet as one."""
    found: list[Range] = []
    for one in sorted(ranges, key=lambda each: each.first_version):
        whole = found[-1].joined(one) if found else None
        found[-1:] = [whole] if whole is not None else [*found[-1:], one]
    return tuple(found)
