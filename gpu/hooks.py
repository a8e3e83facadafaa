"""Owned hooks: a method of one object wrapped as instance attribute, counted by who installs it, exactly removable."""

from __future__ import annotations

import copy
import functools
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

# A token per call: joining and leaving a set of tokens is one step each, so that an interrupt cannot split a count.
Call = object


def finish(clean_up: Callable[[Call], object], call: Call) -> None:
    """Run a clean-up that may be repeated; one that an interrupt cuts short is run again before that is obeyed."""
    try:
        clean_up(call)
    except Exception:
        raise
    except BaseException:
        clean_up(call)
        raise


def attempt_all(steps: Sequence[Callable[[], object]]) -> None:
    """Do every step whatever the others do, one that is interrupted twice; raise the first error at the end."""
    errors: list[BaseException] = []
    for step in steps:
        for _ in range(2):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - every step is attempted
                errors.append(error)
            except BaseException as error:  # noqa: BLE001 - a clean-up is finished before an interrupt is obeyed
                errors.append(error)
                continue
            break
    for note in [f"then also: {type(later).__name__}: {later}" for later in errors[1:]]:
        errors[0].add_note(note)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # A cycle through this frame would keep alive what the steps held, such as device memory.


class MethodHook:
    """Runs `before(call)` and, whatever happens, `after(call)` around a method of one module.

    `after` is also called when `before` did not finish, and must cope. `install` and `remove` may be repeated.
    """

    def __init__(
        self, module: nn.Module, name: str, *, before: Callable[[Call], None], after: Callable[[Call], None]
    ) -> None:
        self._module, self.name = module, name
        self._before, self._after = before, after
        self._replaced: Callable[..., Any] | None = None
        self._wrapper: _Wrapper | None = None

    @property
    def is_installed(self) -> bool:
        """Whether the method is wrapped now."""
        return self._wrapper is not None

    @property
    def is_displaced(self) -> bool:
        """Whether it was installed, but the module has something else in its place now."""
        return self._wrapper is not None and vars(self._module).get(self.name) is not self._wrapper

    def install(self) -> None:
        """Wrap the method. A second call is a no-op."""
        if self._wrapper is not None:
            return
        self._replaced = vars(self._module).get(self.name)
        wrapper = _Wrapper(getattr(self._module, self.name), self.name, before=self._before, after=self._after)
        self._module.__dict__[self.name] = self._wrapper = wrapper

    def remove(self) -> None:
        """Put back what was there. If someone wrapped the wrapper since, it stays, and does nothing any more."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is None:
            return
        wrapper.before = wrapper.after = _nothing
        if vars(self._module).get(self.name) is not wrapper:
            return
        if self._replaced is None:
            del self._module.__dict__[self.name]
        else:
            self._module.__dict__[self.name] = self._replaced


class _Wrapper:
    """What stands in for the method."""

    def __init__(
        self, wrapped: Callable[..., Any], name: str, *, before: Callable[[Call], None], after: Callable[[Call], None]
    ) -> None:
        functools.update_wrapper(self, wrapped)
        self.wrapped, self.name, self.before, self.after = wrapped, name, before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = Call()
        try:
            self.before(call)
            return self.wrapped(*args, **kwargs)
        finally:
            finish(self.after, call)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy of a module is not managed: it gets its own plain method, never one bound to the original.
        owner = getattr(self.wrapped, "__self__", None)
        if owner is None or id(owner) not in memo:
            return copy.deepcopy(self.wrapped, memo)
        method = getattr(type(memo[id(owner)]), self.name)
        # A class has no compiled call: the copy of a compiled layer is not compiled.
        return None if method is None else types.MethodType(method, memo[id(owner)])


def _nothing(call: Call) -> None:
    """Take the place of the hooks of a wrapper that could not be removed."""
