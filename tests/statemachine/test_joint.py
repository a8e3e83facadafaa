"""A joint plan makes the slowest rank as fast as it can be, and never gives away more than a host has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from residency.errors import PlacementInfeasible
from residency.gpu.placement import HostTier, Mode
from residency.gpu.records import HostReading
from residency.statemachine.planner.joint import make_joint_plan
from residency.statemachine.planner.make_plan import make_plan
from residency.statemachine.planner.plan import HostShare

if TYPE_CHECKING:
    from residency.statemachine.planner.plan import PlanInputs
    from tests.statemachine.conftest import Build

MIB = 2**20
TIGHT = 300 * MIB  # not all of the 580 MiB of weights fit


def host(pin_mib: int, available_mib: int = 2**20) -> HostReading:
    return HostReading(available_bytes=available_mib * MIB, cgroup_cap_bytes=None, pin_budget_bytes=pin_mib * MIB)


def rank(build: Build, *, cap: int = TIGHT, pin_mib: int = 2**20, compute_ms: int = 10) -> PlanInputs:
    """Return a rank whose components compute for so long in every pass."""
    specs = build.specs()
    current = build.placement(specs)
    record = build.record(specs, current, compute_ns=compute_ms * 10**6)
    return build.inputs(cap=cap, specs=specs, current=current, records=(record,), host=host(pin_mib))


def test_one_rank_alone_gets_the_plan_that_it_would_make_for_itself(build: Build) -> None:
    inputs = rank(build)
    joint = make_joint_plan([inputs], ["a"])
    assert joint.plans == (make_plan(inputs),)
    assert (joint.slowest_rank, joint.duration_ns) == (0, joint.plans[0].prediction.duration_ns)
    assert joint.exact and joint.gap_ns == 0


def test_ranks_with_equal_inputs_are_solved_once_on_whatever_hosts_they_are(build: Build) -> None:
    joint = make_joint_plan([rank(build)] * 64, [f"host {number // 8}" for number in range(64)])
    assert joint.num_plans == 1
    assert len(joint.plans) == 64 and len(set(map(id, joint.plans))) == 1


def test_every_plan_can_be_made_again_from_the_inputs_that_come_with_it(build: Build) -> None:
    joint = make_joint_plan([rank(build, compute_ms=ms, pin_mib=300) for ms in (2, 40)], ["a", "a"])
    assert [make_plan(inputs) for inputs in joint.inputs] == list(joint.plans)


def test_equal_ranks_of_a_host_divide_what_may_be_pinned_equally(build: Build) -> None:
    joint = make_joint_plan([rank(build, pin_mib=500)] * 2, ["a", "a"])
    assert sum(plan.prediction.pinned_bytes for plan in joint.plans) <= 500 * MIB
    assert joint.plans[0] == joint.plans[1]
    assert joint.exact


def test_a_budget_is_of_a_host_and_not_of_all_hosts(build: Build) -> None:
    inputs = rank(build, pin_mib=500)
    joint = make_joint_plan([inputs] * 2, ["a", "b"])
    assert joint.plans == (make_plan(inputs),) * 2


def test_scarce_pinned_memory_goes_where_it_shortens_the_slowest_rank(build: Build) -> None:
    # One rank computes for long, so that even pageable copies hide behind it; the other one waits for every byte.
    hidden, waiting = rank(build, compute_ms=400, pin_mib=440), rank(build, compute_ms=300, pin_mib=440)
    waiting = replace(waiting, cap_bytes=220 * MIB)
    joint = make_joint_plan([hidden, waiting], ["a", "a"])
    equally = [
        make_plan(replace(one, host_share=HostShare(pinned_bytes=220 * MIB, new_bytes=2**40)))
        for one in (hidden, waiting)
    ]
    assert sum(plan.prediction.pinned_bytes for plan in joint.plans) <= 440 * MIB
    assert joint.plans[1].prediction.pinned_bytes > 220 * MIB
    assert joint.duration_ns < max(plan.prediction.duration_ns for plan in equally)


@pytest.mark.parametrize("pin_mib", [100, 320])
def test_no_other_division_makes_the_slowest_rank_faster_by_more_than_the_gap(build: Build, pin_mib: int) -> None:
    ranks = [
        rank(build, compute_ms=60, pin_mib=pin_mib),
        rank(build, compute_ms=20, cap=240 * MIB, pin_mib=pin_mib),
    ]
    joint = make_joint_plan(ranks, ["a", "a"])
    steps = range(0, pin_mib + 1, pin_mib // 20)
    times = {
        (number, part): make_plan(
            replace(one, host_share=HostShare(pinned_bytes=part * MIB, new_bytes=2**40))
        ).prediction.duration_ns
        for number, one in enumerate(ranks)
        for part in steps
    }
    best = min(max(times[0, part], times[1, pin_mib - part]) for part in steps)
    assert joint.duration_ns - joint.gap_ns <= best
    # A division into twentieths is no finer than ours into sixteenths by more than a step.
    coarser = min(max(times[0, max(0, part - pin_mib // 20)], times[1, pin_mib - part]) for part in steps)
    assert joint.duration_ns <= coarser


def test_ranks_that_are_faster_than_the_slowest_take_less_memory(build: Build) -> None:
    slow, quick = rank(build, compute_ms=200), rank(build, compute_ms=10)
    joint = make_joint_plan([slow, quick], ["a", "b"])
    alone = make_plan(quick)
    assert joint.slowest_rank == 0 and joint.duration_ns == make_plan(slow).prediction.duration_ns
    assert joint.plans[1].prediction.device_bytes < alone.prediction.device_bytes
    assert joint.plans[1].prediction.duration_ns <= joint.duration_ns
    assert joint.plans[1].bound_by == "nothing: it is as fast as the slowest rank"


def test_saving_device_memory_never_takes_more_than_the_host_has(build: Build) -> None:
    # Less on the device is more on the host.
    ranks = [rank(build, compute_ms=ms, pin_mib=700) for ms in (400, 10, 12)]
    joint = make_joint_plan(ranks, ["a"] * 3)
    assert sum(plan.prediction.pinned_bytes for plan in joint.plans) <= 700 * MIB


def test_a_rank_that_nothing_succeeded_on_changes_nothing_for_the_others(build: Build) -> None:
    timed = rank(build)
    failed = build.failed(timed.records[0], last="use:transformer")
    blind = replace(timed, records=(failed,), current=build.placement(timed.specs, vae=build.pinned))
    joint = make_joint_plan([blind, timed, timed], ["a", "b", "c"])
    assert joint.plans[1:] == (make_plan(timed),) * 2
    assert not joint.plans[0].prediction.timed and joint.plans[1].prediction.timed
    assert joint.slowest_rank == 1 and joint.duration_ns == make_plan(timed).prediction.duration_ns


def test_scarce_host_memory_is_divided_as_well(build: Build) -> None:
    specs = build.specs()
    current = build.resident(specs)
    inputs = build.inputs(cap=300 * MIB, current=current, initial=build.placement(specs), records=())
    inputs = replace(inputs, records=(build.record(specs, inputs.initial),), host=host(2**20, available_mib=700))
    alone = make_plan(replace(inputs, host=host(2**20)))
    taken = sum(
        spec.total_bytes - spec.device_bytes(alone.placement.components[spec.name], in_use=False) for spec in specs
    )
    assert 2 * taken > 700 * MIB, "the case must be scarce"
    joint = make_joint_plan([inputs] * 2, ["a", "a"])
    for one in joint.inputs:
        assert one.host_share is not None and one.host_share.new_bytes <= 350 * MIB


def test_pinned_copies_that_no_plan_may_touch_are_counted_first(build: Build) -> None:
    free = rank(build, pin_mib=540)
    fixed = replace(
        free,
        current=build.placement(free.specs, transformer=build.pinned),
        initial=build.placement(free.specs, transformer=build.pinned),
        records=(build.record(free.specs, build.placement(free.specs, transformer=build.pinned)),),
        configured={"transformer": "configured by the user"},
        cap_bytes=500 * MIB,
    )
    joint = make_joint_plan([fixed, free], ["a", "a"])
    assert sum(plan.prediction.pinned_bytes for plan in joint.plans) <= 540 * MIB
    assert joint.plans[0].placement.components["transformer"].tier is HostTier.PINNED


def test_a_joint_plan_is_the_same_wherever_it_is_made_and_its_digest_covers_every_rank(build: Build) -> None:
    ranks = [rank(build, compute_ms=ms, pin_mib=400) for ms in (5, 50)]
    one, again = make_joint_plan(ranks, ["a", "a"]), make_joint_plan(ranks, ["a", "a"])
    other = make_joint_plan([ranks[0], replace(ranks[1], cap_bytes=TIGHT + 60 * MIB)], ["a", "a"])
    assert one == again and one.digest == again.digest
    assert other.digest != one.digest


def test_where_nothing_fits_the_rank_is_named(build: Build) -> None:
    failed = build.failed(rank(build).records[0])
    with pytest.raises(PlacementInfeasible) as caught:
        make_joint_plan([rank(build), replace(rank(build), records=(failed,), cap_bytes=90 * MIB)], ["a", "b"])
    assert caught.value.__notes__ == ["on rank 1"]


def test_ranks_without_hosts_are_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="2 ranks on 1 hosts"):
        make_joint_plan([rank(build)] * 2, ["a"])
    with pytest.raises(ValueError, match="0 ranks"):
        make_joint_plan([], [])


def test_what_is_layerwise_on_one_rank_may_be_resident_on_another(build: Build) -> None:
    joint = make_joint_plan([rank(build), rank(build, cap=2**30)], ["a", "b"])
    modes = [plan.placement.components["transformer"].mode for plan in joint.plans]
    assert modes[0] is Mode.LAYERWISE_OFFLOAD
