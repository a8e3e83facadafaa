"""What is held against placements, and how an operator's clearing forgives it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from residency.journal.events import Draft, EventType
from residency.journal.fold import fold_stream
from residency.journal.store import Journal
from residency.journal.views import Clearing
from residency.statemachine.history import History, Standing
from residency.statemachine.policy import Policy
from residency.statemachine.recovery import Decision, DecisionKind, decide

if TYPE_CHECKING:
    from pathlib import Path

    from residency.journal.views import EpochView, StreamView
    from tests.statemachine.conftest import Past

ORDERLY = {"reason": "exit", "signal": None}


def clearing(*, placement: str | None = None, fingerprint: str = "f") -> Clearing:
    return Clearing(fingerprint=fingerprint, placement=placement, reason="a fixed driver", at_ns=1, position=9)


def cleared(view: StreamView, *found: Clearing) -> StreamView:
    """Return the stream with clearings at its end, which is the newest epoch's."""
    return replace(view, epochs=(*view.epochs[:-1], replace(view.epochs[-1], clearings=found)))


def decided(view: StreamView, fingerprint: str = "f") -> Decision:
    return decide(view, fingerprint={"cap": fingerprint}, fingerprint_digest=fingerprint, initial="initial")


def standings(view: StreamView) -> dict[str, Standing]:
    return {one.placement: one.standing for one in History.of(view, fingerprint_digest="f").held(Policy())}


def good(past: Past) -> EpochView:
    return past.epoch("a", past.round("committed", "p"), stopped=ORDERLY)


def test_a_cleared_placement_is_restored_again(past: Past) -> None:
    view = past.lived(good(past), past.killed("b", "p", at=10), past.killed("c", "p", at=20))
    assert decided(view).kind is DecisionKind.CALIBRATE

    found = decided(cleared(view, clearing(placement="p")))

    assert (found.kind, found.placement, found.excluded) == (DecisionKind.RESTORE, "p", ())
    assert "blamed" not in found.reason


def test_clearing_everything_lets_a_fingerprint_be_planned_for_again(past: Past) -> None:
    view = past.lived(past.killed("a"), past.killed("b", "q", at=10, source="suspect"))
    assert decided(view).kind is DecisionKind.QUARANTINED

    found = decided(cleared(view, clearing()))

    # Not even a suspect is left: nothing is replanned with a larger reserve.
    assert (found.kind, found.reserve_factor, found.excluded) == (DecisionKind.CALIBRATE, 1.0, ())


def test_a_clearing_is_about_its_own_placement_and_fingerprint_only(past: Past) -> None:
    view = past.lived(good(past), past.killed("b", "p", at=10), past.killed("c", "p", at=20))

    for other in (clearing(placement="q"), clearing(fingerprint="g")):
        assert decided(cleared(view, other)) == decided(view)


def test_deaths_after_a_clearing_count_from_one(past: Past) -> None:
    view = past.lived(good(past), past.killed("b", "p", at=10), past.killed("c", "p", at=20))
    after = cleared(view, clearing(placement="p")).epochs

    once = past.lived(*after, past.killed("d", "p", at=30))
    twice = past.lived(*after, past.killed("d", "p", at=30), past.killed("e", "p", at=40))

    assert (decided(once).placement, "1 death" in decided(once).reason) == ("p", True)
    assert standings(twice) == {"p": Standing.QUARANTINED}


def test_a_death_that_no_start_had_closed_yet_is_forgiven_too(past: Past) -> None:
    dead = replace(past.killed("b", "q", at=10), clearings=(clearing(),))

    view = past.lived(past.killed("a"), dead)

    assert view.epochs[1].recovered is not None
    assert decided(view).kind is DecisionKind.CALIBRATE
    assert standings(view) == {}


def test_deaths_in_a_row_begin_anew_after_a_clearing(past: Past) -> None:
    three = [past.serving(name, at=10 * index) for index, name in enumerate("abc")]
    again = past.serving("d", at=30)
    assert past.death(past.lived(*three, again))["blames"] == "plan"

    view = past.lived(*three[:-1], replace(three[-1], clearings=(clearing(placement="p"),)), again)

    assert past.death(view)["blames"] == "infrastructure"
    assert standings(view) == {}


def test_a_placement_that_was_rolled_back_may_be_planned_again(past: Past) -> None:
    verdict = {"verdict": {"ok": False, "blames": "plan", "reason": "memory", "detail": "too much"}}
    view = past.lived(past.epoch("a", past.round("rolled-back", "q", outcome=verdict), stopped=ORDERLY))
    assert decided(view).excluded == ("q",)
    (held,) = History.of(view, fingerprint_digest="f").held(Policy())
    assert (held.standing, held.strikes[0].why) == (Standing.FAILED, "memory: too much")

    assert decided(cleared(view, clearing(placement="q"))).excluded == ()


def test_what_is_held_says_how_it_stands_and_since_when(past: Past) -> None:
    view = past.lived(
        good(past),
        past.killed("b", "p", at=10),
        past.killed("c", "p", at=20),
        past.killed("d", "never", at=30),
        past.epoch("e", at=40, stopped=ORDERLY),
    )

    quarantined, blamed = History.of(view, fingerprint_digest="f").held(Policy())

    assert (quarantined.placement, quarantined.standing) == ("p", Standing.QUARANTINED)
    assert [one.epoch for one in quarantined.strikes] == ["b", "c"]
    assert quarantined.since_ns == quarantined.strikes[1].at_ns == view.epochs[2].last_at
    assert (blamed.placement, blamed.standing) == ("never", Standing.BLAMED)
    stopped = past.lived(*view.epochs[:-1], past.killed("e", "another", at=40))
    assert standings(stopped)["never"] is Standing.PLANNING_STOPPED


def test_a_clearing_is_folded_from_the_journal_and_moves_nothing_else(tmp_path: Path) -> None:
    started = Draft(type=EventType.EPOCH_STARTED, round=0, payload={"fingerprint_digest": "f"})
    payload = {"fingerprint": "f", "placement": None, "reason": "a fixed driver"}
    with Journal.open(tmp_path / "journal.db") as journal:
        journal.append([started], stream="s", epoch="a")
        before = fold_stream(journal.events(stream="s"), "s").epochs[0]
        journal.append([Draft(type=EventType.QUARANTINE_CLEARED, round=0, payload=payload)], stream="s", epoch="a")
        after = fold_stream(journal.events(stream="s"), "s").epochs[0]

    (found,) = after.clearings
    assert (found.fingerprint, found.placement, found.reason, found.position) == ("f", None, "a fixed driver", 2)
    assert replace(after, clearings=(), last_position=1, num_events=1) == before
