"""The components of one pipeline together: who is loaded when, one request at a time, and the way back out."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from residency.errors import SettingsError, UnknownComponent
from residency.gpu.adapters import Disguise, disguise_module, disguise_pipeline
from residency.gpu.component import ManagedComponent
from residency.gpu.gate import RequestGate
from residency.gpu.hazards import Hazard, find_hazards, is_untouchable
from residency.gpu.hooks import Call, MethodHook, attempt_all
from residency.gpu.inventory import named_weights, own_weights
from residency.gpu.placement import ComponentPlacement, Mode, Placement
from residency.gpu.poison import is_poisoning
from residency.gpu.streaming import Streamer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from residency.gpu.device import Device
    from residency.gpu.specs import ComponentSpec

# A request may wait behind the longest request in flight; a video takes minutes.
REQUEST_WAIT_S = 600.0

# Modules that some pipeline manages: two owners of one module would undo each other's moves.
_managed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Observer(Protocol):
    """Told about uses of components, on the thread that runs them."""

    def entered(self, component: str) -> None:
        """Others have left the device; the component is about to be loaded."""

    def loaded(self, component: str) -> None:
        """What it needs as a whole is on the device."""

    def left(self, component: str) -> None:
        """The component's outermost call has ended."""

    def made_whole(self, component: str) -> None:
        """All of the component is about to be brought, for a change of its weights."""

    def was_whole(self, component: str) -> None:
        """The change has been made."""


class ManagedPipeline:
    """Modules by name, on one device. Construction moves nothing; weights stay where they are found.

    minimal: install only the hooks that the placement in force needs (none, if everything is resident).
    Raises SettingsError if another pipeline manages one of the modules.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        *,
        device: Device,
        owner: object | None = None,
        minimal: bool = False,
    ) -> None:
        _refuse_second_owner(modules)
        self.device = device
        self.request_wait_s = REQUEST_WAIT_S
        self.before_request: Callable[[], None] | None = None
        self.on_lost: Callable[[RuntimeError], None] | None = None  # told of an error that lost the device
        self._observer: Observer | None = None
        self.hazards: tuple[Hazard, ...] = find_hazards(modules, device=device.torch_device)
        reasons = {hazard.component: hazard.text for hazard in reversed(self.hazards) if hazard.fixes}
        self._streamer = Streamer(device)
        self._components = {
            name: ManagedComponent(name, module, device, streamer=self._streamer, fixed_reason=reasons.get(name))
            for name, module in modules.items()
        }
        self._minimal = minimal
        self._gate = RequestGate()
        self._calls: dict[Call, None] = {}
        self._running = ExitStack()
        self._thread = threading.local()
        self._is_detached = False
        self._hooks = [hook for component in self._components.values() for hook in self._entry_hooks(component)]
        self._disguises = self._make_disguises(owner)
        _managed.update(child for module in modules.values() for child in module.modules())
        self._sync_hooks()

    @property
    def specs(self) -> tuple[ComponentSpec, ...]:
        """Describe every component as it is now. Read-only."""
        return tuple(component.spec for component in self._components.values())

    @property
    def placement(self) -> Placement:
        """Where every component lives; during a move still the placement before it. Read-only."""
        return Placement(components={name: component.placement for name, component in self._components.items()})

    @property
    def num_hooks(self) -> int:
        """Wrapped methods and swapped classes now."""
        own = sum(hook.is_installed for hook in self._hooks) + sum(d.is_installed for d in self._disguises)
        return own + sum(component.num_hooks for component in self._components.values())

    @property
    def window_bytes(self) -> int:
        """Device bytes of the window that streamed layers share, now."""
        return self._streamer.window_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host copies now, page-locked ones included."""
        return sum(component.host_bytes for component in self._components.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked host copies now."""
        return sum(component.pinned_bytes for component in self._components.values())

    @property
    def asked(self) -> object:
        """What the request asks for that this thread is about to begin, as it was given to `request`; else None."""
        return getattr(self._thread, "asked", None)

    def component(self, name: str) -> ManagedComponent:
        """Return a component. Raises UnknownComponent."""
        if name not in self._components:
            raise UnknownComponent(component=name, known=tuple(self._components))
        return self._components[name]

    def check(self, name: str, target: ComponentPlacement) -> None:
        """Raise UnknownComponent or ModeUnavailable if a component cannot take a placement. Moves nothing."""
        self.component(name).check(target)

    def place(self, name: str, target: ComponentPlacement) -> None:
        """Move one component; on an exception the pipeline is as it was before. A second call is a no-op.

        Blocks until no request runs, at most `request_wait_s`. Raises what `ManagedComponent.place` raises.
        """
        component = self.component(name)
        if self._is_detached:
            raise SettingsError(f"component {name!r} cannot be moved after detach; attach the pipeline again")
        with self.exclusive(f"moving component {name!r}", self.request_wait_s):
            try:
                component.place(target)
            finally:
                self._sync_window()
                self._sync_hooks()

    def commit(self) -> None:
        """Release the host copies that the placement in force does not need. A second call is a no-op."""
        with self.exclusive("a commit", self.request_wait_s):
            for component in self._components.values():
                component.release_host()

    def minimize(self) -> None:
        """From now on keep only the hooks that the placement in force needs. Only while no call is running."""
        self._minimal = True
        self._sync_hooks()

    @contextmanager
    def request(self, asked: object = None) -> Iterator[None]:
        """Enter around one request. Nests on one thread; other threads wait, then get PipelineBusy.

        asked: what it asks for, which `before_request` may want to know.
        """
        call = Call()
        try:
            try:
                self._thread.asked = asked
                self._begin(call)
                yield
            finally:
                self._end(call)
        except RuntimeError as error:
            if self.on_lost is not None and is_poisoning(error):
                self.on_lost(error)
            raise
        finally:
            self._end(call)  # Again: an interrupt may have come before or inside the first one.

    @contextmanager
    def whole(self, name: str) -> Iterator[nn.Module]:
        """Have a component whole on the device, whatever its placement: to change its weights where they are.

        Yields the module. What was changed in place is kept; other placements follow afterwards. The window is given
        up meanwhile. A request of its own, or a part of one. Raises UnknownComponent, PipelineBusy,
        torch.OutOfMemoryError with everything as it was.
        """
        component = self.component(name)
        with self.request():
            self._evict_idle(but=component)
            self._streamer.clear()
            observer = self._observer
            try:
                if observer is not None:
                    observer.made_whole(name)
                with component.whole():
                    yield component.module
            finally:
                if observer is not None:
                    observer.was_whole(name)
                self._streamer.refill()

    def exclusive(self, holder: str, timeout_s: float) -> AbstractContextManager[None]:
        """Enter around a round: nobody else gets in, requests of this thread do. Raises PipelineBusy."""
        return self._gate.exclusive(holder=holder, timeout_s=timeout_s)

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """Have an observer told about uses, and hooks for it, while inside."""
        try:
            self._observer = observer
            self._sync_hooks()
            yield
        finally:
            self._observer = None
            self._sync_hooks()

    def detach(self) -> None:
        """Put every module back exactly as it was found, and let go of it. A second call is a no-op.

        Every component is attempted; the first error is raised at the end, with the others as notes.
        """
        if self._is_detached:
            return
        with self.exclusive("a detach", self.request_wait_s):
            restores = [component.restore for component in self._components.values()]
            attempt_all([self._streamer.release, *restores, *(item.remove for item in self._removables())])
        for component in self._components.values():
            for child in component.module.modules():
                _managed.discard(child)
        self._is_detached = True

    def _begin(self, call: Call) -> None:
        is_outermost = not (self._gate.is_mine and self._calls)
        try:
            if is_outermost and not self._gate.is_mine_exclusively:
                self._call_back()
        finally:
            self._thread.asked = None
        self._gate.acquire(call, holder="a request", timeout_s=self.request_wait_s)
        self._calls[call] = None
        if is_outermost:
            self._evict_idle()  # What an interrupt during the last request's clean-up may have left.
            for component in self._components.values():
                component.sync_hooks()
            self._running.enter_context(self.device.running())
            self._streamer.begin()

    def _end(self, call: Call) -> None:
        if call not in self._calls:
            self._gate.release(call)
            return
        try:
            if len(self._calls) == 1:
                attempt_all([self._streamer.end, self._running.close, self._evict_idle])
        finally:
            self._calls.pop(call, None)
            self._gate.release(call)

    def _call_back(self) -> None:
        """Let the worker act between two requests; requests that it makes itself do not call back again."""
        if self.before_request is None or getattr(self._thread, "is_in_callback", False):
            return
        self._thread.is_in_callback = True
        try:
            self.before_request()
        finally:
            self._thread.is_in_callback = False

    def _enter(self, component: ManagedComponent, call: Call) -> None:
        if self.device.is_capturing():
            component.note_capture()
        self._begin(call)
        self._evict_idle(but=component)
        is_first = not component.users
        if is_first:
            self._streamer.component_entered(component.name)
        if is_first and self._observer is not None:
            self._observer.entered(component.name)
        component.users.add(call)
        component.load()
        if is_first and self._observer is not None:
            self._observer.loaded(component.name)

    def _leave(self, component: ManagedComponent, call: Call) -> None:
        was_inside = call in component.users
        component.users.discard(call)
        is_last = was_inside and not component.users
        try:
            if is_last and self._observer is not None:
                self._observer.left(component.name)
        finally:
            try:
                if is_last:
                    self._streamer.component_left(component.name)
            finally:
                self._end(call)

    def _evict_idle(self, but: ManagedComponent | None = None) -> None:
        """Take back to the host what no call uses, except one that is about to be used."""
        attempt_all([component.evict for component in self._components.values() if component is not but])

    def _entry_hooks(self, component: ManagedComponent) -> list[MethodHook]:
        if is_untouchable(component.module):
            return []
        before, after = partial(self._enter, component), partial(self._leave, component)
        return [MethodHook(component.module, point, before=before, after=after) for point in component.entry_points]

    def _make_disguises(self, owner: object | None) -> list[Disguise]:
        device = self.device.torch_device
        modules = [c.module for c in self._components.values() if c.fixed_reason is None]
        found = [disguise_module(module, device) for module in modules]
        if owner is not None:
            found.append(disguise_pipeline(owner, request=self.request, device=device))
        return [disguise for disguise in found if disguise is not None]

    def _removables(self) -> list[MethodHook | Disguise]:
        return [*self._hooks, *self._disguises]

    def _sync_window(self) -> None:
        components = self._components.values()
        self._streamer.configure(
            window_bytes=max((component.window_bytes for component in components), default=0),
            yields={one.name: one.placement.yield_bytes for one in components if one.placement.yield_bytes},
        )

    def _sync_hooks(self) -> None:
        placements = [component.placement for component in self._components.values()]
        needed = (
            not self._minimal
            or self._observer is not None
            or any(placement.mode is not Mode.RESIDENT for placement in placements)
        )
        for item in self._removables():
            if needed:
                item.install()
            else:
                item.remove()


def _refuse_second_owner(modules: Mapping[str, nn.Module]) -> None:
    # Two modules may share one weight. Looked up, not kept: a weak reference to a tensor would forbid swapping it.
    known = {id(tensor) for module in list(_managed) for _, tensor in own_weights(module)}
    for name, module in modules.items():
        is_known = any(id(tensor) in known for _, tensor in named_weights(module))
        if is_known or any(child in _managed for child in module.modules()):
            raise SettingsError(
                f"component {name!r}, or a weight of it, is managed by another pipeline already; detach that one first",
                component=name,
            )
