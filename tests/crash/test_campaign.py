"""The campaign in short: some of each kind of disturbance, and proof that it finds what is wrong.

All of it is one command, which may be stopped and goes on: see tests/crash/campaign.py.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.crash.campaign import FAULTS, POWER_JOBS, Part, Progress
from tests.crash.cases import BEGINS_WITH, ROOT, Found, Tally, Workshop
from tests.crash.rounds import Rounds
from tests.crash.shim import CHANGES, EVERYTHING, Action, NoShim, build

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of each job; together they take a tenth of the long form's minutes.
KILLS, FAILURES, IMAGES, CUTS, ROUNDS, ROUND_FAULTS = 24, 20, 1500, 400, 14, 10


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where nothing waits for a disk: what survives is decided by the model, and by the kernel."""
    fast = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="residency-test-", dir=fast if os.access(fast, os.W_OK) else None))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def library(folder: Path) -> Path:
    try:
        return build(folder)
    except NoShim as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def workshop(folder: Path, library: Path) -> Iterator[Workshop]:
    made = Workshop(folder / "jobs", library)
    yield made
    made.close()


@pytest.fixture(scope="module")
def rounds(folder: Path, library: Path) -> Iterator[Rounds]:
    made = Rounds(folder / "rounds", library)
    yield made
    made.close()


def nothing_in(tally: Tally) -> bool:
    return (
        tally.cases > 0
        and tally.first_problems == []
        and (tally.events_lost, tally.wrong_placements, tally.effects_unannounced, tally.problems) == (0, 0, 0, 0)
    )


def spread(num: int, wanted: int) -> range:
    """About so many of the numbers from 1, at equal distances, the last few calls among them in any case."""
    return range(1 + num % max(1, num // wanted), num + 1, max(1, num // wanted))


@pytest.mark.parametrize("job", BEGINS_WITH)
def test_a_job_killed_at_any_call_loses_nothing_acknowledged(job: str, workshop: Workshop) -> None:
    tally = Tally()
    for number, at in enumerate(spread(workshop.num_calls(job, CHANGES), KILLS)):
        action = (Action.KILL_BEFORE, Action.KILL_HALFWAY, Action.KILL_AFTER)[number % 3]
        tally.add(workshop.killed(job, at=at, action=action), f"{job}, {action.name} {at}")
    assert nothing_in(tally), tally


@pytest.mark.parametrize("job", BEGINS_WITH)
def test_any_call_that_fails_once_or_for_good_loses_nothing_acknowledged(job: str, workshop: Workshop) -> None:
    tally = Tally()
    for number, at in enumerate(spread(workshop.num_calls(job, EVERYTHING), FAILURES)):
        action, error, sticky = FAULTS[number % len(FAULTS)]
        found = workshop.failed(job, at=at, action=action, error=error, sticky=sticky)
        tally.add(found, f"{job}, {action.name} {at} {errno.errorcode[error]} {sticky}")
    assert nothing_in(tally), tally


def test_power_losses_lose_nothing_acknowledged(workshop: Workshop) -> None:
    tally = Tally()
    for seed in range(IMAGES):
        job = POWER_JOBS[seed % len(POWER_JOBS)]
        tally.add(workshop.lost_power(job, seed), f"{job} {seed}")
    assert nothing_in(tally), tally


def test_a_wal_cut_at_any_byte_leaves_what_was_acknowledged_before_it(workshop: Workshop) -> None:
    tally = Tally()
    size = workshop.wal_bytes()
    frame = 24 + 4096
    # Around every frame's ends, and at equal distances between.
    around = {at + by for at in range(32, size, frame) for by in (-1, 0, 1, 24) if at + by <= size}
    for at in sorted(around | set(spread(size, CUTS))):
        tally.add(workshop.cut(at), f"at byte {at}")
    assert nothing_in(tally), tally


def test_workers_killed_at_random_in_a_round_lose_nothing_and_restore_what_was_committed(rounds: Rounds) -> None:
    tally, num_killed = Tally(), 0
    for number in range(ROUNDS):
        num, found = rounds.killed(number)
        num_killed += num
        tally.add(found, f"journal {number}")
    assert nothing_in(tally), tally
    assert num_killed > 2 * ROUNDS


def test_a_worker_serves_whatever_call_on_its_journal_fails(rounds: Rounds) -> None:
    tally = Tally()
    for number, at in enumerate(spread(rounds.num_calls_at_all, ROUND_FAULTS)):
        error, sticky = (errno.EIO, errno.ENOSPC)[number % 2], number % 4 > 1
        tally.add(rounds.failed(at=at, error=error, sticky=sticky), f"{at} {errno.errorcode[error]} {sticky}")
    assert nothing_in(tally), tally


# It can fail.


def test_a_journal_that_is_written_less_durably_loses_events_in_power_losses(workshop: Workshop) -> None:
    tally = Tally()
    for seed in range(20):
        tally.add(workshop.lost_power("log", seed, mutation="synchronous NORMAL"), f"{seed}")
    assert tally.events_lost > 10
    assert any("acknowledged events are not there" in problem for problem in tally.first_problems)


def test_a_journal_that_lost_a_trigger_is_reported(workshop: Workshop) -> None:
    found = workshop.killed("append", at=10**6, action=Action.KILL_BEFORE, mutation="a trigger dropped")
    assert any("trigger events_no_delete is missing" in problem for problem in found.problems)


def test_an_intent_that_comes_after_its_effect_is_reported(rounds: Rounds) -> None:
    tally = Tally()
    for number in range(4 * ROUNDS):
        tally.add(rounds.killed(number, mutation="intent after effect")[1], f"journal {number}")
        if tally.effects_unannounced:
            break
    assert any("effects were begun, and" in problem for problem in tally.first_problems)


def test_the_campaign_goes_on_where_it_was_stopped_and_prints_its_figures(library: Path, tmp_path: Path) -> None:
    progress = tmp_path / "progress.json"
    command = [sys.executable, "-m", "tests.crash.campaign", "--journal-of-progress", str(progress)]
    command += ["--part", "images", "--images", "40"]
    units = 0
    for seconds in ("1.5", "60"):
        ended = subprocess.run(
            [*command, "--seconds", seconds], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == 0, ended.stderr
        figures = json.loads(ended.stdout)
        assert figures["parts"] == json.loads(progress.read_text())
        assert figures["parts"]["images"]["units"] >= units
        units = figures["parts"]["images"]["units"]
    assert (units, figures["parts"]["images"]["done"]) == (40, True)
    assert figures["total"] == {
        "cases": 40,
        "events_lost": 0,
        "wrong_placements": 0,
        "effects_unannounced": 0,
        "problems": 0,
    }


def test_whatever_is_found_makes_the_campaign_fail(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "progress.json", seconds=None)

    def bad(index: int) -> tuple[int, Found]:
        return 1, Found(problems=["it is gone"] * (index == 3), lost=index == 3)

    progress.run("images", lambda: (Part("images", "losses", 5, 5, [bad]), lambda: None))
    assert progress.is_bad()
    assert progress.figures()["parts"]["images"]["tally"]["first_problems"] == ["images 3: it is gone"]
    assert progress.figures()["total"]["events_lost"] == 1
