"""Closing what dead lives left open, and whom each death blames."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from residency.journal.events import EventType
from residency.statemachine.states import SETTLED, State

if TYPE_CHECKING:
    from tests.statemachine.conftest import Past

IN_FLIGHT = [state.value for state in State if state not in SETTLED]


# --- closing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", IN_FLIGHT)
@pytest.mark.parametrize("num_open", [0, 1, 2])
def test_every_state_is_closed_once_with_one_outcome_per_intent_in_doubt(past: Past, state: str, num_open: int) -> None:
    intents = tuple(past.intent(index) for index in range(num_open))
    view = past.stream(past.epoch("dead", past.round(state, open_intents=intents, num_intents=num_open)))
    (found,) = past.close(view)
    assert (found.epoch, found.rank) == ("dead", 0)
    *outcomes, recovered = found.drafts
    assert [one.causation for one in outcomes] == [intent.event_id for intent in intents]
    assert all(one.type is EventType.EFFECT_OUTCOME and one.payload["result"] == "lost" for one in outcomes)
    assert recovered.type is EventType.RECOVERED
    assert recovered.payload["by_epoch"] == "now"
    assert (recovered.payload["state"], recovered.payload["round"]) == (state, 1)
    assert recovered.payload["in_doubt"] == num_open
    json.dumps([one.payload for one in found.drafts])


@pytest.mark.parametrize("state", [state.value for state in State])
def test_closing_twice_changes_nothing(past: Past, state: str) -> None:
    view = past.stream(past.epoch("dead", past.round(state, open_intents=(past.intent(),))))
    once = past.closed(view, past.close(view))
    assert once != view
    assert past.close(once) == []
    assert past.closed(once, past.close(once)) == once


def test_an_orderly_end_and_the_living_epoch_need_no_closing(past: Past) -> None:
    stopped = past.epoch("a", past.round("committed"), stopped={"reason": "detach", "signal": None})
    gated = past.epoch("b", past.round("measuring", None), stopped={"reason": "exit", "signal": None})
    alive = past.epoch("now", past.round("planned"))
    assert past.close(past.stream(stopped, gated, alive)) == []
    assert past.close(past.stream()) == []


def test_an_intent_left_in_a_recovered_epoch_gets_its_outcome_but_no_second_recovery(past: Past) -> None:
    epoch = past.epoch(
        "dead", past.round("applied", open_intents=(past.intent(),)), recovered={"death": {"blames": "none"}}
    )
    (found,) = past.close(past.stream(epoch))
    assert [one.type for one in found.drafts] == [EventType.EFFECT_OUTCOME]


def test_several_dead_epochs_are_closed_oldest_first(past: Past) -> None:
    view = past.stream(past.epoch("a", at=0), past.epoch("b", past.round("measuring", None), at=10))
    assert [one.epoch for one in past.close(view)] == ["a", "b"]


# --- blame -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["planned", "applied", "validating"])
def test_a_death_between_the_first_intent_and_the_commit_blames_the_plan(past: Past, state: str) -> None:
    view = past.lived(past.epoch("dead", past.round(state, num_intents=1)))
    assert (past.death(view)["blames"], past.death(view)["placement"], past.death(view)["fingerprint"]) == (
        "plan",
        "p",
        "f",
    )
    assert state in past.death(view)["why"]


@pytest.mark.parametrize(
    ("state", "num_intents"),
    [("measuring", 0), ("planned", 0), ("applied", 0), ("validating", 0), ("committed", 3), ("rolled-back", 3)],
)
def test_a_death_before_weights_moved_or_after_the_round_settled_does_not(
    past: Past, state: str, num_intents: int
) -> None:
    view = past.lived(past.epoch("dead", past.round(state, num_intents=num_intents)))
    assert past.death(view)["blames"] == "infrastructure"


def test_a_reboot_blames_the_infrastructure(past: Past) -> None:
    assert past.death(past.lived(past.killed("dead"), boot="another"))["blames"] == "infrastructure"
    serving = [past.serving(f"e{index}", at=20 * index) for index in range(4)]
    view = past.lived(*serving, boot="another")
    assert {past.death(view, index)["blames"] for index in range(4)} == {"infrastructure"}


@pytest.mark.parametrize("reason", ["signal", "exit", "detach"])
def test_a_journaled_end_in_mid_round_is_never_the_plans_fault(past: Past, reason: str) -> None:
    view = past.lived(
        past.killed("dead", stopped={"reason": reason, "signal": "SIGTERM" if reason == "signal" else None})
    )
    assert past.death(view)["blames"] == "infrastructure"
    assert ("SIGTERM" if reason == "signal" else reason) in past.death(view)["why"]


def test_a_failed_rollback_blames_the_plan_however_the_process_ended(past: Past) -> None:
    for stopped in (None, {"reason": "exit", "signal": None}):
        view = past.lived(past.killed("dead", rollback_failed={"problems": ["x"]}, stopped=stopped))
        assert past.death(view)["blames"] == "plan"


LOST = {"problem": "CUDA error: device-side assert triggered", "state": "validating"}
ENDED = {"reason": "error", "signal": None}


@pytest.mark.parametrize(
    ("state", "num_intents"), [("planned", 1), ("applied", 2), ("validating", 2), ("validating", 0)]
)
def test_a_lost_device_blames_the_plan_that_was_applied_or_tried_however_the_process_ended(
    past: Past, state: str, num_intents: int
) -> None:
    for stopped in (None, ENDED):
        tried = past.round(state, num_intents=num_intents)
        view = past.lived(past.epoch("dead", tried, poisoned=LOST, stopped=stopped), boot="another")
        death = past.death(view)
        assert (death["blames"], death["kind"], death["placement"]) == ("plan", "round", "p")
        assert f"round 1, {state}" in death["why"] and "device-side assert" in death["why"]


@pytest.mark.parametrize("placement", [None, "initial"])
def test_a_device_that_is_lost_on_the_way_back_to_the_initial_placement_is_nobodys_plan(
    past: Past, placement: str | None
) -> None:
    tried = past.round("measuring" if placement is None else "validating", placement, num_intents=1)
    view = past.lived(past.epoch("dead", tried, poisoned=LOST, stopped=ENDED))
    assert past.death(view)["blames"] == "infrastructure"


@pytest.mark.parametrize("state", ["measuring", "planned", "committed", "rolled-back"])
def test_a_device_that_is_lost_before_or_after_a_plan_was_tried_is_told_and_blames_no_plan(
    past: Past, state: str
) -> None:
    tried = past.round(state, None if state == "measuring" else "p")
    view = past.lived(past.epoch("dead", tried, poisoned=LOST, stopped=ENDED))
    assert past.death(view)["blames"] == "infrastructure"
    assert "the device was lost to it" in past.death(view)["why"]


def test_a_device_that_is_lost_while_serving_counts_as_a_death_while_serving_however_late_the_next_start_is(
    past: Past,
) -> None:
    lives = [
        past.serving(
            f"e{index}", at=5000 * index, poisoned=LOST, poisoned_at=(5000 * index + 30) * 10**9, stopped=ENDED
        )
        for index in range(3)
    ]
    view = past.lived(*lives, now=99_999)
    assert [past.death(view, index)["blames"] for index in range(3)] == ["infrastructure", "infrastructure", "plan"]
    assert "within 29 s of serving" in past.death(view, 0)["why"]
    late = past.lived(past.serving("e", at=0, poisoned=LOST, poisoned_at=5000 * 10**9, stopped=ENDED))
    assert past.death(late)["kind"] == "survived"


def test_an_intent_in_doubt_of_a_settled_round_in_a_stopped_epoch_blames_nobody(past: Past) -> None:
    settled = past.round("committed", open_intents=(past.intent(),))
    view = past.lived(past.epoch("dead", settled, stopped={"reason": "exit", "signal": None}))
    assert past.death(view)["blames"] == "none"


def test_the_third_death_in_a_row_soon_after_serving_blames_the_plan(past: Past) -> None:
    view = past.lived(*(past.serving(f"e{index}", at=20 * index) for index in range(3)))
    assert [past.death(view, index)["blames"] for index in range(3)] == ["infrastructure", "infrastructure", "plan"]
    assert past.death(view)["placement"] == "p"


@pytest.mark.parametrize(
    "between",
    [
        {"stopped": {"reason": "signal", "signal": "SIGTERM"}},
        {"placement": "q"},
        {"fingerprint": "g"},
    ],
)
def test_another_end_placement_or_fingerprint_in_between_breaks_the_row(past: Past, between: dict[str, Any]) -> None:
    lives = [past.serving("e0", at=0), past.serving("e1", at=20, **between)]
    lives += [past.serving("e2", at=40), past.serving("e3", at=60)]
    view = past.lived(*lives)
    assert [past.death(view, index)["blames"] for index in (2, 3)] == ["infrastructure"] * 2


def test_the_initial_placement_is_nobodys_plan(past: Past) -> None:
    view = past.lived(*(past.serving(f"e{index}", at=20 * index, placement="initial") for index in range(5)))
    assert {past.death(view, index)["blames"] for index in range(5)} == {"infrastructure"}


def test_a_clock_that_went_backwards_blames_nobodys_plan(past: Past) -> None:
    view = past.lived(*(past.serving(f"e{index}", at=1000 - 20 * index) for index in range(4)), now=0)
    assert {past.death(view, index)["blames"] for index in range(4)} == {"infrastructure"}


def test_a_death_long_after_serving_began_breaks_the_row(past: Past) -> None:
    starts = [0, 20, 40 + 700, 760, 780]
    view = past.lived(*(past.serving(f"e{i}", at=at) for i, at in enumerate(starts)), now=800)
    # The second life lasted over ten minutes; three in a row are complete only with the last one.
    assert [past.death(view, index)["blames"] for index in range(5)] == ["infrastructure"] * 4 + ["plan"]
