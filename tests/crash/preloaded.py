"""A process that has everything imported and forks one child for every start of a worker that a test asks for.

Reads one JSON request a line, answers one JSON line: {"status": exit status or -signal, "answer": what the child said}.
It runs no kernel itself, so that its children inherit no thread pool.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

import residency
from residency.effects.place import PlaceComponent
from residency.errors import ProcessPoisoned, ResidencyError, RollbackFailed
from residency.gpu.output import output_digest
from residency.journal.store import Journal

torch.set_num_threads(1)
# A worker imports it when it attaches; here that would be once for every child.
assert residency.attach is not None
CHILD_S_MAX = 120


def load_tiny() -> Any:
    """Import the tiny pipeline that the round tests use."""
    path = Path(__file__).parents[1] / "worker" / "tiny.py"
    spec = spec_from_file_location("tiny", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["tiny"] = module
    spec.loader.exec_module(module)
    return module


def die_at(append: int, *, before: bool, signum: int) -> None:
    """Have the process killed just before or just after its n-th append to the journal."""
    plain = Journal.append
    done = 0

    def counted(self: Journal, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        if before and done == append:
            os.kill(os.getpid(), signum)
        events = plain(self, *args, **kwargs)
        if not before and done == append:
            os.kill(os.getpid(), signum)
        return events

    Journal.append = counted  # type: ignore[method-assign]


class Die:
    """An observer that kills the process when a state is left, or before an effect is applied."""

    def __init__(self, state: str | None, effect: int | None, signum: int) -> None:
        self._state, self._effect, self._signum = state, effect, signum

    def working(self, what: str) -> None:
        pass

    def leaving(self, state: str) -> None:
        if state == self._state:
            os.kill(os.getpid(), self._signum)

    def between_effects(self, index: int) -> None:
        if index == self._effect:
            os.kill(os.getpid(), self._signum)


def break_rollback(manager: Any) -> None:
    """Have validation fail, and the way back, too."""
    initial = manager.placement

    def fail(*args: Any) -> None:
        raise RuntimeError("the device is gone")

    def warmup(shape: Any) -> Any:
        if manager.placement != initial:
            PlaceComponent.revert = fail  # type: ignore[assignment,method-assign]
            raise RuntimeError("the device is going")
        return plain(shape)

    plain = manager._setup.worker._warmup
    manager._setup.worker._warmup = warmup


def lose_device(manager: Any, where: str) -> None:
    """Have the device lost in a validation, or in the way back from one that fails; nothing may be moved after that."""
    initial = manager.placement

    def lose(*args: Any) -> None:
        PlaceComponent.apply = PlaceComponent.revert = die  # type: ignore[assignment,method-assign]
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def die(*args: Any) -> None:
        os._exit(1)

    def warmup(shape: Any) -> Any:
        if manager.placement == initial:
            return plain(shape)
        if where == "validation":
            lose()
        PlaceComponent.revert = lose  # type: ignore[assignment,method-assign]
        raise RuntimeError("no such prompt")

    plain = manager._setup.worker._warmup
    manager._setup.worker._warmup = warmup


def terminate_in_control(manager: Any, signum: int) -> None:
    """Have a round run on another thread, as a control request over HTTP does, and send a signal in its middle."""

    def leaving(state: str) -> None:
        if state == "applied":
            os.kill(os.getpid(), signum)
            time.sleep(0.5)  # the main thread takes the signal

    manager._status.leaving = leaving
    asked = {"verb": "validate", "epoch": manager.epoch}
    thread = threading.Thread(target=manager.handle, args=(asked,), daemon=True)
    thread.start()
    thread.join(60)


def start(request: dict[str, Any], tiny: Any) -> dict[str, Any]:
    """Start one worker, serve one request, and say what came of it."""
    if "append" in request:
        die_at(request["append"], before=request["before"], signum=request.get("signal", signal.SIGKILL))
    journal = request["journal"]
    worker = tiny.Worker(journal if "://" in journal else Path(journal))
    die = Die(request.get("state"), request.get("effect"), request.get("signal", signal.SIGKILL))
    manager = worker.attach(observer=die, **request.get("options", {}))
    if request.get("break_rollback"):
        manager._setup.worker.place(manager._setup.initial)
        break_rollback(manager)
    if "lose_device" in request:
        manager._setup.worker.place(manager._setup.initial)
        lose_device(manager, request["lose_device"])
    appends = 0
    plain = Journal.append

    def counted(self: Journal, *args: Any, **kwargs: Any) -> Any:
        nonlocal appends
        appends += 1
        return plain(self, *args, **kwargs)

    Journal.append = counted  # type: ignore[method-assign]
    try:
        report = manager.start()
    except (RollbackFailed, ProcessPoisoned):
        assert not manager.ready
        raise
    answer: dict[str, Any] = report.to_json()
    with manager.request():
        answer["output"] = output_digest(worker.pipeline.request(tiny.WORKLOAD))
    if "terminate_in_control" in request:
        terminate_in_control(manager, request["terminate_in_control"])
    if "terminate" in request:
        os.kill(os.getpid(), request["terminate"])
    if not request.get("vanish"):
        manager.detach()
    answer["appends"] = appends
    return answer


def serve(request: dict[str, Any], tiny: Any) -> dict[str, Any]:
    """Fork, start a worker in the child, and wait for it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(CHILD_S_MAX)
        code = 0
        try:
            said = json.dumps(start(request, tiny))
        except ResidencyError as error:
            said, code = json.dumps({"error": str(error), "ready": False}), error.exit_code
        with os.fdopen(writing, "w") as pipe:
            pipe.write(said)
        # As a crash leaves it, without the interpreter's own clean-up; what a worker must do it has done.
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return {"status": os.waitstatus_to_exitcode(status), "answer": json.loads(said) if said else None}


def main() -> None:
    """Serve requests until the input ends."""
    tiny = load_tiny()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(serve(json.loads(line), tiny)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
