"""One option per group, exactly: least cost within every limit, by branch and bound that meets a table of the rest."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import add, ge, mul, sub
from typing import TYPE_CHECKING

from residency.statemachine.problem import PRICE_BITS, Problem, reduced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from residency.statemachine.problem import Reduction

_ROUNDS = 80  # of the search for prices; they only make it faster
TABLE_MAX = 5000  # combinations in the table: some 20 ms to build, and a few microseconds to look up

_Choice = tuple[int, ...]
_Loads = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best choice found, an option index per group, or None. exact: proven, within the bound on nodes.

    num_nodes: partial choices that were looked at. prices: of what is taken of each limit, in 2**-PRICE_BITS; any of
    at least 0 give a valid bound, these a good one.
    """

    choice: _Choice | None
    num_nodes: int
    exact: bool
    prices: tuple[int, ...]


def solve(
    problem: Problem,
    *,
    num_nodes_max: int,
    tie_break: Callable[[_Choice], str] | None = None,
    allowed: Callable[[_Choice], bool] = lambda choice: True,
    num_refused: int = 0,
    start: _Choice | None = None,
    prices: Sequence[int] | None = None,
    table_max: int = TABLE_MAX,
) -> Solution:
    """Return the allowed choice of least cost within the limits; among equals, the one of least `tie_break`, or any.

    num_refused: how many choices `allowed` may refuse at most; an understatement may cost the best choice. `start` is
    an allowed choice known to fit, to be beaten. prices: of an earlier solution of the same problem. table_max: how
    many combinations of the last groups may be listed; the answer is the same.
    """
    left = reduced(problem, num_refused=num_refused, ties_matter=tie_break is not None)
    if not all(left.options):
        return Solution(choice=start, num_nodes=0, exact=True, prices=(0,) * len(problem.limits))
    if prices is None:
        of_limit = dict(zip(left.limits, _prices(left.problem), strict=True))
        prices = [of_limit.get(index, 0) for index in range(len(problem.limits))]
    search = _Search(left, [prices[index] for index in left.limits], num_nodes_max, tie_break, allowed, table_max)
    search.best = start
    search.best_cost = problem.cost(start) if start is not None else None
    search.run()
    return Solution(choice=search.best, num_nodes=search.num_nodes, exact=not search.is_cut_short, prices=tuple(prices))


class _Table:
    """All combinations of some groups' options, cheapest first, looked up by what room there is.

    A set of combinations is a whole number with a bit for each. Per limit there is one for every load: those that
    take no more. Their intersection fits, and its lowest bit is the cheapest.
    """

    def __init__(self, problem: Problem, groups: Sequence[int]) -> None:
        combined: list[tuple[int, _Choice, _Loads]] = [(0, (), (0,) * len(problem.limits))]
        for group in groups:
            combined = [
                (cost + more, (*options, option), tuple(map(add, loads, problem.loads[group][option])))
                for cost, options, loads in combined
                for option, more in enumerate(problem.costs[group])
            ]
        combined.sort(key=lambda one: one[:2])
        self.costs = [cost for cost, _, _ in combined]
        self.options = [options for _, options, _ in combined]
        self.everything = (1 << len(combined)) - 1
        self.columns = [_column([loads[index] for _, _, loads in combined]) for index in range(len(problem.limits))]

    def fitting(self, room: Sequence[int]) -> Iterator[int]:
        """Return the combinations within the room, cheapest first."""
        found = self.everything
        for (loads, sets), most in zip(self.columns, room, strict=True):
            found &= sets[bisect_right(loads, most)]
        while found:
            lowest = found & -found
            yield lowest.bit_length() - 1
            found ^= lowest


def _column(loads: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the loads in order, and the sets of the first 0, 1, 2... combinations in that order."""
    ranked = sorted(range(len(loads)), key=lambda one: loads[one])
    sets = [0]
    for one in ranked:
        sets.append(sets[-1] | 1 << one)
    return [loads[one] for one in ranked], sets


class _Search:
    """Depth-first over the groups, pruned by the least loads of the rest and by a Lagrangian bound.

    The last groups are no levels of their own: a table gives the best of them at once.
    """

    def __init__(
        self,
        left: Reduction,
        prices: Sequence[int],
        num_nodes_max: int,
        tie_break: Callable[[_Choice], str] | None,
        allowed: Callable[[_Choice], bool],
        table_max: int,
    ) -> None:
        problem = self.problem = left.problem
        self.names, self.tie_break, self.allowed = left.options, tie_break, allowed
        self.num_nodes, self.num_nodes_max, self.is_cut_short = 0, num_nodes_max, False
        self.best: _Choice | None = None
        self.best_cost: int | None = None
        self.spent = sum(price * limit for price, limit in zip(prices, problem.limits, strict=True))
        self.scores = [
            [problem.score(group, option, prices) for option in range(len(costs))]
            for group, costs in enumerate(problem.costs)
        ]
        # Groups that differ most come first: a wrong turn there shows at once.
        order = sorted(range(len(self.scores)), key=lambda g: min(self.scores[g]) - max(self.scores[g]))
        num_levels, size = len(order), 1
        while num_levels and size * len(self.scores[order[num_levels - 1]]) <= table_max:
            num_levels -= 1
            size *= len(self.scores[order[num_levels]])
        self.levels, self.rest = order[:num_levels], order[num_levels:]
        self.table = _Table(problem, self.rest)
        self.ranked = [[option for _, option in sorted((s, o) for o, s in enumerate(scores))] for scores in self.scores]
        self.score_rest, self.load_rest = [0], [(0,) * len(problem.limits)]
        for group in reversed(order):
            self.score_rest.append(self.score_rest[-1] + min(self.scores[group]))
            least = (min(column) for column in zip(*problem.loads[group], strict=True))
            self.load_rest.append(tuple(a + b for a, b in zip(self.load_rest[-1], least, strict=True)))
        self.score_rest.reverse()
        self.load_rest.reverse()
        self.choice = [0] * len(order)

    def run(self) -> None:
        self._descend(0, 0, 0, self.problem.limits)

    def _descend(self, depth: int, score: int, cost: int, room: _Loads) -> None:
        if depth == len(self.levels):
            self._look_up(cost, room)
            return
        group = self.levels[depth]
        rest, least = self.score_rest[depth + 1], self.load_rest[depth + 1]
        for option in self.ranked[group]:
            reached = score + self.scores[group][option]
            if self._is_beaten(reached + rest - self.spent):
                return  # the options after it score no better
            if not self._count():
                return
            left = tuple(map(sub, room, self.problem.loads[group][option]))
            if not all(map(ge, left, least)):
                continue
            self.choice[group] = option
            self._descend(depth + 1, reached, cost + self.problem.costs[group][option], left)

    def _look_up(self, cost: int, room: _Loads) -> None:
        for found in self.table.fitting(room):
            total = cost + self.table.costs[found]
            if self._is_beaten(total << PRICE_BITS) or not self._count():
                return
            for group, option in zip(self.rest, self.table.options[found], strict=True):
                self.choice[group] = option
            self._consider(total)

    def _count(self) -> bool:
        """Count a node; say whether there was one left."""
        self.is_cut_short = self.is_cut_short or self.num_nodes >= self.num_nodes_max
        self.num_nodes += not self.is_cut_short
        return not self.is_cut_short

    def _is_beaten(self, bound: int) -> bool:
        """Say whether nothing that costs at least the bound is better than the best so far."""
        if self.best_cost is None:
            return False
        # Costs are whole: more than the last one below the best is no less than the best.
        enough = self.best_cost if self.tie_break is not None else self.best_cost - 1
        return bound > enough << PRICE_BITS

    def _consider(self, cost: int) -> None:
        """Take a choice that is no worse than the best so far, unless it is refused or a tie says otherwise."""
        choice = tuple(names[option] for names, option in zip(self.names, self.choice, strict=True))
        if not self.allowed(choice):
            return
        tied = self.best is not None and cost == self.best_cost
        if tied and self.best is not None and self.tie_break and self.tie_break(self.best) <= self.tie_break(choice):
            return
        self.best, self.best_cost = choice, cost


def _prices(problem: Problem) -> list[int]:
    """Return a price per limit, by subgradient ascent; any prices of at least 0 give a valid bound."""
    # Limits of very different sizes are brought to one scale first.
    scales = [
        float(max((abs(loads[i]) for options in problem.loads for loads in options), default=0)) or 1.0
        for i in range(len(problem.limits))
    ]
    groups = [
        [
            (float(cost), [load / scale for load, scale in zip(loads, scales, strict=True)])
            for cost, loads in zip(costs, options, strict=True)
        ]
        for costs, options in zip(problem.costs, problem.loads, strict=True)
    ]
    limits = [limit / scale for limit, scale in zip(problem.limits, scales, strict=True)]
    prices = [0.0] * len(limits)
    best_prices, best_bound = prices, float("-inf")
    costliest = float(sum(max(costs) for costs in problem.costs))
    for step in range(_ROUNDS):
        bound, excess = -sum(map(mul, prices, limits)), [-limit for limit in limits]
        for options in groups:
            value, loads = min((cost + sum(map(mul, prices, loads)), loads) for cost, loads in options)
            bound += value
            excess = list(map(add, excess, loads))
        if bound > best_bound:
            best_prices, best_bound = prices, bound
        length = sum(e * e for e in excess)
        if not length:
            break
        stride = max(costliest - bound, 1.0) / length * 0.95**step
        prices = [max(0.0, p + stride * e) for p, e in zip(prices, excess, strict=True)]
    return [int(p / s * 2**PRICE_BITS) for p, s in zip(best_prices, scales, strict=True)]
