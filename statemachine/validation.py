"""The verdict on a proposed placement: memory, output and time against what was before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median

from residency.gpu.records import RequestRecord
from residency.statemachine.policy import Policy

Figure = int | float | str | bool | None


class Blame(Enum):
    """Whom a failed validation blames. The value is the journal's spelling."""

    PLAN = "plan"
    REQUEST = "request"
    INFRASTRUCTURE = "infrastructure"


class Reason(Enum):
    """What decided a verdict. The value is the journal's spelling."""

    PASSED = "passed"
    OUT_OF_MEMORY = "out-of-memory"
    MEMORY = "memory"
    OUTPUT = "output"
    TIME = "time"
    REQUEST_FAILED = "request-failed"
    INTERRUPTED = "interrupted"
    NOT_MEASURED = "not-measured"
    OTHER_RANK = "other-rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a verdict rests on.

    records: of the requests under the proposed placement. rewarm: of those before them, which count for memory and
    for failures, not for time: the first request after a move pays what later ones do not. baseline: of those under
    the placement before it, the same shape; empty, and time is not judged, where there is none: in a restore, or if
    that placement could not run. expected_output: digest of the output that must come again, None if none is known.
    outputs_close: what a declared tolerance says of the outputs; None if none was declared.
    """

    cap_bytes: int
    records: tuple[RequestRecord, ...]
    rewarm: tuple[RequestRecord, ...] = ()
    baseline: tuple[RequestRecord, ...] = ()
    expected_output: str | None = None
    outputs_close: bool | None = None
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to commit; if not, whom that blames and why. figures: what was compared, in ns and bytes."""

    ok: bool
    blames: Blame | None
    reason: Reason
    detail: str
    figures: Mapping[str, Figure]


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict; the first of out of memory, memory, output and time that fails decides. Pure."""
    figures: dict[str, Figure] = {"cap_bytes": evidence.cap_bytes, "num_samples": len(evidence.records)}
    if not evidence.records:
        detail = "no request ran under the proposed placement"
        return Verdict(
            ok=False, blames=Blame.INFRASTRUCTURE, reason=Reason.NOT_MEASURED, detail=detail, figures=figures
        )
    for check in (_judge_requests, _judge_memory, _judge_output, _judge_time):
        verdict = check(evidence, figures)
        if verdict is not None:
            return verdict
    return Verdict(ok=True, blames=None, reason=Reason.PASSED, detail=_summary(figures), figures=figures)


def steady_output(records: Sequence[RequestRecord]) -> str | None:
    """Return the digest that all these requests gave, at least two: one output cannot tell change from chance."""
    digests = [record.output_digest for record in records if record.succeeded]
    return digests[0] if len(digests) > 1 and len(set(digests)) == 1 else None


def noise_ns(durations_ns: Sequence[int], policy: Policy) -> int:
    """Return the spread to expect of a duration, in ns: a standard deviation estimated from the median deviation.

    Too few samples say nothing about spread; it then counts as a fixed part of their median. 0 without samples.
    """
    if not durations_ns:
        return 0
    middle = median(durations_ns)
    if len(durations_ns) < policy.samples_for_noise_min:
        return round(middle * policy.noise_unknown_fraction)
    # 1.4826 makes the median absolute deviation a standard deviation; one slow outlier barely moves it.
    return round(1.4826 * median(abs(duration - middle) for duration in durations_ns))


def _failed(reason: Reason, detail: str, figures: Mapping[str, Figure], blames: Blame = Blame.PLAN) -> Verdict:
    return Verdict(ok=False, blames=blames, reason=reason, detail=detail, figures=figures)


def _judge_requests(evidence: Evidence, figures: dict[str, Figure]) -> Verdict | None:
    for record in (*evidence.rewarm, *evidence.records):
        if record.out_of_memory:
            detail = f"a request ran out of memory under a cap of {_mib(evidence.cap_bytes)}: {record.error or ''}"
            return _failed(Reason.OUT_OF_MEMORY, detail.rstrip(": "), figures)
        if not record.succeeded:
            # A pipeline that refuses a request says nothing about where its weights are.
            detail = f"a request failed: {record.error or 'no reason given'}"
            return _failed(Reason.REQUEST_FAILED, detail, figures, Blame.REQUEST)
    return None


def _judge_memory(evidence: Evidence, figures: dict[str, Figure]) -> Verdict | None:
    ran = (*evidence.rewarm, *evidence.records)
    peak = max(record.reserved_peak_bytes for record in ran)
    figures["reserved_peak_bytes"] = peak
    figures["allocated_peak_bytes"] = max(record.allocated_peak_bytes for record in ran)
    if peak <= evidence.cap_bytes:
        return None
    detail = f"reserved peak {_mib(peak)} is over the cap of {_mib(evidence.cap_bytes)}"
    return _failed(Reason.MEMORY, detail, figures)


def _judge_output(evidence: Evidence, figures: dict[str, Figure]) -> Verdict | None:
    found = {record.output_digest for record in evidence.records}
    expected = evidence.expected_output
    if expected is None:
        figures["output"] = "not judged"
        return None
    if found == {expected}:
        figures["output"] = "equal"
        return None
    if evidence.outputs_close:
        figures["output"] = "within tolerance"
        return None
    figures["output"] = "changed"
    detail = "the output differs from the one before"
    if evidence.outputs_close is None:
        detail += ", and no tolerance is declared"
    return _failed(Reason.OUTPUT, detail, figures)


def _judge_time(evidence: Evidence, figures: dict[str, Figure]) -> Verdict | None:
    policy = evidence.policy
    after = [record.duration_ns for record in evidence.records]
    before = [record.duration_ns for record in _comparable(evidence)]
    figures["duration_ns"] = round(median(after))
    if not before:
        figures["timing"] = "not judged"
        return None
    baseline = median(before)
    if min(len(before), len(after)) < policy.samples_for_noise_min:
        noise = round(baseline * policy.noise_unknown_fraction)
    else:
        noise = max(noise_ns(before, policy), noise_ns(after, policy))
    slower = median(after) - baseline
    allowed = max(policy.slower_fraction * baseline, policy.slower_min_ms * 1e6, policy.noise_factor * noise)
    figures |= {"baseline_ns": round(baseline), "noise_ns": noise, "allowed_ns": round(allowed)}
    figures["num_baseline_samples"] = len(before)
    figures["timing"] = "judged"
    if slower <= allowed:
        return None
    detail = (
        f"a request takes {median(after) / 1e6:.1f} ms instead of {baseline / 1e6:.1f} ms; "
        f"up to {allowed / 1e6:.1f} ms more would pass (noise {noise / 1e6:.1f} ms)"
    )
    return _failed(Reason.TIME, detail, figures)


def _comparable(evidence: Evidence) -> list[RequestRecord]:
    shape = evidence.records[-1].workload
    return [record for record in evidence.baseline if record.succeeded and record.workload == shape]


def _summary(figures: Mapping[str, Figure]) -> str:
    peak, cap = figures["reserved_peak_bytes"], figures["cap_bytes"]
    assert isinstance(peak, int) and isinstance(cap, int)
    text = f"reserved peak {_mib(peak)} of {_mib(cap)}, output {figures['output']}"
    duration, baseline = figures["duration_ns"], figures.get("baseline_ns")
    if isinstance(duration, int) and isinstance(baseline, int):
        text += f", {duration / 1e6:.1f} ms against {baseline / 1e6:.1f} ms before"
    return text


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
