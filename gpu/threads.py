"""Guards on every thread: from the start of those to come, from the next call of those that run, until they end."""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import operator
import sys
import threading
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from residency.gpu.kernels import KernelGuard

if TYPE_CHECKING:
    from types import FrameType

log = logging.getLogger(__name__)


class ThreadGuard(Protocol):
    """What wants to be called on every thread."""

    def guard_thread(self) -> None:
        """Called on each thread, perhaps more than once. Must be quick, and must not raise."""


_guards: weakref.WeakSet[ThreadGuard] = weakref.WeakSet()
_lock = threading.Lock()


def guard_other_threads(guard: ThreadGuard) -> None:
    """Have `guard.guard_thread()` called on every other thread, while the guard lives. A second call is a no-op.

    A thread that `threading` starts from now on makes it its first call. A thread that runs already, of whatever
    origin, makes it at its next event: the next time it calls a function of Python or C, or returns from one of Python.
    An operator between two tensors (`w @ x`) is no call: a loop of nothing else is not reached before it ends. Threads
    that C code makes later are not reached either. Nothing remains on a thread that was reached. Until the last one
    has been, from Python 3.12 on, each call in the process costs the interpreter about 0.2 us more.

    Tracers (debuggers, coverage) are left alone. The profiler of this thread, and the one that `threading` has for new
    threads, go on as they were; running threads get the latter: what one of them had set for itself is lost.
    """
    with _lock:
        if not _hook.is_in_force:
            # The profile hook is the one call that `threading` makes on a new thread before the thread's own code.
            _hook.previous = threading.getprofile()
            threading.setprofile(_hook)
        _guards.add(guard)
        _reach_running_threads()


def forget(guard: ThreadGuard) -> None:
    """Undo `guard_other_threads`. A second call is a no-op."""
    with _lock:
        _guards.discard(guard)
        if not _guards and _hook.is_in_force:
            threading.setprofile(_hook.previous)


def leave_before_end() -> None:
    """Have this thread leave every guard before it ends. A second call is a no-op."""
    if not hasattr(_of_thread, "end"):
        _of_thread.end = _End()


class _End:
    """Dies with the thread's local data, on that thread, while Python can still run there.

    What is entered then would be let go by the thread's destructors in C++, for which they need the interpreter: one
    that is about to exit ends such a thread, and thereby the process, by force.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __del__(self, this_thread: Any = threading.get_ident, mode_now: Any = _get_current_dispatch_mode) -> None:
        # An interpreter that exits lets the data of threads that have not ended die elsewhere.
        if this_thread() == self._thread:
            while isinstance(mode := mode_now(), KernelGuard) and mode.leave():
                pass


_of_thread = threading.local()


class _Hook:
    """The profile function of a thread that is to be reached; it takes itself away as soon as it has reached it."""

    previous: Any = None

    @property
    def is_in_force(self) -> bool:
        """Whether new threads begin with it."""
        return threading.getprofile() is self

    def __call__(self, frame: FrameType | None, event: str, argument: object) -> None:
        if not _is_safe_point(frame):
            return
        sys.setprofile(self.previous)
        for guard in list(_guards):
            guard.guard_thread()


_hook = _Hook()


def _is_safe_point(frame: FrameType | None) -> bool:
    """Whether a dispatch mode that is entered in this frame stays entered, and keeps nobody else's from ending."""
    # Modes leave by popping whatever is uppermost, so that ours must not come above one that will end.
    if not all(isinstance(mode, KernelGuard) and mode.permanent for mode in _get_current_dispatch_mode_stack()):
        return False
    # A backward pass ends by putting back the modes that it began with.
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch.autograd"):
            return False
        frame = frame.f_back
    return True


if sys.version_info >= (3, 12):

    def _reach_running_threads() -> None:
        mine = sys.getprofile()
        if mine is not None and not callable(mine):
            log.warning("a profiler in C runs on this thread; kernels on threads that run already are not checked")
            return
        threading.setprofile_all_threads(_hook)
        sys.setprofile(mine)

else:
    # What `threading.setprofile_all_threads` does, which Python 3.11 lacks.
    _api = ctypes.pythonapi
    _TraceFunction = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    _set_profile, _next_thread = _api["_PyEval_SetProfile"], _api["PyThreadState_Next"]
    _set_profile.argtypes = (ctypes.c_void_p, _TraceFunction, ctypes.c_void_p)
    _next_thread.argtypes, _next_thread.restype = (ctypes.c_void_p,), ctypes.c_void_p
    _this_interpreter, _first_thread = _api["PyInterpreterState_Get"], _api["PyInterpreterState_ThreadHead"]
    _this_interpreter.argtypes, _this_interpreter.restype = (), ctypes.c_void_p
    _first_thread.argtypes, _first_thread.restype = (ctypes.c_void_p,), ctypes.c_void_p
    _this_thread = _api["PyThreadState_Get"]
    _this_thread.argtypes, _this_thread.restype = (), ctypes.c_void_p

    def _call_hook(*_: object) -> int:
        try:
            _hook(sys._getframe().f_back, "", None)
        except BaseException:
            sys.setprofile(None)
            raise
        return 0

    # Kept for ever: a thread may call it long after everybody has forgotten about it.
    _at_next_event = _TraceFunction(_call_hook)

    def _reach_running_threads() -> None:
        # A thread that ends frees its state. None can while we hold the interpreter's lock, which is passed on between
        # two steps of Python code only: so the walk is one step, made by functions in C alone (which take no notice of
        # an argument too many), and without the finalizers that the garbage collector runs.
        first = map(_first_thread, [_this_interpreter()])
        states = itertools.accumulate(itertools.chain(first, itertools.repeat(0)), _next_thread)
        others = filter(partial(operator.ne, _this_thread()), itertools.takewhile(bool, states))
        collecting = gc.isenabled()
        gc.disable()
        try:
            deque(map(_set_profile, others, itertools.repeat(_at_next_event), itertools.repeat(None)), maxlen=0)
        finally:
            if collecting:
                gc.enable()
