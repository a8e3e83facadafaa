"""What a pipeline consists of, as values: sizes, layer groups, and which modes each component can take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from residency.gpu.placement import ComponentPlacement, Mode, Placement

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroupSpec:
    """A repeated ModuleList of a component. `layer_bytes` are the weight bytes of each layer, in order.

    packed_bytes: what each layer takes as one block, alignment included; empty: the same.
    """

    name: str
    layer_bytes: tuple[int, ...]
    packed_bytes: tuple[int, ...] = ()

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Device bytes that each layer takes in the window."""
        return self.packed_bytes or self.layer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSpec:
    """A named module of the pipeline.

    total_bytes: parameters and buffers, every storage once.
    groups: its layer groups; what is in none of them is `outside_bytes`.
    modes: those it can take. fixed_reason: why it must stay as it is, or None.
    weights_digest: SHA-256 over names, shapes, strides, dtypes and ties of its weights, in hex.
    """

    name: str
    class_name: str
    total_bytes: int
    groups: tuple[LayerGroupSpec, ...]
    modes: tuple[Mode, ...]
    fixed_reason: str | None
    weights_digest: str
    entry_points: tuple[str, ...]

    @property
    def outside_bytes(self) -> int:
        """Weight bytes that are in no layer group."""
        return self.total_bytes - sum(sum(group.layer_bytes) for group in self.groups)

    def away_layers(self, placement: ComponentPlacement) -> dict[str, tuple[int, ...]]:
        """Return layer group -> indices of the layers that are not resident under a layerwise placement."""
        return {
            group.name: tuple(
                index
                for index in range(len(group.layer_bytes))
                if index not in placement.resident_layers.get(group.name, ())
            )
            for group in self.groups
        }

    def streamed_layers(self, placement: ComponentPlacement) -> dict[str, tuple[int, ...]]:
        """Return layer group -> indices of the layers that are brought in for every use."""
        return {
            group: tuple(index for index in indices if index not in placement.held_layers.get(group, ()))
            for group, indices in self.away_layers(placement).items()
        }

    def device_bytes(self, placement: ComponentPlacement, *, in_use: bool) -> int:
        """Return the weight bytes it holds on the device while in use, or while idle, outside the window."""
        if placement.mode is Mode.RESIDENT:
            return self.total_bytes
        if placement.mode is Mode.COMPONENT_OFFLOAD:
            return self.total_bytes if in_use else 0
        return self.total_bytes - self._bytes_of(self.away_layers(placement))

    def window_bytes(self, placement: ComponentPlacement) -> int:
        """Return how large a window it asks for: room for what is held and its slots, or what the placement says."""
        return window_of(self.groups, placement)

    def _bytes_of(self, layers: dict[str, tuple[int, ...]]) -> int:
        sizes = {group.name: group.layer_bytes for group in self.groups}
        return sum(sizes[name][index] for name, indices in layers.items() for index in indices)


def window_of(groups: Iterable[LayerGroupSpec], placement: ComponentPlacement) -> int:
    """Return how large a window a component with such layer groups asks for."""
    if placement.mode is not Mode.LAYERWISE_OFFLOAD:
        return 0
    held_bytes, streamed = 0, []
    for group in groups:
        resident = placement.resident_layers.get(group.name, ())
        held = placement.held_layers.get(group.name, ())
        held_bytes += sum(group.slot_bytes[index] for index in held)
        streamed += [size for index, size in enumerate(group.slot_bytes) if index not in resident and index not in held]
    slots = min(placement.num_slots, len(streamed)) * max(streamed, default=0)
    return max(placement.window_bytes, held_bytes + slots) if streamed or held_bytes else 0


def window_bytes(specs: Iterable[ComponentSpec], placement: Placement, *, active: Iterable[str] = ()) -> int:
    """Return the device bytes of the window that streamed layers share, while the components `active` run."""
    window = max((spec.window_bytes(placement.components[spec.name]) for spec in specs), default=0)
    yielded = max((placement.components[name].yield_bytes for name in active), default=0)
    return max(0, window - yielded)
