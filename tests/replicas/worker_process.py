"""A real worker over a tiny pipeline that serves its control app: worker_process.py JOURNAL PORT HOLD.

While the file HOLD exists, every warmup request waits in its middle.
"""

from __future__ import annotations

import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import uvicorn

import residency
from residency.http_app import ControlApp


def main() -> None:
    journal, port, hold = sys.argv[1:]
    # Kernels this small are slower on several threads, and much slower on a busy machine.
    torch.set_num_threads(1)
    spec = spec_from_file_location("tiny", Path(__file__).parents[1] / "worker" / "tiny.py")
    assert spec is not None and spec.loader is not None
    tiny: Any = module_from_spec(spec)
    sys.modules["tiny"] = tiny
    spec.loader.exec_module(tiny)
    worker = tiny.Worker(Path(journal))
    manager = worker.attach(policy=residency.Policy(image_area_max=128 * 128, samples_max=1))

    def wait(_: object) -> None:
        while Path(hold).exists():
            time.sleep(0.01)

    worker.pipeline.fail = wait
    manager.start()
    uvicorn.run(ControlApp(manager), port=int(port), log_level="error", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
