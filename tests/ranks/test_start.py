"""What ranks agree on at a start, from reports alone."""

from __future__ import annotations

from typing import Any

import pytest

from residency.errors import SettingsError
from residency.ranks import Ranks, find_place
from residency.statemachine.gate import GateReason
from residency.statemachine.ranks import RankLimits
from residency.statemachine.ranks_start import JointRound, StartReport, agree, newest_common
from residency.statemachine.ranks_words import abort_word, commit_word, ended


def joint(number: int, *, digest: str = "d", committed: bool = True) -> JointRound:
    return JointRound(number=number, epoch=f"epoch {number}", digest=digest, committed=committed)


def report(*rounds: JointRound, **fields: Any) -> StartReport:
    return StartReport(alike="a", rounds=rounds, **fields)


def test_the_newest_round_that_all_committed_is_restored() -> None:
    found = agree([report(joint(1), joint(2), joint(3)), report(joint(1), joint(2))])
    assert found.restore == joint(2, committed=False)


def test_one_that_all_prepared_and_one_committed_was_decided() -> None:
    reports = [report(joint(1), joint(2)), report(joint(1), joint(2, committed=False))]
    assert newest_common(reports) == joint(2, committed=False)


def test_one_that_all_prepared_and_nobody_committed_never_was() -> None:
    reports = [report(joint(1), joint(2, committed=False)), report(joint(1), joint(2, committed=False))]
    assert newest_common(reports) == joint(1, committed=False)


def test_rounds_of_one_number_with_different_digests_or_epochs_are_different_rounds() -> None:
    assert newest_common([report(joint(1)), report(joint(1, digest="e"))]) is None
    other = JointRound(number=1, epoch="another", digest="d", committed=True)
    assert newest_common([report(joint(1)), report(other)]) is None


def test_a_rank_that_remembers_nothing_makes_all_calibrate() -> None:
    found = agree([report(joint(1)), report()])
    assert (found.restore, found.replan, found.gate) == (None, False, None)


def test_all_replan_only_if_all_would_from_the_same_round_and_then_as_carefully_as_the_most_careful() -> None:
    one = report(kind="replan", from_round=("e", 3), reserve_factor=2.0)
    assert agree([one, one]).replan
    found = agree([one, report()])
    assert not found.replan
    assert found.reserve_factor == 2.0


def test_one_kill_switch_pins_all_before_anything_else() -> None:
    found = agree([report(gate=("no-warmup", "none")), report(pinned=True)])
    assert (found.pinned_by, found.gate) == (1, None)


def test_a_gate_of_one_closes_it_for_all_but_a_rank_with_nothing_to_decide_takes_part() -> None:
    found = agree([report(), report(gate=("journal-unusable", "the disk is full"))])
    assert found.gate is not None
    assert found.gate.reason is GateReason.JOURNAL_UNUSABLE
    assert found.gate.detail == "rank 1: the disk is full"
    nothing = report(gate=("nothing-to-decide", "all is configured"))
    assert agree([report(), nothing]).gate is None
    closed = agree([nothing, nothing]).gate
    assert closed is not None and closed.reason is GateReason.NOTHING_TO_DECIDE


def test_ranks_that_were_attached_differently_run_no_round() -> None:
    found = agree([report(), StartReport(alike="b")])
    assert found.gate is not None
    assert found.gate.reason is GateReason.RANKS_DIFFER
    assert "rank 1" in found.gate.detail


def test_a_register_with_anything_but_a_commit_ends_the_round() -> None:
    assert ended(commit_word(2)) is None
    told = ended(abort_word(2, "out of memory", pinned=True))
    assert told is not None
    assert (told.fields["rank"], told.fields["problem"], told.fields["pinned"]) == (2, "out of memory", True)
    assert ended(b"\xff") is not None
    assert ended(b'{"word": "perhaps", "rank": 1}') is not None


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan")])
def test_a_limit_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="silence_s"):
        RankLimits(silence_s=wrong)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("world", "pass residency.Ranks"),
        (Ranks(), "init_process_group"),
        (Ranks(rank=0, size=2), "the store"),
        (Ranks(rank=2, size=2, store=object()), "rank=2"),
    ],
)
def test_ranks_that_nobody_could_find_are_refused_with_what_would_help(given: object, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        find_place(given)
