"""Random small instances, each planned and solved by trying everything: as one command.

    python -m benchmarks.planner_campaign --instances 10000 --seconds 3600

Several ranks on one or two hosts, phases, layer groups, what takes turns, page locks that are scarce, changes that give
memory back, and instances that nothing fits. Ends with 1 at the first one in which the plan is not the best there is,
with the seed that gives it again. The tests run a few with fixed seeds.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from benchmarks.planner_models import component, measured, use
from residency.errors import PlacementInfeasible
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.records import HostReading, LinkReading
from residency.gpu.workload import Workload
from residency.statemachine.planner.constraints import phase_limits
from residency.statemachine.planner.holdings import idle_bytes, pinned_bytes, weight_bytes
from residency.statemachine.planner.joint import make_joint_plan
from residency.statemachine.planner.make_plan import make_plan, request_model
from residency.statemachine.planner.options import Options
from residency.statemachine.planner.plan import PlanInputs
from residency.statemachine.planner.request_model import RequestModel, TimePhase
from residency.statemachine.planner.room import Room
from residency.statemachine.planner.timeline import simulate
from residency.statemachine.planner.transition import transition_peak
from residency.statemachine.policy import GIB, Policy

if TYPE_CHECKING:
    from collections.abc import Iterator

WINDOWS = 1
POLICY = Policy(
    reserve_measured_bytes=0,
    equal_fraction_max=1.0,
    window_levels=WINDOWS,
    simulations_max=10**6,
    byte_levels=10**6,
    busy_slowdown=0.0,
)
WHOLE = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PAGEABLE)
PINNED = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED)
SHAPE = Workload(width=512, height=512, frames=1, steps=3, batch=1)


@dataclass(slots=True)
class Tally:
    """What was seen. num_moves_down: plans that hold less than the current placement."""

    num_instances: int = 0
    num_infeasible: int = 0
    num_moves_down: int = 0
    num_ranks: int = 0


def draw(seed: int) -> PlanInputs:
    """Return a random instance of one rank: up to three components, two layer groups, one loop."""
    chance = random.Random(seed)

    def size() -> float:
        return chance.randint(1, 40) / 1024  # GiB, so that link times are tens of ms

    names = ("encoder", "transformer", "vae")[: chance.randint(1, 3)]
    groups: dict[str, dict[str, tuple[float, int]]] = {name: {} for name in names}
    for name in names[:2]:
        for group in ("first", "second")[: chance.randint(0, 2 if name == "transformer" else 1)]:
            groups[name][group] = (size(), chance.randint(1, 2))
    specs = tuple(
        component(name, size() + sum(each * num for each, num in groups[name].values()), **groups[name])
        for name in names
    )
    phases = tuple(
        TimePhase(
            name=name,
            uses=(
                use(
                    name,
                    chance.choice([0, 5, 40]),
                    **{group: (chance.choice([0, 1, 8]), num) for group, (_, num) in groups[name].items()},
                ),
            ),
            passes=3 if name == "transformer" else 1,
            beside_bytes=chance.randint(0, 60) * 2**20,
        )
        for name in names
    )
    cap = chance.randint(20, 260) * 2**20
    model = RequestModel(
        specs=specs, phases=phases, pinned_bytes_per_s=2 * GIB, pageable_bytes_per_s=GIB, cap_bytes=cap
    )
    current = Placement(components={name: chance.choice([RESIDENT, WHOLE, PINNED]) for name in names})
    return PlanInputs(
        specs=specs,
        configured={name: "set" for name in names if chance.random() < 0.1},
        current=current,
        initial=current,
        records=(measured(model, current, SHAPE),),
        cap_bytes=cap,
        link=LinkReading(
            to_device_pinned=2.0 * GIB, to_device_pageable=1.0 * GIB, to_host_pinned=GIB, to_host_pageable=GIB
        ),
        host=HostReading(available_bytes=2**40, cgroup_cap_bytes=None, pin_budget_bytes=chance.randint(0, 260) * 2**20),
        workload=SHAPE,
        policy=POLICY,
        noise_ns=chance.choice([0, 0, 10_000_000]),
    )


def brute_force(inputs: PlanInputs) -> tuple[int, Placement] | None:
    """Return the least time of everything that fits, and the placement that the rules choose; None: nothing fits."""
    model = request_model(inputs, phase_limits(inputs))
    pinned_max = max(inputs.host.pin_budget_bytes, pinned_bytes(inputs.specs, inputs.current))
    found: dict[str, tuple[int, int, int, int, str, Placement]] = {}
    for placement in everything(inputs, model, pinned_max=pinned_max):
        digest = placement.digest
        fits = digest not in found and all(
            weight_bytes(inputs.specs, placement, active=one.active, lingering=one.lingering) <= one.limit_bytes
            for one in model.memory_limits
        )
        way = transition_peak(inputs, inputs.current, placement, inputs.cap_bytes).pinned_bytes
        if not fits or way > pinned_max:
            continue
        try:
            request_ns = simulate(model, placement).request_ns
        except ValueError:
            continue  # its window is too much in pieces
        idle, pinned = idle_bytes(inputs.specs, placement), pinned_bytes(inputs.specs, placement)
        changes = len(inputs.current.changes_to(placement))
        found[digest] = (request_ns, idle, pinned, changes, digest, placement)
    if not found:
        return None
    least_ns = min(one[0] for one in found.values())
    tolerance = min(inputs.noise_ns, least_ns)
    best = min((one for one in found.values() if one[0] <= least_ns + tolerance), key=lambda one: one[1:5])
    return least_ns, best[5]


def everything(inputs: PlanInputs, model: RequestModel, *, pinned_max: int) -> Iterator[Placement]:
    """Yield every combination of options with every size of the window, whether it fits or not."""
    scarce = pinned_max < sum(spec.total_bytes for spec in inputs.specs)
    tiers = (HostTier.PINNED, HostTier.PAGEABLE) if scarce else (HostTier.PINNED,)
    options = Options(model, num_levels=POLICY.byte_levels, num_slots=POLICY.num_slots, tiers=tiers)
    room = Room(model)
    every = [
        [options.fixed(spec, inputs.current.components[spec.name]).head]
        if spec.name in inputs.configured
        else [
            one for family in options.of(spec, known=(inputs.current.components[spec.name],)) for one in family.members
        ]
        for spec in inputs.specs
    ]
    yield inputs.current
    for parts in product(*every):
        caps = room.caps(parts)
        if caps is None:
            continue
        least = room.needed(parts)
        for window in (None, *(least + max(0, caps[0] - least) * number // WINDOWS for number in range(WINDOWS))):
            placement = room.placement(parts, window=window)
            if placement is not None:
                yield placement


def check(seed: int, tally: Tally) -> str | None:
    """Return what is wrong with the plan of an instance; None if nothing is."""
    inputs = draw(seed)
    wanted = brute_force(inputs)
    tally.num_instances += 1
    if wanted is None:
        tally.num_infeasible += 1
        failed = replace(inputs.records[0], succeeded=False, out_of_memory=True, error="out of memory")
        try:
            plan = make_plan(replace(inputs, records=(*inputs.records, failed)))
        except PlacementInfeasible:
            return None
        return f"nothing fits, but {plan.placement.digest} was planned"
    plan = make_plan(inputs)
    if plan.placement != wanted[1]:
        return f"planned {plan.placement.digest}, the best is {wanted[1].digest}"
    if not plan.exact or plan.gap_ns:
        return f"a gap of {plan.gap_ns} ns where everything was weighed"
    if plan.prediction.device_bytes < idle_bytes(inputs.specs, inputs.current):
        tally.num_moves_down += 1
    return check_ranks(seed, inputs, tally) if seed % 10 == 0 else None


def check_ranks(seed: int, inputs: PlanInputs, tally: Tally) -> str | None:
    """Return what is wrong with the joint plan of an instance and one or two others; None if nothing is."""
    chance = random.Random(seed)
    others = [draw(seed + 1 + number) for number in range(chance.randint(1, 2))]
    ranks = [replace(one, host=inputs.host) for one in (inputs, *others)]
    hosts = [chance.choice(["one", "other"]) for _ in ranks]
    try:
        joint = make_joint_plan(ranks, hosts)
    except PlacementInfeasible:
        return None
    tally.num_ranks += len(ranks)
    for host in set(hosts):
        here = [number for number, name in enumerate(hosts) if name == host]
        present = sum(pinned_bytes(ranks[one].specs, ranks[one].current) for one in here)
        taken = sum(joint.plans[one].prediction.pinned_bytes for one in here)
        if taken > max(inputs.host.pin_budget_bytes, present):
            return f"the ranks on host {host!r} pin {taken} bytes together"
    slowest = max(plan.prediction.duration_ns for plan in joint.plans)
    if slowest != joint.duration_ns:
        return f"the slowest rank takes {slowest} ns, the joint plan says {joint.duration_ns} ns"
    alone = [found for one in ranks if (found := brute_force(one)) is not None]
    is_alone = len(set(hosts)) == len(hosts)
    if len(alone) == len(ranks) and is_alone:
        least_ns = max(found[0] for found in alone)
        if not least_ns <= slowest <= least_ns + max(one.noise_ns for one in ranks):
            return f"the slowest rank takes {slowest} ns, by itself it could take {least_ns} ns"
    if [make_plan(one) for one in joint.inputs] != list(joint.plans):
        return "a rank's plan cannot be made again from its inputs"
    return None


def main() -> int:
    """Run it; the exit status is 1 if a plan was wrong."""
    parser = argparse.ArgumentParser(description="random instances against trying everything")
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long")
    parser.add_argument("--first-seed", type=int, default=0)
    asked = parser.parse_args()
    tally, started = Tally(), time.monotonic()
    for seed in range(asked.first_seed, asked.first_seed + asked.instances):
        problem = check(seed, tally)
        if problem is not None:
            sys.stdout.write(f"seed {seed}: {problem}\n")
            return 1
        if time.monotonic() - started > asked.seconds:
            break
    sys.stdout.write(f"all agree: {tally} in {time.monotonic() - started:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
