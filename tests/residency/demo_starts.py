"""A process that has diffusers imported and forks one child for every start of the demo that a test asks for.

Reads one JSON request a line ({"arguments", "environment", "terminal"}) and answers with one JSON line: the exit status
or -signal, and what the child wrote. It runs no kernel itself, so that its children inherit no thread pool.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from importlib import import_module
from typing import Any

import torch

from residency.cli import main as residency_main
from residency.demo import quieten

torch.set_num_threads(1)
START_S_MAX = 120


def start(request: dict[str, Any], out: int, err: int) -> None:
    """Be one start of the demo; never returns."""
    os.dup2(out, sys.stdout.fileno())
    os.dup2(err, sys.stderr.fileno())
    os.environ.update(request["environment"])
    signal.alarm(START_S_MAX)
    code = 1
    try:
        code = residency_main(["demo", *request["arguments"]])
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def everything_from(descriptor: int) -> bytes:
    """Read until the other end is closed, which a terminal tells as an error."""
    read = b""
    while True:
        try:
            more = os.read(descriptor, 65536)
        except OSError:
            return read
        if not more:
            return read
        read += more


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Fork, run the demo in the child, and wait for it."""
    reading, err = os.openpty() if request["terminal"] else os.pipe()
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if child == 0:
            os.close(reading)
            start(request, out.fileno(), err)
        os.close(err)
        said = everything_from(reading)
        os.close(reading)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        return {"status": os.waitstatus_to_exitcode(status), "out": out.read().decode(), "err": said.decode()}


def main() -> None:
    """Import once what every start needs, then serve requests until the input ends."""
    quieten()
    import_module("residency.demo_pipeline")
    for line in sys.stdin:
        answer = json.dumps(serve(json.loads(line)))
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
