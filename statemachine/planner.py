"""Choice of the complete target placement: pure, exact, and able to say why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from residency.errors import PlacementInfeasible
from residency.gpu.placement import Placement
from residency.statemachine.candidates import Candidate, candidates
from residency.statemachine.constraints import PhaseLimit, failed_digests, phase_limits, relaxed
from residency.statemachine.initial import configured_placements, initial_placement
from residency.statemachine.plan import (
    PLANNER_VERSION,
    Alternative,
    Change,
    NextChange,
    PhasePrediction,
    Plan,
    PlanInputs,
    Prediction,
)
from residency.statemachine.probing import bounded_workload, fit_probe
from residency.statemachine.problem import Problem, with_ceiling
from residency.statemachine.solver import solve
from residency.statemachine.timing import compute_ns, timing_record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.gpu.records import RequestRecord

__all__ = [
    "PLANNER_VERSION",
    "Plan",
    "PlanInputs",
    "bounded_workload",
    "configured_placements",
    "fit_probe",
    "initial_placement",
    "make_plan",
    "predict",
]

_Choice = tuple[int, ...]


def make_plan(inputs: PlanInputs) -> Plan:
    """Return the placement to aim for, with its prediction, what bound it, and what else was weighed.

    The fastest of all that fit; of those within the noise of it the one that holds the fewest device bytes, then the
    fewest pinned ones, then changes least, then has the smallest digest. The current placement is always weighed.
    Raises PlacementInfeasible if nothing fits: by measurement, or by an estimate where the current placement is
    known to fail.
    """
    return _Planner(inputs).plan()


def predict(inputs: PlanInputs, placement: Placement) -> Prediction:
    """Return what a placement should cost for one request of the workload; it need not fit."""
    planner = _Planner(inputs)
    priced = replace(inputs, current=placement, records=())
    parts = tuple(candidate for spec in inputs.specs for candidate in candidates(spec, priced, planner.record)[:1])
    return planner.predict(parts, planner.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    limits: tuple[PhaseLimit, ...]
    by_time: Problem
    prices: tuple[int, ...]
    choice: _Choice
    fastest: _Choice
    num_nodes: int
    exact: bool
    relaxed: bool


class _Planner:
    """The options and limits of one plan."""

    def __init__(self, inputs: PlanInputs) -> None:
        self.inputs = inputs
        self.record: RequestRecord | None = timing_record(inputs.records, inputs.workload)
        self.limits = phase_limits(inputs)
        self.options = tuple(candidates(spec, inputs, self.record) for spec in inputs.specs)
        self.compute_ns = compute_ns(inputs, self.record)
        harmless = {inputs.current.digest, inputs.initial.digest}
        self.forbidden = (set(inputs.excluded) - harmless) | failed_digests(inputs)
        self.digests: dict[_Choice, str] = {}

    def plan(self) -> Plan:
        found = self._search()
        chosen = self.parts(found.choice)
        target = self.placement(found.choice)
        next_change, bound_by = self._what_binds(found)
        return Plan(
            placement=target,
            keep=target == self.inputs.current,
            changes=self._changes(found.choice),
            prediction=self.predict(chosen, found.limits),
            bound_by=bound_by,
            next_cheapest=next_change,
            alternatives=self._alternatives(found),
            num_candidates={
                spec.name: len(options) for spec, options in zip(self.inputs.specs, self.options, strict=True)
            },
            num_nodes=found.num_nodes,
            exact=found.exact,
            relaxed=found.relaxed,
        )

    def parts(self, choice: _Choice) -> tuple[Candidate, ...]:
        return tuple(options[index] for options, index in zip(self.options, choice, strict=True))

    def placement(self, choice: _Choice) -> Placement:
        return Placement(components={part.spec.name: part.placement for part in self.parts(choice)})

    def digest(self, choice: _Choice) -> str:
        if choice not in self.digests:
            self.digests[choice] = self.placement(choice).digest
        return self.digests[choice]

    def predict(self, parts: Sequence[Candidate], limits: tuple[PhaseLimit, ...]) -> Prediction:
        transfer_ns = sum(part.transfer_ns for part in parts)
        return Prediction(
            duration_ns=self.compute_ns + transfer_ns,
            compute_ns=self.compute_ns,
            transfer_ns=transfer_ns,
            device_bytes=sum(part.idle_bytes for part in parts),
            pinned_bytes=sum(part.pinned_bytes for part in parts),
            phases=tuple(
                PhasePrediction(
                    key=limit.key,
                    peak_bytes=limit.fixed_bytes + _held(parts, limit),
                    reserve_bytes=limit.reserve_bytes(self.inputs, self.inputs.cap_bytes),
                    limit_bytes=limit.fixed_bytes + limit.weight_limit(self.inputs),
                    measured=limit.measured,
                )
                for limit in limits
            ),
            timed=self.record is not None,
            measured=bool(limits) and all(limit.measured for limit in limits),
        )

    def _search(self) -> _Search:
        found = self._choose(self.limits, is_relaxed=False)
        if found is None and self.inputs.current.digest not in self.forbidden:
            # An estimate is no proof: a placement that was not seen failing may stay, and nothing may grow.
            found = self._choose(relaxed(self.limits, self.inputs), is_relaxed=True)
        if found is None:
            raise self._infeasible()
        return found

    def _choose(self, limits: tuple[PhaseLimit, ...], *, is_relaxed: bool) -> _Search | None:
        num_nodes_max, num_refused = self.inputs.policy.solver_nodes_max, len(self.forbidden)
        by_time = self._problem(self._times(), limits)
        current = self._current_choice()
        start = current if by_time.fits(current) and self._allowed(current) else None
        first = solve(by_time, num_nodes_max=num_nodes_max, allowed=self._allowed, num_refused=num_refused, start=start)
        if first.choice is None:
            return None
        least_ns = by_time.cost(first.choice)
        thrift = with_ceiling(
            by_time, costs=self._thrift_costs(), ceiling=least_ns + self._tolerance_ns(least_ns), prices=first.prices
        )
        second = solve(
            thrift,
            num_nodes_max=num_nodes_max,
            tie_break=self.digest,
            allowed=self._allowed,
            num_refused=num_refused,
            start=first.choice,
        )
        assert second.choice is not None
        is_as_fast = by_time.cost(second.choice) == least_ns
        return _Search(
            limits=limits,
            by_time=by_time,
            prices=first.prices,
            choice=second.choice,
            fastest=second.choice if is_as_fast else first.choice,
            num_nodes=first.num_nodes + second.num_nodes,
            exact=first.exact and second.exact,
            relaxed=is_relaxed,
        )

    def _problem(
        self,
        costs: tuple[tuple[int, ...], ...],
        limits: tuple[PhaseLimit, ...],
        *,
        cap_bytes: int | None = None,
    ) -> Problem:
        inputs = self.inputs if cap_bytes is None else replace(self.inputs, cap_bytes=cap_bytes)
        # Phases with the same users differ in nothing but their limit: the least one implies the others.
        tightest: dict[tuple[frozenset[str], str | None], PhaseLimit] = {}
        for limit in limits:
            users = (frozenset(limit.active), limit.lingering)
            if users not in tightest or limit.weight_limit(inputs) < tightest[users].weight_limit(inputs):
                tightest[users] = limit
        phases = tuple(tightest.values())
        host, current = inputs.host, self.parts(self._current_choice())
        # What is pinned already may stay so, whatever the budget has become.
        pin_limit = max(host.pin_budget_bytes, sum(part.pinned_bytes for part in current))
        bounds = [limit.weight_limit(inputs) for limit in phases] + [pin_limit, max(0, host.available_bytes)]
        loads = tuple(
            tuple(
                (
                    *(part.held_bytes(limit.active, limit.lingering) for limit in phases),
                    part.pinned_bytes,
                    part.host_bytes,
                )
                for part in options
            )
            for options in self.options
        )
        return Problem(costs=costs, loads=loads, limits=tuple(bounds))

    def _times(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(part.transfer_ns for part in options) for options in self.options)

    def _thrift_costs(self) -> tuple[tuple[int, ...], ...]:
        # One whole number holds (device bytes, pinned bytes, changes), compared in that order.
        num_changes = len(self.options) + 1
        pinned = sum(max(part.pinned_bytes for part in options) for options in self.options) + 1
        return tuple(
            tuple((part.idle_bytes * pinned + part.pinned_bytes) * num_changes + part.changed for part in options)
            for options in self.options
        )

    def _tolerance_ns(self, transfer_ns: int) -> int:
        """Return by how much a request with such transfers may differ and still count as equally fast."""
        most = self.inputs.policy.equal_fraction_max * (self.compute_ns + transfer_ns)
        return min(self.inputs.noise_ns, round(most))

    def _current_choice(self) -> _Choice:
        return (0,) * len(self.options)

    def _allowed(self, choice: _Choice) -> bool:
        return not self.forbidden or self.digest(choice) not in self.forbidden

    def _infeasible(self) -> PlacementInfeasible:
        """Say what is short: the phase that no placement satisfies, or the least cap that would do for all."""
        cap = self.inputs.cap_bytes
        needed = {
            limit.key: limit.cap_needed(self.inputs, sum(min(held) for held in self._held_by_option(limit)))
            for limit in self.limits
        }
        worst = max(needed, key=lambda key: needed[key], default=None)
        if worst is not None and needed[worst] > cap:
            return PlacementInfeasible(needed_bytes=needed[worst], cap_bytes=cap, bound_by=f"phase {worst!r}")
        for step in range(1, 65):
            # In sixteenths of the cap: no phase is short by itself, so little more will do, if anything does.
            larger = cap + cap * step // 16
            if self._fits_under(larger):
                return PlacementInfeasible(needed_bytes=larger, cap_bytes=cap, bound_by="every phase at once")
        return PlacementInfeasible(
            needed_bytes=cap + max(1, self.inputs.policy.measured_reserve(cap)),
            cap_bytes=cap,
            bound_by="every placement left to choose ran out of memory or is excluded: a larger one",
        )

    def _held_by_option(self, limit: PhaseLimit) -> list[list[int]]:
        return [[part.held_bytes(limit.active, limit.lingering) for part in options] for options in self.options]

    def _fits_under(self, cap_bytes: int) -> bool:
        costs = tuple((0,) * len(options) for options in self.options)
        problem = self._problem(costs, self.limits, cap_bytes=cap_bytes)
        nodes = self.inputs.policy.solver_nodes_max // 16
        found = solve(problem, num_nodes_max=nodes, allowed=self._allowed, num_refused=len(self.forbidden))
        return found.choice is not None

    def _changes(self, choice: _Choice) -> tuple[Change, ...]:
        return tuple(
            Change(
                component=part.spec.name,
                before=before.placement,
                after=part.placement,
                transfer_before_ns=before.transfer_ns,
                transfer_after_ns=part.transfer_ns,
            )
            for before, part in zip(self.parts(self._current_choice()), self.parts(choice), strict=True)
            if part.changed
        )

    def _what_binds(self, found: _Search) -> tuple[NextChange | None, str]:
        """Return the cheapest change worth having that device memory forbids, and what bound the choice, for people."""
        parts = self.parts(found.choice)
        best = sum(min(part.transfer_ns for part in options) for options in self.options)
        if sum(part.transfer_ns for part in parts) <= best + self._tolerance_ns(best):
            return None, "nothing: no placement is faster by more than the noise"
        options = [
            change
            for index, others in enumerate(self.options)
            for other in others
            if (change := self._if_changed(found, parts, index, other)) is not None
        ]
        if not options:
            return None, "host memory: every faster placement needs more of it, or is excluded"
        # A change too small to be noticed is no advice, but memory is what binds all the same.
        worth = [one for one in options if one.gain_ns >= self._noticeable_ns(parts)]
        change = min(worth or options, key=lambda one: (one.extra_bytes, -one.gain_ns, one.component))
        return change if worth else None, f"device memory in phase {change.phase!r}"

    def _noticeable_ns(self, parts: Sequence[Candidate]) -> float:
        request_ns = self.compute_ns + sum(part.transfer_ns for part in parts)
        return max(self.inputs.noise_ns, request_ns * self.inputs.policy.noticeable_fraction)

    def _if_changed(
        self, found: _Search, parts: tuple[Candidate, ...], index: int, other: Candidate
    ) -> NextChange | None:
        gain_ns = parts[index].transfer_ns - other.transfer_ns
        if gain_ns <= self._tolerance_ns(sum(part.transfer_ns for part in parts)):
            return None
        changed = (*parts[:index], other, *parts[index + 1 :])
        needed = [
            (limit.cap_needed(self.inputs, held), limit)
            for limit in found.limits
            if (held := _held(changed, limit)) > limit.weight_limit(self.inputs)
        ]
        if not needed:
            return None  # forbidden by host memory or by exclusion
        cap, limit = max(needed, key=lambda one: one[0])
        return NextChange(
            component=other.spec.name,
            placement=other.placement,
            extra_bytes=cap - self.inputs.cap_bytes,
            gain_ns=gain_ns,
            phase=limit.key,
            measured=limit.measured and self.record is not None,
        )

    def _alternatives(self, found: _Search) -> tuple[Alternative, ...]:
        chosen = self.digest(found.choice)
        second = solve(
            found.by_time,
            num_nodes_max=self.inputs.policy.solver_nodes_max,
            allowed=lambda choice: choice != found.choice and self._allowed(choice),
            num_refused=len(self.forbidden) + 1,
            prices=found.prices,
        ).choice
        initial = tuple(
            next(
                i for i, part in enumerate(options) if part.placement == self.inputs.initial.components[part.spec.name]
            )
            if any(part.placement == self.inputs.initial.components[part.spec.name] for part in options)
            else 0
            for options in self.options
        )
        named = [
            ("runner-up", second),
            ("fastest", found.fastest),
            ("current", self._current_choice()),
            ("initial", initial),
        ]
        listed: list[Alternative] = []
        for name, choice in named:
            if choice is None or self.digest(choice) in {chosen, *(one.digest for one in listed)}:
                continue
            prediction = self.predict(self.parts(choice), found.limits)
            listed.append(
                Alternative(
                    name=name,
                    digest=self.digest(choice),
                    placement=self.placement(choice),
                    duration_ns=prediction.duration_ns,
                    device_bytes=prediction.device_bytes,
                    pinned_bytes=prediction.pinned_bytes,
                    feasible=found.by_time.fits(choice) and self._allowed(choice),
                )
            )
        return tuple(listed)


def _held(parts: Sequence[Candidate], limit: PhaseLimit) -> int:
    return sum(part.held_bytes(limit.active, limit.lingering) for part in parts)
