"""What a round measures before it plans: a small request, a probe at full shape, and samples to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from residency.errors import WarmupFailed, describe
from residency.gpu.records import RequestKind, RequestRecord
from residency.gpu.workload import Workload
from residency.statemachine.policy import Policy
from residency.statemachine.probing import bounded_workload, fit_probe, measured_steps
from residency.statemachine.ranks import Alone, RequestEnd
from residency.statemachine.worker import Measured, Observer, Worker


@dataclass(slots=True, kw_only=True)
class Measuring:
    """Runs measured requests for one round and hands each record out as soon as it exists.

    target: the default workload; others: shapes that must fit as well. clock: monotonic ns, for time budgets.
    on_record: called after every request.
    before_run: called before every one; what it raises ends the measuring. ranks: that run the same requests; every
    branch here is taken by what all of them found.
    """

    worker: Worker
    target: Workload
    policy: Policy
    observer: Observer
    clock: Callable[[], int]
    on_record: Callable[[RequestRecord], None]
    before_run: Callable[[], None]
    ranks: Alone = field(default_factory=Alone)
    others: tuple[Workload, ...] = ()
    records: list[RequestRecord] = field(default_factory=list)

    @property
    def small(self) -> Workload:
        """The bounded shape of a first, cold request."""
        return bounded_workload(self.target, self.policy)

    def calibrate(self) -> Workload | None:
        """Measure the placement in force; returns the shape to take samples at, None if no request succeeded.

        A small request first: a cold one at full shape would mix one-time costs into every figure. Then the probe,
        the default shape shrunk until it should fit; then the small shape again, without what the probe left behind.
        Raises WarmupFailed for anything but out of memory.
        """
        small = self.small
        first = self.run(RequestKind.BOUNDED, small)
        shape = self._probe_shape(small, first, self.target)
        # Before the default one, so that what they leave behind is tidied up with what it leaves.
        others = [self._probe_shape(small, first, one) for one in self.others] if first.succeeded else []
        for other in dict.fromkeys(one for one in others if one not in (small, shape)):
            self.run(RequestKind.PROBE, other)
        if shape == small:
            return small if first.succeeded else None
        probe = self.run(RequestKind.PROBE, shape)
        self.ranks.renew_workspaces()
        again = self.run(RequestKind.BOUNDED, small)
        if probe.succeeded:
            return shape
        return small if again.succeeded else None

    def samples(self, kind: RequestKind, shape: Workload, *, num_max: int) -> tuple[Measured, ...]:
        """Run up to num_max requests within the policy's time budget, at least one; stops at the first failure."""
        taken: list[Measured] = []
        budget_ns = int(self.policy.sample_budget_s * 1e9)
        begun = self.clock()
        while len(taken) < num_max:
            if not self.ranks.all_of("sample", not taken or self.clock() - begun < budget_ns):
                break
            taken.append(self.run(kind, shape))
            if not taken[-1].succeeded:
                break
        return tuple(taken)

    def run(self, kind: RequestKind, shape: Workload) -> Measured:
        """Run one measured request. Raises WarmupFailed for anything but out of memory."""
        self.before_run()
        size = f"{shape.width}x{shape.height}x{shape.frames}, {shape.steps} steps"
        self.observer.working(f"{kind.value} request, {size}")
        # Whoever cannot begin it says so before the others wait for it inside.
        self.ranks.begin_request(f"{kind.value} request, {shape}")
        try:
            with self.ranks.request():
                measured = self.worker.measure(kind, shape)
        except WarmupFailed as error:
            failed = error.fields.get("record")
            if failed is not None:
                self._keep(failed)
            together = self.ranks.request_ended(RequestEnd(succeeded=False, problem=describe(error)))
            if failed is None or not together.out_of_memory:
                raise
            # Another rank ran out of memory, and this one waited for it in vain.
            return Measured(record=failed, output=None, everywhere=False)
        record = measured.record
        self._keep(record)
        end = RequestEnd(succeeded=record.succeeded, out_of_memory=record.out_of_memory, problem=record.error)
        return replace(measured, everywhere=self.ranks.request_ended(end).succeeded)

    def _keep(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.on_record(record)

    def _probe_shape(self, small: Workload, first: Measured, target: Workload) -> Workload:
        full = replace(target, steps=measured_steps(target, self.policy))
        if full.units <= small.units:
            return small
        worker = self.worker
        cap_bytes = worker.device().cap_bytes
        own = fit_probe(full, first.record, worker.specs, worker.placement, cap_bytes, self.policy)
        return self.ranks.most_shrunk(own)
