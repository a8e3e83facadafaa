"""Every rank killed, hung or raising at every step of a round: the others end in time, on one placement or not at all.

Steps are those of a life that nothing happens to, not listed here. Every rank is struck at every step, by one of the
three in turn, so that all three come to every step; where a step is the first of its kind before or after the weights
move, all three come to one of the ranks, in turn. The long form, in which all come to every rank before and after every
step, and all pairs of them, is `python -m tests.ranks.long`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

Live = Callable[[list[list[dict[str, Any]]]], list[Any]]
RANKS = 4


def _load(name: str) -> Any:
    spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


outcomes = _load("outcomes")


@pytest.fixture(scope="module")
def undisturbed(live: Live) -> list[Any]:
    """Two lives that nothing happens to."""
    (case,) = live([[{}, {}]])
    assert outcomes.problems(case, set()) == []
    assert [one["decision"] for one in case[0]] == ["committed"] * RANKS
    return list(case)


def check(live: Live, faults: list[dict[str, Any]]) -> list[Any]:
    """Live one case per fault, and the start after it; nothing may be wrong with any."""
    cases = live([[{"faults": [fault]}, {}] for fault in faults])
    wrong = {
        str(fault): (
            found,
            [(one["status"], one.get("decision"), one.get("reason", one.get("text"))) for one in case[0]],
        )
        for fault, case in zip(faults, cases, strict=True)
        if (found := outcomes.problems(case, {fault["rank"]}))
    }
    assert not wrong, f"{len(wrong)} of {len(faults)}: " + "\n".join(f"{key}: {value}" for key, value in wrong.items())
    return cases


KINDS = ("kill", "hang", "raise")
PARTS = 4  # each well within the time that a test may take, also on a busy machine


def new_steps(steps: list[str]) -> list[bool]:
    """Say of each step whether it is the first of its kind, before the weights are moved or after."""
    names = [step.partition(".")[2] for step in steps]
    kinds = [(name, "applied" in names[:index]) for index, name in enumerate(names)]
    return [kind not in kinds[:index] for index, kind in enumerate(kinds)]


@pytest.mark.parametrize("part", range(PARTS))
def test_a_rank_struck_at_any_step_leaves_one_placement_or_none(live: Live, undisturbed: list[Any], part: int) -> None:
    """Every rank, before or after it has passed its part."""
    steps = undisturbed[0][0]["steps"]
    faults = [
        {"rank": rank, "what": what, "at": ("before", "after")[(rank + number + kind) % 2], "number": number}
        for number, is_new in enumerate(new_steps(steps), 1)
        if number % PARTS == part
        for rank in range(RANKS)
        for kind, what in enumerate(KINDS)
        if kind == (rank + number) % len(KINDS) or (is_new and rank == number % RANKS)
    ]
    check(live, faults)


def test_placements_differ_between_ranks_and_one_epoch_and_round_are_shared(undisturbed: list[Any]) -> None:
    first, second = undisturbed
    assert len({one["placement_digest"] for one in first}) > 1
    for life in undisturbed:
        assert len({(one["epoch"], one["round"], one["joint"]) for one in life}) == 1
    assert [one["placement_digest"] for one in second] == [one["placement_digest"] for one in first]
    assert {one["decision"] for one in second} == {"restored"}
