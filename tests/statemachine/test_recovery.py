"""Recovery: what the next start does with what earlier lives left behind."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from residency.gpu.placement import Placement
from residency.journal.events import Draft, EventType
from residency.journal.fold import fold_stream
from residency.journal.store import Journal
from residency.statemachine.planner.plan import PlanInputs
from residency.statemachine.policy import Policy
from residency.statemachine.recovery import Decision, DecisionKind, closing, decide

if TYPE_CHECKING:
    from pathlib import Path

    from residency.journal.views import RoundView, StreamView
    from tests.statemachine.conftest import Build, Past


def decided(view: StreamView, fingerprint: str = "f") -> Decision:
    return decide(view, fingerprint={"cap": fingerprint}, fingerprint_digest=fingerprint, initial="initial")


# --- decisions -------------------------------------------------------------------------------------------------------


def test_an_empty_stream_calibrates(past: Past) -> None:
    found = decided(past.stream())
    assert (found.kind, found.placement, found.reserve_factor) == (DecisionKind.CALIBRATE, None, 1.0)


def test_a_committed_placement_with_an_equal_fingerprint_is_restored(past: Past) -> None:
    outcome = {"placement": "p", "output_digest": "out"}
    view = past.lived(past.epoch("a", past.round("committed", outcome=outcome)))
    found = decided(view)
    assert (found.kind, found.placement, found.expected_output) == (DecisionKind.RESTORE, "p", "out")
    assert found.round is not None and found.round.epoch == "a"


def test_the_newest_of_several_commits_is_restored(past: Past) -> None:
    first = past.round("committed", "old")
    second = past.round("committed", "new", number=2)
    assert decided(past.stream(past.epoch("a", first, second))).placement == "new"
    back = past.round("committed", "old", number=3, source="previous")
    assert decided(past.stream(past.epoch("a", first, second, back))).placement == "old"


def test_a_placement_that_was_kept_is_restored_too(past: Past) -> None:
    assert decided(past.stream(past.epoch("a", past.round("committed", "initial")))).placement == "initial"


def test_a_changed_fingerprint_calibrates_and_says_what_changed(past: Past) -> None:
    found = decided(past.stream(past.epoch("a", past.round("committed"), fingerprint="g")))
    assert (found.kind, found.differences) == (DecisionKind.CALIBRATE, ("cap",))
    assert "cap" in found.reason


def test_a_fingerprint_that_comes_back_finds_its_own_placement_again(past: Past) -> None:
    old = past.epoch("a", past.round("committed", "p"))
    other = past.epoch("b", past.round("committed", "q"), fingerprint="g", at=10)
    assert decided(past.stream(old, other)).placement == "p"


def test_a_killed_calibration_is_a_suspect_and_replanned_with_the_reserve_doubled(past: Past, build: Build) -> None:
    inputs = build.inputs(cap=2**29)
    journaled = json.loads(msgspec.json.encode(inputs))
    found = decided(past.lived(past.killed("a", plan={"placement": "p", "inputs": journaled})))
    assert (found.kind, found.placement, found.reserve_factor) == (DecisionKind.REPLAN, "p", 2.0)
    assert found.inputs == inputs and isinstance(found.inputs, PlanInputs)


@pytest.mark.parametrize("plan", [{"placement": "p"}, {"placement": "p", "inputs": {"specs": 3}}])
def test_a_suspect_without_readable_inputs_is_measured_anew_as_carefully(past: Past, plan: dict[str, Any]) -> None:
    found = decided(past.lived(past.killed("a", plan=plan)))
    assert (found.kind, found.reserve_factor, found.inputs) == (DecisionKind.CALIBRATE, 2.0, None)


def test_a_pinned_start_in_between_does_not_make_a_suspect_harmless(past: Past) -> None:
    pinned = past.epoch("b", at=10, pinned={"by": "RESIDENCY_DISABLE"}, stopped={"reason": "exit", "signal": None})
    assert decided(past.lived(past.killed("a"), pinned)).reserve_factor == 2.0


@pytest.mark.parametrize("second", ["p", "q"])
def test_two_deaths_of_plans_never_committed_stop_planning_for_the_fingerprint(past: Past, second: str) -> None:
    view = past.lived(past.killed("a"), past.killed("b", second, at=10, source="suspect"))
    found = decided(view)
    assert found.kind is DecisionKind.QUARANTINED
    assert found.reason.startswith("2 lives died")
    assert decided(view, "another").kind is DecisionKind.CALIBRATE


def test_deaths_that_blame_the_infrastructure_never_add_up(past: Past) -> None:
    signal = {"reason": "signal", "signal": "SIGTERM"}
    view = past.lived(*(past.killed(f"e{index}", at=10 * index, stopped=signal) for index in range(5)))
    assert (decided(view).kind, decided(view).reserve_factor) == (DecisionKind.CALIBRATE, 1.0)


def test_a_committed_placement_blamed_once_is_restored_again_and_blamed_twice_is_quarantined(past: Past) -> None:
    good = past.epoch("a", past.round("committed", "p"), stopped={"reason": "exit", "signal": None})
    once = past.lived(good, past.killed("b", "p", at=10, source="journal"))
    assert (decided(once).kind, decided(once).placement) == (DecisionKind.RESTORE, "p")
    assert "1 death" in decided(once).reason
    twice = past.lived(
        good, past.killed("b", "p", at=10, source="journal"), past.killed("c", "p", at=20, source="journal")
    )
    found = decided(twice)
    assert found.kind is DecisionKind.CALIBRATE
    assert found.excluded == ("p",)
    assert "quarantined" in found.reason


def test_a_commit_sets_the_count_to_zero(past: Past) -> None:
    orderly = {"reason": "exit", "signal": None}
    lives = [
        past.epoch("a", past.round("committed", "p"), stopped=orderly),
        past.killed("b", "p", at=10, source="journal"),
        past.epoch("c", past.round("committed", "p", source="journal"), at=20, stopped=orderly),
        past.killed("d", "p", at=30, source="journal"),
    ]
    assert decided(past.lived(*lives)).placement == "p"
    assert decided(past.lived(*lives, past.killed("e", "p", at=40, source="journal"))).kind is DecisionKind.CALIBRATE


def test_a_suspect_that_is_committed_in_the_end_is_no_suspect(past: Past) -> None:
    view = past.lived(past.killed("a"), past.epoch("b", past.round("committed", "p", source="suspect"), at=10))
    assert (decided(view).kind, decided(view).placement) == (DecisionKind.RESTORE, "p")


def test_an_older_commit_is_used_when_the_newest_is_quarantined(past: Past) -> None:
    both = past.epoch("a", past.round("committed", "old"), past.round("committed", "new", number=2))
    view = past.lived(both, past.killed("b", "new", at=10), past.killed("c", "new", at=20))
    found = decided(view)
    assert (found.kind, found.placement, found.excluded) == (DecisionKind.RESTORE, "old", ("new",))


def test_deaths_are_counted_per_fingerprint(past: Past) -> None:
    good = past.epoch("a", past.round("committed", "p"))
    elsewhere = [past.killed(f"e{index}", "p", at=10 + index, fingerprint="g") for index in range(2)]
    assert decided(past.lived(good, *elsewhere)).placement == "p"


def rolled_back(past: Past, blames: str, **changes: Any) -> RoundView:
    outcome = {"placement": "initial", "verdict": {"blames": blames, "reason": "memory", "detail": ""}}
    return past.round("rolled-back", "p", outcome=outcome, **changes)


def test_a_restore_rolled_back_for_the_plan_is_quarantined_and_calibrated_without_it(past: Past) -> None:
    good = past.epoch("a", past.round("committed", "p"))
    failed = past.epoch("b", rolled_back(past, "plan", source="journal"), at=10)
    found = decided(past.stream(good, failed))
    assert (found.kind, found.excluded) == (DecisionKind.CALIBRATE, ("p",))


@pytest.mark.parametrize("blames", ["request", "infrastructure"])
def test_a_restore_rolled_back_for_anything_else_is_tried_again(past: Past, blames: str) -> None:
    good = past.epoch("a", past.round("committed", "p"))
    failed = past.epoch("b", rolled_back(past, blames, source="journal"), at=10)
    assert decided(past.stream(good, failed)).placement == "p"


def test_a_calibration_rolled_back_for_the_plan_is_not_tried_again_in_the_next_life(past: Past) -> None:
    found = decided(past.stream(past.epoch("a", rolled_back(past, "plan"))))
    assert (found.kind, found.excluded, found.reserve_factor) == (DecisionKind.CALIBRATE, ("p",), 1.0)


def test_a_placement_that_is_committed_after_it_was_rolled_back_is_restored(past: Past) -> None:
    view = past.stream(past.epoch("a", rolled_back(past, "plan"), past.round("committed", "p", number=2)))
    assert (decided(view).kind, decided(view).placement) == (DecisionKind.RESTORE, "p")


def test_the_initial_placement_is_never_excluded(past: Past) -> None:
    view = past.stream(past.epoch("a", replace(rolled_back(past, "plan"), placement="initial")))
    assert decided(view).excluded == ()


def test_a_placement_under_which_workers_keep_dying_while_serving_is_quarantined_although_each_start_commits_it(
    past: Past,
) -> None:
    lives = [past.serving(f"e{index}", at=20 * index) for index in range(4)]
    assert decided(past.lived(*lives[:2])).placement == "p"
    third = decided(past.lived(*lives[:3]))
    assert (third.kind, third.placement) == (DecisionKind.RESTORE, "p")
    fourth = decided(past.lived(*lives))
    assert (fourth.kind, fourth.excluded) == (DecisionKind.CALIBRATE, ("p",))


@pytest.mark.parametrize("ending", [{"stopped": {"reason": "signal", "signal": "SIGTERM"}}, {}])
def test_a_life_that_serves_long_or_ends_well_forgives_the_deaths_while_serving(
    past: Past, ending: dict[str, Any]
) -> None:
    lives = [past.serving(f"e{index}", at=20 * index) for index in range(3)]
    lives += [past.serving("good", at=60, **ending)]
    lives += [past.serving(f"f{index}", at=5000 + 20 * index) for index in range(3)]
    found = decided(past.lived(*lives, now=5100))
    assert (found.kind, found.placement) == (DecisionKind.RESTORE, "p")


def test_the_limits_come_from_the_policy(past: Past) -> None:
    view = past.lived(past.killed("a"))
    patient = Policy(deaths_max=1)
    found = decide(view, fingerprint={}, fingerprint_digest="f", initial="initial", policy=patient)
    assert found.kind is DecisionKind.QUARANTINED


def test_a_plan_that_lost_the_device_is_a_suspect_and_twice_it_stops_planning(past: Past) -> None:
    lost: dict[str, Any] = {
        "poisoned": {"problem": "CUDA error: misaligned address"},
        "stopped": {"reason": "error", "signal": None},
    }
    once = past.lived(past.killed("a", **lost))
    assert (decided(once).kind, decided(once).placement, decided(once).reserve_factor) == (
        DecisionKind.CALIBRATE,
        "p",
        2.0,
    )
    twice = past.lived(past.killed("a", **lost), past.killed("b", at=10, **lost))
    assert decided(twice).kind is DecisionKind.QUARANTINED


def test_after_a_lost_device_the_last_committed_placement_is_restored_and_not_the_one_that_lost_it(past: Past) -> None:
    lost: dict[str, Any] = {
        "poisoned": {"problem": "CUDA error: misaligned address"},
        "stopped": {"reason": "error", "signal": None},
    }
    good = past.epoch("a", past.round("committed", "p"))
    other = past.round("validating", "q", number=2)
    found = decided(past.lived(good, past.epoch("b", past.round("committed", "p"), other, at=10, **lost)))
    assert (found.kind, found.placement) == (DecisionKind.RESTORE, "p")
    # A restore that loses it twice is given up, as one that dies twice.
    restore = past.round("validating", "p", source="journal")
    tried = [past.epoch("b", restore, at=10, **lost), past.epoch("c", restore, at=20, **lost)]
    assert decided(past.lived(good, tried[0])).placement == "p"
    assert decided(past.lived(good, *tried)).excluded == ("p",)


def test_a_device_that_is_lost_while_serving_is_no_orderly_end_that_forgives(past: Past) -> None:
    lost: dict[str, Any] = {
        "poisoned": {"problem": "CUDA error: misaligned address"},
        "stopped": {"reason": "exit", "signal": None},
    }
    lives = [
        past.serving(f"e{index}", at=20 * index, poisoned_at=(20 * index + 5) * 10**9, **lost) for index in range(4)
    ]
    assert decided(past.lived(*lives)).excluded == ("p",)


# --- on a real journal -----------------------------------------------------------------------------------------------


def test_a_round_killed_after_its_first_intent_is_closed_and_judged_on_a_real_journal(
    past: Past, tmp_path: Path
) -> None:
    placement = Placement(components={}).digest
    started = {"fingerprint": {"cap": 1}, "fingerprint_digest": "f", "initial_placement": "initial"}
    plan = {"placement": placement, "previous": "initial", "source": "calibration"}
    intent = {"index": 0, "component": "unet", "before": {}, "after": {}, "undo": False}
    with Journal.open(tmp_path / "journal.db") as journal:
        journal.append(
            [
                Draft(type=EventType.EPOCH_STARTED, round=0, payload=started),
                Draft(
                    type=EventType.TRANSITION,
                    round=1,
                    payload=plan,
                    from_state="measuring",
                    to_state="planned",
                    trigger="plan",
                ),
                Draft(type=EventType.EFFECT_INTENT, round=1, payload=intent),
            ],
            stream="s",
            epoch="dead",
        )

        def view() -> StreamView:
            return fold_stream(journal.events(stream="s"), "s")

        before = view()
        (found,) = closing(before, boot_id=before.epochs[0].boot_id, now_ns=before.epochs[0].last_at, by_epoch="now")
        journal.append(found.drafts, stream="s", epoch=found.epoch, rank=found.rank)
        after = view()
        assert closing(after, boot_id="any", now_ns=0, by_epoch="now") == []
        assert past.death(after)["blames"] == "plan"
        assert after.epochs[0].rounds[0].open_intents == ()
        found_next = decide(after, fingerprint={"cap": 1}, fingerprint_digest="f", initial="initial")
        assert (found_next.placement, found_next.reserve_factor) == (placement, 2.0)
