"""The bound of a placement and its simulation: by hand on small requests, and as measured on a large one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner_models import GIB, MS, all_resident, component, flux_model, gib, use
from residency.errors import PlacementInfeasible
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.specs import window_bytes
from residency.statemachine.planner.best import best_placement, fastest_placement
from residency.statemachine.planner.bound import pass_bound_ns, placement_bound
from residency.statemachine.planner.layer_choice import evenly
from residency.statemachine.planner.request_model import ComponentUse, RequestModel, TimePhase
from residency.statemachine.planner.timeline import simulate


def layerwise(
    resident: dict[str, tuple[int, ...]] | None = None,
    held: dict[str, tuple[int, ...]] | None = None,
    *,
    window: float = 0,
    gives: float = 0,
    tier: HostTier = HostTier.PINNED,
) -> ComponentPlacement:
    return ComponentPlacement(
        mode=Mode.LAYERWISE_OFFLOAD,
        tier=tier,
        resident_layers=resident or {},
        held_layers=held or {},
        num_slots=2,
        window_bytes=gib(window),
        yield_bytes=gib(gives),
    )


def tiny(*, passes: int = 1, layer_ms: float = 10, tail_ms: float = 0) -> RequestModel:
    """Return one component of four layers of 1 GiB, 100 ms each on the link, and a tail that only computes."""
    loop = TimePhase(name="dit", uses=(use("dit", layer_ms * 4, blocks=(layer_ms, 4)),), passes=passes)
    tail = TimePhase(name="vae", uses=(ComponentUse(component="vae", compute_ns=round(tail_ms * MS)),))
    return RequestModel(
        specs=(component("dit", 4, blocks=(1, 4)), component("vae", 1)),
        phases=(loop, tail),
        pinned_bytes_per_s=gib(10),
        pageable_bytes_per_s=gib(1),
        cap_bytes=gib(100),
    )


def placed(dit: ComponentPlacement, vae: ComponentPlacement = RESIDENT) -> Placement:
    return Placement(components={"dit": dit, "vae": vae})


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_what_never_moves_costs_what_it_computes() -> None:
    model = tiny(tail_ms=50)
    placement = placed(RESIDENT)
    assert placement_bound(model, placement).total_ns == simulate(model, placement).request_ns == 90 * MS
    assert simulate(model, placement).to_device_bytes == 0


def test_a_request_that_streams_takes_what_the_link_takes() -> None:
    model = tiny(passes=3)
    # 12 GiB at 10 GiB/s, and no tail to hide any of it.
    assert placement_bound(model, placed(layerwise())).total_ns == 1200 * MS
    timeline = simulate(model, placed(layerwise()))
    assert timeline.request_ns == 1200 * MS
    assert timeline.exposed_ns == timeline.exposed_by_component["dit"] == 1080 * MS
    assert timeline.link_busy_ns == 1200 * MS and timeline.to_device_bytes == 12 * GIB


def test_what_is_held_crosses_the_link_once_a_request() -> None:
    model = tiny(passes=3)
    placement = placed(layerwise(held={"blocks": (0, 2)}))
    assert window_bytes(model.specs, placement) == 4 * GIB
    assert placement_bound(model, placement).total_ns == (2 + 3 * 2) * 100 * MS
    assert simulate(model, placement).to_device_bytes == 8 * GIB


def test_the_link_runs_ahead_into_the_next_request_as_far_as_the_window_has_room() -> None:
    for room, ahead in ((2, 2), (3, 3), (4, 4)):
        model = tiny(tail_ms=1000)
        placement = placed(layerwise(window=room))
        bound = placement_bound(model, placement)
        assert bound.phases[1].ahead_bytes == ahead * GIB
        assert bound.total_ns == (1000 + max(40, (4 - ahead) * 100)) * MS
        # The layer that is computed has its room, too: what is missing comes after it.
        assert simulate(model, placement).request_ns >= bound.total_ns


def test_what_a_phase_yields_holds_nothing_for_later() -> None:
    model = tiny(tail_ms=1000)
    vae = replace(RESIDENT, yield_bytes=gib(3))
    free = simulate(model, placed(layerwise(window=4)))
    yielding = simulate(model, placed(layerwise(window=4), vae))
    assert free.request_ns == 1040 * MS
    assert placement_bound(model, placed(layerwise(window=4), vae)).phases[1].ahead_bytes == 1 * GIB
    assert yielding.request_ns == (1000 + 310) * MS


def test_the_link_does_not_run_ahead_of_a_phase_that_yields_either() -> None:
    # What lies ready while the tail runs must lie outside of what it gets, also if it was fetched before.
    model = tiny(tail_ms=0, layer_ms=500)
    full = replace(RESIDENT, yield_bytes=gib(4))
    phase = placement_bound(model, placed(layerwise(window=4), full)).phases[0]
    assert phase.room_bytes == 4 * GIB and phase.ahead_bytes == 0
    assert simulate(model, placed(layerwise(window=4), full)).request_ns == 2100 * MS
    assert simulate(model, placed(layerwise(window=4))).request_ns == 2000 * MS


def test_a_whole_component_that_comes_when_it_is_entered_is_exposed() -> None:
    model = tiny(tail_ms=50)
    vae = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PAGEABLE)
    assert placement_bound(model, placed(RESIDENT, vae)).total_ns == 1090 * MS
    timeline = simulate(model, placed(RESIDENT, vae))
    assert timeline.request_ns == 1090 * MS and timeline.exposed_by_component["vae"] == 1000 * MS


def test_a_component_stays_until_another_is_entered() -> None:
    model = tiny(tail_ms=50)
    alone = replace(model, phases=model.phases[1:])
    assert model.num_entries == {"dit": (1, 0), "vae": (0, 1)}
    # A request that begins with what the last one ended with brings it again.
    assert alone.num_entries["vae"] == (1,)
    assert replace(alone, phases=(replace(alone.phases[0], passes=7),)).num_entries["vae"] == (1,)
    turns = TimePhase(name="both", uses=(model.phases[0].uses[0], model.phases[1].uses[0]), passes=5)
    assert replace(model, phases=(turns,)).num_entries == {"dit": (5,), "vae": (5,)}


def test_a_window_without_room_is_no_timeline() -> None:
    model = tiny(passes=2)
    with pytest.raises(ValueError, match="no room"):
        simulate(model, placed(layerwise(window=4, gives=3.5)))


def test_streamed_layers_lie_as_far_apart_as_they_can() -> None:
    assert evenly(0, 8) == ()
    assert evenly(1, 9) == (4,)
    assert evenly(4, 8) == (1, 3, 5, 7)
    assert evenly(8, 8) == tuple(range(8))
    assert all(len(set(evenly(num, 19))) == num for num in range(20))


# --- a large pipeline ------------------------------------------------------------------------------------------------


def streamed(*, double: int, single: int, encoder: int) -> Placement:
    """Return a placement that streams so many layers, spread, with two slots."""
    kept = {
        name: tuple(sorted(set(range(num)) - set(evenly(away, num))))
        for name, num, away in (("double", 19, double), ("single", 38, single), ("block", 24, encoder))
    }
    return Placement(
        components={
            "text_encoder": RESIDENT,
            "text_encoder_2": layerwise({"block": kept["block"]}) if encoder else RESIDENT,
            "transformer": layerwise({"double": kept["double"], "single": kept["single"]}),
            "vae": RESIDENT,
        }
    )


@pytest.mark.parametrize(
    ("double", "single", "encoder", "measured_s"),
    [(6, 24, 0, 0.905), (5, 10, 0, 0.821), (7, 22, 0, 0.923), (5, 21, 16, 0.9005), (6, 22, 14, 0.940)],
)
def test_the_simulation_is_close_to_what_a_card_did(double: int, single: int, encoder: int, measured_s: float) -> None:
    # Measured with a ring of its own for each group and a request at a time.
    model = flux_model(24)
    timeline = simulate(model, streamed(double=double, single=single, encoder=encoder))
    assert timeline.request_ns / 1e9 == pytest.approx(measured_s, rel=0.04)


def test_everything_resident_takes_what_it_computes() -> None:
    model = flux_model(36)
    assert simulate(model, all_resident(model)).request_ns == model.compute_ns
    assert best_placement(model)[1].total_ns == model.compute_ns


@pytest.mark.parametrize(("cap", "most_s"), [(24, 0.83), (12, 1.28)])
def test_a_large_pipeline_comes_close_to_its_bound_under_every_cap(cap: int, most_s: float) -> None:
    model = flux_model(cap)
    placement, timeline = fastest_placement(model)
    assert timeline.request_ns / 1e9 < most_s
    _, bound = best_placement(model)
    assert bound.total_ns <= timeline.request_ns
    assert_fits(model, placement)


def test_a_pipeline_that_cannot_fit_is_refused() -> None:
    with pytest.raises(PlacementInfeasible):
        best_placement(flux_model(2))


def test_fixed_components_stay_as_they_are() -> None:
    offloaded = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED)
    model = flux_model(16)
    placement, _ = best_placement(model, fixed={"text_encoder_2": offloaded})
    assert replace(placement.components["text_encoder_2"], yield_bytes=0) == offloaded
    assert_fits(model, placement)


def test_a_pin_budget_is_kept() -> None:
    model = flux_model(24)
    placement, bound = best_placement(model, pin_budget_bytes=gib(6))
    pinned = sum(
        spec.total_bytes - spec.device_bytes(one, in_use=False)
        for spec in model.specs
        if (one := placement.components[spec.name]).tier is HostTier.PINNED
    )
    assert pinned <= gib(6)
    assert bound.total_ns > best_placement(model)[1].total_ns


def assert_fits(model: RequestModel, placement: Placement) -> None:
    for phase in model.phases:
        for name in phase.components:
            held = sum(s.device_bytes(placement.components[s.name], in_use=s.name == name) for s in model.specs)
            window = window_bytes(model.specs, placement, active=(name,))
            assert held + window + phase.beside_bytes <= model.cap_bytes - model.reserve_bytes


# --- whatever the placement ------------------------------------------------------------------------------------------


@given(data=st.data())
def test_no_simulation_beats_the_bound(data: st.DataObject) -> None:
    passes = data.draw(st.integers(1, 5))
    model = tiny(passes=passes, layer_ms=data.draw(st.integers(1, 300)), tail_ms=data.draw(st.integers(0, 900)))
    kinds = data.draw(st.lists(st.sampled_from("rhs"), min_size=4, max_size=4))
    chosen = {kind: tuple(index for index, one in enumerate(kinds) if one == kind) for kind in "rhs"}
    gives = data.draw(st.integers(0, 3))
    dit = layerwise({"blocks": chosen["r"]}, {"blocks": chosen["h"]}, window=data.draw(st.integers(0, 8)))
    placement = placed(dit, replace(RESIDENT, yield_bytes=gib(gives)))
    timeline = simulate(model, placement, requests=8)
    bound = placement_bound(model, placement).total_ns
    # Nanoseconds are rounded stretch by stretch.
    assert bound - 10 <= pass_bound_ns(model, placement)
    assert pass_bound_ns(model, placement) - 10 <= timeline.request_ns
    assert timeline.request_ns == timeline.compute_ns + timeline.exposed_ns
