"""A device that is lost to the process: nothing more is moved, the journal says it, and the next start is safe."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

import residency
from residency.effects.place import PlaceComponent
from residency.errors import ProcessPoisoned
from residency.gpu.records import RequestKind
from residency.interrupts import Interrupts
from residency.statemachine.worker import Silent

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = "CUDA error: an illegal memory access was encountered"
ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call\n"
ASSERTION = '!handles_.at(i) INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp":487, please report a bug'


def sticky() -> Exception:
    return torch.AcceleratorError(TEXT + ADVICE)


class Moves:
    """Every effect that is applied or reverted, in order; the n-th call of a method can find the device lost."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fail_at: tuple[str, int] | None = None
        for name in ("apply", "revert"):
            patch.setattr(PlaceComponent, name, self._recorded(name, getattr(PlaceComponent, name)))

    def _recorded(self, name: str, plain: Callable[[PlaceComponent], None]) -> Callable[[PlaceComponent], None]:
        def move(effect: PlaceComponent) -> None:
            self.calls.append(name)
            if self.fail_at == (name, self.calls.count(name)):
                raise RuntimeError(ASSERTION)
            plain(effect)

        return move


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    return Moves(monkeypatch)


def attach(worker: Any, **options: Any) -> residency.Manager:
    """Attach a worker whose weights are where it starts from, so that only a round moves them."""
    manager: residency.Manager = worker.attach(**options)
    manager._setup.worker.place(manager._setup.initial)
    return manager


def lose_it(manager: residency.Manager, moves: Moves) -> ProcessPoisoned:
    """Start a worker that loses its device, and check what is true wherever that happens."""
    with pytest.raises(ProcessPoisoned) as caught:
        manager.start()
    assert caught.value.exit_code == 71
    assert not manager.ready
    num_moves = len(moves.calls)
    with pytest.raises(residency.ResidencyError):
        manager.start()
    assert len(moves.calls) == num_moves
    return caught.value


def journal(worker: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(event.type, json.loads(event.payload)) for event in worker.events()]


def tail(worker: Any, num: int) -> list[str]:
    """The last events before the worker's own last word."""
    kinds = [kind for kind, _ in journal(worker)]
    assert kinds[-1] == "stopped"
    return kinds[-num - 1 : -1]


def next_start(worker: Any) -> tuple[residency.Report, dict[str, Any]]:
    """What the next start does, and the death that it found."""
    report = worker.attach().start()
    assert worker.is_sound()
    view = worker.view()
    assert not any(one.open_intents for one in view.rounds)
    recovered = view.epochs[-2].recovered
    assert recovered is not None
    return report, recovered["death"]


def lost_under(worker: Any, manager: residency.Manager, error: Callable[[], Exception] = sticky) -> None:
    """Have every request after the weights have moved lose the device."""
    initial = manager._setup.initial

    def fail(shape: Any) -> None:
        if manager.placement != initial:
            raise error()

    worker.pipeline.fail = fail


def test_lost_in_the_baseline_nothing_moves_and_no_plan_is_blamed(worker: Any, moves: Moves) -> None:
    manager = attach(worker)
    moves.calls.clear()

    def fail(shape: Any) -> None:
        raise sticky()

    worker.pipeline.fail = fail
    error = lose_it(manager, moves)
    assert error.fields == {"round_number": 1, "problem": f"AcceleratorError: {TEXT}"}
    assert moves.calls == []
    assert tail(worker, 3) == ["epoch.started", "measured", "poisoned"]
    assert journal(worker)[-2][1] == {"problem": f"AcceleratorError: {TEXT}", "state": "measuring"}
    report, death = next_start(worker)
    assert (report.decision, death["blames"]) == (residency.Decision.COMMITTED, "infrastructure")


def test_lost_in_an_effect_it_stays_in_doubt_and_those_before_it_applied(worker: Any, moves: Moves) -> None:
    manager = attach(worker)
    moves.calls.clear()
    moves.fail_at = ("apply", 2)
    error = lose_it(manager, moves)
    assert "INTERNAL ASSERT FAILED" in str(error)
    assert moves.calls == ["apply", "apply"]
    assert tail(worker, 4) == ["effect.intent", "effect.outcome", "effect.intent", "poisoned"]
    assert journal(worker)[-4][1]["result"] == "applied"
    (one,) = worker.view().rounds
    assert (one.state, len(one.open_intents)) == ("planned", 1)
    moves.fail_at = None
    report, death = next_start(worker)
    assert (death["blames"], death["placement"]) == ("plan", one.placement)
    assert worker.view().rounds[0].moves[1].result == "lost"
    # The suspect is planned again, with a larger reserve.
    assert worker.view().rounds[-1].source == "suspect"
    assert report.decision in (residency.Decision.COMMITTED, residency.Decision.KEPT)


def test_lost_between_an_intent_and_its_outcome_nothing_is_applied(worker: Any, moves: Moves) -> None:
    class Losing(Silent):
        def between_effects(self, index: int) -> None:
            raise sticky()

    manager = attach(worker, observer=Losing())
    moves.calls.clear()
    lose_it(manager, moves)
    assert moves.calls == []
    assert tail(worker, 2) == ["effect.intent", "poisoned"]
    assert next_start(worker)[1]["blames"] == "plan"


def test_lost_in_validation_nothing_is_moved_back(worker: Any, moves: Moves) -> None:
    manager = attach(worker)
    moves.calls.clear()
    lost_under(worker, manager)
    lose_it(manager, moves)
    target = manager.placement
    assert target != manager._setup.initial
    assert set(moves.calls) == {"apply"}
    assert tail(worker, 3) == ["transition", "measured", "poisoned"]
    (one,) = worker.view().rounds
    assert (one.state, one.placement) == ("validating", target.digest)
    worker.pipeline.fail = None
    _, death = next_start(worker)
    assert (death["blames"], death["placement"]) == ("plan", target.digest)
    assert f"round 1, validating (AcceleratorError: {TEXT})" in death["why"]


def test_lost_in_the_first_undo_the_others_are_not_tried(worker: Any, moves: Moves) -> None:
    manager = attach(worker)
    moves.calls.clear()
    moves.fail_at = ("revert", 1)
    lost_under(worker, manager, error=lambda: ValueError("no such prompt"))
    lose_it(manager, moves)
    assert moves.calls.count("apply") > 1
    assert moves.calls.count("revert") == 1
    assert tail(worker, 2) == ["effect.intent", "poisoned"]
    assert journal(worker)[-3][1]["undo"] is True
    moves.fail_at = worker.pipeline.fail = None
    assert next_start(worker)[1]["blames"] == "plan"


def test_lost_after_the_way_back_the_round_stays_rolled_back(worker: Any, moves: Moves) -> None:
    manager = attach(worker)
    moves.calls.clear()
    lost_under(worker, manager, error=lambda: torch.OutOfMemoryError("CUDA out of memory"))
    plain = worker.pipeline.fail

    def fail(shape: Any) -> None:
        plain(shape)
        if "revert" in moves.calls:
            raise sticky()

    worker.pipeline.fail = fail
    lose_it(manager, moves)
    assert moves.calls.count("revert") == moves.calls.count("apply")
    assert manager.placement == manager._setup.initial
    assert journal(worker)[-3][1]["record"]["kind"] == RequestKind.REWARM.value
    assert worker.view().rounds[0].state == "rolled-back"
    worker.pipeline.fail = None
    report, death = next_start(worker)
    assert death["blames"] == "infrastructure"
    # What ran out of memory is not tried again.
    assert report.placement.digest != worker.view().rounds[0].placement


def test_lost_before_any_round_it_is_journaled_too(worker: Any, moves: Moves) -> None:
    manager = worker.attach(modes={"encoder": "resident"})
    moves.fail_at = ("apply", 1)
    error = lose_it(manager, moves)
    assert error.fields["round_number"] == 0
    assert tail(worker, 2) == ["epoch.started", "poisoned"]
    moves.fail_at = None
    assert next_start(worker)[1]["blames"] == "infrastructure"


def test_a_detach_on_a_lost_device_says_what_the_process_has_to_end_with(
    worker: Any, moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = attach(worker)
    lost_under(worker, manager)
    error = lose_it(manager, moves)

    def fail() -> None:
        raise sticky()

    monkeypatch.setattr(manager._pipeline.device, "synchronize", fail)
    monkeypatch.setattr(manager._pipeline.device, "upload_all", lambda *_, **__: fail())
    with pytest.raises(ProcessPoisoned) as caught:
        manager.detach()
    monkeypatch.undo()
    assert str(caught.value) == str(error)


def test_a_device_found_lost_by_a_detach_is_journaled(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = worker.attach()
    manager.start()

    def fail(*_: object) -> None:
        raise sticky()

    monkeypatch.setattr(manager._pipeline._streamer, "release", fail)
    with pytest.raises(ProcessPoisoned, match="illegal memory access"):
        manager.detach()
    assert journal(worker)[-1][0] == "poisoned"
    monkeypatch.undo()


def test_lost_while_a_committed_placement_is_restored_it_is_tried_once_more_and_then_given_up(
    worker: Any, moves: Moves
) -> None:
    committed = worker.attach().start()
    worker.managers[-1].detach()
    for _ in range(2):
        manager = attach(worker)
        moves.calls.clear()
        lost_under(worker, manager)
        lose_it(manager, moves)
        assert worker.view().rounds[-1].source == "journal"
        worker.pipeline.fail = None
    report, _ = next_start(worker)
    assert report.placement != committed.placement
    assert worker.view().rounds[-1].source == "calibration"


def ask(manager: residency.Manager, verb: str) -> dict[str, Any]:
    now = manager.status()
    return manager.handle({"verb": verb, "epoch": now["epoch"], "round": now["round"], "attempt": 0})


def test_lost_in_a_round_that_was_asked_for_the_answer_says_so_and_nobody_is_served(worker: Any, moves: Moves) -> None:
    manager = worker.attach()
    manager.start()
    moves.calls.clear()
    lost_under(worker, manager)
    with pytest.raises(ProcessPoisoned):
        ask(manager, "validate")
    assert moves.calls == []
    (control,) = [content for kind, content in journal(worker) if kind == "control"]
    assert control["outcome"]["outcome"] == "poisoned"
    assert not manager.ready
    worker.pipeline.fail = None
    with pytest.raises(ProcessPoisoned), manager.request():
        pass
    with pytest.raises(ProcessPoisoned):
        worker.pipeline.request(residency.Workload(width=128, height=128, frames=1, steps=6, batch=1))


def test_lost_in_a_request_it_is_journaled_once_and_counts_as_a_death_while_serving(worker: Any, moves: Moves) -> None:
    manager = worker.attach()
    manager.start()
    moves.calls.clear()
    with pytest.raises(ProcessPoisoned, match="an illegal memory access"), manager.request():
        raise sticky()
    with pytest.raises(ProcessPoisoned), manager.request():
        pass
    assert not manager.ready
    assert [kind for kind, _ in journal(worker)].count("poisoned") == 1
    manager._end("exit")
    report, death = next_start(worker)
    assert (report.decision, death["kind"]) == (residency.Decision.RESTORED, "early")
    assert moves.calls.count("revert") == 0


def test_lost_in_a_request_that_the_pipeline_brackets_itself_it_is_journaled_all_the_same(worker: Any) -> None:
    manager = worker.attach()
    manager.start()
    with pytest.raises(RuntimeError, match="an illegal memory access"), manager._pipeline.request():
        raise sticky()
    assert not manager.ready
    with pytest.raises(ProcessPoisoned), manager.request():
        pass
    assert [kind for kind, _ in journal(worker)].count("poisoned") == 1


def test_an_ordinary_error_of_a_request_passes_as_it_is(worker: Any) -> None:
    manager = worker.attach()
    manager.start()
    for error in (ValueError("no such prompt"), torch.OutOfMemoryError("CUDA out of memory")):
        with pytest.raises(type(error)) as caught, manager.request():
            raise error
        assert caught.value is error
    assert manager.ready


def test_lost_on_the_way_back_that_a_kill_switch_asked_for_it_ends_there(
    worker: Any, moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = worker.attach()
    manager.start()
    moves.calls.clear()
    moves.fail_at = ("apply", 1)
    monkeypatch.setenv("RESIDENCY_DISABLE", "1")
    with pytest.raises(ProcessPoisoned), manager.request():
        pass
    assert moves.calls == ["apply"]
    assert not manager.ready
    assert journal(worker)[-1] == ("poisoned", {"problem": f"RuntimeError: {ASSERTION}", "state": "measuring"})
    manager._end("exit")
    monkeypatch.delenv("RESIDENCY_DISABLE")
    moves.fail_at = None
    report, death = next_start(worker)
    assert (report.decision, death["blames"]) == (residency.Decision.RESTORED, "infrastructure")


def test_an_out_of_memory_whose_text_could_not_be_made_is_rolled_back_as_ever(worker: Any) -> None:
    manager = attach(worker)
    text = 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please report a bug'
    lost_under(worker, manager, error=lambda: RuntimeError(text))
    report = manager.start()
    assert report.decision is residency.Decision.ROLLED_BACK
    assert report.placement == manager._setup.initial


def test_a_signal_that_came_meanwhile_does_not_hide_it() -> None:
    with pytest.raises(ProcessPoisoned), Interrupts() as interrupts:
        interrupts.interrupt(signal.SIGTERM)
        raise ProcessPoisoned(round_number=1, problem=TEXT)
