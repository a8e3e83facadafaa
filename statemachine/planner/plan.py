"""What goes into a plan and what comes out of it, as values that the journal keeps in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from residency.gpu.placement import ComponentPlacement, Mode, Placement
from residency.gpu.records import HostReading, LinkReading, RequestRecord
from residency.gpu.specs import ComponentSpec
from residency.gpu.workload import Workload
from residency.statemachine.planner.envelope import Envelope
from residency.statemachine.policy import Policy

PLANNER_VERSION = 4  # raised whenever equal inputs may give another plan


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """What one rank may take of the memory of a host that several share, as a joint plan has divided it.

    pinned_bytes: of all its pinned host copies, those that it has already included. new_bytes: of host memory that it
    takes anew.
    """

    pinned_bytes: int
    new_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """All that a plan depends on; equal inputs give equal plans. Survives msgspec's JSON both ways.

    configured: component -> why it is never touched. current: the placement in force. records: what was measured,
    under `current`, `initial` or one of `placements`. noise_ns: durations closer than that count as equal, within the
    policy's bound. excluded: digests never to choose, except of the current and the initial placement.
    reserve_factor: multiplies every reserve. modes: component -> the only mode of it that is weighed, if somebody asks
    what that would give. host.pin_budget_bytes is what all pinned host copies together may take, present ones included;
    of a host that several ranks share it is what those of all of them may, and host_share is this rank's part; None:
    all of it. enough_ns: a request that takes no longer is fast enough, as if it were the fastest. workload: the shape
    whose time counts; workloads: others that must fit in memory as well. measured_cap_bytes: under which the records
    were measured, 0 if it is cap_bytes: what ran out of memory then may do under a larger one.
    Raises ValueError if a name or digest leads nowhere.
    """

    specs: tuple[ComponentSpec, ...]
    configured: Mapping[str, str]
    current: Placement
    initial: Placement
    records: tuple[RequestRecord, ...]
    cap_bytes: int
    link: LinkReading
    host: HostReading
    workload: Workload
    policy: Policy = field(default_factory=Policy)
    noise_ns: int = 0
    excluded: tuple[str, ...] = ()
    reserve_factor: float = 1.0
    placements: tuple[Placement, ...] = ()
    modes: Mapping[str, Mode] = field(default_factory=dict)
    host_share: HostShare | None = None
    enough_ns: int = 0
    workloads: tuple[Workload, ...] = ()
    measured_cap_bytes: int = 0

    def __post_init__(self) -> None:
        names = {spec.name for spec in self.specs}
        for placement in (self.current, self.initial, *self.placements):
            if set(placement.components) != names:
                raise ValueError(f"a placement of {sorted(placement.components)} is not one of {sorted(names)}")
        known = self.measured_placements()
        for record in self.records:
            if record.placement_digest not in known:
                raise ValueError(f"a record was measured under placement {record.placement_digest}, which is not given")

    def measured_placements(self) -> dict[str, Placement]:
        """Return digest -> placement of everything that a record may have been measured under."""
        return {one.digest: one for one in (self.current, self.initial, *self.placements)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePrediction:
    """One memory phase under a placement, in bytes.

    peak_bytes: allocated, weights included. limit_bytes: what it may be, the reserve taken off; a phase that already
    ran with more may have that. measured: at the target shape or a larger one, not extrapolated.
    """

    key: str
    peak_bytes: int
    reserve_bytes: int
    limit_bytes: int
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePrediction:
    """One time phase of a request under a placement, all its passes together: computing, and waiting for weights."""

    name: str
    passes: int
    compute_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a placement should cost for one request of the workload.

    duration_ns = compute_ns + transfer_ns, the waiting for transfers that computing does not hide and what they slow it
    down by. timed: False if no request succeeded, so that only transfers count. device_bytes: weights held between
    requests, with the window. pinned_bytes: of host copies. to_device_bytes: what crosses the link. phases: of memory;
    time_phases: of time, in order.
    """

    duration_ns: int
    compute_ns: int
    transfer_ns: int
    device_bytes: int
    pinned_bytes: int
    phases: tuple[PhasePrediction, ...]
    timed: bool
    measured: bool
    to_device_bytes: int = 0
    time_phases: tuple[TimePrediction, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A limit that the plan comes close to. slack_bytes: what is left of it. kind: 'device', 'pinned' or 'host'.

    name: of the memory phase, for device memory.
    """

    kind: str
    name: str
    slack_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What device memory is worth to a component, in ns of a request per GiB. None: it has none to give, or needs none.

    loss_ns_per_gib: what a request would lose if it had less. gain_ns_per_gib: what it would gain if it had more.
    """

    component: str
    loss_ns_per_gib: int | None
    gain_ns_per_gib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One component's part of a plan: from one placement to another, and how long a request waits for it."""

    component: str
    before: ComponentPlacement
    after: ComponentPlacement
    transfer_before_ns: int
    transfer_after_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NextChange:
    """The cheapest change that the cap forbids: with `extra_bytes` more, `component` would save `gain_ns`.

    An estimate from the same model as the plan, and nothing that happens by itself: `text` says so.
    """

    component: str
    placement: ComponentPlacement
    extra_bytes: int
    gain_ns: int
    phase: str
    measured: bool

    @property
    def text(self) -> str:
        """One line for people."""
        what = self.placement.mode.value
        if self.placement.resident_layers:
            what += f" with {sum(map(len, self.placement.resident_layers.values()))} layers resident"
        basis = "estimated" if self.measured else "extrapolated, not measured"
        return (
            f"{self.extra_bytes / 2**20:.1f} MiB more would allow {self.component} {what}: "
            f"-{self.gain_ns / 1e9:.3g} s ({basis}; needs a higher cap and a new calibration)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another placement that was weighed: why it is listed, and what it should cost. feasible: within the limits."""

    name: str
    digest: str
    placement: Placement
    duration_ns: int
    device_bytes: int
    pinned_bytes: int
    feasible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The complete target placement with its prediction and reasons.

    keep: it is the current placement. bound_by: what kept it from being faster. num_candidates: component -> how
    many placements of it were weighed. exact: nothing that was weighed is faster, gap_ns is 0; else another placement
    may be, by gap_ns at most, because the search ended before it had seen all.
    relaxed: nothing fits by the estimate, so the choice only avoids growing; where the current placement is known to
    fail, no room is kept for what no request reached.
    binding: the limits in which less is left than the next layer or component would take, the tightest first.
    prices: of every component that may be placed. envelope: the request shapes that the placement is good for.
    """

    placement: Placement
    keep: bool
    changes: tuple[Change, ...]
    prediction: Prediction
    bound_by: str
    next_cheapest: NextChange | None
    alternatives: tuple[Alternative, ...]
    num_candidates: Mapping[str, int]
    num_nodes: int
    exact: bool
    relaxed: bool
    gap_ns: int = 0
    binding: tuple[Binding, ...] = ()
    prices: tuple[Price, ...] = ()
    envelope: Envelope | None = None
    planner_version: int = PLANNER_VERSION
