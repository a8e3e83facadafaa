"""Journals as workers leave them, written through the real store."""

import io
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from residency.cli import main
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.records import HostReading, LinkReading, PhaseRecord, RequestKind, RequestRecord
from residency.gpu.specs import ComponentSpec, LayerGroupSpec
from residency.gpu.workload import Workload
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal
from residency.statemachine.planner.plan import PlanInputs

MIB = 2**20
OFFLOADED = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED)
LAYERWISE = ComponentPlacement(
    mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PAGEABLE, resident_layers={"blocks": (0, 2)}, num_slots=2
)
INITIAL = Placement(components={"text_encoder": OFFLOADED, "transformer": OFFLOADED, "vae": RESIDENT})
PLANNED = Placement(components={"text_encoder": OFFLOADED, "transformer": LAYERWISE, "vae": RESIDENT})
SHAPE = Workload(width=128, height=96, frames=1, steps=6, batch=1)
SPECS = tuple(
    ComponentSpec(
        name=name,
        class_name=name.title(),
        total_bytes=sum(layers) + 10 * MIB,
        groups=(LayerGroupSpec(name="blocks", layer_bytes=layers),) if layers else (),
        modes=tuple(Mode),
        fixed_reason=None,
        weights_digest="ef" * 32,
        entry_points=("forward",),
    )
    for name, layers in {"text_encoder": (), "transformer": (50 * MIB,) * 4, "vae": ()}.items()
)
# Events are a second apart from here on: 2026-11-30T12:00:00Z.
START_NS = 1_796_040_000_000_000_000


def record(kind: RequestKind, placement: Placement) -> RequestRecord:
    phase = PhaseRecord(
        key="use:transformer",
        active=("transformer",),
        lingering=None,
        allocated_peak_bytes=300 * MIB,
        reserved_peak_bytes=320 * MIB,
        duration_ns=2_000_000_000,
        num_occurrences=1,
    )
    return RequestRecord(
        kind=kind,
        workload=SHAPE,
        target_steps=6,
        placement_digest=placement.digest,
        succeeded=True,
        out_of_memory=False,
        error=None,
        baseline_allocated_bytes=10 * MIB,
        baseline_reserved_bytes=20 * MIB,
        phases=(phase,),
        uses=(("text_encoder", 1), ("transformer", 6), ("vae", 1)),
        layer_uses={},
        duration_ns=2_500_000_000,
        to_device_bytes=0,
        to_host_bytes=0,
        output_digest="ab" * 32,
    )


def plan_payload() -> dict[str, Any]:
    """A plan as the planner hands it out: every part that explain can print."""
    inputs = PlanInputs(
        specs=SPECS,
        configured={"vae": "configured by the user"},
        current=INITIAL,
        initial=INITIAL,
        records=(record(RequestKind.PROBE, INITIAL),),
        cap_bytes=400 * MIB,
        link=LinkReading(to_device_pinned=50e9, to_device_pageable=10e9, to_host_pinned=50e9, to_host_pageable=10e9),
        host=HostReading(available_bytes=2**33, cgroup_cap_bytes=None, pin_budget_bytes=2**32),
        workload=SHAPE,
        excluded=("cd" * 32,),
        reserve_factor=2.0,
    )
    prediction = {
        "duration_ns": 1_900_000_000,
        "compute_ns": 1_700_000_000,
        "transfer_ns": 200_000_000,
        "device_bytes": 250 * MIB,
        "pinned_bytes": 100 * MIB,
        "phases": [
            {"key": "use:transformer", "peak_bytes": 350 * MIB, "reserve_bytes": 25 * MIB, "limit_bytes": 375 * MIB}
        ],
        "timed": True,
        "measured": True,
    }
    alternative = {
        "name": "runner-up",
        "digest": INITIAL.digest,
        "placement": INITIAL,
        "duration_ns": 2_500_000_000,
        "device_bytes": 50 * MIB,
        "pinned_bytes": 0,
        "feasible": True,
    }
    following = {
        "component": "text_encoder",
        "placement": RESIDENT,
        "extra_bytes": 30 * MIB,
        "gain_ns": 170_000_000,
        "phase": "use:transformer",
        "measured": True,
    }
    payload = {
        "placement": PLANNED.digest,
        "previous": INITIAL.digest,
        "source": "calibration",
        "prediction": prediction,
        "inputs": inputs,
        "bound_by": "device memory in phase 'use:transformer'",
        "next_cheapest": following,
        "alternatives": [alternative],
        "num_candidates": {"text_encoder": 3, "transformer": 9},
        "exact": True,
        "relaxed": False,
    }
    plain: dict[str, Any] = msgspec.to_builtins(payload)
    return plain


@dataclass
class Story:
    """Writes the events of workers, a second apart."""

    path: Path
    now_ns: int = START_NS
    journal: Journal = field(init=False)
    # The intent without outcome of a story that ends with one.
    in_doubt: str = ""

    def __post_init__(self) -> None:
        self.journal = Journal.open(self.path, clock_ns=self.tick)
        # Making the file may have asked for the time: the first event is at START_NS and a second.
        self.now_ns = START_NS

    def tick(self) -> int:
        self.now_ns += 1_000_000_000
        return self.now_ns

    def write(self, *drafts: Draft, stream: str = "worker", epoch: str = "epoch-1") -> list[str]:
        ids = []
        for draft in drafts:
            ids += [event.event_id for event in self.journal.append([draft], stream=stream, epoch=epoch, witness=True)]
        return ids

    def start(
        self, *, stream: str = "worker", epoch: str = "epoch-1", fingerprint: dict[str, Any] | None = None
    ) -> None:
        parts = fingerprint or {"torch": "2.13.0", "cap_bytes": 400 * MIB}
        payload = {
            "version": "0.1.0",
            "fingerprint": parts,
            "fingerprint_digest": str(sorted(parts.items())),
            "initial_placement": INITIAL.digest,
            "configured": {"vae": "configured by the user"},
            "specs": [],
            "workload": msgspec.to_builtins(SHAPE),
            "device": {},
            "host": {},
        }
        started = Draft(type=EventType.EPOCH_STARTED, round=0, payload=payload, blobs=(INITIAL.to_bytes(),))
        self.write(started, stream=stream, epoch=epoch)

    def plan(self, number: int, *, stream: str = "worker", epoch: str = "epoch-1") -> None:
        measured = {"record": msgspec.to_builtins(record(RequestKind.PROBE, INITIAL))}
        self.write(
            Draft(type=EventType.MEASURED, round=number, payload=measured),
            transition(number, "measuring", "planned", "plan", plan_payload(), blobs=(PLANNED.to_bytes(),)),
            stream=stream,
            epoch=epoch,
        )

    def restore(self, number: int, *, from_round: int, epoch: str) -> None:
        """A round that has gone as far as planned: back to the placement of an earlier one."""
        plan = {
            "placement": PLANNED.digest, "previous": INITIAL.digest, "source": "journal", "from_round": from_round,
        }  # fmt: skip
        self.write(transition(number, "measuring", "planned", "plan", plan), epoch=epoch)

    def recover(self, number: int, *, epoch: str, by_epoch: str, intent: str) -> None:
        """What a later start writes about a life that died with one effect in doubt."""
        lost = {"index": 0, "component": "transformer", "result": "lost", "error": None, "duration_ns": 0}
        death = {
            "blames": "plan",
            "kind": "round",
            "why": f"it died between the first effect and the commit, in round {number}, planned",
            "placement": PLANNED.digest,
            "fingerprint": "f",
        }
        payload = {"by_epoch": by_epoch, "round": number, "state": "planned", "in_doubt": 1, "death": death}
        self.write(
            Draft(type=EventType.EFFECT_OUTCOME, round=number, payload=lost, causation=intent),
            Draft(type=EventType.RECOVERED, round=number, payload=payload),
            epoch=epoch,
        )

    def intend(self, number: int, *, stream: str = "worker", epoch: str = "epoch-1", undo: bool = False) -> str:
        payload = msgspec.to_builtins(
            {"index": 0, "component": "transformer", "before": OFFLOADED, "after": LAYERWISE, "undo": undo}
        )
        draft = Draft(type=EventType.EFFECT_INTENT, round=number, payload=payload)
        return self.write(draft, stream=stream, epoch=epoch)[0]

    def commit(self, number: int, *, stream: str = "worker", epoch: str = "epoch-1") -> None:
        """A whole round that commits."""
        self.plan(number, stream=stream, epoch=epoch)
        intent = self.intend(number, stream=stream, epoch=epoch)
        outcome = {"index": 0, "component": "transformer", "result": "applied", "error": None, "duration_ns": 5}
        verdict = {"ok": True, "blames": None, "reason": "faster", "detail": "2.50 s to 1.90 s"}
        self.write(
            Draft(type=EventType.EFFECT_OUTCOME, round=number, payload=outcome, causation=intent),
            transition(number, "planned", "applied", "apply", {"placement": PLANNED.digest, "num_effects": 1}),
            transition(number, "applied", "validating", "validate", {}),
            transition(number, "validating", "committed", "commit", {"placement": PLANNED.digest, "verdict": verdict}),
            stream=stream,
            epoch=epoch,
        )

    def serve(self, *, stream: str = "worker", epoch: str = "epoch-1") -> None:
        payload = {"placement": PLANNED.digest, "decision": "committed"}
        self.write(Draft(type=EventType.SERVING, round=1, payload=payload), stream=stream, epoch=epoch)


def transition(
    number: int, source: str, target: str, trigger: str, payload: dict[str, Any], *, blobs: tuple[bytes, ...] = ()
) -> Draft:
    return Draft(
        type=EventType.TRANSITION,
        round=number,
        payload=payload,
        from_state=source,
        to_state=target,
        trigger=trigger,
        blobs=blobs,
    )


@dataclass(frozen=True)
class Result:
    """What a run of the command line left."""

    code: int
    out: str
    err: str

    def json(self) -> list[Any]:
        return [msgspec.json.decode(line) for line in self.out.splitlines()]


Run = Callable[..., Result]


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path / "journal.db")


@pytest.fixture
def committed(story: Story) -> Story:
    """One worker that calibrated, committed and serves. Nine events."""
    story.start()
    story.commit(1)
    story.serve()
    return story


@pytest.fixture
def crashed(committed: Story) -> Story:
    """The same, then a second epoch under another cap that died with an effect in doubt."""
    committed.start(epoch="epoch-2", fingerprint={"torch": "2.13.0", "cap_bytes": 500 * MIB})
    committed.plan(2, epoch="epoch-2")
    committed.in_doubt = committed.intend(2, epoch="epoch-2")
    return committed


@pytest.fixture
def died(crashed: Story) -> Callable[[], None]:
    """Write what the next start, epoch-3, writes about the crashed one."""
    return lambda: crashed.recover(2, epoch="epoch-2", by_epoch="epoch-3", intent=crashed.in_doubt)


@pytest.fixture
def poison() -> Callable[..., None]:
    """Write what a worker writes whose device is lost, and its orderly end."""

    def call(story: Story, *, round_number: int, epoch: str, state: str) -> None:
        lost = {"problem": "AcceleratorError: CUDA error: misaligned address", "state": state}
        stopped = {"reason": "error", "signal": None}
        story.write(
            Draft(type=EventType.POISONED, round=round_number, payload=lost),
            Draft(type=EventType.STOPPED, round=round_number, payload=stopped),
            epoch=epoch,
        )

    return call


@pytest.fixture
def settle(crashed: Story) -> Callable[..., None]:
    """Write the outcome of the crashed epoch's effect, or of another intent of it."""

    def call(result: str, *, intent: str | None = None) -> None:
        payload = {"index": 0, "component": "transformer", "result": result, "error": None, "duration_ns": 5}
        draft = Draft(type=EventType.EFFECT_OUTCOME, round=2, payload=payload, causation=intent or crashed.in_doubt)
        crashed.write(draft, epoch="epoch-2")

    return call


@pytest.fixture
def measured() -> Callable[..., None]:
    """Write a validation request of a round."""

    def call(story: Story, *, round_number: int, epoch: str) -> None:
        payload = {"record": msgspec.to_builtins(record(RequestKind.VALIDATION, PLANNED))}
        story.write(Draft(type=EventType.MEASURED, round=round_number, payload=payload), epoch=epoch)

    return call


DROPPED = ("RESIDENCY_", "SGLANG_", "NO_COLOR", "COLUMNS")


@pytest.fixture
def clean_environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return {**kept, "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def run(tmp_path: Path, clean_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process, in a folder and an environment of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, environment: dict[str, str] | None = None) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            for name in (name for name in os.environ if name.startswith(DROPPED)):
                patch.delenv(name)
            for name, value in {**clean_environment, **(environment or {})}.items():
                patch.setenv(name, value)
            code = main(arguments)
        return Result(code=code, out=out.getvalue(), err=err.getvalue())

    return call


@pytest.fixture
def gate() -> Callable[..., None]:
    """Write the event of a gate: gate(story, reason=..., detail=...)."""

    def call(story: Story, *, epoch: str = "epoch-1", **payload: str) -> None:
        story.write(Draft(type=EventType.GATED, round=0, payload=payload), epoch=epoch)

    return call
