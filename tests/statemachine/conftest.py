"""Builders of the values that the pure half of the state machine works on."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode, Placement
from residency.gpu.records import HostReading, LinkReading, PhaseRecord, RequestKind, RequestRecord
from residency.gpu.specs import ComponentSpec, LayerGroupSpec
from residency.gpu.workload import Workload
from residency.journal.views import EpochView, OpenIntent, RoundView, StreamView
from residency.statemachine.planner.plan import PlanInputs
from residency.statemachine.policy import Policy
from residency.statemachine.recovery import closing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residency.statemachine.recovery import Closing

# The models of pipelines are those of the benchmarks, which are no part of the package. At the end, so that the folders
# at the root shadow nothing.
sys.path.append(str(Path(__file__).parents[2]))

# Generated cases must cost seconds on two cores, and a slow one is no failure.
settings.register_profile(
    "fast", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
# The long form: pytest --hypothesis-profile long tests/statemachine
settings.register_profile("long", settings.get_profile("fast"), max_examples=10_000, print_blob=True)
if settings.get_current_profile_name() != "long":
    settings.load_profile("fast")

MIB = 2**20
OFFLOADED = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PAGEABLE)
PINNED = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED)
SHAPE = Workload(width=512, height=512, frames=1, steps=4, batch=1)


@dataclass(frozen=True)
class Build:
    """Values with defaults: a text encoder, a transformer of layers, and a decoder, 1 GiB/s pageable, twice pinned."""

    pageable: ComponentPlacement = OFFLOADED
    pinned: ComponentPlacement = PINNED
    shape: Workload = SHAPE
    policy: Policy = field(
        default_factory=lambda: Policy(reserve_measured_bytes=0, equal_fraction_max=1.0, busy_slowdown=0.0)
    )
    link: LinkReading = field(
        default_factory=lambda: LinkReading(
            to_device_pinned=2 * 2**30, to_device_pageable=2**30, to_host_pinned=2 * 2**30, to_host_pageable=2**30
        )
    )

    def spec(
        self,
        name: str,
        size: int,
        *,
        layers: tuple[int, ...] = (),
        modes: tuple[Mode, ...] | None = None,
        fixed_reason: str | None = None,
    ) -> ComponentSpec:
        found = (Mode.RESIDENT, Mode.COMPONENT_OFFLOAD, *((Mode.LAYERWISE_OFFLOAD,) if layers else ()))
        return ComponentSpec(
            name=name,
            class_name=name.title(),
            total_bytes=size,
            groups=(LayerGroupSpec(name="blocks", layer_bytes=layers),) if layers else (),
            modes=found if modes is None else modes,
            fixed_reason=fixed_reason,
            weights_digest=name,
            entry_points=("forward",),
        )

    def specs(self) -> tuple[ComponentSpec, ...]:
        return (
            self.spec("encoder", 100 * MIB),
            self.spec("transformer", 440 * MIB, layers=(50 * MIB,) * 8),
            self.spec("vae", 40 * MIB),
        )

    def transfer_ns(self, spec: ComponentSpec, placement: ComponentPlacement, *, uses: int) -> int:
        speed = self.link.to_device_pinned if placement.tier is HostTier.PINNED else self.link.to_device_pageable
        if placement.mode is Mode.RESIDENT:
            return 0
        moved = spec.total_bytes
        if placement.mode is Mode.LAYERWISE_OFFLOAD:
            kept = placement.resident_layers.get("blocks", ())
            (group,) = spec.groups
            moved = uses * sum(size for index, size in enumerate(group.layer_bytes) if index not in kept)
        return round(moved * 1e9 / speed)

    def placement(self, specs: tuple[ComponentSpec, ...], **chosen: ComponentPlacement) -> Placement:
        return Placement(components={spec.name: chosen.get(spec.name, OFFLOADED) for spec in specs})

    def resident(self, specs: tuple[ComponentSpec, ...]) -> Placement:
        return Placement(components={spec.name: RESIDENT for spec in specs})

    def record(
        self,
        specs: tuple[ComponentSpec, ...],
        placement: Placement,
        *,
        activations: Mapping[str, int] | None = None,
        workload: Workload = SHAPE,
        kind: RequestKind = RequestKind.BASELINE,
        gap: int = 0,
        target_steps: int | None = None,
        skip: tuple[str, ...] = (),
        compute_ns: int = 10_000_000,
        **changes: Any,
    ) -> RequestRecord:
        """Return what an honest measurement gives: each component runs in turn, the transformer once per step."""
        used = [spec for spec in specs if spec.name not in skip]
        counts = {spec.name: workload.steps if spec.name == "transformer" else 1 for spec in used}
        phases = []
        for index, spec in enumerate(used):
            beside = (activations or {}).get(spec.name, 10 * MIB)
            held = sum(one.device_bytes(placement.components[one.name], in_use=one.name == spec.name) for one in specs)
            phases.append(
                PhaseRecord(
                    key=f"use:{spec.name}",
                    active=(spec.name,),
                    lingering=None,
                    allocated_peak_bytes=held + beside,
                    reserved_peak_bytes=held + beside + gap,
                    duration_ns=compute_ns * counts[spec.name]
                    + self.transfer_ns(spec, placement.components[spec.name], uses=counts[spec.name]),
                    num_occurrences=1,
                )
            )
            if index + 1 < len(used):
                phases.append(
                    replace(phases[-1], key=f"after:{spec.name}", active=(), lingering=spec.name, duration_ns=0)
                )
        record = RequestRecord(
            kind=kind,
            workload=workload,
            target_steps=workload.steps if target_steps is None else target_steps,
            placement_digest=placement.digest,
            succeeded=True,
            out_of_memory=False,
            error=None,
            baseline_allocated_bytes=0,
            baseline_reserved_bytes=0,
            phases=tuple(phases),
            uses=tuple(counts.items()),
            layer_uses={
                spec.name: {g.name: (counts[spec.name],) * len(g.layer_bytes) for g in spec.groups} for spec in used
            },
            duration_ns=sum(phase.duration_ns for phase in phases),
            to_device_bytes=0,
            to_host_bytes=0,
            output_digest="aa",
        )
        return replace(record, **changes)

    def failed(self, record: RequestRecord, *, last: str | None = None, error: str = "out of memory") -> RequestRecord:
        """Return what is left of a record if memory ran out in the phase `last`, the first one if not said."""
        keys = [phase.key for phase in record.phases]
        reached = record.phases[: keys.index(last) + 1 if last else 1]
        entered = tuple(use for use in record.uses if any(use[0] in phase.active for phase in reached))
        # Between the failure and the end of the request one more phase is booked.
        after = replace(reached[-1], key="after", active=(), lingering=entered[-1][0] if entered else None)
        return replace(
            record,
            succeeded=False,
            out_of_memory=True,
            error=error,
            phases=(*reached, after),
            uses=entered,
            output_digest=None,
        )

    def inputs(self, *, cap: int, specs: tuple[ComponentSpec, ...] | None = None, **changes: Any) -> PlanInputs:
        found = self.specs() if specs is None else specs
        current = changes.pop("current", self.placement(found))
        values: dict[str, Any] = {
            "specs": found,
            "configured": {},
            "current": current,
            "initial": current,
            "records": (self.record(found, current),),
            "cap_bytes": cap,
            "link": self.link,
            "host": HostReading(available_bytes=2**40, cgroup_cap_bytes=None, pin_budget_bytes=2**40),
            "workload": SHAPE,
            "policy": self.policy,
        }
        return PlanInputs(**{**values, **changes})


@pytest.fixture(scope="session")
def build() -> Build:
    return Build()


SECOND_NS = 10**9


@dataclass(frozen=True)
class Past:
    """Builds the folded past of one stream. Times in seconds."""

    def intent(self, index: int = 0, *, undo: bool = False) -> OpenIntent:
        return OpenIntent(event_id=f"intent-{index}", position=index + 1, index=index, component="unet", undo=undo)

    def round(self, state: str, placement: str | None = "p", **changes: Any) -> RoundView:
        values: dict[str, Any] = {
            "epoch": "",
            "number": 1,
            "state": state,
            "source": "calibration" if placement else None,
            "placement": placement,
            "previous": "initial",
            "plan": {"placement": placement} if placement else None,
            "outcome": {"placement": placement} if state in {"committed", "rolled-back"} else None,
            "num_intents": 0 if state in {"measuring", "planned"} else 1,
            "open_intents": (),
            "started_at": 0,
            "ended_at": 1 if state in {"committed", "rolled-back"} else None,
            "first_position": 1,
            "last_position": 9,
        }
        return RoundView(**{**values, **changes})

    def epoch(self, name: str, *rounds: RoundView, at: float = 0, fingerprint: str = "f", **changes: Any) -> EpochView:
        own = tuple(replace(one, epoch=name) for one in rounds)
        values: dict[str, Any] = {
            "epoch": name,
            "rank": 0,
            "boot_id": "boot",
            "pid": 1,
            "started_at": int(at * SECOND_NS),
            "last_at": int(at * SECOND_NS) + 1,
            "state": own[-1].state if own else "measuring",
            "round": own[-1].number if own else 0,
            "placement": next((r.placement for r in reversed(own) if r.state == "committed"), "initial"),
            "moving": any(r.num_intents and r.state not in {"committed", "rolled-back"} for r in own),
            "started": {
                "fingerprint": {"cap": fingerprint},
                "fingerprint_digest": fingerprint,
                "initial_placement": "initial",
            },
            "pinned": None,
            "gated": None,
            "serving": None,
            "serving_at": None,
            "stopped": None,
            "recovered": None,
            "rollback_failed": None,
            "rounds": own,
            "first_position": 1,
            "last_position": 9,
        }
        return EpochView(**{**values, **changes})

    def serving(self, name: str, *, at: float, placement: str = "p", **changes: Any) -> EpochView:
        """Return a life that restored a placement, committed it and served under it."""
        return self.epoch(
            name,
            self.round("committed", placement, source="journal"),
            at=at,
            serving={"placement": placement, "decision": "restored"},
            serving_at=int((at + 1) * SECOND_NS),
            **changes,
        )

    def stream(self, *epochs: EpochView) -> StreamView:
        return StreamView(stream="s", epochs=epochs, last_position=9)

    def closed(self, view: StreamView, closings: list[Closing]) -> StreamView:
        """Return the stream as a fold gives it once the closing events are written."""
        found = {one.epoch: one.drafts for one in closings}
        epochs = []
        for epoch in view.epochs:
            written = found.get(epoch.epoch, ())
            settled = {draft.causation for draft in written}
            recovered = next((draft.payload for draft in written if draft.type.value == "recovered"), epoch.recovered)
            rounds = tuple(
                replace(one, open_intents=tuple(i for i in one.open_intents if i.event_id not in settled))
                for one in epoch.rounds
            )
            epochs.append(replace(epoch, recovered=recovered, rounds=rounds))
        return replace(view, epochs=tuple(epochs))

    def close(self, view: StreamView, *, boot: str = "boot", now: float = 100) -> list[Closing]:
        return closing(view, boot_id=boot, now_ns=int(now * SECOND_NS), by_epoch="now")

    def lived(self, *epochs: EpochView, boot: str = "boot", now: float = 100) -> StreamView:
        """Return the stream after every start has closed what the one before it left."""
        view = self.stream()
        for index, epoch in enumerate(epochs):
            gone = epochs[index + 1].started_at / SECOND_NS if index + 1 < len(epochs) else now
            view = replace(view, epochs=(*view.epochs, epoch))
            view = self.closed(view, self.close(view, boot=boot, now=gone))
        return view

    def killed(self, name: str, placement: str = "p", *, at: float = 0, **changes: Any) -> EpochView:
        """Return a life killed while weights moved to a placement."""
        own = {key: changes.pop(key) for key in ("plan", "source", "number") if key in changes}
        moving = self.round("planned", placement, num_intents=1, open_intents=(self.intent(),), **own)
        return self.epoch(name, moving, at=at, **changes)

    def death(self, view: StreamView, index: int = -1) -> dict[str, Any]:
        """Return the journaled death of an epoch."""
        recovered = view.epochs[index].recovered
        assert recovered is not None
        found = recovered["death"]
        assert isinstance(found, dict)
        return found


@pytest.fixture(scope="session")
def past() -> Past:
    return Past()
