"""How long plans take: a target case, and curves over layers and ranks with their growth.

    python -m benchmarks.planner
    python -m benchmarks.planner --layers 25,50,100,200,400 --ranks 1,8,64

Processor seconds of one core, the least of some runs: a busy machine adds to them, and takes nothing away.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.planner_models import component, flux_inputs, flux_model, gib, measured, use
from residency.gpu.workload import Workload
from residency.statemachine.planner.joint import make_joint_plan
from residency.statemachine.planner.make_plan import make_plan
from residency.statemachine.planner.request_model import RequestModel, TimePhase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from residency.statemachine.planner.plan import PlanInputs

SHAPE = Workload(width=1024, height=1024, frames=1, steps=4, batch=1)
RANKS_PER_HOST = 8


def target_inputs(cap_gib: float = 16.0) -> PlanInputs:
    """Return 4 components, of which one has 57 layers in 2 groups, and 12 memory phases."""
    inputs = flux_inputs(cap_gib)
    (record,) = inputs.records
    between = [one for one in record.phases if not one.active]
    more = [replace(one, key=f"{one.key} again") for one in between]
    return replace(inputs, records=(replace(record, phases=(*record.phases, *more)),))


def layered_inputs(num_layers: int) -> PlanInputs:
    """Return an image pipeline with so many layers in all, of the same bytes and times together."""
    base = flux_model(16)
    double = max(1, num_layers * 19 // 93)
    single = max(1, num_layers * 38 // 93)
    block = max(1, num_layers - double - single)
    encoder = use("text_encoder_2", 24.3, block=(24 / block, block))
    passes = use("transformer", 172.8, double=(60.6 / double, double), single=(111 / single, single))
    model = RequestModel(
        specs=(
            component("text_encoder_2", 8.87, block=(8.6 / block, block)),
            component("transformer", 22.17, double=(12.0 / double, double), single=(10.0 / single, single)),
            component("vae", 0.16),
        ),
        phases=(
            TimePhase(name="text_encoder_2", uses=(encoder,), beside_bytes=gib(0.25)),
            TimePhase(name="transformer", uses=(passes,), passes=4, beside_bytes=gib(0.5)),
            TimePhase(name="vae", uses=(use("vae", 86.5),), beside_bytes=gib(2.45)),
        ),
        pinned_bytes_per_s=base.pinned_bytes_per_s,
        pageable_bytes_per_s=base.pageable_bytes_per_s,
        cap_bytes=base.cap_bytes,
        reserve_bytes=base.reserve_bytes,
    )
    inputs = flux_inputs(16)
    current = replace(inputs.current, components={spec.name: inputs.current.components["vae"] for spec in model.specs})
    return replace(
        inputs, specs=model.specs, current=current, initial=current, records=(measured(model, current, SHAPE),)
    )


def unequal(inputs: PlanInputs, num: int) -> list[PlanInputs]:
    """Return the inputs of so many ranks that measured slightly different times."""
    (record,) = inputs.records
    return [
        replace(inputs, records=(replace(record, duration_ns=record.duration_ns + number * 1_000_000),))
        for number in range(num)
    ]


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the least processor seconds of some runs."""
    found = []
    for _ in range(repeats):
        started = time.process_time()
        run()
        found.append(time.process_time() - started)
    return min(found)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _curve(name: str, sizes: Sequence[int], measure: Callable[[int], float]) -> None:
    before: tuple[int, float] | None = None
    for size in sizes:
        took = measure(size)
        growth = ""
        if before is not None:
            growth = f"  as the power {math.log(took / before[1]) / math.log(size / before[0]):.1f}"
        _say(f"{size:>5} {name}: {took:7.3f} s{growth}")
        before = size, took


def main() -> None:
    """Print the target case and the curves."""
    parser = argparse.ArgumentParser(description="how long plans take")
    parser.add_argument("--layers", default="25,50,100,200,400")
    parser.add_argument("--ranks", default="1,8,64")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    layers, ranks = ([int(word) for word in text.split(",")] for text in (asked.layers, asked.ranks))
    target = target_inputs()
    hosts = ["host"] * 8
    took = seconds(lambda: make_joint_plan([target] * 8, hosts), asked.repeats)
    joint = make_joint_plan([target] * 8, hosts)
    _say(f"4 components, 57 layers in 2 groups, 12 memory phases, 8 equal ranks: {took:.3f} s, gap {joint.gap_ns} ns")
    _curve("layers, one rank", layers, lambda num: seconds(lambda: make_plan(layered_inputs(num)), asked.repeats))

    def of_ranks(num: int) -> float:
        inputs = unequal(layered_inputs(50), num)
        return seconds(lambda: make_joint_plan(inputs, [f"host {n // RANKS_PER_HOST}" for n in range(num)]), 1)

    _curve("unequal ranks of 50 layers", ranks, of_ranks)


if __name__ == "__main__":
    main()
