"""Running requests under a proposed placement, and gathering what the verdict rests on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from residency.gpu.records import RequestKind, RequestRecord
from residency.gpu.workload import Workload
from residency.statemachine.probing import measured_steps
from residency.statemachine.validation import Evidence, Verdict, judge, noise_ns, steady_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.statemachine.context import RoundContext
    from residency.statemachine.measuring import Measuring
    from residency.statemachine.policy import Policy
    from residency.statemachine.source import Source
    from residency.statemachine.worker import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the placement before the round did.

    records: timing samples, all of `shape`. expected_output: digest of their output if it was the same every time, at
    least twice. output: one of them, for a declared tolerance.
    """

    records: tuple[RequestRecord, ...] = ()
    shape: Workload | None = None
    expected_output: str | None = None
    output: object = None

    @classmethod
    def measured(
        cls, samples: Sequence[Measured], records: Sequence[RequestRecord], shape: Workload | None
    ) -> Baseline:
        """Return the baseline of a round that measured one; `records` are all that it measured."""
        return cls(
            records=tuple(one.record for one in samples if one.record.succeeded),
            shape=shape,
            expected_output=steady_output([one for one in records if one.workload == shape]),
            output=samples[0].output if samples else None,
        )

    @classmethod
    def journaled(cls, source: Source) -> Baseline:
        """Return what a source knows from an earlier round."""
        samples = tuple(one for one in source.records if one.kind is RequestKind.BASELINE and one.succeeded)
        return cls(
            records=samples,
            shape=samples[-1].workload if samples else None,
            expected_output=source.expected_output or steady_output(samples),
        )

    def noise_ns(self, policy: Policy) -> int:
        """Return the spread to expect of a duration, in ns; 0 without samples."""
        return noise_ns([one.duration_ns for one in self.records], policy)


def compare(context: RoundContext, source: Source, measuring: Measuring, baseline: Baseline) -> Verdict:
    """Run every shape that must fit once, then samples beside those of the baseline, and judge. Raises WarmupFailed.

    The default shape, even where the placement before could not run it: what cannot serve it must not be committed.
    """
    full = replace(context.workload, steps=measured_steps(context.workload, context.policy))
    others = [replace(one, steps=measured_steps(one, context.policy)) for one in context.workloads]
    extra = [measuring.run(RequestKind.VALIDATION, one) for one in dict.fromkeys(others) if one != full]
    rewarm = measuring.run(RequestKind.VALIDATION, full)
    taken: tuple[Measured, ...] = ()
    if rewarm.succeeded and baseline.records and baseline.shape is not None:
        taken = measuring.samples(RequestKind.VALIDATION, baseline.shape, num_max=len(baseline.records))
    last = taken[-1] if taken else next((one for one in extra if one.record.workload == source.shape), rewarm)
    close = None  # without a declared tolerance no outputs are kept
    if baseline.output is not None and last.record.workload == baseline.shape:
        close = context.worker.outputs_close(baseline.output, last.output)
    # Another process may hold other weights under the same names and shapes; then outputs may well differ.
    is_known = source.is_measured or (
        context.is_identified and last.record.workload == (baseline.shape or source.shape)
    )
    return judge(
        Evidence(
            cap_bytes=context.worker.device().cap_bytes,
            records=tuple(one.record for one in taken) or (last.record,),
            rewarm=(*(one.record for one in extra), rewarm.record),
            baseline=baseline.records,
            expected_output=baseline.expected_output if is_known else None,
            outputs_close=close,
            policy=context.policy,
        )
    )
