"""The verdict: every reason, whom it blames, and what is no verdict on the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from residency.gpu.records import RequestKind
from residency.statemachine.policy import Policy
from residency.statemachine.validation import Blame, Evidence, Reason, Verdict, judge, noise_ns, steady_output

if TYPE_CHECKING:
    from typing import Any

    from residency.gpu.records import RequestRecord
    from tests.statemachine.conftest import Build

MS = 10**6
CAP = 2**30


def samples(build: Build, *durations_ms: float, **changes: Any) -> tuple[RequestRecord, ...]:
    specs = build.specs()
    record = build.record(specs, build.placement(specs), kind=RequestKind.VALIDATION, **changes)
    return tuple(replace(record, duration_ns=int(duration * MS)) for duration in durations_ms)


def test_an_equal_placement_passes_with_its_figures(build: Build) -> None:
    before = samples(build, 100, 100)
    evidence = Evidence(
        cap_bytes=CAP, records=samples(build, 100, 101), baseline=before, expected_output=steady_output(before)
    )
    verdict = judge(evidence)
    assert verdict.ok and verdict.blames is None and verdict.reason is Reason.PASSED
    assert verdict.figures["output"] == "equal"
    assert verdict.figures["baseline_ns"] == 100 * MS
    assert verdict.figures["duration_ns"] == 100.5 * MS
    assert "output equal" in verdict.detail and "100.5 ms against 100.0 ms" in verdict.detail


def test_a_verdict_survives_the_journal(build: Build) -> None:
    verdict = judge(Evidence(cap_bytes=CAP, records=samples(build, 100)))
    assert msgspec.json.decode(msgspec.json.encode(verdict, order="sorted"), type=Verdict) == verdict


def test_reserved_memory_over_the_cap_blames_the_plan(build: Build) -> None:
    records = samples(build, 100, gap=50)
    peak = records[0].reserved_peak_bytes
    assert judge(Evidence(cap_bytes=peak, records=records)).ok
    verdict = judge(Evidence(cap_bytes=peak - 1, records=records))
    assert (verdict.reason, verdict.blames) == (Reason.MEMORY, Blame.PLAN)


def test_running_out_of_memory_blames_the_plan(build: Build) -> None:
    good = samples(build, 100)
    verdict = judge(Evidence(cap_bytes=CAP, records=(*good, build.failed(good[0]))))
    assert (verdict.reason, verdict.blames) == (Reason.OUT_OF_MEMORY, Blame.PLAN)


def test_a_request_that_the_pipeline_refuses_is_no_verdict_on_the_plan(build: Build) -> None:
    # A pipeline that needs two steps refused a one-step validation, and a correct placement was taken back for good.
    refused = samples(build, 1, succeeded=False, error="num_inference_steps must be at least 2")
    verdict = judge(Evidence(cap_bytes=CAP, records=refused, baseline=samples(build, 100)))
    assert not verdict.ok
    assert (verdict.reason, verdict.blames) == (Reason.REQUEST_FAILED, Blame.REQUEST)
    assert "at least 2" in verdict.detail


def test_a_validation_without_a_request_commits_nothing() -> None:
    verdict = judge(Evidence(cap_bytes=CAP, records=()))
    assert (verdict.ok, verdict.reason, verdict.blames) == (False, Reason.NOT_MEASURED, Blame.INFRASTRUCTURE)


@pytest.mark.parametrize(
    ("before", "after", "passes"),
    [
        # Five per cent decide where the noise is small and requests are long.
        ([1000, 1000, 1000], [1049, 1049, 1049], True),
        ([1000, 1000, 1000], [1051, 1051, 1051], False),
        # Twenty ms decide where requests are short.
        ([100, 100, 100], [119, 119, 119], True),
        ([100, 100, 100], [121, 121, 121], False),
        # Three times the noise decides where samples scatter: here 3 x 1.4826 x 20 ms.
        ([980, 1000, 1020], [1088, 1088, 1088], True),
        ([980, 1000, 1020], [1089, 1089, 1089], False),
        # Either side's scatter counts.
        ([1000, 1000, 1000], [1060, 1080, 1100], True),
        # With fewer than three samples the noise counts as five per cent: fifteen may pass.
        ([1000, 1000], [1149, 1149, 1149], True),
        ([1000, 1000, 1000], [1151], False),
        # The median decides, not the worst.
        ([1000] * 5, [1000, 1000, 1000, 5000, 5000], True),
        ([1000] * 5, [500] * 5, True),
    ],
)
def test_time_fails_only_beyond_five_per_cent_and_twenty_ms_and_three_times_the_noise(
    build: Build, before: list[float], after: list[float], passes: bool
) -> None:
    verdict = judge(Evidence(cap_bytes=CAP, records=samples(build, *after), baseline=samples(build, *before)))
    assert verdict.ok is passes
    assert verdict.reason is (Reason.PASSED if passes else Reason.TIME)
    assert verdict.blames is (None if passes else Blame.PLAN)


def test_the_noise_of_too_few_samples_is_a_part_of_their_median() -> None:
    policy = Policy()
    assert noise_ns([], policy) == 0
    assert noise_ns([100 * MS, 200 * MS], policy) == 7_500_000
    assert noise_ns([100, 100, 100, 100, 9000], policy) == 0
    assert noise_ns([90, 100, 110], policy) == 15


def test_without_a_baseline_time_is_told_and_not_judged(build: Build) -> None:
    slow = samples(build, 900, 900, 900)
    assert judge(Evidence(cap_bytes=CAP, records=slow)).figures["timing"] == "not judged"


def test_samples_of_another_shape_are_not_compared(build: Build) -> None:
    other = samples(build, 1, 1, 1, workload=replace(build.shape, width=64))
    assert judge(Evidence(cap_bytes=CAP, records=samples(build, 900), baseline=other)).ok


def test_a_changed_output_fails_only_if_the_baseline_always_gives_the_same(build: Build) -> None:
    changed = samples(build, 100, output_digest="bb")
    same = samples(build, 100, 100)
    differing = (same[0], replace(same[1], output_digest="cc"))
    verdict = judge(Evidence(cap_bytes=CAP, records=changed, baseline=same, expected_output=steady_output(same)))
    assert (verdict.reason, verdict.blames) == (Reason.OUTPUT, Blame.PLAN)
    assert "no tolerance is declared" in verdict.detail
    for baseline in (differing, same[:1]):
        assert steady_output(baseline) is None
        verdict = judge(Evidence(cap_bytes=CAP, records=changed, baseline=baseline))
        assert verdict.ok and verdict.figures["output"] == "not judged"


def test_a_declared_tolerance_decides_on_outputs_that_differ(build: Build) -> None:
    changed, same = samples(build, 100, output_digest="bb"), samples(build, 100, 100)
    close = judge(
        Evidence(cap_bytes=CAP, records=changed, baseline=same, expected_output=steady_output(same), outputs_close=True)
    )
    assert close.ok and close.figures["output"] == "within tolerance"
    far = judge(
        Evidence(
            cap_bytes=CAP, records=changed, baseline=same, expected_output=steady_output(same), outputs_close=False
        )
    )
    assert far.reason is Reason.OUTPUT and "tolerance" not in far.detail


def test_a_restore_compares_with_the_cap_and_the_journaled_output_and_never_with_time(build: Build) -> None:
    found = samples(build, 900)
    good = judge(Evidence(cap_bytes=CAP, records=found, expected_output="aa"))
    assert good.ok and good.figures["output"] == "equal" and good.figures["duration_ns"] == 900 * MS
    unknown = judge(Evidence(cap_bytes=CAP, records=found))
    assert unknown.ok and unknown.figures["output"] == "not judged"
    other = judge(Evidence(cap_bytes=CAP, records=found, expected_output="bb"))
    assert (other.reason, other.blames) == (Reason.OUTPUT, Blame.PLAN)
    assert judge(Evidence(cap_bytes=1, records=found)).reason is Reason.MEMORY


def test_memory_decides_before_output_and_output_before_time(build: Build) -> None:
    records = samples(build, 900, 900, 900, output_digest="bb")
    baseline = samples(build, 100, 100, 100)
    assert judge(Evidence(cap_bytes=1, records=records, baseline=baseline)).reason is Reason.MEMORY
    expected = steady_output(baseline)
    changed = Evidence(cap_bytes=CAP, records=records, baseline=baseline, expected_output=expected)
    assert judge(changed).reason is Reason.OUTPUT
    same = samples(build, 900, 900, 900)
    assert judge(Evidence(cap_bytes=CAP, records=same, baseline=baseline)).reason is Reason.TIME


def test_the_request_after_a_move_counts_for_memory_and_failures_and_not_for_time(build: Build) -> None:
    records, baseline = samples(build, 100, 100, 100), samples(build, 100, 100, 100)
    slow, large = samples(build, 5000), samples(build, 100, gap=CAP)
    verdict = judge(Evidence(cap_bytes=CAP, records=records, rewarm=slow, baseline=baseline))
    assert verdict.ok and verdict.figures["duration_ns"] == 100 * MS
    assert verdict.figures["num_samples"] == 3
    over = judge(Evidence(cap_bytes=CAP, records=records, rewarm=large, baseline=baseline))
    assert (over.reason, over.blames) == (Reason.MEMORY, Blame.PLAN)
    out = judge(Evidence(cap_bytes=CAP, records=records, rewarm=(build.failed(slow[0]),), baseline=baseline))
    assert (out.reason, out.blames) == (Reason.OUT_OF_MEMORY, Blame.PLAN)
    refused = samples(build, 1, succeeded=False, error="no")
    failed = judge(Evidence(cap_bytes=CAP, records=records, rewarm=refused, baseline=baseline))
    assert (failed.reason, failed.blames) == (Reason.REQUEST_FAILED, Blame.REQUEST)
