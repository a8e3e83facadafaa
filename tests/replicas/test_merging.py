"""How outcomes become one: the worst wins, whatever the order, and a difference is told."""

from __future__ import annotations

import itertools

import pytest

from residency.control import Outcome
from residency.statemachine.replicas import ReplicaOutcome, merge, worst

PRECEDENCE = [
    "rollback-failed",
    "unknown",
    "refused",
    "rolled-back",
    "applied",
    "committed",
    "kept",
    "pinned",
    "skipped",
]


@pytest.mark.parametrize(("worse", "better"), list(itertools.combinations(PRECEDENCE, 2)))
def test_the_worse_of_two_wins_in_either_order(worse: str, better: str) -> None:
    outcomes = [ReplicaOutcome(better), ReplicaOutcome(worse)]

    assert worst(outcomes) is worst(outcomes[::-1]) is ReplicaOutcome(worse)
    assert merge(outcomes).mixed


def test_a_lost_device_is_next_to_a_failed_rollback_and_a_mere_answer_is_last() -> None:
    order = [one.value for one in ReplicaOutcome]

    assert order == [PRECEDENCE[0], "poisoned", *PRECEDENCE[1:], "answered"]


def test_every_outcome_of_a_worker_can_be_merged() -> None:
    assert {one.value for one in Outcome} <= {one.value for one in ReplicaOutcome}


def test_merging_in_parts_is_merging_at_once() -> None:
    for three in itertools.product(ReplicaOutcome, repeat=3):
        assert worst([worst(three[:2]), three[2]]) is worst(three)


def test_replicas_that_agree_are_not_mixed() -> None:
    merged = merge([ReplicaOutcome.KEPT] * 3, placements=["a", "a", None])

    assert (merged.outcome, merged.mixed, merged.num_placements) == (ReplicaOutcome.KEPT, False, 1)
    assert merged.counts == {ReplicaOutcome.KEPT: 3}


def test_counts_and_placements_are_told_the_worst_first() -> None:
    outcomes = [ReplicaOutcome.COMMITTED, ReplicaOutcome.UNKNOWN, ReplicaOutcome.COMMITTED]
    merged = merge(outcomes, placements=["a", None, "b"])

    assert list(merged.counts.items()) == [(ReplicaOutcome.UNKNOWN, 1), (ReplicaOutcome.COMMITTED, 2)]
    assert merged.num_placements == 2


def test_nothing_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="empty"):
        merge([])
