"""The best placement of a request by itself: of the least bound, or the one that is simulated fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.errors import PlacementInfeasible
from residency.gpu.placement import RESIDENT, HostTier, Placement
from residency.statemachine.planner.bound import placement_bound
from residency.statemachine.planner.choice import Chooser
from residency.statemachine.planner.holdings import idle_bytes
from residency.statemachine.planner.options import Options
from residency.statemachine.planner.room import Room
from residency.statemachine.planner.search import Search
from residency.statemachine.planner.timeline import simulate
from residency.statemachine.planner.weighing import Rules
from residency.statemachine.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residency.gpu.placement import ComponentPlacement
    from residency.statemachine.planner.bound import Bound
    from residency.statemachine.planner.options import Family
    from residency.statemachine.planner.request_model import RequestModel
    from residency.statemachine.planner.search import Parts
    from residency.statemachine.planner.timeline import Timeline

_STEPS = (8, 4, 2, 1)
_EQUALS_MAX = 32  # placements of one bound that are simulated


def best_placement(
    model: RequestModel,
    *,
    fixed: Mapping[str, ComponentPlacement] | None = None,
    pin_budget_bytes: int | None = None,
) -> tuple[Placement, Bound]:
    """Return the placement of the least bound among all whose weights, window and peaks fit the cap, and its bound.

    fixed: component -> its placement, which is taken as it is (it may yield). pin_budget_bytes: for all pinned host
    copies together; None: no limit. Among equal bounds the one that is simulated fastest, then the one with the least
    device memory. Raises PlacementInfeasible if nothing fits.
    """
    room, options, families = _weighed(model, fixed or {}, pin_budget_bytes, has_slack=False)
    search = Search(
        room,
        families,
        by_pass=False,
        num_nodes_max=Policy().solver_nodes_max,
        pinned_bytes_max=pin_budget_bytes,
    )
    found: list[Placement] = []
    for lower_ns, parts in search.run():
        placement = room.placement(parts)
        if placement is not None:
            if not found:
                placement = room.placement(_improved(search, room, options, parts)) or placement
            found.append(placement)
            search.threshold_ns = lower_ns if search.threshold_ns is None else min(lower_ns, search.threshold_ns)
        if len(found) >= _EQUALS_MAX:
            break
    if not found:
        raise _infeasible(model)
    ranked = [(placement_bound(model, one), _simulated(model, one), one) for one in found]
    bound, _, placement = min(ranked, key=lambda one: (one[0].total_ns, one[1], one[2].digest))
    return placement, bound


def fastest_placement(
    model: RequestModel,
    *,
    fixed: Mapping[str, ComponentPlacement] | None = None,
    pin_budget_bytes: int | None = None,
) -> tuple[Placement, Timeline]:
    """Return the placement that is simulated fastest, and how it goes. Otherwise as `best_placement`."""
    room, options, families = _weighed(model, fixed or {}, pin_budget_bytes, has_slack=True)
    policy = Policy()
    rules = Rules(
        tolerance=lambda _: 0,
        pinned_bytes_max=_unlimited(model) if pin_budget_bytes is None else pin_budget_bytes,
        host_bytes_max=_unlimited(model),
        allowed=lambda _: True,
        reachable=lambda _: True,
        num_nodes_max=policy.solver_nodes_max,
        num_simulations_max=policy.simulations_max,
        num_windows=policy.window_levels,
    )
    current = Placement(components={spec.name: RESIDENT for spec in model.specs})
    found = Chooser(room, options, families, current, rules).choose(())
    if found is None:
        raise _infeasible(model)
    return found.best.placement, found.best.timeline


def _improved(search: Search, room: Room, options: Options, parts: Parts) -> Parts:
    """Return parts of a lower bound, layer by layer: the search tells apart only so many of them."""
    least_ns = search.bound_ns(parts)
    for step in _STEPS:
        is_better = True
        while is_better:
            is_better = False
            for place, part in enumerate(parts):
                for option in options.moves(part, step):
                    other = (*parts[:place], option, *parts[place + 1 :])
                    lower_ns = search.bound_ns(other)
                    is_less = lower_ns is not None and (least_ns is None or lower_ns < least_ns)
                    if is_less and room.placement(other) is not None:
                        parts, least_ns, is_better = other, lower_ns, True
    return parts


def _weighed(
    model: RequestModel,
    fixed: Mapping[str, ComponentPlacement],
    pin_budget_bytes: int | None,
    *,
    has_slack: bool,
) -> tuple[Room, Options, list[list[Family]]]:
    scarce = pin_budget_bytes is not None and pin_budget_bytes < _unlimited(model)
    tiers = (HostTier.PINNED, HostTier.PAGEABLE) if scarce else (HostTier.PINNED,)
    options = Options(model, num_levels=Policy().byte_levels, tiers=tiers)
    families = [
        [options.fixed(spec, fixed[spec.name])] if spec.name in fixed else options.of(spec) for spec in model.specs
    ]
    return Room(model, has_slack=has_slack), options, families


def _unlimited(model: RequestModel) -> int:
    return sum(spec.total_bytes for spec in model.specs)


def _simulated(model: RequestModel, placement: Placement) -> tuple[float, int]:
    try:
        return simulate(model, placement).request_ns, idle_bytes(model.specs, placement)
    except ValueError:
        # The window lies in too many pieces for one of its layers.
        return float("inf"), 0


def _infeasible(model: RequestModel) -> PlacementInfeasible:
    return PlacementInfeasible(
        needed_bytes=model.cap_bytes + 1, cap_bytes=model.cap_bytes, bound_by="every phase at once"
    )
