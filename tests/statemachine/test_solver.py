"""The solver: the same choice as by brute force, whatever is left out, refused, or listed in a table."""

from __future__ import annotations

import hashlib
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from residency.statemachine.problem import Problem, reduced, with_ceiling
from residency.statemachine.solver import TABLE_MAX, solve

Choice = tuple[int, ...]
NODES = 10**6
# None of the groups listed, some, all.
TABLES = st.sampled_from([0, 1, 4, TABLE_MAX])


def name(choice: Choice) -> str:
    return hashlib.sha256(repr(choice).encode()).hexdigest()


def choices(problem: Problem) -> list[Choice]:
    """Return every choice that fits, the best first."""
    every = product(*(range(len(costs)) for costs in problem.costs))
    return sorted(filter(problem.fits, every), key=lambda one: (problem.cost(one), name(one)))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    # Small numbers: ties, options that beat each other, and limits that imply each other are then frequent.
    num_limits = draw(st.integers(0, 3))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    costs, load = st.integers(0, 4), st.integers(0, 5)
    return Problem(
        costs=tuple(tuple(draw(costs) for _ in range(size)) for size in sizes),
        loads=tuple(tuple(tuple(draw(load) for _ in range(num_limits)) for _ in range(size)) for size in sizes),
        limits=tuple(draw(st.integers(-1, 14)) for _ in range(num_limits)),
    )


@given(problem=problems(), num_refused=st.integers(0, 6), best_refused=st.booleans(), table_max=TABLES, data=st.data())
def test_the_best_choice_that_is_not_refused_is_found(
    problem: Problem, num_refused: int, best_refused: bool, table_max: int, data: st.DataObject
) -> None:
    found = choices(problem)
    # The best ones: a pruned option is needed most where all that beat it are refused.
    refused = set(found[:num_refused])
    if found and not best_refused:
        refused = set(data.draw(st.lists(st.sampled_from(found), max_size=num_refused)))
    wanted = next((one for one in found if one not in refused), None)
    solution = solve(
        problem,
        num_nodes_max=NODES,
        tie_break=name,
        allowed=lambda choice: choice not in refused,
        num_refused=num_refused,
        table_max=table_max,
    )
    assert solution.choice == wanted
    assert solution.exact
    any_best = solve(
        problem,
        num_nodes_max=NODES,
        allowed=lambda choice: choice not in refused,
        num_refused=num_refused,
        table_max=table_max,
    )
    assert (any_best.choice is None) is (wanted is None)
    if wanted is not None and any_best.choice is not None:
        assert any_best.choice not in refused and problem.fits(any_best.choice)
        assert problem.cost(any_best.choice) == problem.cost(wanted)


@given(problem=problems(), table_max=TABLES, data=st.data())
def test_a_choice_to_start_from_and_prices_change_nothing_but_the_effort(
    problem: Problem, table_max: int, data: st.DataObject
) -> None:
    found = choices(problem)
    prices = data.draw(st.tuples(*(st.integers(0, 2**22) for _ in problem.limits)))
    start = data.draw(st.sampled_from(found)) if found else None
    solution = solve(problem, num_nodes_max=NODES, tie_break=name, start=start, prices=prices, table_max=table_max)
    assert solution.choice == (found[0] if found else None)


@given(problem=problems(), ceiling=st.integers(0, 12), own_prices=st.booleans(), data=st.data())
def test_a_ceiling_on_the_first_costs_leaves_exactly_what_is_below_it(
    problem: Problem, ceiling: int, own_prices: bool, data: st.DataObject
) -> None:
    others = tuple(tuple(data.draw(st.integers(0, 4)) for _ in costs) for costs in problem.costs)
    prices = solve(problem, num_nodes_max=NODES).prices
    if not own_prices:
        prices = data.draw(st.tuples(*(st.integers(0, 2**22) for _ in problem.limits)))
    bounded = with_ceiling(problem, costs=others, ceiling=ceiling, prices=prices)
    assert set(choices(bounded)) == {one for one in choices(problem) if problem.cost(one) <= ceiling}


@given(problem=problems())
def test_leaving_limits_out_lets_nothing_more_through(problem: Problem) -> None:
    left = reduced(problem, num_refused=10**6, ties_matter=True)
    assert set(left.limits) <= set(range(len(problem.limits)))
    kept = {
        tuple(names[option] for names, option in zip(left.options, choice, strict=True))
        for choice in choices(left.problem)
    }
    assert kept == set(choices(problem))


def test_limits_that_cannot_bind_and_options_that_others_beat_are_left_out() -> None:
    problem = Problem(
        costs=((1, 2, 3, 3), (0, 5)),
        loads=(((5, 5, 1), (4, 4, 1), (5, 5, 0), (9, 9, 0)), ((0, 0, 1), (4, 4, 1))),
        # The second follows from the first, the third from the options alone; the option that takes 9 never fits.
        limits=(8, 8, 2),
    )
    left = reduced(problem, num_refused=0, ties_matter=True)
    assert len(left.limits) == 1
    assert left.options == ((0, 1), (0,))
    # With one choice refused, what a single option beats may be needed; what two beat may not.
    assert reduced(problem, num_refused=1, ties_matter=True).options == ((0, 1), (0, 1))


def test_a_search_cut_short_says_so_and_keeps_what_it_started_from() -> None:
    problem = Problem(
        costs=tuple((3, 2, 1) for _ in range(4)),
        loads=tuple(((1,), (2,), (3,)) for _ in range(4)),
        limits=(9,),
    )
    cut = solve(problem, num_nodes_max=2, tie_break=name, start=(0, 0, 0, 0), table_max=0)
    assert cut.choice == (0, 0, 0, 0) and not cut.exact and cut.num_nodes == 2
    assert solve(problem, num_nodes_max=NODES, tie_break=name, table_max=0).choice == choices(problem)[0]
