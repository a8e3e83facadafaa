"""SIGKILL just before and just after every append of a round; every next start recovers, restores or calibrates.

To prove a new crash point, let the round append an event there: the number of appends is counted, not listed.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from residency.journal.views import StreamView

Start = Callable[..., dict[str, Any]]
Inspect = Callable[[Path | str], StreamView]


@pytest.fixture(scope="module")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a first and a second start do if nobody dies."""
    journal = tmp_path_factory.mktemp("undisturbed") / "journal.db"
    first, second = start(journal=journal)["answer"], start(journal=journal)["answer"]
    assert (first["decision"], second["decision"]) == ("committed", "restored")
    return first, second


def test_a_calibration_killed_at_any_append_is_recovered(
    start: Start, inspect: Inspect, undisturbed: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    calibration, _ = undisturbed
    for append in range(1, calibration["appends"] + 1):
        for before in (True, False):
            journal = tmp_path / f"{append}-{before}.db"
            killed = start(journal=journal, append=append, before=before)
            assert killed["status"] == -signal.SIGKILL, (append, before)
            _recovers(start, inspect, journal, calibration, where=(append, before))


def test_a_restore_killed_at_any_append_is_recovered(
    start: Start, inspect: Inspect, undisturbed: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    calibration, restore = undisturbed
    committed = tmp_path / "committed.db"
    assert start(journal=committed)["answer"]["decision"] == "committed"
    for append in range(1, restore["appends"] + 1):
        for before in (True, False):
            journal = _copy(committed, tmp_path / f"{append}-{before}.db")
            assert start(journal=journal, append=append, before=before)["status"] == -signal.SIGKILL
            again = start(journal=journal)["answer"]
            # Blamed once, a committed placement is restored again.
            assert again["decision"] == "restored", (append, before)
            assert again["placement_digest"] == calibration["placement_digest"]
            assert again["output"] == calibration["output"]
            _is_closed(inspect(journal))


def test_a_calibration_killed_at_any_append_to_a_server_is_recovered(
    start: Start, inspect: Inspect, undisturbed: tuple[dict[str, Any], dict[str, Any]], database: Any
) -> None:
    calibration, _ = undisturbed
    # Every other one: which events there are does not depend on where they are written.
    for append in range(1, calibration["appends"] + 1, 2):
        before = append % 4 == 1
        schema = database.new_schema()
        journal = database.url(schema)
        killed = start(journal=journal, append=append, before=before)
        assert killed["status"] == -signal.SIGKILL, (append, before)
        _recovers(start, inspect, journal, calibration, where=(append, before))
        database.drop_schema(schema)


def _recovers(
    start: Start, inspect: Inspect, journal: Path | str, calibration: dict[str, Any], *, where: object
) -> None:
    again = start(journal=journal)["answer"]
    assert again["decision"] in ("committed", "restored", "rolled-back", "kept"), where
    assert again["output"] == calibration["output"], where
    view = inspect(journal)
    _is_closed(view)
    committed = [one.placement for one in view.rounds if one.state == "committed"]
    if again["decision"] == "restored":
        assert again["placement_digest"] in committed, where
    deaths = [epoch.recovered["death"] for epoch in view.epochs if epoch.recovered is not None]
    moved = [epoch for epoch in view.epochs[:-1] if any(one.num_intents for one in epoch.rounds)]
    unsettled = [epoch for epoch in moved if epoch.rounds[-1].state not in ("committed", "rolled-back")]
    blamed = [death for death in deaths if death["blames"] == "plan"]
    assert len(blamed) == len(unsettled), where


def _copy(journal: Path, to: Path) -> Path:
    """Copy a journal that nobody has open, with the witness of its head."""
    for suffix in ("", ".head"):
        shutil.copy(f"{journal}{suffix}", f"{to}{suffix}")
    return to


def _is_closed(view: StreamView) -> None:
    """No epoch but the last is open, and no intent is in doubt."""
    assert all(epoch.ended for epoch in view.epochs)
    assert not any(one.open_intents for one in view.rounds)


def test_two_deaths_of_uncommitted_plans_quarantine_planning(start: Start, tmp_path: Path) -> None:
    journal = tmp_path / "journal.db"
    assert start(journal=journal, effect=0)["status"] == -signal.SIGKILL
    # A suspect is planned again from its records, with a larger reserve, and dies again.
    assert start(journal=journal, effect=0)["status"] == -signal.SIGKILL
    report = start(journal=journal)["answer"]
    assert report["decision"] == "gated"
    assert "quarantined" in report["reason"]
    assert report["num_requests"] == 0
    # Another fingerprint is another matter.
    assert start(journal=journal, options={"cap": 64 * 2**20})["answer"]["decision"] == "kept"


def test_a_suspect_is_planned_again_from_its_records_without_a_probe(
    start: Start, inspect: Inspect, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.db"
    assert start(journal=journal, effect=0)["status"] == -signal.SIGKILL
    report = start(journal=journal)["answer"]
    assert report["num_probes"] == 0
    view = inspect(journal)
    assert view.rounds[-1].source == "suspect"
    plan = view.rounds[-1].plan
    assert plan is not None
    assert plan["inputs"]["reserve_factor"] == 2.0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("state", ["measuring", "planned", "applied", "validating"])
def test_a_termination_signal_in_mid_round_rolls_back_first(
    start: Start, inspect: Inspect, tmp_path: Path, state: str, signum: signal.Signals
) -> None:
    journal = tmp_path / "journal.db"
    died = start(journal=journal, state=state, signal=signum)
    assert died["status"] != 0
    view = inspect(journal)
    (epoch,) = view.epochs
    assert epoch.rounds[-1].state == "rolled-back"
    assert epoch.stopped == {"reason": "signal", "signal": signum.name}
    assert not any(one.open_intents for one in view.rounds)
    # Nobody blames the plan for that.
    assert start(journal=journal)["answer"]["decision"] == "committed"


def test_a_serving_worker_that_is_asked_to_terminate_says_so_and_blames_nobody(
    start: Start, inspect: Inspect, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.db"
    # As often as a rollout restarts a worker: more often than early deaths would be forgiven.
    for number in range(5):
        died = start(journal=journal, terminate=signal.SIGTERM)
        assert died["status"] == -signal.SIGTERM
        last = inspect(journal).epochs[-1]
        assert last.stopped == {"reason": "signal", "signal": "SIGTERM"}
        assert last.serving is not None
        assert last.serving["decision"] == ("restored" if number else "committed")


def test_a_round_on_another_thread_rolls_back_before_the_signal_ends_the_process(
    start: Start, inspect: Inspect, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.db"
    died = start(journal=journal, terminate_in_control=signal.SIGTERM)
    assert died["status"] == -signal.SIGTERM
    (epoch,) = inspect(journal).epochs
    assert [one.state for one in epoch.rounds] == ["committed", "rolled-back"]
    assert epoch.stopped == {"reason": "signal", "signal": "SIGTERM"}


def test_three_early_deaths_while_serving_quarantine_a_committed_placement(
    start: Start, inspect: Inspect, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.db"
    first = start(journal=journal, vanish=True)["answer"]
    # Its first life and two more die soon after they began to serve; at two blamed deaths it is out.
    later = [start(journal=journal, vanish=True)["answer"] for _ in range(4)]
    assert [one["decision"] for one in later] == ["restored", "restored", "restored", "committed"]
    assert [one["placement_digest"] == first["placement_digest"] for one in later] == [True, True, True, False]
    blamed = [
        epoch.recovered["death"]["placement"]
        for epoch in inspect(journal).epochs
        if epoch.recovered is not None and epoch.recovered["death"]["blames"] == "plan"
    ]
    assert set(blamed) == {first["placement_digest"]}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_termination_signal_during_any_append_leaves_one_truth(
    start: Start, inspect: Inspect, tmp_path: Path, signum: signal.Signals
) -> None:
    """The handler runs while the append is being written, as it does when a signal comes during its sync."""
    appends = start(journal=tmp_path / "counted.db")["answer"]["appends"]
    for append in range(1, appends + 1):
        journal = tmp_path / f"{append}.db"
        assert start(journal=journal, append=append, before=False, signal=signum)["status"] != 0
        view = inspect(journal)
        for one in view.rounds:
            assert one.state in ("committed", "rolled-back"), append
            assert not one.open_intents, append
            settled = one.placement if one.state == "committed" else one.previous
            assert view.epochs[-1].placement == settled, append


def test_a_rollback_that_fails_ends_with_its_exit_code_and_is_recovered(
    start: Start, inspect: Inspect, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.db"
    died = start(journal=journal, break_rollback=True)
    assert died["status"] == 70
    assert "rollback failed" in died["answer"]["error"]
    assert died["answer"]["ready"] is False
    (epoch,) = inspect(journal).epochs
    assert epoch.rollback_failed is not None
    assert epoch.rounds[-1].state not in ("committed", "rolled-back")
    again = start(journal=journal)["answer"]
    assert again["decision"] in ("committed", "kept", "rolled-back")


@pytest.mark.parametrize("where", ["validation", "way back"])
def test_a_device_that_is_lost_ends_with_its_exit_code_and_the_next_start_is_safe(
    start: Start, inspect: Inspect, undisturbed: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, where: str
) -> None:
    journal = tmp_path / "journal.db"
    died = start(journal=journal, lose_device=where)
    assert died["status"] == 71
    assert "the device is lost to this process" in died["answer"]["error"]
    assert died["answer"]["ready"] is False
    (epoch,) = inspect(journal).epochs
    assert epoch.poisoned is not None
    assert epoch.rounds[-1].state == "validating"
    again = start(journal=journal)["answer"]
    assert again["decision"] in ("committed", "kept", "rolled-back")
    assert again["output"] == undisturbed[0]["output"]
    view = inspect(journal)
    assert view.rounds[-1].source == "suspect"
    _is_closed(view)


def test_a_committed_placement_under_which_the_device_is_lost_is_restored_once_more_and_then_given_up(
    start: Start, inspect: Inspect, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.db"
    committed = start(journal=journal)["answer"]["placement_digest"]
    for _ in range(2):
        assert start(journal=journal, lose_device="validation")["status"] == 71
        assert inspect(journal).rounds[-1].placement == committed
    last = start(journal=journal)["answer"]
    assert (last["decision"] == "restored", last["placement_digest"] == committed) == (False, False)
    _is_closed(inspect(journal))
