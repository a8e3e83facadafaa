"""The greedy planner that ours is compared with: a fair one, and never a better one."""

from __future__ import annotations

import pytest

from benchmarks.planner_baseline import bytes_times_uses, compare
from benchmarks.planner_models import flux_model, wan_model
from benchmarks.request_time_shards import BYTES_USES, GIB, Mode, parse_peers
from residency.gpu.placement import Mode as PlacementMode
from residency.statemachine.planner.holdings import weight_bytes


@pytest.mark.parametrize("cap", [24, 8])
def test_the_greedy_placement_fits_every_memory_phase(cap: float) -> None:
    model = flux_model(cap)
    placement = bytes_times_uses(model)
    for limit in model.memory_limits:
        taken = weight_bytes(model.specs, placement, active=limit.active, lingering=limit.lingering)
        assert taken <= limit.limit_bytes, limit.key


def test_with_enough_memory_the_greedy_planner_keeps_everything() -> None:
    placement = bytes_times_uses(wan_model(60))
    assert {one.mode for one in placement.components.values()} == {PlacementMode.RESIDENT}


def test_ours_is_never_slower_and_at_one_cap_faster_by_a_tenth() -> None:
    found = [*compare(flux_model, (28, 16)), *compare(wan_model, (12,))]
    assert len(found) == 3
    assert all(ours <= theirs for _, theirs, ours in found)
    assert max(1 - ours / theirs for _, theirs, ours in found) >= 0.10


def test_it_is_a_row_of_the_benchmark_of_requests_if_it_is_named() -> None:
    caps = (16 * GIB,)
    (mode,) = parse_peers("bytes-times-uses", caps)
    assert mode == Mode(kind=BYTES_USES, cap_bytes=16 * GIB) and not mode.is_peer
    assert all(one.kind != BYTES_USES for one in parse_peers("all", caps))
