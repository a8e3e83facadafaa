"""Where every weight lives: a value whose digest covers all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec

_LATER_FIELDS = ("held_layers", "window_bytes", "yield_bytes")


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
    resident_layers: layer group -> indices of the layers kept on the device at all times; empty unless layerwise.
    held_layers: layer group -> indices of the layers that are brought in once a request and kept until their last use
    in it. What is in neither is streamed: brought in for every use.
    num_slots: how many streamed layers must find room at once, at least; 0 unless layerwise.
    window_bytes: device memory for its streamed and held layers; 0: the slots and what is held. All components of a
    pipeline share one window, as large as the largest that any of them asks for.
    yield_bytes: how much of the window is given back to activations while this component runs, in any mode.
    """

    mode: Mode
    tier: HostTier | None = None
    resident_layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    num_slots: int = 0
    held_layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    window_bytes: int = 0
    yield_bytes: int = 0

    def __post_init__(self) -> None:
        layerwise = self.mode is Mode.LAYERWISE_OFFLOAD
        if (self.tier is None) != (self.mode is Mode.RESIDENT):
            raise ValueError(f"a {self.mode.value} component with host tier {self.tier!r} is contradictory")
        if layerwise != (self.num_slots > 0) or (self._has_layers and not layerwise):
            raise ValueError(
                f"slots, a window, resident and held layers belong to layerwise-offload, not to {self.mode.value}"
            )
        if min(self.window_bytes, self.yield_bytes) < 0:
            raise ValueError(f"a window of {self.window_bytes} bytes that yields {self.yield_bytes} is absurd")
        for group, held in self.held_layers.items():
            twice = set(held) & set(self.resident_layers.get(group, ()))
            if twice:
                raise ValueError(f"layers {sorted(twice)} of {group!r} are given as resident and as held")

    @property
    def _has_layers(self) -> bool:
        return bool(self.resident_layers or self.held_layers or self.window_bytes)


RESIDENT = ComponentPlacement(mode=Mode.RESIDENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """For every component of a pipeline where its weights live. Equal placements have equal digests."""

    components: Mapping[str, ComponentPlacement]

    def to_bytes(self) -> bytes:
        """Return the canonical JSON form; the digest is its SHA-256."""
        plain = msgspec.to_builtins(self)
        for component in plain["components"].values():
            for name in _LATER_FIELDS:
                if not component[name]:
                    # A placement keeps its digest when later versions can say more.
                    del component[name]
        return msgspec.json.encode(plain, order="sorted")

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
