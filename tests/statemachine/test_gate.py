"""Every reason to do nothing, by name."""

from __future__ import annotations

import pytest

from residency.statemachine.gate import Facts, GateReason, check_gate

# Facts that close the gate for exactly one reason; a new reason without a row here fails a test below.
CLOSED = {
    GateReason.STREAM_IN_USE: Facts(stream_holder="pid 17"),
    GateReason.JOURNAL_NEWER: Facts(journal_newer="format 9 is newer than 1"),
    GateReason.JOURNAL_UNUSABLE: Facts(journal_problem="it is read-only"),
    GateReason.SEVERAL_RANKS: Facts(num_ranks=2),
    GateReason.RANK_FAILED: Facts(rank_problem="rank 2 was not heard from"),
    GateReason.RANKS_DIFFER: Facts(ranks_differ="rank 1 has another workload"),
    GateReason.NO_WARMUP: Facts(has_warmup=False),
    GateReason.NO_WORKLOAD: Facts(has_workload=False),
    GateReason.NOTHING_TO_DECIDE: Facts(num_movable=0, fixed=(("vae", "foreign hooks"),)),
    GateReason.QUARANTINED: Facts(quarantine="2 lives died"),
    GateReason.WARMUP_FAILED: Facts(warmup_problem="raised ValueError"),
}


@pytest.mark.parametrize("reason", GateReason)
def test_every_reason_closes_the_gate_and_says_what_was_found_and_what_would_help(reason: GateReason) -> None:
    gate = check_gate(CLOSED[reason])
    assert gate is not None and gate.reason is reason
    assert gate.detail and gate.remedy
    assert gate.text == f"{reason.value}: {gate.detail}; {gate.remedy}"
    assert not gate.text.endswith(".")


@pytest.mark.parametrize("reason", GateReason)
def test_no_reason_promises_anything_that_happens_by_itself(reason: GateReason) -> None:
    gate = check_gate(CLOSED[reason])
    assert gate is not None
    assert not any(word in gate.text for word in ("automatic", " will ", "soon", "later"))


def test_without_a_reason_the_gate_is_open() -> None:
    assert check_gate(Facts()) is None


def test_the_first_reason_of_the_table_decides() -> None:
    everything = Facts(
        stream_holder="pid 17",
        journal_newer="newer",
        journal_problem="read-only",
        num_ranks=2,
        has_warmup=False,
        has_workload=False,
        num_movable=0,
        quarantine="q",
        warmup_problem="w",
    )
    gate = check_gate(everything)
    assert gate is not None and gate.reason is GateReason.STREAM_IN_USE


def test_details_carry_the_values_that_were_found() -> None:
    details = {reason: gate.detail for reason, facts in CLOSED.items() if (gate := check_gate(facts)) is not None}
    assert "pid 17" in details[GateReason.STREAM_IN_USE]
    assert "2 ranks" in details[GateReason.SEVERAL_RANKS]
    assert "vae (foreign hooks)" in details[GateReason.NOTHING_TO_DECIDE]
    empty = check_gate(Facts(num_movable=0))
    assert empty is not None and "none with weights" in empty.detail
