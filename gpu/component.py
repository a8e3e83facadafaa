"""One component of a pipeline: where its weights are, and how they come and go around its use."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from residency.errors import CaptureRefused, ModeUnavailable, PipelineBusy
from residency.gpu.hooks import Call, attempt_all
from residency.gpu.inventory import named_weights, storage_bytes, weights_digest
from residency.gpu.layers import find_layer_groups, modules_outside
from residency.gpu.pinning import pin_all
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode
from residency.gpu.poison import is_poisoning
from residency.gpu.specs import ComponentSpec, LayerGroupSpec, window_of
from residency.gpu.storage import HostStore
from residency.gpu.streaming import Layer, Streamer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from residency.gpu.device import Device
    from residency.gpu.streaming import LayerObserver

PARALLEL_BYTES_MIN = 64 * 2**20  # Below it starting threads takes longer than what they save.

# What may be called on a component beside `forward`; calling one counts as use.
ENTRY_POINTS = (
    "forward",
    "encode",
    "decode",
    "tiled_encode",
    "tiled_decode",
    "generate",
    "encode_image",
    "encode_text",
    "encode_prompt",
    "get_image_features",
    "get_text_features",
)


class ManagedComponent:
    """A module whose weights residency places. One with a `fixed_reason` is only described, never touched."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        device: Device,
        *,
        streamer: Streamer | None = None,
        fixed_reason: str | None = None,
    ) -> None:
        self.name, self.module, self._device, self.fixed_reason = name, module, device, fixed_reason
        self._streamer = streamer or Streamer(device)
        self.users: set[Call] = set()
        self.entry_points = tuple(point for point in ENTRY_POINTS if _is_method(module, point))
        self._groups: dict[str, tuple[Layer, ...]] = {}
        self.placement = RESIDENT
        self._is_settled = True
        self._is_captured = False
        if fixed_reason is not None:
            return
        groups = find_layer_groups(module)
        for group, layers in groups.items():
            self._groups[group] = tuple(Layer(layer, self._streamer) for layer in layers)
        inner = [layer for layers in groups.values() for layer in layers]
        self._outside = HostStore(lambda: modules_outside(module, inner), device)
        self.was_on_device = all(store.on_device or not store.num_bytes for store in self._stores())
        if not self.was_on_device:
            self.placement = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PAGEABLE)
            # Found with a part of it on the device: the first move puts that right.
            self._is_settled = all(store.is_idle for store in self._stores())

    @property
    def spec(self) -> ComponentSpec:
        """Describe it as it is now. Read-only."""
        fixed = self.fixed_reason is not None
        modes = [Mode.RESIDENT] if fixed else [Mode.RESIDENT, Mode.COMPONENT_OFFLOAD]
        if self._groups:
            modes.append(Mode.LAYERWISE_OFFLOAD)
        return ComponentSpec(
            name=self.name,
            class_name=type(self.module).__name__,
            total_bytes=_fixed_bytes(self.module) if fixed else sum(store.num_bytes for store in self._stores()),
            groups=self._group_specs(),
            modes=tuple(modes),
            fixed_reason=self.fixed_reason,
            weights_digest=weights_digest(self.module),
            entry_points=self.entry_points,
        )

    @property
    def num_hooks(self) -> int:
        """Layer hooks installed now."""
        return sum(layer.is_hooked for layer in self._layers())

    @property
    def window_bytes(self) -> int:
        """How large a window its placement asks for."""
        return window_of(self._group_specs(), self.placement)

    @property
    def host_bytes(self) -> int:
        """Bytes of its host copies."""
        return sum(store.host_bytes for store in self._stores())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of its host copies that are page-locked."""
        return sum(store.pinned_bytes for store in self._stores())

    def check(self, target: ComponentPlacement) -> None:
        """Raise ModeUnavailable if it cannot take this placement. Moves nothing."""
        problem = self._problem(target)
        if problem is not None:
            modes = tuple(mode.value for mode in self.spec.modes)
            raise ModeUnavailable(component=self.name, mode=target.mode.value, reason=problem, possible=modes)

    def place(self, target: ComponentPlacement) -> None:
        """Move to another placement; on any exception what was before is in force again, and it is raised.

        Raises ModeUnavailable, PipelineBusy while it runs, torch.OutOfMemoryError, MemoryError if the host refuses.
        """
        self.check(target)
        if self.users:
            raise PipelineBusy(holder=f"a call of component {self.name!r}", waited_s=0.0)
        if self.fixed_reason is not None or (target == self.placement and self._is_settled):
            return
        self._is_settled = False  # If going back fails, too, the same call may be made again.
        self._streamer.release()
        try:
            self._settle(target)
            self.placement = target
        except BaseException as error:
            if is_poisoning(error):
                raise  # Nothing can be moved back on a broken context.
            self._settle(self.placement)
            self._is_settled = True
            raise
        self._is_settled = True

    def load(self) -> None:
        """Before use: bring what the mode keeps on the host between uses. A second call is a no-op."""
        if self.placement.mode is Mode.COMPONENT_OFFLOAD and self.fixed_reason is None:
            for store in self._stores():
                if not store.on_device:
                    store.onload()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have every weight on the device while inside; afterwards what its placement says, changes kept.

        Only while nothing of it is in the window. Raises torch.OutOfMemoryError with everything as it was.
        """
        call = Call()
        try:
            self.users.add(call)
            for store in self._stores():
                store.onload()
            yield
        finally:
            self.users.discard(call)
            attempt_all([store.offload for store in self._away() if not store.is_idle])

    def evict(self) -> None:
        """After use: take what the mode keeps on the host back there. A second call, or one while in use: no-op.

        Every part of it is attempted; the first error is raised at the end.
        """
        if self.fixed_reason is not None or self.users:
            return
        whole = self.placement.mode is Mode.COMPONENT_OFFLOAD
        # Layers that have a room in the window come and go by what is used next; only strays are sent away here.
        stores = self._stores() if whole else [one.store for one in self._layers() if one.is_stray]
        steps: list[Callable[[], None]] = [store.offload for store in stores if not store.is_idle]
        if steps and whole:
            steps.append(self._make_room)
        attempt_all(steps)

    def note_capture(self) -> None:
        """Book that its work is being captured into a CUDA graph: its weights stay where they are from now on.

        Raises CaptureRefused, before anything is captured, if they come and go.
        """
        if self.fixed_reason is None and self.placement.mode is not Mode.RESIDENT:
            raise CaptureRefused(component=self.name)
        self._is_captured = True

    def release_host(self) -> None:
        """Give up the host copies of weights that stay on the device under this placement."""
        if self.fixed_reason is None:
            away = {id(store) for store in self._away()}
            for store in self._stores():
                if id(store) not in away:
                    store.release_host()

    def restore(self) -> None:
        """Go back to where the weights were found, without hooks and pins, for good."""
        if self.fixed_reason is None:
            home = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PAGEABLE)
            self._is_captured = False  # Whoever detaches has no use for the graph any more.
            self.place(RESIDENT if self.was_on_device else home)
            for store in self._stores():
                store.let_go()

    @contextmanager
    def observing_layers(self, observer: LayerObserver) -> Iterator[dict[str, tuple[Layer, ...]]]:
        """Have an observer told about uses of its layers while inside; yields them by group."""
        try:
            for layer in self._layers():
                layer.observer = observer
                layer.sync_hook()
            yield dict(self._groups)
        finally:
            for layer in self._layers():
                layer.observer = None
                layer.sync_hook()

    def sync_hooks(self) -> None:
        """Follow layers that were compiled, or compiled anew, since. Cheap if none was."""
        for layer in self._layers():
            if layer.is_streamed:
                layer.sync_hook()

    def _problem(self, target: ComponentPlacement) -> str | None:
        if self.fixed_reason is not None:
            return None if target == self.placement else self.fixed_reason
        if self._is_captured and target != self.placement:
            return "it was captured into a CUDA graph, whose replays read its weights where they are"
        if target.tier is HostTier.MAPPED and not all(store.is_file_backed for store in self._away(target)):
            return "its weights are not, or not any more, in a mapped file, as those of safetensors' load_file are"
        if target.mode is Mode.LAYERWISE_OFFLOAD and not self._groups:
            return "it has no repeated layers that could be streamed"
        for group, indices in [*target.resident_layers.items(), *target.held_layers.items()]:
            layers = self._groups.get(group, ())
            if any(index not in range(len(layers)) for index in indices):
                return f"layer group {group!r} has {len(layers)} layers, resident or held ones are given as {indices!r}"
        return None

    def _settle(self, target: ComponentPlacement) -> None:
        """Bring weights, pins and hooks to a placement: releases first, then growth. Safe to repeat."""
        away = self._away(target)
        ids = {id(store) for store in away}
        staying = [store for store in self._stores() if id(store) not in ids]
        is_pinned = target.tier is HostTier.PINNED
        for store in staying if is_pinned else self._stores():
            store.unpin()
        # Before anything leaves: a copy that has to be made is made in place, and a refusal has moved nothing.
        if is_pinned:
            self._pin(away)
        for store in away:
            store.offload()
        for store in staying:
            store.onload()
        streamed = ids if target.mode is Mode.LAYERWISE_OFFLOAD else set()
        for group, layers in self._groups.items():
            held = target.held_layers.get(group, ())
            for index, layer in enumerate(layers):
                layer.is_streamed, layer.is_held = id(layer.store) in streamed, index in held
                layer.sync_hook()

    def _make_room(self) -> None:
        """See to it that the next load finds room, whatever others have cut out of the blocks of this one by then.

        A piece of them that outlives the request would keep the allocator from using the rest. Giving all of them
        back waits for the device, so it is done only if there is not as much under the cap besides.
        """
        if self._device.unreserved_bytes() < sum(store.packed_bytes for store in self._stores()):
            self._device.empty_cache()

    def _pin(self, stores: list[HostStore]) -> None:
        if sum(store.num_bytes for store in stores) < PARALLEL_BYTES_MIN:
            for store in stores:
                store.pin()
        else:
            # On an error the others stay pinned, and going back unpins them.
            names = [f"host copy {index + 1} of {len(stores)} of {self.name!r}" for index in range(len(stores))]
            pin_all(stores, self._device, names=names)

    def _away(self, placement: ComponentPlacement | None = None) -> list[HostStore]:
        """Return the stores that are on the host between uses."""
        placement = placement or self.placement
        if placement.mode is Mode.RESIDENT:
            return []
        if placement.mode is Mode.COMPONENT_OFFLOAD:
            return self._stores()
        return [
            layer.store
            for group, layers in self._groups.items()
            for index, layer in enumerate(layers)
            if index not in placement.resident_layers.get(group, ())
        ]

    def _group_specs(self) -> tuple[LayerGroupSpec, ...]:
        return tuple(
            LayerGroupSpec(
                name=name,
                layer_bytes=tuple(layer.store.num_bytes for layer in layers),
                packed_bytes=tuple(layer.store.packed_bytes for layer in layers),
            )
            for name, layers in self._groups.items()
        )

    def _layers(self) -> list[Layer]:
        return [layer for layers in self._groups.values() for layer in layers]

    def _stores(self) -> list[HostStore]:
        return [] if self.fixed_reason is not None else [self._outside, *(layer.store for layer in self._layers())]


def _is_method(module: nn.Module, name: str) -> bool:
    found = getattr(module, name, None)
    return callable(found) and not isinstance(found, nn.Module)


def _fixed_bytes(module: nn.Module) -> int:
    """Best figure for weights that cannot be looked into."""
    plain = {id(tensor): tensor for _, tensor in named_weights(module)}
    try:
        return sum(storage_bytes(plain.values()).values())
    except (RuntimeError, NotImplementedError):
        return sum(tensor.numel() * tensor.element_size() for tensor in plain.values())
