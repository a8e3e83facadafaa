"""Whole rounds of real workers in forked children, with the system's calls on their journal killed or failed.

Run as `python -m tests.crash.rounds_server` with the library of shim.py preloaded; see jobs.py for how it is asked.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residency.effects.place import PlaceComponent
from residency.effects.transaction import Transaction
from residency.errors import ResidencyError
from residency.journal.store import Journal
from tests.crash.preloaded import load_tiny, start
from tests.crash.shim import Action, Kind, Shim

if TYPE_CHECKING:
    from collections.abc import Callable

START_S_MAX = 60


def tell_everything(say: Callable[..., None]) -> None:
    """Have every acknowledged append told, and every effect before it begins."""
    append, apply = Journal.append, PlaceComponent.apply

    def told(self: Journal, *args: Any, **kwargs: Any) -> Any:
        events = append(self, *args, **kwargs)
        say(acknowledged=[[event.position, event.hash.hex()] for event in events])
        return events

    def begun(self: PlaceComponent) -> None:
        say(effect=self.spec.component)
        apply(self)

    Journal.append = told  # type: ignore[method-assign]
    PlaceComponent.apply = begun  # type: ignore[method-assign]


def put_intents_after_effects() -> None:
    """Break the first rule of the journal: say what is to be done only when it was."""
    made = Transaction.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        on_intent, on_outcome = self._on_intent, self._on_outcome
        late: list[tuple[Any, ...]] = []

        def outcome(*told: Any, **named: Any) -> Any:
            while late:
                on_intent(*late.pop(0))
            return on_outcome(*told, **named)

        self._on_intent, self._on_outcome = lambda *spec: late.append(spec), outcome

    Transaction.__init__ = init  # type: ignore[method-assign]


def run(request: dict[str, Any], tiny: Any, shim: Shim, out: int) -> int:
    """Start one worker in this process; returns its exit status."""

    def say(**told: Any) -> None:
        os.write(out, (json.dumps(told) + "\n").encode())

    tell_everything(say)
    if request.get("mutation") == "intent after effect":
        put_intents_after_effects()
    shim.arm(
        Path(request["journal"]).parent,
        kinds=Kind(request.get("kinds", 0)),
        action=Action(request.get("action", 0)),
        at=request.get("at", 0),
        error=request.get("error", 0),
        sticky=bool(request.get("sticky")),
    )
    try:
        answer = start({"journal": request["journal"], "vanish": True}, tiny)
    except ResidencyError as error:
        say(error=str(error))
        return error.exit_code
    finally:
        if not isinstance(sys.exception(), ResidencyError | None):
            say(unexpected=traceback.format_exc()[-300:])
    num = shim.count()
    shim.disarm()
    say(calls=num, disturbed=shim.disturbed(), answer=answer)
    return 0


def serve(request: dict[str, Any], tiny: Any, shim: Shim) -> dict[str, Any]:
    """Start one worker in a forked child, and kill it after `after_s`, if it lives."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(START_S_MAX)
        status = 70
        try:
            status = run(request, tiny, shim, writing)
        finally:
            os._exit(status)
    os.close(writing)
    deadline = time.monotonic() + request.get("after_s", 2 * START_S_MAX)
    said = b""
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            deadline = time.monotonic() + START_S_MAX
            continue
        piece = os.read(reading, 65536)
        if not piece:
            break
        said += piece
    os.close(reading)
    _, status = os.waitpid(child, 0)
    # Of a child that was killed while it spoke, the last line may be cut; what it said then was not yet heard.
    lines = said.decode().split("\n")[:-1]
    return {"status": os.waitstatus_to_exitcode(status), "said": [json.loads(line) for line in lines]}


def main() -> None:
    """Serve requests until the input ends."""
    shim, tiny = Shim(), load_tiny()
    # One sample a side: a round of the same steps in half the time.
    tiny.POLICY = replace(tiny.POLICY, samples_max=1)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(serve(json.loads(line), tiny, shim)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
