"""A worker on a CUDA device in a process of its own, which can lose the device in the middle of a round.

Arguments: a journal, and where: 'baseline', 'validation', or 'nowhere'. Prints its decision; ends with its exit code.
"""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

import residency
from residency.gpu.devices import open_device

WIDTH = 8192  # 0.25 GiB a layer in single precision: 0.25, 1.5 and 0.75 GiB in all
CAP_BYTES = 2 * 2**30 + 5 * 2**27


def load_tiny() -> Any:
    """Import the tiny pipeline that the round tests use."""
    spec = spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["tiny"] = module
    spec.loader.exec_module(module)
    return module


def main(journal: str, where: str) -> int:
    """Start the worker, serve one request, and return the exit code."""
    tiny = load_tiny()
    pipeline = tiny.make_pipeline(WIDTH, "cuda")
    manager = residency.attach(
        pipeline.modules,
        journal=journal,
        workload=tiny.WORKLOAD,
        warmup=pipeline.request,
        name="tiny",
        device=open_device("cuda", cap_bytes=CAP_BYTES),
        identity=dict.fromkeys(pipeline.modules, "seed 0"),
        policy=tiny.POLICY,
    )
    initial = manager._setup.initial

    def fail(shape: Any) -> None:
        if where == "baseline" or (where == "validation" and manager.placement != initial):
            # An index out of range, which a kernel asserts; nobody waits for it here, so that it is told of later.
            torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]

    pipeline.fail = fail
    try:
        report = manager.start()
    except residency.ResidencyError as error:
        print(json.dumps({"error": str(error), "ready": manager.ready}))  # noqa: T201
        return error.exit_code
    output = pipeline.request(tiny.WORKLOAD)
    print(json.dumps({**report.to_json(), "is_finite": bool(output.isfinite().all())}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
