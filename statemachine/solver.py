"""One option per group, exactly: least cost within every limit, by branch and bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SHIFT = 20  # fraction bits of a multiplier: bounds stay whole numbers, so that pruning is never wrong by rounding
_ROUNDS = 80  # of the search for multipliers; they only make it faster


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best choice found, an option index per group, or None. exact: proven, within the bound on nodes."""

    choice: tuple[int, ...] | None
    num_nodes: int
    exact: bool


def solve(
    problem: Problem,
    *,
    num_nodes_max: int,
    tie_break: Callable[[tuple[int, ...]], str],
    allowed: Callable[[tuple[int, ...]], bool] = lambda choice: True,
    start: tuple[int, ...] | None = None,
) -> Solution:
    """Return the allowed choice of least cost within the limits; among equals, the one of least `tie_break`.

    `start` is a choice known to fit, to be beaten.
    """
    search = _Search(problem, num_nodes_max, tie_break, allowed, start)
    search.run()
    return Solution(choice=search.best, num_nodes=search.num_nodes, exact=search.num_nodes < num_nodes_max)


class _Search:
    """Depth-first over the groups, pruned by the least loads of the rest and by a Lagrangian bound."""

    def __init__(
        self,
        problem: Problem,
        num_nodes_max: int,
        tie_break: Callable[[tuple[int, ...]], str],
        allowed: Callable[[tuple[int, ...]], bool],
        start: tuple[int, ...] | None,
    ) -> None:
        self.problem, self.tie_break, self.allowed = problem, tie_break, allowed
        self.num_nodes, self.num_nodes_max = 0, num_nodes_max
        self.best = start
        self.best_cost = problem.cost(start) if start is not None else None
        multipliers = _multipliers(problem)
        self.spent = sum(m * limit for m, limit in zip(multipliers, problem.limits, strict=True))
        # An option's score is its cost plus the price of what it takes of every limit.
        self.scores = [
            [
                (cost << _SHIFT) + sum(m * load for m, load in zip(multipliers, loads, strict=True))
                for cost, loads in zip(costs, options, strict=True)
            ]
            for costs, options in zip(problem.costs, problem.loads, strict=True)
        ]
        # Groups that differ most come first: a wrong turn there shows at once.
        self.order = sorted(range(len(self.scores)), key=lambda g: min(self.scores[g]) - max(self.scores[g]))
        self.ranked = [
            sorted(range(len(self.scores[group])), key=lambda option: (self.scores[group][option], option))
            for group in range(len(self.scores))
        ]
        self.score_rest, self.load_rest = [0], [(0,) * len(problem.limits)]
        for group in reversed(self.order):
            self.score_rest.append(self.score_rest[-1] + min(self.scores[group]))
            least = (min(column) for column in zip(*problem.loads[group], strict=True))
            self.load_rest.append(tuple(a + b for a, b in zip(self.load_rest[-1], least, strict=True)))
        self.score_rest.reverse()
        self.load_rest.reverse()
        self.choice = [0] * len(self.order)

    def run(self) -> None:
        self._descend(0, 0, 0, (0,) * len(self.problem.limits))

    def _descend(self, depth: int, score: int, cost: int, used: tuple[int, ...]) -> None:
        if depth == len(self.order):
            self._consider(cost)
            return
        group = self.order[depth]
        rest, least = self.score_rest[depth + 1], self.load_rest[depth + 1]
        for option in self.ranked[group]:
            if self.num_nodes >= self.num_nodes_max:
                return
            self.num_nodes += 1
            reached = score + self.scores[group][option]
            if self.best_cost is not None and reached + rest - self.spent > self.best_cost << _SHIFT:
                return  # the options after it score no better
            taken = tuple(a + b for a, b in zip(used, self.problem.loads[group][option], strict=True))
            if any(a + b > limit for a, b, limit in zip(taken, least, self.problem.limits, strict=True)):
                continue
            self.choice[group] = option
            self._descend(depth + 1, reached, cost + self.problem.costs[group][option], taken)

    def _consider(self, cost: int) -> None:
        if self.best_cost is not None and cost > self.best_cost:
            return
        choice = tuple(self.choice)
        if not self.allowed(choice):
            return
        if self.best is not None and cost == self.best_cost and self.tie_break(self.best) <= self.tie_break(choice):
            return
        self.best, self.best_cost = choice, cost


def _multipliers(problem: Problem) -> list[int]:
    """Return a price per limit, by subgradient ascent; any prices of at least 0 give a valid bound."""
    # Limits of very different sizes are brought to one scale first.
    scales = [
        float(max((abs(loads[i]) for options in problem.loads for loads in options), default=0)) or 1.0
        for i in range(len(problem.limits))
    ]
    prices = [0.0] * len(problem.limits)
    best_prices, best_bound = prices, float("-inf")
    costliest = float(sum(max(costs) for costs in problem.costs))
    for step in range(_ROUNDS):
        bound, excess = 0.0, [-limit / scale for limit, scale in zip(problem.limits, scales, strict=True)]
        for costs, options in zip(problem.costs, problem.loads, strict=True):
            value, loads = min(
                (
                    cost + sum(p * load / s for p, load, s in zip(prices, loads, scales, strict=True)),
                    loads,
                )
                for cost, loads in zip(costs, options, strict=True)
            )
            bound += value
            excess = [e + load / s for e, load, s in zip(excess, loads, scales, strict=True)]
        bound -= sum(p * limit / s for p, limit, s in zip(prices, problem.limits, scales, strict=True))
        if bound > best_bound:
            best_prices, best_bound = prices, bound
        length = sum(e * e for e in excess)
        if not length:
            break
        stride = max(costliest - bound, 1.0) / length * 0.95**step
        prices = [max(0.0, p + stride * e) for p, e in zip(prices, excess, strict=True)]
    return [int(p / s * 2**_SHIFT) for p, s in zip(best_prices, scales, strict=True)]
