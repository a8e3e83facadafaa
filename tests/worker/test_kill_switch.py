"""The kill switch, at every moment: the initial placement, nothing beyond it, and it stays so."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import residency
from residency import settings
from residency.errors import JournalError, TransitionRefused
from residency.gpu.emulated import EmulatedDevice
from residency.gpu.placement import Mode
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal
from residency.settings import KILL_SWITCHES, sentinel_path
from residency.statemachine.states import State, Trigger

if TYPE_CHECKING:
    from pathlib import Path

OFF_WORDS = ["", "0", "false", "no", "off", " OFF ", "False"]
STATES = ["measuring", "planned", "applied", "validating"]
FITS_ALL = 64 * 2**20

Throw = Callable[[str], None]


@pytest.fixture(autouse=True)
def _off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KILL_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(settings, "_warned", set())


@pytest.fixture
def sentinel(worker: Any) -> Path:
    return sentinel_path(str(worker.journal))


@pytest.fixture
def throw(monkeypatch: pytest.MonkeyPatch, sentinel: Path) -> Throw:
    """Throw the kill switch: by a variable's name, or 'sentinel'."""
    return lambda by: sentinel.touch() if by == "sentinel" else monkeypatch.setenv(by, "1")


@pytest.fixture(scope="module")
def expected(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """What the pipeline serves if nobody ever moves anything but the initial placement does."""
    worker = tiny.Worker(tmp_path_factory.mktemp("expected") / "journal.db")
    manager = worker.attach(warmup=None)
    manager.start()
    output: torch.Tensor = worker.pipeline.request(tiny.WORKLOAD)
    manager.detach()
    worker.device.close()
    return output


def events_of(worker: Any, manager: residency.Manager) -> list[Any]:
    return [event for event in worker.events() if event.epoch == manager.epoch]


def triggers(events: list[Any]) -> list[str]:
    return [event.trigger for event in events if event.type == "transition"]


def payloads(events: list[Any], kind: str) -> list[dict[str, Any]]:
    return [json.loads(event.payload) for event in events if event.type == kind]


def ask(manager: residency.Manager, verb: str, attempt: int = 0) -> dict[str, Any]:
    status = manager.status()
    request = {"verb": verb, "epoch": manager.epoch, "round": status["round"], "attempt": attempt}
    return manager.handle(request)


def is_pinned_for_good(worker: Any, manager: residency.Manager) -> None:
    """It sits in the initial state, under the initial placement, and refuses everything with that reason."""
    before = worker.device.moved_bytes(), len(worker.pipeline.calls), triggers(events_of(worker, manager))
    assert manager.ready
    assert manager.status()["state"] == "measuring"
    assert manager.placement == manager._setup.initial
    assert manager._pipeline.pinned_bytes == 0
    for verb in ("calibrate", "validate", "roll_back"):
        answer = ask(manager, verb)
        assert answer["outcome"] == "pinned"
        assert "kill switch" in answer["reason"]
    with pytest.raises(TransitionRefused, match="the kill switch is on"):
        manager._epoch.machine.check(Trigger.PLAN, pinned=True)
    assert (worker.device.moved_bytes(), len(worker.pipeline.calls), triggers(events_of(worker, manager))) == before
    assert worker.is_sound()


# A start.


@pytest.mark.parametrize("by", [*KILL_SWITCHES, "sentinel"])
def test_a_start_under_a_kill_switch_serves_the_initial_placement_and_does_nothing_else(
    worker: Any, tiny: Any, throw: Throw, expected: torch.Tensor, by: str
) -> None:
    throw(by)
    manager = worker.attach()
    report = manager.start()
    assert report.decision is residency.Decision.PINNED
    assert by in report.reason
    assert report.placement == manager._setup.initial
    assert (report.num_requests, report.num_probes) == (0, 0)
    assert worker.pipeline.calls == []
    events = events_of(worker, manager)
    assert [event.type for event in events] == ["epoch.started", "pinned", "serving"]
    (said,) = payloads(events, "pinned")
    assert (said["reason"], said["by"]) == ("kill-switch", by)
    assert torch.equal(worker.pipeline.request(tiny.WORKLOAD), expected)
    is_pinned_for_good(worker, manager)


@pytest.mark.parametrize("name", KILL_SWITCHES)
def test_off_words_pin_nothing(worker: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for word in OFF_WORDS:
        monkeypatch.setenv(name, word)
        manager = worker.attach(warmup=None)
        # As far as the gate: no switch stood before it.
        assert manager.start().reason.startswith("no-warmup"), word
        manager.detach()


@pytest.mark.parametrize("name", KILL_SWITCHES)
def test_an_unknown_word_pins_and_warns_once(
    worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv(name, "maybe")
    manager = worker.attach()
    assert manager.start().decision is residency.Decision.PINNED
    (line,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert name in line and "'maybe'" in line and "write 1 or 0" in line
    assert payloads(events_of(worker, manager), "pinned")[0]["value"] == "maybe"


def test_a_committed_placement_is_not_restored_under_a_kill_switch_and_not_forgotten(
    worker: Any, tiny: Any, sentinel: Path, expected: torch.Tensor
) -> None:
    committed = worker.attach().start()
    worker.managers[-1].detach()
    sentinel.touch()
    manager = worker.attach()
    report = manager.start()
    assert report.decision is residency.Decision.PINNED
    assert report.placement == manager._setup.initial != committed.placement
    assert worker.pipeline.calls == []
    assert triggers(events_of(worker, manager)) == []
    assert torch.equal(worker.pipeline.request(tiny.WORKLOAD), expected)
    manager.detach()
    sentinel.unlink()
    restored = worker.attach().start()
    assert restored.decision is residency.Decision.RESTORED
    assert restored.placement == committed.placement


def test_a_pinned_start_closes_what_an_earlier_life_left_in_flight_by_events_only(worker: Any, sentinel: Path) -> None:
    worker.attach(warmup=None).start()
    worker.managers[-1].detach()
    with Journal.open(worker.journal) as journal:
        started = Draft(type=EventType.EPOCH_STARTED, round=0, payload=dict(worker.view().epochs[0].started))
        plan = {"placement": "f" * 64, "previous": "0" * 64, "source": "calibration"}
        planned = Draft(
            type=EventType.TRANSITION,
            round=1,
            payload=plan,
            from_state="measuring",
            to_state="planned",
            trigger="plan",
        )
        intent = Draft(type=EventType.EFFECT_INTENT, round=1, payload={"index": 0, "component": "decoder"})
        *_, left_open = journal.append([started, planned, intent], stream="tiny", epoch="dead")
    sentinel.touch()
    for _ in range(2):
        manager = worker.attach()
        assert manager.start().decision is residency.Decision.PINNED
        assert worker.device.moved_bytes()[0] == 0, "the initial placement keeps everything on the host"
        manager.detach()
        dead = [event for event in worker.events() if event.epoch == "dead"][3:]
        assert [event.type for event in dead] == ["effect.outcome", "recovered"]
        assert dead[0].causation == left_open.event_id
        assert json.loads(dead[0].payload)["result"] == "lost"
        assert [event.type for event in events_of(worker, manager)][:2] == ["epoch.started", "pinned"]


# Nothing hooked or pinned.


class Owner:
    """Stands for a diffusers pipeline: what residency gives another class, unless it is switched off."""

    def __init__(self, components: dict[str, nn.Module]) -> None:
        self.components = components

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __call__(self, shape: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("moment", ["before attach", "between attach and start"])
def test_where_everything_is_resident_a_pinned_start_touches_no_module_and_no_class(
    worker: Any, tiny: Any, throw: Throw, moment: str
) -> None:
    pipeline = tiny.make_pipeline()
    owner, classes = Owner(pipeline.modules), {name: type(one) for name, one in pipeline.modules.items()}
    if moment == "before attach":
        throw("sentinel")
    manager = residency.attach(
        owner, journal=worker.journal, workload=tiny.WORKLOAD, device=EmulatedDevice(cap_bytes=FITS_ALL)
    )
    worker.managers.append(manager)
    throw("sentinel")
    report = manager.start()
    assert report.decision is residency.Decision.PINNED
    assert {one.mode for one in report.placement.components.values()} == {Mode.RESIDENT}
    assert manager._pipeline.num_hooks == 0
    assert manager._pipeline.pinned_bytes == 0
    assert type(owner) is Owner
    assert {name: type(one) for name, one in pipeline.modules.items()} == classes
    assert not any(point in vars(one) for one in pipeline.modules.values() for point in ("forward", "decode"))


def test_an_initial_placement_that_moves_weights_gets_its_entry_points_hooked_and_no_more(
    worker: Any, throw: Throw
) -> None:
    throw("sentinel")
    manager = worker.attach()
    manager.start()
    assert {one.mode for one in manager.placement.components.values()} == {Mode.COMPONENT_OFFLOAD}
    assert manager._pipeline.num_hooks == sum(len(spec.entry_points) for spec in manager._pipeline.specs)
    assert manager._pipeline.pinned_bytes == 0


# In mid-round.


@pytest.mark.parametrize("by", [KILL_SWITCHES[0], "sentinel"])
@pytest.mark.parametrize("state", STATES)
def test_thrown_in_mid_round_it_ends_in_measuring_with_the_initial_placement(
    worker: Any, tiny: Any, on_leaving: Any, throw: Throw, expected: torch.Tensor, state: str, by: str
) -> None:
    manager = worker.attach(observer=on_leaving(state, lambda: throw(by)))
    report = manager.start()
    assert report.decision is residency.Decision.PINNED
    assert by in report.reason
    events = events_of(worker, manager)
    assert triggers(events) == ["plan", "apply", "validate"][: STATES.index(state)] + ["roll_back", "measure"]
    assert len(payloads(events, "pinned")) == 1
    first_back = next(index for index, event in enumerate(events) if event.trigger == "roll_back")
    assert not payloads(events[first_back:], "measured"), "it was warmed again"
    is_pinned_for_good(worker, manager)
    assert torch.equal(worker.pipeline.request(tiny.WORKLOAD), expected)
    assert manager._epoch.machine.state is State.MEASURING


def test_thrown_while_a_round_is_rolled_back_anyway_nothing_is_warmed_again(
    worker: Any, on_leaving: Any, throw: Throw
) -> None:
    manager = worker.attach(observer=on_leaving("validating", lambda: throw("sentinel")))

    def fail(shape: Any) -> None:
        if manager.placement != manager._setup.initial:
            raise torch.OutOfMemoryError("emulated out of memory")

    worker.pipeline.fail = fail
    assert manager.start().decision is residency.Decision.PINNED
    kinds = [said["record"]["kind"] for said in payloads(events_of(worker, manager), "measured")]
    assert kinds[-1] == "validation"
    is_pinned_for_good(worker, manager)


def test_thrown_between_two_rounds_the_second_measures_nothing(worker: Any, throw: Throw) -> None:
    worker.attach().start()
    worker.managers[-1].detach()
    manager = worker.attach()

    def fail(shape: Any) -> None:
        if manager.placement != manager._setup.initial:
            raise torch.OutOfMemoryError("emulated out of memory")
        if manager._epoch.machine.state is State.ROLLED_BACK:
            throw("sentinel")

    worker.pipeline.fail = fail
    assert manager.start().decision is residency.Decision.PINNED
    kinds = [said["record"]["kind"] for said in payloads(events_of(worker, manager), "measured")]
    assert kinds == ["validation", "rewarm"]
    is_pinned_for_good(worker, manager)


@pytest.mark.parametrize("verb", ["calibrate", "validate"])
def test_thrown_in_a_round_that_somebody_asked_for_it_leads_back_beyond_what_was_committed_before(
    worker: Any, tiny: Any, on_leaving: Any, throw: Throw, expected: torch.Tensor, verb: str
) -> None:
    manager = worker.attach()
    assert manager.start().placement != manager._setup.initial
    manager._epoch.observer = on_leaving("planned", lambda: throw("sentinel"))
    assert ask(manager, verb)["outcome"] == "pinned"
    assert len(payloads(events_of(worker, manager), "pinned")) == 1
    is_pinned_for_good(worker, manager)
    assert torch.equal(worker.pipeline.request(tiny.WORKLOAD), expected)


# While serving.


@pytest.mark.parametrize("by", [KILL_SWITCHES[1], "sentinel"])
def test_thrown_while_serving_the_worker_is_taken_back_before_the_next_request(
    worker: Any, tiny: Any, throw: Throw, expected: torch.Tensor, sentinel: Path, by: str
) -> None:
    manager = worker.attach()
    committed = manager.start().placement
    assert torch.equal(worker.pipeline.request(tiny.WORKLOAD), expected)
    num_calls, seen = len(worker.pipeline.calls), len(worker.events())
    throw(by)
    assert manager.placement == committed, "between two requests, not behind anybody's back"
    assert torch.equal(worker.pipeline.request(tiny.WORKLOAD), expected)
    assert len(worker.pipeline.calls) == num_calls + 1, "the request itself, and no warmup"
    later = worker.events()[seen:]
    effects = [event for event in later if event.type.startswith("effect.")]
    assert [event.type for event in effects] == ["effect.intent", "effect.outcome"] * (len(effects) // 2)
    assert len(effects) >= 2
    others = [event.trigger or event.type for event in later if event not in effects]
    assert others == ["measure", "roll_back", "measure", "pinned"]
    assert later[0].trigger == "measure" and later[-3].trigger == "roll_back"
    assert worker.view().epochs[-1].placement == manager._setup.initial.digest
    is_pinned_for_good(worker, manager)
    # There it stays, whatever becomes of the switch.
    sentinel.unlink(missing_ok=True)
    assert torch.equal(worker.pipeline.request(tiny.WORKLOAD), expected)
    is_pinned_for_good(worker, manager)


def test_a_placement_that_was_taken_back_is_restored_by_the_next_start_without_the_switch(
    worker: Any, tiny: Any, sentinel: Path
) -> None:
    manager = worker.attach()
    committed = manager.start().placement
    sentinel.touch()
    worker.pipeline.request(tiny.WORKLOAD)
    manager.detach()
    sentinel.unlink()
    report = worker.attach().start()
    assert (report.decision, report.placement) == (residency.Decision.RESTORED, committed)


def test_a_journal_that_fails_does_not_keep_the_worker_from_being_taken_back(
    worker: Any,
    tiny: Any,
    sentinel: Path,
    expected: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = worker.attach()
    assert manager.start().placement != manager._setup.initial

    def fail(self: Journal, *args: Any, **kwargs: Any) -> None:
        raise JournalError(journal=self.location, problem="the disk is full", remedy="free some space")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", fail)
        sentinel.touch()
        for _ in range(2):
            assert torch.equal(worker.pipeline.request(tiny.WORKLOAD), expected)
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1
    is_pinned_for_good(worker, manager)


def test_a_request_behind_a_long_one_waits_for_its_turn_and_is_served_after_the_way_back(
    worker: Any, tiny: Any, sentinel: Path, expected: torch.Tensor
) -> None:
    manager = worker.attach(policy=residency.Policy(image_area_max=64 * 64, samples_max=1, busy_wait_s=0.01))
    manager.start()
    entered, leave = threading.Event(), threading.Event()

    def occupy() -> None:
        with manager.request():
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=occupy)
    other.start()
    assert entered.wait(10)
    sentinel.touch()
    threading.Timer(0.2, leave.set).start()
    assert torch.equal(worker.pipeline.request(tiny.WORKLOAD), expected)
    other.join(10)
    is_pinned_for_good(worker, manager)
