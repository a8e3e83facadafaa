"""One plan for all ranks of a worker: the slowest rank counts, and the ranks of a host share its memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from residency.errors import PlacementInfeasible
from residency.statemachine.planner.holdings import pinned_bytes
from residency.statemachine.planner.make_plan import make_plan
from residency.statemachine.planner.options import host_bytes
from residency.statemachine.planner.plan import HostShare, Plan, PlanInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNITS = 16  # parts in which scarce host memory is divided among ranks that want different amounts of it

_WORTH_PART = 100  # of the slowest rank's time: who is faster by less has nothing to give for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlan:
    """The plans of all ranks. plans, inputs: one of each per rank, in their order; make_plan(inputs[i]) is plans[i].

    digest: SHA-256 over all plans, in hex. duration_ns: of the slowest rank, which is `slowest_rank`; only ranks that
    were timed count, if there is one. gap_ns: by how much the slowest could still be faster under another choice or
    another division of host memory, at most; exact: it is 0. num_plans: how many different ones had to be made.
    """

    plans: tuple[Plan, ...]
    inputs: tuple[PlanInputs, ...]
    digest: str
    slowest_rank: int
    duration_ns: int
    exact: bool
    gap_ns: int
    num_plans: int


def make_joint_plan(ranks: Sequence[PlanInputs], hosts: Sequence[str]) -> JointPlan:
    """Return the plans of all ranks of one worker; `hosts`: the name of the host that each rank runs on.

    Pure: equal inputs give equal plans, wherever they are made. Where ranks share a host, the pin budget and the
    available memory in the inputs of each are those of the whole host, present copies of all its ranks included (the
    least of what they read counts), and are divided where they are scarce, so that the slowest rank is as fast as it
    can be. Of placements as fast as the slowest rank those that are faster by over a hundredth take the one with the
    least memory. A rank in which
    no request succeeded is planned by its transfers, and changes nothing for the others. Ranks with equal inputs are
    solved once. Raises PlacementInfeasible, with a note that names the rank, if nothing fits on one of them,
    MeasurementRefused for absurd inputs, ValueError if `hosts` is not one name per rank.
    """
    if not ranks or len(ranks) != len(hosts):
        raise ValueError(f"{len(ranks)} ranks on {len(hosts)} hosts; give each of at least one rank the name of one")
    return _Joint(ranks, hosts).plan()


@dataclass(slots=True)
class _Host:
    """The ranks of one host and what they share. lowest_ns: what dividing it cannot bring the slowest of them below."""

    ranks: list[int]
    pinned_bytes: int
    new_bytes: int
    divides_pins: bool = False
    divides_memory: bool = False
    lowest_ns: int = 0


@dataclass(slots=True)
class _Kind:
    """Ranks of one host with equal inputs; each has the same share. stays_bytes: pinned, whatever is planned."""

    ranks: list[int]
    stays_bytes: int
    units: int = 0
    tried: dict[int, tuple[PlanInputs, Plan] | PlacementInfeasible] = field(default_factory=dict)


class _Joint:
    """The plans of one worker's ranks while they are made."""

    def __init__(self, ranks: Sequence[PlanInputs], hosts: Sequence[str]) -> None:
        self._made: dict[bytes, Plan | PlacementInfeasible] = {}
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        self._hosts = [self._host(ranks, found) for found in by_host.values()]
        self._inputs = list(ranks)
        for one in self._hosts:
            for rank in one.ranks if len(one.ranks) > 1 else ():
                shared = replace(ranks[rank].host, available_bytes=one.new_bytes, pin_budget_bytes=one.pinned_bytes)
                share = HostShare(pinned_bytes=one.pinned_bytes, new_bytes=one.new_bytes)
                self._inputs[rank] = replace(ranks[rank], host=shared, host_share=share)
        self._plans: list[Plan] = []

    def plan(self) -> JointPlan:
        whole = list(self._inputs)
        for rank, inputs in enumerate(whole):
            self._plans.append(self._made_for(inputs, rank))
        for host in self._hosts:
            self._divide(host, whole)
        slowest = self._slowest()
        lowest_ns = max(one.lowest_ns for one in self._hosts)
        gap_ns = max(0, self._plans[slowest].prediction.duration_ns - lowest_ns)
        self._save_memory(self._plans[slowest].prediction.duration_ns)
        encoded = msgspec.json.encode(self._plans, order="sorted")
        return JointPlan(
            plans=tuple(self._plans),
            inputs=tuple(self._inputs),
            digest=hashlib.sha256(encoded).hexdigest(),
            slowest_rank=slowest,
            duration_ns=self._plans[slowest].prediction.duration_ns,
            exact=gap_ns == 0,
            gap_ns=gap_ns,
            num_plans=len(self._made),
        )

    def _host(self, ranks: Sequence[PlanInputs], found: list[int]) -> _Host:
        # What is pinned already may stay so, whatever the budget has become.
        present = sum(pinned_bytes(ranks[rank].specs, ranks[rank].current) for rank in found)
        budget = min(ranks[rank].host.pin_budget_bytes for rank in found)
        available = min(ranks[rank].host.available_bytes for rank in found)
        return _Host(ranks=found, pinned_bytes=max(budget, present), new_bytes=max(0, available))

    def _try(self, inputs: PlanInputs) -> Plan | PlacementInfeasible:
        key = msgspec.json.encode(inputs, order="sorted")
        if key not in self._made:
            try:
                self._made[key] = make_plan(inputs)
            except PlacementInfeasible as error:
                self._made[key] = error
        return self._made[key]

    def _made_for(self, inputs: PlanInputs, rank: int) -> Plan:
        found = self._try(inputs)
        if isinstance(found, PlacementInfeasible):
            found.add_note(f"on rank {rank}")
            raise found
        return found

    def _slowest(self) -> int:
        timed = [rank for rank, one in enumerate(self._plans) if one.prediction.timed] or range(len(self._plans))
        return max(timed, key=lambda rank: (self._plans[rank].prediction.duration_ns, -rank))

    def _divide(self, host: _Host, whole: Sequence[PlanInputs]) -> None:
        """Give every rank of a host a share of what is scarce, and a plan within it."""
        host.lowest_ns = max((self._lower_ns(rank) for rank in host.ranks if self._counts(rank)), default=0)
        for _ in range(2):
            pinned = sum(self._plans[rank].prediction.pinned_bytes for rank in host.ranks)
            anew = sum(_new_bytes(self._inputs[rank], self._plans[rank]) for rank in host.ranks)
            # A host with one rank has nothing to divide; what its current placement pins may exceed the budget.
            lacks_pins = len(host.ranks) > 1 and pinned > host.pinned_bytes
            lacks_memory = len(host.ranks) > 1 and anew > host.new_bytes
            if not lacks_pins and not lacks_memory:
                return
            host.divides_pins, host.divides_memory = (
                host.divides_pins or lacks_pins,
                host.divides_memory or lacks_memory,
            )
            kinds: dict[bytes, _Kind] = {}
            for rank in host.ranks:
                key = msgspec.json.encode(whole[rank], order="sorted")
                kinds.setdefault(key, _Kind(ranks=[], stays_bytes=_stays_bytes(whole[rank]))).ranks.append(rank)
            self._share(host, list(kinds.values()), whole)

    def _share(self, host: _Host, kinds: list[_Kind], whole: Sequence[PlanInputs]) -> None:
        """Give unit after unit to the slowest kind, as long as all that is left would make it faster."""
        if len(kinds) == 1:
            kinds[0].units = _UNITS
            self._settle(host, kinds, whole)
            lower = max((self._lower_ns(rank) for rank in host.ranks if self._counts(rank)), default=0)
            host.lowest_ns = max(host.lowest_ns, lower)
            return
        left = _UNITS
        while left:
            found = [(self._time_ns(host, kind, whole, kind.units), -number) for number, kind in enumerate(kinds)]
            slowest = kinds[-max(found)[1]]
            if self._time_ns(host, slowest, whole, slowest.units + left) >= max(found)[0]:
                break
            slowest.units += 1
            left -= 1
        self._settle(host, kinds, whole)
        host.lowest_ns = max(host.lowest_ns, self._divided_ns(host, kinds, whole))

    def _divided_ns(self, host: _Host, kinds: list[_Kind], whole: Sequence[PlanInputs]) -> int:
        """Return what no division brings the slowest kind below: each other one needs more than a unit less."""
        times = [self._time_ns(host, kind, whole, kind.units) for kind in kinds]
        slowest = times.index(max(times))
        others = sum(max(0, kind.units - 1) for number, kind in enumerate(kinds) if number != slowest)
        found = self._at(host, kinds[slowest], whole, _UNITS - others)
        if isinstance(found, PlacementInfeasible) or not found[1].prediction.timed:
            return 0
        return found[1].prediction.duration_ns - found[1].gap_ns

    def _settle(self, host: _Host, kinds: list[_Kind], whole: Sequence[PlanInputs]) -> None:
        """Take the plans of all kinds within their shares. Raises PlacementInfeasible."""
        for kind in kinds:
            found = self._best(host, kind, whole, kind.units)
            if isinstance(found, PlacementInfeasible):
                found.add_note(f"on rank {kind.ranks[0]}, with its share of the host's memory")
                raise found
            for rank in kind.ranks:
                self._inputs[rank], self._plans[rank] = found

    def _time_ns(self, host: _Host, kind: _Kind, whole: Sequence[PlanInputs], units: int) -> float:
        """Return the least time within so many units; infinite if nothing fits, nothing of a rank without timing."""
        found = self._best(host, kind, whole, units)
        if isinstance(found, PlacementInfeasible):
            return float("inf")
        return found[1].prediction.duration_ns if found[1].prediction.timed else 0

    def _best(
        self, host: _Host, kind: _Kind, whole: Sequence[PlanInputs], units: int
    ) -> tuple[PlanInputs, Plan] | PlacementInfeasible:
        """Return the fastest plan that was made within so many units: what fits into fewer fits into more."""
        found = self._at(host, kind, whole, units)
        plans = [one for num, one in sorted(kind.tried.items()) if num <= units and isinstance(one, tuple)]
        return min(plans, key=lambda one: one[1].prediction.duration_ns) if plans else found

    def _at(
        self, host: _Host, kind: _Kind, whole: Sequence[PlanInputs], units: int
    ) -> tuple[PlanInputs, Plan] | PlacementInfeasible:
        if units not in kind.tried:
            num = len(kind.ranks)
            free = max(0, host.pinned_bytes - sum(_stays_bytes(whole[rank]) for rank in host.ranks))
            pinned = kind.stays_bytes + free * units // _UNITS // num if host.divides_pins else host.pinned_bytes
            anew = host.new_bytes * units // _UNITS // num if host.divides_memory else host.new_bytes
            inputs = replace(whole[kind.ranks[0]], host_share=HostShare(pinned_bytes=pinned, new_bytes=anew))
            plan = self._try(inputs)
            kind.tried[units] = plan if isinstance(plan, PlacementInfeasible) else (inputs, plan)
        return kind.tried[units]

    def _counts(self, rank: int) -> bool:
        """Whether the time of a rank means anything: beside a timed one, transfers alone do not."""
        return self._plans[rank].prediction.timed or not any(one.prediction.timed for one in self._plans)

    def _lower_ns(self, rank: int) -> int:
        return self._plans[rank].prediction.duration_ns - self._plans[rank].gap_ns

    def _save_memory(self, slowest_ns: int) -> None:
        """Let ranks that are faster than the slowest one take less device memory, within what is left of the host's."""
        for host in self._hosts:
            faster = [
                rank
                for rank in host.ranks
                if self._plans[rank].prediction.timed
                and self._plans[rank].prediction.duration_ns < slowest_ns - slowest_ns // _WORTH_PART
            ]
            plans = [(self._inputs[rank], self._plans[rank]) for rank in host.ranks]
            pins = host.pinned_bytes - sum(plan.prediction.pinned_bytes for _, plan in plans)
            anew = host.new_bytes - sum(_new_bytes(inputs, plan) for inputs, plan in plans)
            for rank in faster:
                inputs, plan = self._inputs[rank], self._plans[rank]
                share = inputs.host_share
                if share is not None:
                    # Less device memory takes more of the host's: no more than an equal part of what is left.
                    share = HostShare(
                        pinned_bytes=plan.prediction.pinned_bytes + max(0, pins) // len(faster),
                        new_bytes=_new_bytes(inputs, plan) + max(0, anew) // len(faster),
                    )
                thrifty = replace(inputs, enough_ns=slowest_ns, host_share=share)
                found = self._try(thrifty)
                if isinstance(found, Plan) and found.prediction.device_bytes < plan.prediction.device_bytes:
                    self._inputs[rank], self._plans[rank] = thrifty, found


def _stays_bytes(inputs: PlanInputs) -> int:
    """Return the pinned bytes of components that no plan may touch."""
    fixed = [spec for spec in inputs.specs if spec.name in inputs.configured or spec.fixed_reason is not None]
    return pinned_bytes(fixed, inputs.current)


def _new_bytes(inputs: PlanInputs, plan: Plan) -> int:
    """Return the host memory that a plan takes anew."""
    current, target = inputs.current.components, plan.placement.components
    return sum(host_bytes(spec, current[spec.name], target[spec.name]) for spec in inputs.specs)
