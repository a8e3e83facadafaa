"""A real worker behind its control app: it is killed with a request in flight, and its next life tells what became."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.fleet_replicas import keep_port
from residency.control import Verb
from residency.fleet import FleetClient
from residency.journal.fold import fold_stream
from residency.journal.reader import JournalReader
from residency.statemachine.replicas import Fault, ReplicaOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = Path(__file__).with_name("worker_process.py")
WAIT_S = 60.0


class Worker:
    """Lives of one worker, one after the other, at one URL."""

    def __init__(self, folder: Path) -> None:
        self.journal, self.hold = folder / "journal.db", folder / "hold"
        self.kept = keep_port()
        self.port = self.kept.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, SCRIPT, self.journal, str(self.port), self.hold])
        self.wait_for(lambda told: told["ready"])

    def wait_for(self, is_there: Any) -> dict[str, Any]:
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            assert self.process is not None and self.process.poll() is None
            try:
                told: dict[str, Any] = httpx2.get(f"{self.url}/control", timeout=5).json()
                if is_there(told):
                    return told
            except httpx2.HTTPError:
                pass
            time.sleep(0.02)
        raise AssertionError("the worker did not get there in time")

    def end(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(WAIT_S)

    def ask(self, verb: Verb = Verb.CALIBRATE, **options: Any) -> Any:
        return FleetClient([self.url]).ask(verb, timeout_s=WAIT_S, **options).replicas[0]

    def ask_held(self) -> tuple[threading.Thread, list[Any]]:
        """Have a calibration begin that does not go on, on a thread."""
        self.hold.touch()
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(self.ask()))
        thread.start()
        told = self.wait_for(lambda told: told["control"]["running"] and told["state"] == "measuring")
        assert told["ready"] is False
        return thread, answers


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    pytest.importorskip("uvicorn")
    made = Worker(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.end()
    made.kept.close()


def test_a_worker_killed_with_a_request_is_unknown_until_its_next_life_tells(worker: Worker) -> None:
    worker.start()
    kept = worker.ask()
    assert (kept.outcome, kept.round) == (ReplicaOutcome.KEPT, 2)

    thread, answers = worker.ask_held()
    worker.end()
    thread.join(WAIT_S)
    (lost,) = answers
    assert lost.outcome is ReplicaOutcome.UNKNOWN
    assert (lost.request["epoch"], lost.request["round"]) == (kept.epoch, 2)

    worker.hold.unlink()
    worker.start()
    again = worker.ask(again={worker.url: lost.request})
    assert (again.outcome, again.fault) == (ReplicaOutcome.REFUSED, Fault.ANOTHER_EPOCH)
    assert "round 3 never got beyond measuring; it died, which blames " in again.reason
    assert again.epoch != lost.request["epoch"]
    # What was done and told in the life before is still what it was.
    told = worker.ask(again={worker.url: kept.request})
    assert (told.outcome, told.fault, told.repeated) == (ReplicaOutcome.KEPT, Fault.ANOTHER_EPOCH, True)
    # Nothing but a new request changes anything.
    assert worker.ask(Verb.VALIDATE).outcome is ReplicaOutcome.COMMITTED


def test_a_worker_that_is_asked_to_stop_with_a_request_rolls_back_first(worker: Worker) -> None:
    worker.start()
    thread, answers = worker.ask_held()
    # After the second that its server waits; then the signal is residency's, and the round sees it when it goes on.
    threading.Timer(2.0, worker.hold.unlink).start()
    assert worker.process is not None
    worker.process.send_signal(signal.SIGTERM)

    assert worker.process.wait(WAIT_S) == -signal.SIGTERM
    thread.join(WAIT_S)
    assert answers[0].outcome is ReplicaOutcome.UNKNOWN
    with JournalReader.open(worker.journal) as reader:
        (epoch,) = fold_stream(reader.events("tiny"), "tiny").epochs
    assert (epoch.state, epoch.rounds[-1].state) == ("rolled-back", "rolled-back")
    assert epoch.stopped is not None and epoch.stopped["signal"] == "SIGTERM"
