"""What a pipeline consists of, as values: sizes, layer groups, and which modes each component can take."""

from __future__ import annotations

from dataclasses import dataclass

from residency.gpu.placement import ComponentPlacement, Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroupSpec:
    """A repeated ModuleList of a component. `layer_bytes` are the weight bytes of each layer, in order."""

    name: str
    layer_bytes: tuple[int, ...]


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

    def streamed_layers(self, placement: ComponentPlacement) -> dict[str, tuple[int, ...]]:
        """Return layer group -> indices of the layers that are streamed under a layerwise placement."""
        return {
            group.name: tuple(
                index
                for index in range(len(group.layer_bytes))
                if index not in placement.resident_layers.get(group.name, ())
            )
            for group in self.groups
        }

    def device_bytes(self, placement: ComponentPlacement, *, in_use: bool) -> int:
        """Return the weight bytes it holds on the device while in use, or while idle."""
        if placement.mode is Mode.RESIDENT:
            return self.total_bytes
        if placement.mode is Mode.COMPONENT_OFFLOAD:
            return self.total_bytes if in_use else 0
        streamed = self.streamed_layers(placement)
        sizes = {group.name: group.layer_bytes for group in self.groups}
        away = sum(sizes[name][index] for name, indices in streamed.items() for index in indices)
        largest = max((sizes[n][i] for n, indices in streamed.items() for i in indices), default=0)
        slots = placement.num_slots * largest if in_use else 0
        return self.total_bytes - away + slots
