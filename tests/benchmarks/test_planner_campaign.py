"""The campaign of random instances, in short, and that it would notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.planner import target_inputs
from benchmarks.planner_campaign import Tally, check, draw
from residency.statemachine.planner.make_plan import make_plan

if TYPE_CHECKING:
    import pytest


def test_plans_of_random_instances_are_those_that_trying_everything_finds() -> None:
    tally = Tally()
    problems = {seed: problem for seed in range(40) if (problem := check(seed, tally)) is not None}
    assert not problems
    assert tally.num_instances == 40
    assert tally.num_infeasible and tally.num_moves_down and tally.num_ranks


def test_a_plan_that_is_not_the_best_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.planner_campaign.make_plan", lambda inputs: make_plan(draw(3)))
    assert check(2, Tally()) is not None


def test_the_target_case_has_the_size_that_it_is_named_for() -> None:
    inputs = target_inputs()
    groups = {spec.name: [len(group.layer_bytes) for group in spec.groups] for spec in inputs.specs}
    assert len(inputs.specs) == 4 and groups["transformer"] == [19, 38]
    assert len(inputs.records[0].phases) == 12
