import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from residency.errors import ProcessPoisoned, ResidencyError, RollbackFailed, RoundUndecided
from residency.interrupts import Interrupts, Terminated, deliver
from residency.journal.fold import fold_stream
from residency.journal.reader import JournalReader

ROOT = Path(__file__).parents[2]


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that reach the handlers a worker had before its rounds."""
    found: list[int] = []

    def handle(signum: int, frame: object) -> None:
        found.append(signum)

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield found
    for signum, handler in before.items():
        signal.signal(signum, handler)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


def test_a_signal_that_was_held_back_ends_what_held_it(heard: list[int]) -> None:
    interrupts = Interrupts()

    with pytest.raises(Terminated, match="SIGTERM"), interrupts, interrupts.deferred():
        send(signal.SIGTERM)

    assert heard == []


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_nothing_while_the_first_is_cleared_up(heard: list[int], second: signal.Signals) -> None:
    cleared_up = []

    def round_trip(interrupts: Interrupts) -> None:
        try:
            send(signal.SIGTERM)
        except Terminated:
            # A rollback: outside of what is deferred, inside of it, and at its end.
            send(second)
            with interrupts.deferred():
                send(second)
            cleared_up.append(True)
            raise

    with pytest.raises(Terminated, match="SIGTERM"), Interrupts() as interrupts:
        round_trip(interrupts)

    assert cleared_up == [True]
    # The last words of the worker.
    send(second)
    assert heard == []
    deliver(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    send(second)
    assert heard == [signal.SIGTERM, second]


@pytest.mark.parametrize(
    "error",
    [
        RollbackFailed(round_number=1, problems=("vae: gone",)),
        ProcessPoisoned(round_number=1, problem="illegal access"),
        RoundUndecided(round_number=1, problem="the store is lost"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_ends_the_process_by_itself_is_not_hidden_by_a_signal(heard: list[int], error: ResidencyError) -> None:
    interrupts = Interrupts()

    with pytest.raises(type(error)), interrupts, interrupts.deferred():
        send(signal.SIGTERM)
        raise error


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_are_back_after_what_no_signal_ended(heard: list[int], fails: bool) -> None:
    def run() -> None:
        if fails:
            raise ValueError("no signal")

    try:
        with Interrupts():
            run()
    except ValueError:
        pass
    send(signal.SIGTERM)

    assert heard == [signal.SIGTERM]


def test_interrupts_can_be_entered_again_after_a_signal(heard: list[int]) -> None:
    interrupts = Interrupts()
    for _ in range(2):
        with pytest.raises(Terminated), interrupts:
            send(signal.SIGINT)
        deliver(signal.SIGTERM)

    assert heard == [signal.SIGTERM] * 2


# A worker that is interrupted as it leaves a state, and again while it writes that it stopped.
WORKER = f"""
import importlib.util, os, signal, sys
from pathlib import Path
from residency.journal import insert
from residency.journal.events import EventType

spec = importlib.util.spec_from_file_location("tiny", {str(ROOT / "tests" / "worker" / "tiny.py")!r})
tiny = importlib.util.module_from_spec(spec)
sys.modules["tiny"] = tiny
spec.loader.exec_module(tiny)
plain = insert._make_event

def make_event(one, **fields):
    if one.draft.type is EventType.STOPPED:
        os.kill(os.getpid(), signal.SIGINT)
    return plain(one, **fields)

insert._make_event = make_event

class Observer:
    def working(self, what): pass
    def between_effects(self, index): pass
    def leaving(self, state):
        if state == "applied":
            os.kill(os.getpid(), signal.SIGINT)

try:
    tiny.Worker(Path(sys.argv[1])).attach(observer=Observer()).start()
except KeyboardInterrupt:
    sys.exit(42)
"""


def test_a_second_ctrl_c_while_a_worker_ends_neither_shows_nor_loses_anything(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    journal = tmp_path / "journal.db"

    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(journal)], capture_output=True, text=True, check=False, env=clean_environment
    )

    assert (done.returncode, done.stderr) == (42, "")
    with JournalReader.open(journal) as reader:
        (stream,) = reader.streams()
        (epoch,) = fold_stream(reader.events(stream), stream).epochs
    assert epoch.stopped == {"reason": "signal", "signal": "SIGINT"}
    assert epoch.rounds[-1].state == "rolled-back"
