"""Control requests: what each verb does, and that it is done once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import residency
from residency.errors import SettingsError
from residency.gpu.placement import Mode
from residency.settings import KILL_SWITCHES, sentinel_path

# One sample a side: what a verdict takes is shown elsewhere.
QUICK = residency.Policy(image_area_max=128 * 128, samples_max=1)


def start(worker: Any, **options: Any) -> residency.Manager:
    manager: residency.Manager = worker.attach(**{"policy": QUICK, **options})
    manager.start()
    return manager


def ask(manager: residency.Manager, verb: str, **fields: Any) -> dict[str, Any]:
    """Send a request as a caller that has just looked at the status."""
    now = manager.status()
    return manager.handle({"verb": verb, "epoch": now["epoch"], "round": now["round"], "attempt": 0, **fields})


def controls(worker: Any) -> list[dict[str, Any]]:
    return [json.loads(e.payload) for e in worker.events() if e.type == "control"]


def plans(worker: Any) -> list[dict[str, Any]]:
    return [json.loads(e.payload) for e in worker.events() if e.trigger == "plan"]


def test_status_tells_what_a_caller_needs_for_its_next_request(worker: Any) -> None:
    manager = start(worker)

    status = manager.handle({"verb": "status"})

    assert status == {
        "verb": "status",
        "ready": True,
        "decision": "committed",
        "epoch": manager.epoch,
        "round": 1,
        "state": "committed",
        "placement": manager.placement.digest,
        "control": {"running": None, "last": None},
    }
    assert controls(worker) == []


def test_calibrate_again_keeps_what_is_best_already(worker: Any) -> None:
    manager = start(worker)
    placement = manager.placement

    answer = ask(manager, "calibrate")

    assert (answer["outcome"], answer["round"], answer["state"]) == ("kept", 2, "committed")
    assert manager.placement == placement
    assert plans(worker)[-1]["source"] == "calibration"


def test_validate_runs_the_current_placement_again_without_moving_anything(worker: Any) -> None:
    manager = start(worker)
    placement = manager.placement
    num_effects = sum(e.type == "effect.intent" for e in worker.events())

    answer = ask(manager, "validate")

    assert (answer["outcome"], answer["round"], answer["placement"]) == ("committed", 2, placement.digest)
    assert plans(worker)[-1]["source"] == "current"
    assert sum(e.type == "effect.intent" for e in worker.events()) == num_effects


def test_a_validation_that_finds_another_output_is_rolled_back(worker: Any) -> None:
    manager = start(worker)
    request = worker.pipeline.request
    manager._setup.worker._warmup = lambda shape: request(shape) + 1e-6

    answer = ask(manager, "validate")

    assert (answer["outcome"], answer["state"]) == ("rolled-back", "rolled-back")
    assert "output" in answer["reason"]
    assert manager.ready


def test_roll_back_after_the_first_commit_goes_to_the_initial_placement(worker: Any) -> None:
    manager = start(worker)

    answer = ask(manager, "roll_back")

    assert (answer["outcome"], answer["state"], answer["round"]) == ("rolled-back", "committed", 2)
    assert {one.mode for one in manager.placement.components.values()} == {Mode.COMPONENT_OFFLOAD}
    assert plans(worker)[-1]["source"] == "initial"
    # What was rolled back to is what the next start takes up.
    manager.detach()
    restored = worker.attach(policy=QUICK).start()
    assert restored.decision is residency.Decision.RESTORED
    assert restored.placement.digest == answer["placement"]


def test_roll_back_goes_to_the_placement_that_was_committed_before(worker: Any) -> None:
    manager = start(worker)
    first = manager.placement
    ask(manager, "roll_back")

    answer = ask(manager, "roll_back")

    assert (answer["outcome"], answer["placement"]) == ("rolled-back", first.digest)
    assert plans(worker)[-1]["source"] == "previous"


def test_a_roll_back_whose_round_fails_is_refused_and_changes_nothing(worker: Any) -> None:
    manager = start(worker)
    placement = manager.placement

    def fail(shape: Any) -> None:
        if manager.placement != placement:
            raise torch.OutOfMemoryError("emulated out of memory")

    worker.pipeline.fail = fail
    answer = ask(manager, "roll_back")

    assert (answer["outcome"], answer["placement"]) == ("refused", placement.digest)
    assert manager.placement == placement


@pytest.mark.parametrize("verb", ["calibrate", "validate", "roll_back"])
def test_the_same_request_gets_the_same_outcome_and_runs_nothing_again(worker: Any, verb: str) -> None:
    manager = start(worker)
    request = {"verb": verb, "epoch": manager.epoch, "round": 1, "attempt": 7, "args": {}}
    first = manager.handle(request)
    num_calls, num_events = len(worker.pipeline.calls), len(worker.events())

    again = manager.handle(request)

    assert again == {**first, "repeated": True}
    assert (len(worker.pipeline.calls), len(worker.events())) == (num_calls, num_events)
    assert controls(worker) == [{"request": request, "outcome": first}]


def test_a_stale_request_is_refused_and_costs_nothing(worker: Any) -> None:
    manager = start(worker)
    ask(manager, "validate")
    num_calls, num_controls = len(worker.pipeline.calls), len(controls(worker))
    another_epoch: list[dict[str, Any]] = [{"epoch": "another"}, {"epoch": ""}]
    another_round: list[dict[str, Any]] = [{"round": 1}, {"round": 3}, {"round": -1}]

    for fields in another_epoch + another_round:
        answer = ask(manager, "calibrate", **fields)

        assert answer["outcome"] == "refused"
        assert answer["reason"].startswith("stale: ")
        assert (answer["epoch"], answer["round"]) == (manager.epoch, 2)

    assert (len(worker.pipeline.calls), len(controls(worker))) == (num_calls, num_controls)


def test_a_caller_that_saw_no_round_may_name_none(worker: Any) -> None:
    manager = start(worker)

    assert ask(manager, "validate", round=0)["outcome"] == "committed"


def test_a_gated_worker_skips(worker: Any) -> None:
    manager = start(worker, warmup=None)

    answer = ask(manager, "calibrate")

    assert answer["outcome"] == "skipped"
    assert answer["reason"].startswith("no-warmup: ")
    assert worker.pipeline.calls == []


def test_a_worker_without_a_journal_skips(worker: Any, tmp_path: Any) -> None:
    manager = worker.attach(journal=tmp_path)
    assert manager.start().decision is residency.Decision.WITHOUT_JOURNAL

    answer = ask(manager, "calibrate")

    assert answer["outcome"] == "skipped"
    assert "journal" in answer["reason"]


def test_a_pinned_worker_says_so(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KILL_SWITCHES[0], "1")
    manager = start(worker)
    # Switching it off again takes a new start: a pinned epoch stays pinned.
    monkeypatch.delenv(KILL_SWITCHES[0])

    assert [ask(manager, verb)["outcome"] for verb in ("calibrate", "validate", "roll_back")] == ["pinned"] * 3
    assert worker.pipeline.calls == []


def test_a_kill_switch_thrown_while_serving_pins_the_next_request(worker: Any) -> None:
    manager = start(worker)
    num_calls = len(worker.pipeline.calls)
    sentinel_path(str(worker.journal)).touch()

    answer = ask(manager, "calibrate")

    assert answer["outcome"] == "pinned"
    assert len(worker.pipeline.calls) == num_calls


def test_what_is_no_request_is_a_settings_error(worker: Any) -> None:
    manager = start(worker, warmup=None)
    no_requests: list[Any] = [
        {},
        {"verb": "explode"},
        {"verb": None},
        {"verb": "calibrate", "round": "1"},
        {"verb": "calibrate", "round": True},
        {"verb": "calibrate", "epoch": 3},
        {"verb": "calibrate", "attempt": 1.5},
        {"verb": "calibrate", "args": []},
        {"verb": "calibrate", "args": {"when": object()}},
        {3: "calibrate"},
        [1, 2],
        None,
        "calibrate",
    ]

    for one in no_requests:
        with pytest.raises(
            SettingsError, match="control request .* send {verb, epoch, round, attempt, args}"
        ) as caught:
            manager.handle(one)

        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)


def test_before_the_start_has_returned_only_status_is_served(worker: Any) -> None:
    manager = worker.attach()
    status = manager.handle({"verb": "status"})
    assert (status["ready"], status["decision"], status["state"]) == (False, None, "measuring")
    refused = manager.handle({"verb": "calibrate", "epoch": manager.epoch})
    assert (refused["outcome"], refused["reason"]) == ("refused", "busy: start() has not returned")
    assert worker.pipeline.calls == []


def test_a_control_request_after_detach_is_skipped(worker: Any) -> None:
    manager = start(worker)
    manager.detach()

    assert ask(manager, "calibrate")["outcome"] == "skipped"
    assert not manager.ready
