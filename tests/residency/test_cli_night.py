"""The commands that docs/operations.md shows with their output, on the journal of a night: they print just that."""

import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from residency.gpu.placement import ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.records import PhaseRecord, RequestKind, RequestRecord
from residency.gpu.specs import ComponentSpec, LayerGroupSpec
from residency.gpu.workload import Workload
from residency.journal.events import Draft, EventType
from residency.journal.store import Journal

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
TITLE = "## What was on the GPU at 03:12, and why"
# In their order: what the first one shows, the second one goes on with.
TITLES = (TITLE, "## When a placement is given up")

GIB = 2**30
MIB = 2**20
S_NS = 10**9
MIDNIGHT_NS = 1_795_993_200 * S_NS  # 2026-11-30T00:00:00+01:00
SHAPE = Workload(width=1024, height=1024, frames=1, steps=28, batch=1)
FINGERPRINT = {"cap_bytes": 24 * GIB, "torch": "2.13.0"}
FIRST, SECOND = "3f2a91bc-5a0e-4a53-9f3c-0d1f6f6f1f11", "9d41c7e0-66cf-4b42-8f0a-2b7c1b0f7a22"


def spec(name: str, *, layers: int, layer_bytes: int, outside: int) -> ComponentSpec:
    groups = (LayerGroupSpec(name="blocks", layer_bytes=(layer_bytes,) * layers),) if layers else ()
    return ComponentSpec(
        name=name,
        class_name=name.title(),
        total_bytes=layers * layer_bytes + outside,
        groups=groups,
        modes=tuple(Mode),
        fixed_reason=None,
        weights_digest="ef" * 32,
        entry_points=("forward",),
    )


SPECS = (
    spec("text_encoder", layers=24, layer_bytes=384 * MIB, outside=256 * MIB),
    spec("transformer", layers=57, layer_bytes=384 * MIB, outside=GIB),
    spec("vae", layers=0, layer_bytes=0, outside=160 * MIB),
)
OFFLOADED = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PAGEABLE)
RESIDENT = ComponentPlacement(mode=Mode.RESIDENT)


def layerwise(num_resident: int, window_bytes: int) -> ComponentPlacement:
    return ComponentPlacement(
        mode=Mode.LAYERWISE_OFFLOAD,
        tier=HostTier.PINNED,
        resident_layers={"blocks": tuple(range(num_resident))} if num_resident else {},
        num_slots=2,
        window_bytes=window_bytes,
    )


INITIAL = Placement(components={"text_encoder": OFFLOADED, "transformer": OFFLOADED, "vae": OFFLOADED})
LARGE = Placement(
    components={"text_encoder": layerwise(0, 2 * GIB), "transformer": layerwise(48, 2 * GIB), "vae": RESIDENT}
)
SMALL = Placement(
    components={"text_encoder": layerwise(0, 2 * GIB), "transformer": layerwise(30, 2 * GIB), "vae": RESIDENT}
)


def record(kind: RequestKind, placement: Placement, *, ms: int, peak: int, succeeded: bool = True) -> dict[str, Any]:
    phase = PhaseRecord(
        key="use:transformer",
        active=("transformer",),
        lingering=None,
        allocated_peak_bytes=peak - 256 * MIB,
        reserved_peak_bytes=peak,
        duration_ns=ms * 10**6,
        num_occurrences=1,
    )
    found = RequestRecord(
        kind=kind,
        workload=SHAPE,
        target_steps=28,
        placement_digest=placement.digest,
        succeeded=succeeded,
        out_of_memory=not succeeded,
        error=None if succeeded else "CUDA out of memory",
        baseline_allocated_bytes=GIB,
        baseline_reserved_bytes=GIB,
        phases=(phase,),
        uses=(("text_encoder", 1), ("transformer", 28), ("vae", 1)),
        layer_uses={},
        duration_ns=ms * 10**6,
        to_device_bytes=0,
        to_host_bytes=0,
        output_digest="ab" * 32,
    )
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return plain


class Night:
    """Writes what a worker wrote in that night, each event at its time."""

    def __init__(self, path: Path) -> None:
        self._now_ns = 0
        self._epoch = FIRST
        self._journal = Journal.open(path, clock_ns=lambda: self._now_ns)

    def at(self, clock: str) -> None:
        """Go on at a time of that day; of the evening before with a '-' in front."""
        hours, minutes, seconds = (float(part) for part in clock.removeprefix("-").split(":"))
        since_ns = round((hours * 3600 + minutes * 60 + seconds) * S_NS)
        self._now_ns = MIDNIGHT_NS + since_ns - (86_400 * S_NS if clock.startswith("-") else 0)

    def write(self, kind: EventType, number: int = 0, *, epoch: str | None = None, **fields: Any) -> str:
        payload = msgspec.to_builtins(fields.pop("payload", {}))
        draft = Draft(type=kind, round=number, payload=payload, **fields)
        return self._journal.append([draft], stream="worker-0", epoch=epoch or self._epoch, witness=True)[0].event_id

    def start(self, epoch: str, **recovery: Any) -> None:
        self._epoch = epoch
        payload = {
            "version": "0.1.0",
            "fingerprint": FINGERPRINT,
            "fingerprint_digest": "f",
            "initial_placement": INITIAL.digest,
            "specs": SPECS,
            "workload": SHAPE,
            "device": {"kind": "cuda", "name": "NVIDIA H200", "index": 0, "cap_bytes": 24 * GIB},
            "recovery": recovery,
        }
        self.write(EventType.EPOCH_STARTED, payload=payload, blobs=(INITIAL.to_bytes(),))

    def measured(self, number: int, kind: RequestKind, placement: Placement, **figures: Any) -> None:
        self.write(EventType.MEASURED, number, payload={"record": record(kind, placement, **figures)})

    def transition(self, number: int, way: str, trigger: str, **payload: Any) -> None:
        source, target = way.split(" -> ")
        blobs = (LARGE.to_bytes(), SMALL.to_bytes()) if trigger == "plan" else ()
        self.write(
            EventType.TRANSITION,
            number,
            payload=payload,
            from_state=source,
            to_state=target,
            trigger=trigger,
            blobs=blobs,
        )

    def move(self, number: int, name: str, before: Placement, after: Placement, *, undo: bool = False) -> None:
        change = {"before": before.components[name], "after": after.components[name]}
        intent = self.write(
            EventType.EFFECT_INTENT, number, payload={"index": 0, "component": name, "undo": undo, **change}
        )
        result = "undone" if undo else "applied"
        outcome = {"index": 0, "component": name, "result": result, "error": None, "duration_ns": 9}
        self.write(EventType.EFFECT_OUTCOME, number, payload=outcome, causation=intent)

    def close(self) -> None:
        self._journal.close()


def plan(placement: Placement, source: str, *, ms: int, **extra: Any) -> dict[str, Any]:
    prediction = {"duration_ns": ms * 10**6, "compute_ns": ms * 10**6, "transfer_ns": 0}
    prediction |= {"device_bytes": 0, "pinned_bytes": 0}
    bound = "device memory in phase 'use:transformer'"
    plain = {"placement": placement.digest, "previous": INITIAL.digest, "source": source}
    return {**plain, **({"prediction": prediction, "bound_by": bound} if source == "calibration" else {}), **extra}


def verdict(*, ok: bool, reason: str, detail: str) -> dict[str, Any]:
    return {"ok": ok, "blames": None if ok else "plan", "reason": reason, "detail": detail, "figures": {}}


@pytest.fixture
def night(tmp_path: Path) -> Iterator[None]:
    """A worker that calibrated in the evening, was killed at night, could not be restored, and calibrated again."""
    night = Night(tmp_path / "residency.db")
    night.at("-22:00:05")
    night.start(FIRST, kind="calibrate", reason="no placement is remembered")
    night.at("-22:00:40")
    night.measured(1, RequestKind.PROBE, INITIAL, ms=5890, peak=23 * GIB)
    night.measured(1, RequestKind.BASELINE, INITIAL, ms=5870, peak=23 * GIB)
    night.transition(1, "measuring -> planned", "plan", **plan(LARGE, "calibration", ms=1200))
    for name in LARGE.components:
        night.move(1, name, INITIAL, LARGE)
    night.transition(1, "planned -> applied", "apply", placement=LARGE.digest)
    night.transition(1, "applied -> validating", "validate")
    night.at("-22:01:10")
    night.measured(1, RequestKind.VALIDATION, LARGE, ms=1240, peak=23 * GIB)
    good = verdict(ok=True, reason="passed", detail="reserved peak 23.0 GiB of 24.0 GiB, 1.24 s against 5.87 s before")
    night.transition(1, "validating -> committed", "commit", placement=LARGE.digest, verdict=good)
    night.write(EventType.SERVING, 1, payload={"placement": LARGE.digest, "decision": "committed"})
    night.at("03:11:20")
    why = "it may have served for 18610 s"
    death = {"blames": "infrastructure", "kind": "survived", "why": why, "placement": LARGE.digest, "fingerprint": "f"}
    recovered = {"by_epoch": SECOND, "round": 1, "state": "committed", "in_doubt": 0, "death": death}
    night.write(EventType.RECOVERED, 1, epoch=FIRST, payload=recovered)
    night.start(SECOND, kind="restore", reason="round 1 committed it under the same fingerprint")
    night.at("03:11:45")
    night.transition(2, "measuring -> planned", "plan", **plan(LARGE, "journal", ms=0, from_round=1))
    night.at("03:11:46")
    night.move(2, "text_encoder", INITIAL, LARGE)
    night.at("03:11:52")
    night.move(2, "transformer", INITIAL, LARGE)
    night.move(2, "vae", INITIAL, LARGE)
    night.transition(2, "planned -> applied", "apply", placement=LARGE.digest)
    night.transition(2, "applied -> validating", "validate")
    night.at("03:12:09")
    night.measured(2, RequestKind.VALIDATION, LARGE, ms=900, peak=24 * GIB, succeeded=False)
    for name in reversed(list(LARGE.components)):
        night.move(2, name, LARGE, INITIAL, undo=True)
    bad = verdict(ok=False, reason="out-of-memory", detail="a request ran out of memory under the proposed placement")
    night.transition(2, "validating -> rolled-back", "roll_back", placement=INITIAL.digest, verdict=bad)
    night.transition(3, "rolled-back -> measuring", "measure", placement=INITIAL.digest)
    night.at("03:13:02")
    night.measured(3, RequestKind.PROBE, INITIAL, ms=5910, peak=20 * GIB)
    night.transition(3, "measuring -> planned", "plan", **plan(SMALL, "calibration", ms=2100))
    for name in SMALL.components:
        night.move(3, name, INITIAL, SMALL)
    night.transition(3, "planned -> applied", "apply", placement=SMALL.digest)
    night.transition(3, "applied -> validating", "validate")
    night.at("03:13:30")
    night.measured(3, RequestKind.VALIDATION, SMALL, ms=2140, peak=18 * GIB)
    good = verdict(ok=True, reason="passed", detail="reserved peak 18.0 GiB of 24.0 GiB, 2.14 s against 5.91 s before")
    night.transition(3, "validating -> committed", "commit", placement=SMALL.digest, verdict=good)
    night.write(EventType.SERVING, 3, payload={"placement": SMALL.digest, "decision": "committed"})
    night.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "CET-1")
        time.tzset()
        # Somebody asks in the morning.
        patch.setattr(time, "time_ns", lambda: MIDNIGHT_NS + 8 * 3600 * S_NS + 1800 * S_NS)
        yield
    time.tzset()


def page(title: str) -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(title) :].split("\n## ", 1)[0]


def told() -> list[tuple[str, str]]:
    """Every command of these pages that is shown with what it prints."""
    found = []
    text = "\n".join(map(page, TITLES))
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def normal(text: str) -> str:
    """What differs from machine to machine is left out: processes, folders, and how wide a column is for it."""
    return re.sub(r"process \d+", "process N", text).rstrip()


def test_the_pages_show_what_their_commands_print(night: None, run: Callable[..., Any]) -> None:
    commands = told()
    assert len(commands) >= 7
    for command, output in commands:
        program, *arguments = shlex.split(command)
        assert program == "residency"

        done = run(*arguments, environment={"RESIDENCY_JOURNAL": "residency.db"})

        assert normal(done.out + done.err) == normal(output), command
        assert done.code in (0, 1), command


def test_the_page_takes_a_minute() -> None:
    # A person reads some 250 words a minute; what commands print is looked at, not read.
    prose = re.sub(r"^```.*?^```$", "", page(TITLE), flags=re.MULTILINE | re.DOTALL)

    assert len(prose.split()) < 300
