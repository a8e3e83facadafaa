"""Moving one component as an effect, and the order in which several are moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from residency.effects.place import PlaceComponent, order_effects
from residency.effects.spec import EffectSpec
from residency.errors import ModeUnavailable, UnknownComponent
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode

if TYPE_CHECKING:
    from residency.gpu.pipeline import ManagedPipeline

PAGEABLE = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PAGEABLE)
PINNED = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED)


def change(component: str, before: ComponentPlacement, after: ComponentPlacement) -> EffectSpec:
    return EffectSpec(index=0, component=component, before=before, after=after)


def test_apply_and_revert_are_exact_and_may_be_repeated(pipeline: ManagedPipeline) -> None:
    before = pipeline.placement
    effect = PlaceComponent(pipeline, change("big", RESIDENT, PINNED))
    effect.check()
    effect.apply()
    effect.apply()
    assert pipeline.placement.components["big"] == PINNED
    assert pipeline.device.memory().allocated_bytes == pipeline.component("small").spec.total_bytes
    effect.revert()
    effect.revert()
    assert pipeline.placement == before
    assert pipeline.pinned_bytes == 0


def test_check_refuses_what_cannot_be_applied_or_taken_back(pipeline: ManagedPipeline) -> None:
    mapped = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.MAPPED)
    for spec in (change("big", RESIDENT, mapped), change("big", mapped, RESIDENT)):
        with pytest.raises(ModeUnavailable):
            PlaceComponent(pipeline, spec).check()
    with pytest.raises(UnknownComponent):
        PlaceComponent(pipeline, change("absent", RESIDENT, PAGEABLE)).check()


def test_what_frees_memory_and_pins_comes_before_what_takes_them(pipeline: ManagedPipeline) -> None:
    layerwise = ComponentPlacement(mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PINNED, num_slots=1)
    cases = [
        ([change("big", PAGEABLE, RESIDENT), change("small", RESIDENT, PINNED)], ["small", "big"]),
        ([change("small", PAGEABLE, PINNED), change("big", PINNED, RESIDENT)], ["big", "small"]),
        ([change("big", RESIDENT, PINNED), change("small", PINNED, PAGEABLE)], ["small", "big"]),
        ([change("big", PAGEABLE, RESIDENT), change("small", PAGEABLE, PINNED)], ["big", "small"]),
        ([change("big", PINNED, RESIDENT), change("small", RESIDENT, layerwise)], ["small", "big"]),
        ([change("small", RESIDENT, PAGEABLE), change("big", RESIDENT, PAGEABLE)], ["big", "small"]),
    ]
    for specs, expected in cases:
        ordered = order_effects(specs, pipeline)
        assert [spec.component for spec in ordered] == expected
        assert [spec.index for spec in ordered] == [0, 1]


def test_a_swap_fits_although_both_never_do(pipeline: ManagedPipeline) -> None:
    pipeline.place("small", PAGEABLE)
    big = pipeline.component("big").spec.total_bytes
    pipeline.device.limit(big)
    specs = order_effects([change("small", PAGEABLE, RESIDENT), change("big", RESIDENT, PAGEABLE)], pipeline)
    for spec in specs:
        PlaceComponent(pipeline, spec).apply()
    for spec in reversed(specs):
        PlaceComponent(pipeline, spec).revert()
    assert pipeline.placement.components["big"] == RESIDENT
