"""All effects or none, whatever fails and wherever, and every undo is attempted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from residency.effects.place import PlaceComponent
from residency.effects.spec import EffectSpec
from residency.effects.transaction import Transaction
from residency.errors import EffectFailed, ProcessPoisoned, RollbackFailed
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode
from residency.gpu.poison import find_poison

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from residency.gpu.pipeline import ManagedPipeline

PAGEABLE = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PAGEABLE)
LAYERWISE = ComponentPlacement(mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PINNED, num_slots=1)
SPECS = (
    EffectSpec(index=0, component="big", before=RESIDENT, after=PAGEABLE),
    EffectSpec(index=1, component="small", before=RESIDENT, after=LAYERWISE),
)
STICKY = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nadvice")
WHOLE_STORY = ["do big", "applied big", "do small", "applied small"]


class Failing(PlaceComponent):
    """Raises in a method after doing what the method does, `times` times."""

    def __init__(self, pipeline: ManagedPipeline, spec: EffectSpec, *, method: str, error: BaseException) -> None:
        super().__init__(pipeline, spec)
        self._method, self._error = method, error
        self.times = 1

    def _fail(self, method: str) -> None:
        if method == self._method and self.times:
            self.times -= 1
            raise self._error

    def check(self) -> None:
        super().check()
        self._fail("check")

    def apply(self) -> None:
        super().apply()
        self._fail("apply")

    def revert(self) -> None:
        self._fail("revert")
        super().revert()


def transaction(pipeline: ManagedPipeline, story: Any, effects: Sequence[PlaceComponent] = ()) -> Transaction:
    effects = effects or [PlaceComponent(pipeline, spec) for spec in SPECS]
    return Transaction(effects, on_intent=story.on_intent, on_outcome=story.on_outcome, find_poison=find_poison)


def test_effects_apply_in_order_each_between_intent_and_outcome(pipeline: ManagedPipeline, story: Any) -> None:
    transaction(pipeline, story).apply()
    assert story.lines == WHOLE_STORY
    assert pipeline.placement.components == {"big": PAGEABLE, "small": LAYERWISE}


def test_revert_undoes_in_reverse_and_only_once(pipeline: ManagedPipeline, story: Any) -> None:
    before, hooks = pipeline.placement, pipeline.num_hooks
    done = transaction(pipeline, story)
    done.apply()
    done.revert()
    done.revert()
    assert story.lines[4:] == ["undo small", "undone small", "undo big", "undone big"]
    assert (pipeline.placement, pipeline.num_hooks, pipeline.pinned_bytes) == (before, hooks, 0)


def test_a_failed_check_moves_nothing(pipeline: ManagedPipeline, story: Any, addresses: Callable[[], Any]) -> None:
    before = addresses()
    effects = [
        PlaceComponent(pipeline, SPECS[0]),
        Failing(pipeline, SPECS[1], method="check", error=ValueError("not now")),
    ]
    with pytest.raises(EffectFailed, match="component 'small' failed: ValueError: not now"):
        transaction(pipeline, story, effects).apply()
    assert (story.lines, addresses()) == ([], before)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt(), SystemExit(3)])
def test_an_effect_that_fails_after_moving_is_taken_back_with_all_before_it(
    pipeline: ManagedPipeline, story: Any, error: BaseException
) -> None:
    before = pipeline.placement
    effects = [PlaceComponent(pipeline, SPECS[0]), Failing(pipeline, SPECS[1], method="apply", error=error)]
    expected = EffectFailed if isinstance(error, Exception) else type(error)
    with pytest.raises(expected) as caught:
        transaction(pipeline, story, effects).apply()
    assert story.lines == ["do big", "applied big", "do small", "failed small", "undo big", "undone big"]
    assert pipeline.placement == before
    assert error in (caught.value, caught.value.__cause__)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_callback_that_raises_rolls_everything_back(
    pipeline: ManagedPipeline, story: Any, fail_at: int, error: BaseException
) -> None:
    before = pipeline.placement
    story.fail_at, story.error = fail_at, error
    with pytest.raises(EffectFailed if isinstance(error, Exception) else KeyboardInterrupt):
        transaction(pipeline, story).apply()
    assert story.lines[:fail_at] == WHOLE_STORY[:fail_at]
    applied = {line.split()[1] for line in WHOLE_STORY[:fail_at] if line.startswith("applied")}
    assert {line.split()[1] for line in story.lines if line.startswith("undone")} == applied
    assert pipeline.placement == before


@pytest.mark.parametrize("fail_at", [5, 6, 7, 8])
def test_a_callback_that_raises_during_the_undo_does_not_stop_it(
    pipeline: ManagedPipeline, story: Any, fail_at: int
) -> None:
    before = pipeline.placement
    done = transaction(pipeline, story)
    done.apply()
    story.fail_at = fail_at
    done.revert()
    assert pipeline.placement == before
    assert [str(error) for error in done.untold] == ["disk full"]


def test_an_interrupt_during_the_undo_is_raised_after_it(pipeline: ManagedPipeline, story: Any) -> None:
    before = pipeline.placement
    effects = [
        PlaceComponent(pipeline, SPECS[0]),
        Failing(pipeline, SPECS[1], method="revert", error=KeyboardInterrupt()),
    ]
    done = transaction(pipeline, story, effects)
    done.apply()
    with pytest.raises(KeyboardInterrupt):
        done.revert()
    assert pipeline.placement == before
    assert story.lines[4:] == ["undo small", "undone small", "undo big", "undone big"]


def test_a_failing_undo_is_told_with_all_others_attempted(pipeline: ManagedPipeline, story: Any) -> None:
    effects = [Failing(pipeline, spec, method="revert", error=RuntimeError(f"lost {spec.component}")) for spec in SPECS]
    done = transaction(pipeline, story, effects)
    done.apply()
    with pytest.raises(RollbackFailed, match="lost small; big: RuntimeError: lost big") as caught:
        done.revert()
    assert caught.value.fields["problems"] == ("small: RuntimeError: lost small", "big: RuntimeError: lost big")
    assert story.lines[4:] == ["undo small", "failed small", "undo big", "failed big"]


def test_a_failed_undo_outweighs_the_failure_that_led_to_it(pipeline: ManagedPipeline, story: Any) -> None:
    effects = [
        Failing(pipeline, SPECS[0], method="revert", error=RuntimeError("lost")),
        Failing(pipeline, SPECS[1], method="apply", error=ValueError("first")),
    ]
    with pytest.raises(RollbackFailed):
        transaction(pipeline, story, effects).apply()
    assert pipeline.placement.components == {"big": PAGEABLE, "small": RESIDENT}


def test_memory_that_runs_out_in_mid_growth_leaves_addresses_hooks_and_pins(
    pipeline: ManagedPipeline, story: Any, addresses: Callable[[], Any]
) -> None:
    pipeline.place("big", LAYERWISE)
    pipeline.place("small", PAGEABLE)
    before, hooks, pins = addresses(), pipeline.num_hooks, pipeline.pinned_bytes
    pipeline.device.limit(pipeline.component("small").spec.total_bytes + 100)
    effects = [
        PlaceComponent(pipeline, EffectSpec(index=0, component="small", before=PAGEABLE, after=RESIDENT)),
        PlaceComponent(pipeline, EffectSpec(index=1, component="big", before=LAYERWISE, after=RESIDENT)),
    ]
    with pytest.raises(EffectFailed, match="OutOfMemoryError"):
        transaction(pipeline, story, effects).apply()
    assert (addresses(), pipeline.num_hooks, pipeline.pinned_bytes) == (before, hooks, pins)
    assert pipeline.device.memory().allocated_bytes == 0
    pipeline.device.limit(2**20)


@pytest.mark.parametrize(("method", "told"), [("check", []), ("apply", ["do big", "applied big", "do small"])])
def test_a_lost_device_ends_it_with_nothing_undone_and_nothing_told(
    pipeline: ManagedPipeline, story: Any, method: str, told: list[str]
) -> None:
    effects = [PlaceComponent(pipeline, SPECS[0]), Failing(pipeline, SPECS[1], method=method, error=STICKY)]
    done = transaction(pipeline, story, effects)
    with pytest.raises(ProcessPoisoned, match="an illegal memory access") as caught:
        done.apply()
    assert caught.value.__cause__ is STICKY
    moved = {"big": PAGEABLE, "small": LAYERWISE} if told else {"big": RESIDENT, "small": RESIDENT}
    assert (story.lines, pipeline.placement.components) == (told, moved)
    # Nobody can make it go on: it has forgotten what it did.
    done.revert()
    assert (story.lines, pipeline.placement.components) == (told, moved)


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_device_that_is_lost_between_intent_and_outcome_ends_it(
    pipeline: ManagedPipeline, story: Any, fail_at: int
) -> None:
    story.fail_at, story.error = fail_at, STICKY
    with pytest.raises(ProcessPoisoned):
        transaction(pipeline, story).apply()
    assert story.lines == WHOLE_STORY[:fail_at]


def test_an_undo_that_finds_the_device_lost_is_the_last_one(pipeline: ManagedPipeline, story: Any) -> None:
    effects = [
        PlaceComponent(pipeline, SPECS[0]),
        Failing(pipeline, SPECS[1], method="revert", error=STICKY),
    ]
    done = transaction(pipeline, story, effects)
    done.apply()
    with pytest.raises(ProcessPoisoned):
        done.revert()
    assert story.lines[4:] == ["undo small"]
    assert pipeline.placement.components == {"big": PAGEABLE, "small": LAYERWISE}


def test_a_device_that_is_lost_while_a_failure_is_undone_outweighs_the_failure(
    pipeline: ManagedPipeline, story: Any
) -> None:
    effects = [
        Failing(pipeline, SPECS[0], method="revert", error=STICKY),
        Failing(pipeline, SPECS[1], method="apply", error=ValueError("first")),
    ]
    with pytest.raises(ProcessPoisoned):
        transaction(pipeline, story, effects).apply()
    assert story.lines == ["do big", "applied big", "do small", "failed small", "undo big"]


def test_an_out_of_memory_is_undone_as_ever(pipeline: ManagedPipeline, story: Any) -> None:
    before = pipeline.placement
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    effects = [PlaceComponent(pipeline, SPECS[0]), Failing(pipeline, SPECS[1], method="apply", error=error)]
    with pytest.raises(EffectFailed):
        transaction(pipeline, story, effects).apply()
    assert pipeline.placement == before
