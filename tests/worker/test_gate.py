"""Every reason to do nothing: found before any cost is paid, told by name, and the worker serves."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import residency
from residency.journal.events import Draft, EventType
from residency.journal.schema import FORMAT
from residency.journal.sqlite import connect
from residency.journal.store import Journal
from residency.settings import KILL_SWITCHES
from residency.statemachine.gate import GateReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOLD = """
import sys
from residency.journal.store import Journal
journal = Journal.open(sys.argv[1])
held = journal.hold("tiny")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _no_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KILL_SWITCHES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def held_elsewhere(worker: Any) -> Iterator[int]:
    """Another process that holds the stream; its process id."""
    command = [sys.executable, "-c", HOLD, str(worker.journal)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.stdin.close()


@pytest.fixture
def costs_nothing(worker: Any, tiny: Any) -> Callable[[residency.Manager, residency.Report], None]:
    """Assert that a gated start measured nothing, watches nothing, and serves its initial placement."""

    def check(manager: residency.Manager, report: residency.Report) -> None:
        assert worker.pipeline.calls == [], "no warmup, so no probe and no step floor"
        assert (report.num_requests, report.num_probes, report.round) == (0, 0, 0)
        assert manager._epoch._first_rounds.results == [], "no timing is kept"
        assert manager._pipeline.num_hooks <= sum(len(spec.entry_points) for spec in manager._pipeline.specs)
        assert manager._pipeline.pinned_bytes == 0
        assert report.placement == manager.placement == manager._setup.initial
        assert manager.ready
        assert worker.pipeline.request(tiny.WORKLOAD).shape == (1, 64, 768)

    return check


def kinds(worker: Any, manager: residency.Manager) -> list[str]:
    return [event.type for event in worker.events() if event.epoch == manager.epoch]


def gated(worker: Any, manager: residency.Manager) -> dict[str, Any]:
    (said,) = [event for event in worker.events() if event.epoch == manager.epoch and event.type == "gated"]
    payload: dict[str, Any] = json.loads(said.payload)
    return payload


def is_gated(worker: Any, manager: residency.Manager, report: residency.Report, reason: GateReason) -> None:
    assert report.decision is residency.Decision.GATED
    assert report.reason.startswith(f"{reason.value}: ")
    assert "\n" not in report.reason
    said = gated(worker, manager)
    assert said["reason"] == reason.value
    assert said["detail"] in report.reason


def test_a_stream_that_another_process_holds(worker: Any, held_elsewhere: int, costs_nothing: Any) -> None:
    before = worker.events()
    manager = worker.attach()
    report = manager.start()
    assert report.decision is residency.Decision.GATED
    assert report.reason == (
        f"stream-in-use: the stream is held by process {held_elsewhere}; "
        "give each worker its own name (attach(name=...) or RESIDENCY_NAME)"
    )
    costs_nothing(manager, report)
    manager.detach()
    assert worker.events() == before, "neither recovered nor written to"


def test_a_second_worker_of_the_same_name(worker: Any, costs_nothing: Any) -> None:
    first = worker.attach(warmup=None)
    first.start()
    second = worker.attach()
    report = second.start()
    assert report.reason.startswith("stream-in-use: ")
    assert kinds(worker, second) == []
    assert second.handle({"verb": "calibrate", "epoch": second.epoch})["outcome"] == "skipped"
    costs_nothing(second, report)
    # Under a name of its own it has a stream of its own, in the same journal.
    assert worker.attach(name="other", warmup=None).start().reason.startswith("no-warmup: ")
    assert "recovered" not in kinds(worker, first)


def test_a_journal_that_a_newer_program_wrote(worker: Any, costs_nothing: Any) -> None:
    Journal.open(worker.journal).close()
    connection = connect(worker.journal, mode="rw", wait_s=1)
    connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    connection.close()
    content = worker.journal.read_bytes()
    manager = worker.attach()
    report = manager.start()
    assert report.decision is residency.Decision.WITHOUT_JOURNAL
    assert f"format {FORMAT + 1} is newer than this program's {FORMAT}; upgrade residency" in report.reason
    assert manager._epoch.gate is not None and manager._epoch.gate.reason is GateReason.JOURNAL_NEWER
    costs_nothing(manager, report)
    manager.detach()
    assert worker.journal.read_bytes() == content


def test_a_journal_that_cannot_be_used(worker: Any, costs_nothing: Any) -> None:
    worker.journal.mkdir()
    manager = worker.attach()
    report = manager.start()
    assert report.decision is residency.Decision.WITHOUT_JOURNAL
    assert report.reason == report.error == f"journal {worker.journal}: is a directory; name a file in it"
    assert manager._epoch.gate is not None and manager._epoch.gate.reason is GateReason.JOURNAL_UNUSABLE
    costs_nothing(manager, report)


def test_several_ranks(worker: Any, costs_nothing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A group of two needs two processes; what it says about its size does not.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    manager = worker.attach()
    report = manager.start()
    is_gated(worker, manager, report, GateReason.SEVERAL_RANKS)
    costs_nothing(manager, report)


def test_no_warmup(worker: Any, costs_nothing: Any) -> None:
    manager = worker.attach(warmup=None)
    report = manager.start()
    is_gated(worker, manager, report, GateReason.NO_WARMUP)
    assert kinds(worker, manager) == ["epoch.started", "gated", "serving"]
    costs_nothing(manager, report)


def test_no_workload(worker: Any, costs_nothing: Any) -> None:
    manager = worker.attach(workload=None)
    report = manager.start()
    is_gated(worker, manager, report, GateReason.NO_WORKLOAD)
    costs_nothing(manager, report)


def test_nothing_to_decide(worker: Any, costs_nothing: Any) -> None:
    modes = dict.fromkeys(("encoder", "denoiser", "decoder"), "component-offload")
    manager = worker.attach(modes=modes)
    report = manager.start()
    is_gated(worker, manager, report, GateReason.NOTHING_TO_DECIDE)
    assert "encoder (configured by the worker)" in report.reason
    costs_nothing(manager, report)


def test_a_fingerprint_under_which_two_plans_were_the_death_of_the_worker(worker: Any, costs_nothing: Any) -> None:
    worker.attach(warmup=None).start()
    worker.managers[-1].detach()
    begun = dict(worker.view().epochs[0].started)
    with Journal.open(worker.journal) as journal:
        for number, plan in enumerate(("e" * 64, "f" * 64), start=1):
            drafts = [
                Draft(type=EventType.EPOCH_STARTED, round=0, payload=begun),
                Draft(
                    type=EventType.TRANSITION,
                    round=number,
                    payload={"placement": plan},
                    from_state="measuring",
                    to_state="planned",
                    trigger="plan",
                ),
                Draft(type=EventType.EFFECT_INTENT, round=number, payload={"index": 0, "component": "decoder"}),
            ]
            journal.append(drafts, stream="tiny", epoch=f"dead-{number}")
    manager = worker.attach()
    report = manager.start()
    is_gated(worker, manager, report, GateReason.QUARANTINED)
    assert "2 lives died" in report.reason
    costs_nothing(manager, report)


@pytest.mark.parametrize(
    ("error", "problem"),
    [(ValueError("no such prompt"), "raised ValueError: no such prompt"), (None, "returned nothing")],
)
def test_a_warmup_that_fails_is_called_once(worker: Any, tiny: Any, error: Exception | None, problem: str) -> None:
    shapes: list[residency.Workload] = []

    def warmup(shape: residency.Workload) -> None:
        shapes.append(shape)
        if error is not None:
            raise error

    manager = worker.attach(warmup=warmup)
    report = manager.start()
    is_gated(worker, manager, report, GateReason.WARMUP_FAILED)
    assert report.reason == (
        f"warmup-failed: the warmup {problem}; "
        "make the warmup run one request of the shape it is given and return its output"
    )
    assert report.error is not None and problem in report.error
    assert len(shapes) == 1, "once, and neither probed nor warmed again"
    assert report.num_probes == 0
    assert report.placement == manager._setup.initial
    assert manager.handle({"verb": "calibrate", "epoch": manager.epoch, "round": 1})["outcome"] == "skipped"
    assert worker.pipeline.request(tiny.WORKLOAD).shape == (1, 64, 768)
