"""The way to a placement: what it takes beyond both ends, and that a plan has room for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.records import HostReading
from residency.statemachine.planner.make_plan import make_plan
from residency.statemachine.planner.transition import transition_peak

if TYPE_CHECKING:
    from residency.gpu.records import RequestRecord
    from tests.statemachine.conftest import Build

MIB = 2**20
STREAMED = ComponentPlacement(mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PINNED, num_slots=2)


def test_what_takes_the_place_of_pinned_copies_is_pinned_beside_them_where_the_device_is_full(build: Build) -> None:
    specs = (build.spec("first", 100 * MIB), build.spec("second", 120 * MIB))
    inputs = build.inputs(cap=2**40, specs=specs)
    before = build.placement(specs, first=RESIDENT, second=build.pinned)
    after = build.placement(specs, first=build.pinned, second=RESIDENT)
    # The first must leave the device before the second finds room there; with room for both, page locks go first.
    full, roomy = (transition_peak(inputs, before, after, cap * MIB) for cap in (130, 300))
    assert (full.pinned_bytes, full.device_bytes) == (220 * MIB, 120 * MIB)
    assert (roomy.pinned_bytes, roomy.device_bytes) == (120 * MIB, 220 * MIB)


def test_a_plan_whose_way_would_pin_more_than_the_host_has_is_not_made(build: Build) -> None:
    specs = (
        build.spec("encoder", 200 * MIB),
        build.spec("transformer", 440 * MIB, layers=(50 * MIB,) * 8),
        build.spec("vae", 100 * MIB),
    )
    current = build.placement(specs, encoder=build.pinned, transformer=RESIDENT, vae=RESIDENT)
    record = build.record(specs, current, compute_ns=1_000_000)
    inputs = build.inputs(cap=580 * MIB, specs=specs, current=current, initial=current, records=(record,))
    is_bound = []
    for budget in range(200, 600, 80):
        host = HostReading(available_bytes=2**40, cgroup_cap_bytes=None, pin_budget_bytes=budget * MIB)
        plan = make_plan(replace(inputs, host=host))
        peak = transition_peak(inputs, current, plan.placement, inputs.cap_bytes)
        assert peak.pinned_bytes <= budget * MIB
        # With nothing pinned before, the way is no longer than its end.
        free = build.placement(specs, transformer=RESIDENT, vae=RESIDENT)
        unbound = replace(inputs, host=host, current=free, initial=free, records=(replace_digest(record, free),))
        is_bound.append(plan.prediction.duration_ns > make_plan(unbound).prediction.duration_ns)
    assert any(is_bound), "the case must be one in which the way binds"


def replace_digest(record: RequestRecord, placement: Placement) -> RequestRecord:
    return replace(record, placement_digest=placement.digest)


def components() -> st.SearchStrategy[ComponentPlacement]:
    return st.sampled_from(
        [
            RESIDENT,
            ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED),
            ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PAGEABLE),
            STREAMED,
            replace(STREAMED, resident_layers={"blocks": (1, 3, 5)}),
            replace(STREAMED, tier=HostTier.PAGEABLE, resident_layers={"blocks": (0, 1, 2, 3)}),
        ]
    )


@given(
    before=st.tuples(*[components()] * 4),
    after=st.tuples(*[components()] * 4),
    cap_mib=st.integers(min_value=1, max_value=800),
)
def test_device_memory_on_the_way_is_within_the_cap_or_no_higher_than_at_one_of_its_ends(
    build: Build, before: tuple[ComponentPlacement, ...], after: tuple[ComponentPlacement, ...], cap_mib: int
) -> None:
    specs = tuple(build.spec(f"part {n}", (n + 7) * 10 * MIB, layers=((n + 1) * MIB,) * 8) for n in range(4))
    inputs = build.inputs(cap=2**40, specs=specs)
    one, other = (
        Placement(components={spec.name: where for spec, where in zip(specs, found, strict=True)})
        for found in (before, after)
    )
    ends = [
        sum(spec.device_bytes(found.components[spec.name], in_use=False) for spec in specs) for found in (one, other)
    ]
    peak = transition_peak(inputs, one, other, cap_mib * MIB)
    assert max(ends) <= peak.device_bytes <= max(*ends, cap_mib * MIB * 7 // 8)
    assert peak.pinned_bytes <= transition_peak(inputs, one, other, 1).pinned_bytes
