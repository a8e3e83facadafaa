"""Choice of the complete target placement: pure, and able to say why."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from residency.errors import PlacementInfeasible
from residency.gpu.placement import HostTier, Placement
from residency.statemachine.initial import configured_placements, initial_placement
from residency.statemachine.planner.checks import check_inputs
from residency.statemachine.planner.choice import Chooser
from residency.statemachine.planner.constraints import PhaseLimit, failed_digests, phase_limits, reached, relaxed
from residency.statemachine.planner.envelope import envelope_of
from residency.statemachine.planner.holdings import idle_bytes, pinned_bytes
from residency.statemachine.planner.options import Family, Options
from residency.statemachine.planner.plan import (
    PLANNER_VERSION,
    Alternative,
    Change,
    PhasePrediction,
    Plan,
    PlanInputs,
    Prediction,
    TimePrediction,
)
from residency.statemachine.planner.reasons import binding, prices, what_binds
from residency.statemachine.planner.request_model import MemoryLimit, RequestModel
from residency.statemachine.planner.room import Room
from residency.statemachine.planner.timing import timing_record
from residency.statemachine.planner.transition import transition_peak
from residency.statemachine.planner.weighing import Rules, Weighed
from residency.statemachine.probing import bounded_workload, fit_probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.statemachine.planner.choice import Chosen
    from residency.statemachine.planner.time_phase import TimePhase

__all__ = [
    "PLANNER_VERSION",
    "Plan",
    "PlanInputs",
    "bounded_workload",
    "can_fit",
    "configured_placements",
    "fit_probe",
    "initial_placement",
    "make_plan",
    "predict",
    "shortfall",
]


def make_plan(inputs: PlanInputs) -> Plan:
    """Return the placement to aim for, with its prediction, what bound it, and what else was weighed.

    The fastest of all that fit, as simulated; of those within the noise of it the one that takes the fewest device
    bytes, then the fewest pinned ones, then changes least, then has the smallest digest. The current placement is
    always weighed. Raises PlacementInfeasible if nothing fits: by measurement, or by an estimate where the current
    placement is known to fail. Raises MeasurementRefused for inputs that are absurd or contradict themselves.
    """
    return _Planner(inputs).plan()


def predict(inputs: PlanInputs, placement: Placement) -> Prediction:
    """Return what a placement should cost for one request of the workload; it need not fit.

    Raises ValueError if its window has no room for a layer that must run.
    """
    planner = _Planner(inputs)
    chooser = planner.chooser(planner.limits)
    weighed = chooser.weigh(placement)
    if weighed is None:
        raise ValueError(f"placement {placement.digest} has no room for a layer that must run")
    return planner.prediction(weighed, planner.limits, chooser.model.phases)


def can_fit(inputs: PlanInputs) -> bool:
    """Say whether any placement fits, without looking for a good one. Raises MeasurementRefused."""
    planner = _Planner(inputs)
    return planner.chooser(planner.limits).fits_at_all()


def shortfall(inputs: PlanInputs) -> PlacementInfeasible:
    """Return what is short if nothing fits: the phase, or the least cap that would do. Raises MeasurementRefused."""
    return _Planner(inputs).infeasible()


class _Planner:
    """The request, the options and the limits of one plan."""

    def __init__(self, inputs: PlanInputs) -> None:
        check_inputs(inputs)
        self.inputs = inputs
        self.timed = timing_record(inputs.records, inputs.workload) is not None
        self.limits = phase_limits(inputs)
        harmless = {inputs.current.digest, inputs.initial.digest}
        self.forbidden = (set(inputs.excluded) - harmless) | failed_digests(inputs)

    def plan(self) -> Plan:
        limits, is_relaxed = self.limits, False
        chooser = self.chooser(limits)
        modes, inputs = self.inputs.modes, self.inputs
        known = [
            one
            for one in (inputs.current, inputs.initial)
            if all(one.components[name].mode is mode for name, mode in modes.items())
        ]
        found = chooser.choose(known)
        if found is None and known and self.inputs.current.digest not in self.forbidden:
            # An estimate is no proof: a placement that was not seen failing may stay, and nothing may grow.
            limits, is_relaxed = relaxed(self.limits, self.inputs), True
            chooser = self.chooser(limits)
            found = chooser.choose(known)
        if found is None and (proven := reached(self.limits, self.inputs)) != self.limits:
            limits, is_relaxed = proven, True
            chooser = self.chooser(limits)
            found = chooser.choose(known)
        if found is None:
            raise self.infeasible()
        before = chooser.weigh(self.inputs.current)
        next_change, bound_by = what_binds(self.inputs, chooser, found, limits, timed=self.timed)
        return Plan(
            placement=found.best.placement,
            keep=found.best.placement == self.inputs.current,
            changes=self._changes(before, found.best),
            prediction=self.prediction(found.best, limits, chooser.model.phases),
            bound_by=bound_by,
            next_cheapest=next_change,
            alternatives=self._alternatives(chooser, found),
            num_candidates={found[0].head.spec.name: sum(map(len, found)) for found in chooser.choices},
            num_nodes=found.num_nodes,
            exact=found.gap_ns == 0,
            gap_ns=found.gap_ns,
            relaxed=is_relaxed,
            binding=binding(self.inputs, chooser, found.best, limits),
            prices=prices(self.inputs, chooser, found.best),
            envelope=envelope_of(inputs, found.best.placement),
        )

    def chooser(self, limits: Sequence[PhaseLimit], *, cap_bytes: int | None = None) -> Chooser:
        """Return what weighs placements within some limits, by default under the cap in force."""
        inputs = self.inputs if cap_bytes is None else replace(self.inputs, cap_bytes=cap_bytes)
        policy, current = inputs.policy, inputs.current
        model = request_model(inputs, limits)
        # What is pinned already may stay so, whatever the budget has become.
        pinned_max = max(inputs.host.pin_budget_bytes, pinned_bytes(inputs.specs, current))
        host_max = max(0, inputs.host.available_bytes)
        if inputs.host_share is not None:
            pinned_max, host_max = inputs.host_share.pinned_bytes, inputs.host_share.new_bytes
        scarce = pinned_max < sum(spec.total_bytes for spec in inputs.specs)
        options = Options(
            model,
            num_levels=policy.byte_levels,
            num_slots=policy.num_slots,
            tiers=(HostTier.PINNED, HostTier.PAGEABLE) if scarce else (HostTier.PINNED,),
            current=current,
        )
        rules = Rules(
            tolerance=self.tolerance_ns,
            pinned_bytes_max=pinned_max,
            host_bytes_max=host_max,
            allowed=lambda digest: digest not in self.forbidden,
            reachable=partial(_has_way, inputs, max(pinned_max, pinned_bytes(inputs.specs, current))),
            num_nodes_max=policy.solver_nodes_max,
            num_simulations_max=policy.simulations_max,
            num_windows=policy.window_levels,
        )
        untouchable = {spec.name for spec in inputs.specs if spec.fixed_reason is not None}
        room = Room(model, unyielding=untouchable)
        return Chooser(room, options, self._choices(options), current, rules)

    def tolerance_ns(self, request_ns: int) -> int:
        """Return by how much a request of such a length may differ and still count as equally fast."""
        noise_ns = min(self.inputs.noise_ns, round(self.inputs.policy.equal_fraction_max * request_ns))
        return max(noise_ns, self.inputs.enough_ns - request_ns)

    def prediction(self, weighed: Weighed, limits: Sequence[PhaseLimit], phases: Sequence[TimePhase]) -> Prediction:
        """Return what a placement costs, phase by phase."""
        cap = self.inputs.cap_bytes
        return Prediction(
            duration_ns=weighed.timeline.request_ns,
            compute_ns=weighed.timeline.compute_ns,
            transfer_ns=weighed.timeline.request_ns - weighed.timeline.compute_ns,
            device_bytes=weighed.device_bytes,
            pinned_bytes=weighed.pinned_bytes,
            phases=tuple(
                PhasePrediction(
                    key=limit.key,
                    peak_bytes=limit.fixed_bytes + limit.weight_bytes(self.inputs, weighed.placement),
                    reserve_bytes=limit.reserve_bytes(self.inputs, cap),
                    limit_bytes=limit.fixed_bytes + limit.weight_limit(self.inputs),
                    measured=limit.measured,
                )
                for limit in limits
            ),
            timed=self.timed,
            measured=bool(limits) and all(limit.measured for limit in limits),
            to_device_bytes=weighed.timeline.to_device_bytes,
            time_phases=tuple(
                TimePrediction(
                    name=phase.name, passes=of.passes, compute_ns=phase.compute_ns, exposed_ns=phase.exposed_ns
                )
                for phase, of in zip(weighed.timeline.phases, phases, strict=True)
            ),
        )

    def _choices(self, options: Options) -> list[list[Family]]:
        inputs = self.inputs
        return [
            [options.fixed(spec, inputs.current.components[spec.name])]
            if spec.name in inputs.configured or spec.fixed_reason is not None
            else options.of(
                spec,
                known=(inputs.current.components[spec.name], inputs.initial.components[spec.name]),
                mode=inputs.modes.get(spec.name),
            )
            for spec in inputs.specs
        ]

    def _changes(self, before: Weighed | None, after: Weighed) -> tuple[Change, ...]:
        exposed_before = {} if before is None else before.timeline.exposed_by_component
        exposed_after = after.timeline.exposed_by_component
        current = self.inputs.current
        return tuple(
            Change(
                component=name,
                before=current.components[name],
                after=after.placement.components[name],
                transfer_before_ns=exposed_before.get(name, 0),
                transfer_after_ns=exposed_after.get(name, 0),
            )
            for name in current.changes_to(after.placement)
        )

    def _alternatives(self, chooser: Chooser, found: Chosen) -> tuple[Alternative, ...]:
        others = [one for one in found.weighed if one.digest != found.best.digest]
        named = [
            ("runner-up", others[0] if others else None),
            ("fastest", found.fastest),
            ("current", chooser.weigh(self.inputs.current)),
            ("initial", chooser.weigh(self.inputs.initial)),
        ]
        listed: list[Alternative] = []
        for name, one in named:
            if one is None or one.digest in {found.best.digest, *(other.digest for other in listed)}:
                continue
            listed.append(
                Alternative(
                    name=name,
                    digest=one.digest,
                    placement=one.placement,
                    duration_ns=one.request_ns,
                    device_bytes=one.device_bytes,
                    pinned_bytes=one.pinned_bytes,
                    feasible=chooser.fits(one.placement) and one.digest not in self.forbidden,
                )
            )
        return tuple(listed)

    def infeasible(self) -> PlacementInfeasible:
        """Say what is short: the phase that no placement satisfies, or the least cap that would do for all."""
        cap = self.inputs.cap_bytes
        limits = reached(self.limits, self.inputs)
        choices = self.chooser(limits).choices
        needed = {limit.key: limit.cap_needed(self.inputs, _least_weights(choices, limit)) for limit in limits}
        worst = max(needed, key=lambda key: needed[key], default=None)
        if worst is not None and needed[worst] > cap:
            return PlacementInfeasible(needed_bytes=needed[worst], cap_bytes=cap, bound_by=f"phase {worst!r}")
        for step in range(1, 65):
            # In sixteenths of the cap: no phase is short by itself, so little more will do, if anything does.
            larger = cap + cap * step // 16
            if self.chooser(limits, cap_bytes=larger).fits_at_all():
                return PlacementInfeasible(needed_bytes=larger, cap_bytes=cap, bound_by="every phase at once")
        return PlacementInfeasible(
            needed_bytes=cap + max(1, self.inputs.policy.measured_reserve(cap)),
            cap_bytes=cap,
            bound_by="every placement left to choose ran out of memory or is excluded: a larger one",
        )


def request_model(inputs: PlanInputs, limits: Sequence[PhaseLimit]) -> RequestModel:
    """Return the request that a plan is made for, with its memory limits."""
    found = [
        MemoryLimit(
            key=limit.key,
            active=limit.active,
            lingering=limit.lingering,
            limit_bytes=limit.weight_limit(inputs),
            whole=limit.whole,
        )
        for limit in limits
    ]
    if not any(not limit.active and not limit.whole for limit in limits):
        # Nobody looked between the uses: what is there then must fit, at least.
        room = inputs.cap_bytes - inputs.policy.measured_reserve(inputs.cap_bytes)
        most = max(room, idle_bytes(inputs.specs, inputs.current))
        found.append(MemoryLimit(key="idle", active=(), lingering=None, limit_bytes=most))
    return RequestModel.from_records(
        inputs.specs,
        inputs.records,
        inputs.workload,
        inputs.link,
        inputs.cap_bytes,
        placements=inputs.measured_placements().values(),
        limits=tuple(found),
        busy_slowdown=inputs.policy.busy_slowdown,
    )


def _has_way(inputs: PlanInputs, pinned_bytes_max: int, target: Placement) -> bool:
    """Say whether no more is page-locked on the way than may be; the order of effects sees to device memory."""
    if pinned_bytes_max >= sum(spec.total_bytes for spec in inputs.specs):
        return True
    return transition_peak(inputs, inputs.current, target, inputs.cap_bytes).pinned_bytes <= pinned_bytes_max


def _least_weights(choices: Sequence[Sequence[Family]], limit: PhaseLimit) -> int:
    """Return what weights and window take in a phase at least, every component for itself."""
    total = 0
    for families in choices:
        options = [family.head for family in families]
        name = options[0].spec.name
        is_running = name in limit.active
        if name in limit.whole:
            total += options[0].spec.total_bytes
            continue
        total += min(
            option.idle_bytes
            + (option.extra_bytes if is_running or name == limit.lingering else 0)
            + (option.held_bytes + option.slot_bytes if is_running else 0)
            for option in options
        )
    return total
