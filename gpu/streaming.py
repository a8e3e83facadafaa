"""Streaming: the layers that are not on the device come through the window, ahead of their use, over one queue."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from residency.errors import CaptureRefused
from residency.gpu.forecast import Forecast
from residency.gpu.hooks import Call, MethodHook, attempt_all
from residency.gpu.layers import call_method
from residency.gpu.storage import HostStore
from residency.gpu.window import Room, Window

if TYPE_CHECKING:
    from torch import nn

    from residency.gpu.device import Device, Mark


class LayerObserver(Protocol):
    """Told about uses of layers while a request is measured, on the thread that runs them."""

    def arrived(self, layer: Layer) -> None:
        """The layer was called; its weights may not be there yet."""

    def started(self, layer: Layer) -> None:
        """Its weights are there, or come before what is computed now."""

    def ended(self, layer: Layer) -> None:
        """Its call has ended."""


class Layer:
    """One layer of a group: its store, where it is, and who is inside it right now."""

    def __init__(self, module: nn.Module, streamer: Streamer) -> None:
        self.module = module
        self.store = HostStore(lambda: module.modules(), streamer.device)
        self.users: set[Call] = set()
        self.is_streamed = False  # Not on the device between uses: streamed, or held.
        self.is_held = False
        self.observer: LayerObserver | None = None
        self.room: Room | None = None
        self.ready: Mark | None = None  # Reached when its weights have arrived in the room.
        self._streamer = streamer
        self._hook: MethodHook | None = None

    @property
    def is_hooked(self) -> bool:
        """Whether its calls are wrapped now."""
        return self._hook is not None and self._hook.is_installed

    @property
    def is_stray(self) -> bool:
        """Whether it is on the device for a call that was cut short, outside the window."""
        return self.is_streamed and not self.users and self.room is None and not self.store.is_idle

    def sync_hook(self) -> None:
        """Have the hook exactly while it is needed, around whatever a call goes through."""
        name = call_method(self.module)
        if self._hook is not None and (self._hook.name != name or self._hook.is_displaced):
            self._hook.remove()
            self._hook = None
        if self.is_streamed or self.observer is not None:
            if self._hook is None:
                self._hook = MethodHook(self.module, name, before=self._enter, after=self._leave)
            self._hook.install()
        elif self._hook is not None:
            self._hook.remove()

    def _enter(self, call: Call) -> None:
        observer, is_first = self.observer, not self.users
        if observer is not None and is_first:
            observer.arrived(self)
        self.users.add(call)
        if self.is_streamed and is_first:
            self._streamer.enter(self)
        if observer is not None and is_first:
            observer.started(self)

    def _leave(self, call: Call) -> None:
        was_inside = call in self.users
        self.users.discard(call)
        if self.users:
            return
        try:
            if self.observer is not None and was_inside:
                self.observer.ended(self)
        finally:
            if self.is_streamed:
                self._streamer.leave(self)


class Streamer:
    """Brings the streamed and held layers of one pipeline to the device and gives their rooms back.

        forecast:  ... A | B  C  D  E ...     A runs; B and C have rooms and are copied or there already;
        window:    [ A ][ B ][ C ]            D is asked for as soon as A's room is free again

    Nothing waits on the host. Wrong forecasts cost time, never correctness. One thread at a time: the request's.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._forecast: Forecast[Layer | str] = Forecast()
        self._window: Window | None = None
        self._wanted_bytes = 0
        self._yields: dict[str, int] = {}
        self._yielding: list[str] = []
        self._is_short = False  # There was no memory for all of the window.
        self._loaded: dict[Layer, None] = {}  # Layers with a room, the one that was asked for first, first.
        self._known: dict[Layer, None] = {}  # Layers that had one: they remember places of the window.

    @property
    def window_bytes(self) -> int:
        """Device bytes that the window has now."""
        return 0 if self._window is None else self._window.held_bytes

    def configure(self, *, window_bytes: int, yields: dict[str, int]) -> None:
        """Have another window from the next request on; the present one and all in it is let go of."""
        self.release()
        self._wanted_bytes, self._yields = window_bytes, yields

    def release(self) -> None:
        """Let go of the window and everything in it. Only while no layer runs."""
        self.clear()
        self._forecast.forget()

    def clear(self) -> None:
        """Let go of the window and everything in it, until `refill`; what is expected is not forgotten."""
        for layer in list(self._loaded):
            layer.store.offload()
            self._give_back(layer)
        for layer in self._known:
            layer.store.forget_blocks()
        self._known.clear()
        if self._window is not None:
            self.device.synchronize()  # A copy in flight would write into memory that is somebody else's by then.
            self._window = None

    def refill(self) -> None:
        """Have the window, and in it what is used next, as far as there is memory."""
        if self._window is None and self._wanted_bytes:
            self._window = Window(self.device, num_bytes=self._wanted_bytes, yields=self._yields.values())
        self._grow()
        self._run_ahead()

    def begin(self) -> None:
        """A request begins."""
        if self.device.is_capturing():
            return  # What is queued here would become part of the graph.
        self._forecast.begin()
        self._yielding.clear()
        self._is_short = False
        self.refill()

    def end(self) -> None:
        """The request has ended, however: everything that it used is free, and the next one is prepared."""
        if self.device.is_capturing():
            return
        attempt_all([partial(self._take_back, layer) for layer in self._loaded if not layer.store.is_idle])
        self._forecast.end()
        self._yielding.clear()
        self._run_ahead()

    def component_entered(self, name: str) -> None:
        """A component is about to run: give back what it is to have of the window, or take again what others had."""
        if self._window is None or self.device.is_capturing():
            return
        if name in self._yields:
            self._forecast.note(name)
            self._yielding.append(name)
            self._make_way(self._yields[name])
        elif not self._yielding and not self._window.is_whole and not self._is_short:
            self._grow()
            self._run_ahead()

    def component_left(self, name: str) -> None:
        """A component has run."""
        if name in self._yielding:
            self._yielding.remove(name)
            # Not now: what it has computed may lie in the middle of what it had, and goes when the request is over.
            self._run_ahead()

    def enter(self, layer: Layer) -> None:
        """Have a layer's weights on the device for what is computed next. Raises torch.OutOfMemoryError."""
        if self.device.is_capturing():
            raise CaptureRefused(component=type(layer.module).__name__)
        self._forecast.note(layer)
        if layer.store.on_device:
            self._run_ahead()  # One that is held, or was cut short.
            return
        if layer.room is None:
            self._fetch(layer, self._room_at_once(layer))
        if layer.room is not None:
            self._await(layer)
            if not layer.store.bind(layer.room.block):
                # Changed on the host since it was copied: once more, now.
                self._fetch(layer, layer.room)
                self._await(layer)
                layer.store.bind(layer.room.block)
        if not layer.store.on_device:
            layer.store.onload()  # No room for it in the window at all.
        self._run_ahead()

    def leave(self, layer: Layer) -> None:
        """A layer's call has ended. May be repeated."""
        if layer.is_held and layer.room is not None and not self._forecast.is_last(layer):
            return
        self._take_back(layer)
        self._run_ahead()

    def _take_back(self, layer: Layer) -> None:
        """Bind a layer to the host again; its room is free once what was computed with it has ended."""
        if layer.users:
            return
        layer.store.offload()
        self._give_back(layer)

    def _give_back(self, layer: Layer) -> None:
        room, ready = layer.room, layer.ready
        layer.room = layer.ready = None
        self._loaded.pop(layer, None)
        if room is not None and self._window is not None:
            marks = [self.device.mark()]
            self._window.give(room, after=marks if ready is None else [*marks, ready])

    def _run_ahead(self) -> None:
        """Ask for what is used next, in order, as far as there is room."""
        if self._window is None:
            return
        yielded = self._yielded
        for token in self._forecast.ahead():
            if isinstance(token, str):
                # What is used after it has to lie where the window stays meanwhile.
                yielded = max(yielded, self._yields.get(token, 0))
                continue
            if token.users and not token.is_held:
                return  # Its room is free after this use; to pass over it would let later ones take the room.
            if token.room is None and not token.store.on_device:
                room = self._window.take(token.store.packed_bytes, yielded=yielded, is_held=token.is_held)
                if room is None:
                    return
                self._fetch(token, room)

    @property
    def _yielded(self) -> int:
        return max((self._yields.get(name, 0) for name in self._yielding), default=0)

    def _fetch(self, layer: Layer, room: Room | None) -> None:
        """Queue the copies of a layer into a room."""
        if room is None:
            return
        try:
            layer.room = room
            self._loaded[layer] = self._known[layer] = None
            layer.ready = self.device.copy_ahead(layer.store.copies(room.block), after=room.after)
        except BaseException:
            # Part of it may be on its way, with no mark that tells of its end.
            try:
                with suppress(RuntimeError, TimeoutError):
                    self.device.synchronize()
            finally:
                self._give_back(layer)
            raise

    def _await(self, layer: Layer) -> None:
        """Let what is computed next wait for the copy of a layer. Raises what kept the copy from being made."""
        assert layer.ready is not None
        try:
            self.device.wait_for(layer.ready)
        except BaseException:
            # Others may be missing, too: all are asked for anew by the next request.
            with suppress(RuntimeError, TimeoutError):
                self.clear()
            raise

    def _room_at_once(self, layer: Layer) -> Room | None:
        """Return a room for a layer that nobody expected, at the cost of those that are used latest."""
        if self._window is None:
            return None
        wanted = layer.store.packed_bytes
        while (room := self._window.take(wanted, yielded=self._yielded, is_held=False)) is None:
            victim = self._used_latest()
            if victim is None:
                return None
            self._take_back(victim)
        return room

    def _used_latest(self) -> Layer | None:
        idle = [layer for layer in self._loaded if not layer.users]
        if not idle:
            return None
        expected: dict[Layer | str, int] = {}
        for distance, token in enumerate(self._forecast.ahead()):
            expected.setdefault(token, distance)
        return max(idle, key=lambda layer: expected.get(layer, len(expected) + 1))

    def _make_way(self, yielded: int) -> None:
        """Empty and give back the blocks of the window that are yielded."""
        window = self._window
        assert window is not None
        for layer in [one for one in self._loaded if one.room is not None and not window.stays(one.room, yielded)]:
            self._take_back(layer)
        for block in window.shrink(yielded):
            for layer in self._known:
                layer.store.forget_blocks(block)

    def _grow(self) -> None:
        """Have the window back as far as nobody wants it; without the memory for it go on with what there is."""
        if self._window is not None and not self._window.is_whole:
            try:
                self._window.grow(self._yielded)
            except torch.OutOfMemoryError as error:
                error.__traceback__ = None
                self._is_short = True  # Until the next request: to ask again and again costs more than it gives.
