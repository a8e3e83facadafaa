"""The choice of one option per group within limits, and what of it can be left out without changing the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PRICE_BITS = 20  # fraction bits of a price: bounds stay whole numbers, so that pruning is never wrong by rounding

_Kept = list[list[int]]  # group -> its options that are left


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """costs[group][option], loads[group][option][limit] and limits, whole numbers. Every group needs an option."""

    costs: tuple[tuple[int, ...], ...]
    loads: tuple[tuple[tuple[int, ...], ...], ...]
    limits: tuple[int, ...]

    def fits(self, choice: tuple[int, ...]) -> bool:
        """Whether a choice is within every limit."""
        return all(
            sum(self.loads[group][option][index] for group, option in enumerate(choice)) <= limit
            for index, limit in enumerate(self.limits)
        )

    def cost(self, choice: tuple[int, ...]) -> int:
        """Return the cost of a choice."""
        return sum(self.costs[group][option] for group, option in enumerate(choice))

    def score(self, group: int, option: int, prices: Sequence[int]) -> int:
        """Return the cost of an option plus the price of what it takes of every limit, in 2**-PRICE_BITS."""
        loads = self.loads[group][option]
        return (self.costs[group][option] << PRICE_BITS) + sum(p * load for p, load in zip(prices, loads, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What is left of a problem: `problem`, and the indices that its options and limits have in the whole one."""

    problem: Problem
    options: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]


def with_ceiling(
    problem: Problem, *, costs: tuple[tuple[int, ...], ...], ceiling: int, prices: Sequence[int]
) -> Problem:
    """Return the problem with other costs, where the present ones may not exceed a ceiling.

    prices: one of at least 0 per limit, in 2**-PRICE_BITS. Whatever they are, the answer is the same; those that the
    solver found for the present costs make it quick, by one more limit: what costs little must take much of the others.
    """
    loads = tuple(
        tuple(
            (*loads, cost, problem.score(group, option, prices))
            for option, (cost, loads) in enumerate(zip(problem.costs[group], options, strict=True))
        )
        for group, options in enumerate(problem.loads)
    )
    combined = (ceiling << PRICE_BITS) + sum(p * limit for p, limit in zip(prices, problem.limits, strict=True))
    return Problem(costs=costs, loads=loads, limits=(*problem.limits, ceiling, combined))


def reduced(problem: Problem, *, num_refused: int, ties_matter: bool) -> Reduction:
    """Return the problem without the limits that cannot bind and the options that the best choice cannot need.

    The best choice stays the same even if any `num_refused` choices are not to be had. ties_matter: every choice of
    least cost stays, not just one. A group without options means that nothing fits.
    """
    kept = [list(range(len(costs))) for costs in problem.costs]
    limits = list(range(len(problem.limits)))
    size = -1
    while size != (size := sum(map(len, kept))):
        _drop_what_never_fits(problem, kept, limits)
        limits = _binding(problem, kept, limits)
    for group, options in enumerate(kept):
        kept[group] = _undominated(problem, group, options, limits, num_refused=num_refused, ties_matter=ties_matter)
    left = Problem(
        costs=tuple(tuple(problem.costs[group][option] for option in options) for group, options in enumerate(kept)),
        loads=tuple(
            tuple(tuple(problem.loads[group][option][index] for index in limits) for option in options)
            for group, options in enumerate(kept)
        ),
        limits=tuple(problem.limits[index] for index in limits),
    )
    return Reduction(problem=left, options=tuple(map(tuple, kept)), limits=tuple(limits))


def _drop_what_never_fits(problem: Problem, kept: _Kept, limits: Iterable[int]) -> None:
    for index in limits:
        least = [min((problem.loads[g][option][index] for option in kept[g]), default=0) for g in range(len(kept))]
        room = problem.limits[index] - sum(least)
        for group, options in enumerate(kept):
            kept[group] = [one for one in options if problem.loads[group][one][index] - least[group] <= room]


def _binding(problem: Problem, kept: _Kept, limits: Sequence[int]) -> list[int]:
    """Return the limits that can matter: neither the worst options of all groups nor another limit imply them."""
    if not all(kept):
        return list(limits)
    found = list(limits)
    for index in limits:
        others: list[int | None] = [None, *(other for other in found if other != index)]
        # Taken away one by one, against those still there: of two that imply each other one stays.
        if any(_implies(problem, kept, other, index) for other in others):
            found.remove(index)
    return found


def _implies(problem: Problem, kept: _Kept, other: int | None, index: int) -> bool:
    """Say whether a choice within one limit (None: any choice) is always within another."""
    room = problem.limits[index] - (0 if other is None else problem.limits[other])
    for group, options in enumerate(kept):
        loads = problem.loads[group]
        room -= max(loads[option][index] - (0 if other is None else loads[option][other]) for option in options)
    return room >= 0


def _undominated(
    problem: Problem, group: int, options: list[int], limits: Sequence[int], *, num_refused: int, ties_matter: bool
) -> list[int]:
    """Return the options that are not beaten by more others than choices may be refused.

    To exchange an option for one that beats it keeps a choice within the limits and makes it better; each exchange
    gives another choice, so that one of them is not refused. Equal costs are told apart by whole choices only, so
    that they beat nothing where ties matter.
    """
    costs = problem.costs[group]
    taken = [(costs[option], tuple(problem.loads[group][option][index] for index in limits)) for option in options]
    ranked = sorted(range(len(options)), key=lambda one: (taken[one], one))
    left: list[int] = []
    for rank, one in enumerate(ranked):
        cost, loads = taken[one]
        num_better = 0
        for other in ranked[:rank]:
            if ties_matter and taken[other][0] == cost:
                break
            if all(a <= b for a, b in zip(taken[other][1], loads, strict=True)):
                num_better += 1
                if num_better > num_refused:
                    break
        if num_better <= num_refused:
            left.append(options[one])
    return sorted(left)
