"""Where every weight lives: a value whose digest covers all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec


class Mode(Enum):
    """How a component lives on the device. The value is the journal's spelling."""

    RESIDENT = "resident"
    COMPONENT_OFFLOAD = "component-offload"
    LAYERWISE_OFFLOAD = "layerwise-offload"


class HostTier(Enum):
    """Where the host copy of a weight is. The value is the journal's spelling."""

    PINNED = "pinned"
    PAGEABLE = "pageable"
    MAPPED = "mapped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentPlacement:
    """One component's part of a placement.

    tier: of its host copy; None while it is resident, which needs none.
    resident_layers: layer group -> indices of the layers kept on the device; empty unless layerwise.
    num_slots: device slots for streamed layers; 0 unless layerwise.
    """

    mode: Mode
    tier: HostTier | None = None
    resident_layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    num_slots: int = 0

    def __post_init__(self) -> None:
        layerwise = self.mode is Mode.LAYERWISE_OFFLOAD
        if (self.tier is None) != (self.mode is Mode.RESIDENT):
            raise ValueError(f"a {self.mode.value} component with host tier {self.tier!r} is contradictory")
        if layerwise != (self.num_slots > 0) or (self.resident_layers and not layerwise):
            raise ValueError(f"slots and resident layers belong to layerwise-offload, not to {self.mode.value}")


RESIDENT = ComponentPlacement(mode=Mode.RESIDENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """For every component of a pipeline where its weights live. Equal placements have equal digests."""

    components: Mapping[str, ComponentPlacement]

    def to_bytes(self) -> bytes:
        """Return the canonical JSON form; the digest is its SHA-256."""
        return msgspec.json.encode(self, order="sorted")

    @classmethod
    def from_bytes(cls, data: bytes) -> Placement:
        """Return the placement that `to_bytes` wrote; raises msgspec.ValidationError on anything else."""
        return msgspec.json.decode(data, type=cls)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form, in hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def changes_to(self, target: Placement) -> tuple[str, ...]:
        """Return the names of the components that differ in `target`, sorted."""
        return tuple(sorted(n for n, c in target.components.items() if self.components.get(n) != c))
