"""The verb `explain`: why this placement, from the plan's own journaled inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from residency.cli_common import (
    FINDING,
    find_round,
    open_reader,
    read_view,
    reading_options,
    say,
    show_json,
    show_lines,
)
from residency.cli_rounds import changes, placement_object, read_placement, verdict_text
from residency.explanation import budget_lines, change_text, fingerprint_changes, measurement_lines, plan_lines
from residency.rendering import short

if TYPE_CHECKING:
    from residency.gpu.placement import Placement
    from residency.journal.views import EpochView, RoundView, StreamView


@click.command()
@click.argument("number", metavar="[ROUND]", type=click.IntRange(min=1), required=False)
@reading_options
def explain(*, number: int | None, journal: str | None, stream: str | None, as_json: bool) -> int:
    """Explain why a placement was chosen.

    What was measured, what else was possible, and what bound the choice. Without ROUND: of the newest round that
    made a plan.
    """
    with open_reader(journal) as reader:
        view = read_view(reader, stream)
        if view is None:
            return FINDING
        found = find_round(view, number) if number is not None else _newest_plan(view)
        if found is None:
            return _why_no_plan(view) if number is None else FINDING
        epoch, one = found
        before, after = read_placement(reader, one.previous), read_placement(reader, one.placement)
    different = _differences(view, epoch)
    if as_json:
        show_json([_object(one, different=different, before=before, after=after)])
        return 0
    show_lines(_lines(one, different=different))
    click.echo("")
    show_lines(changes(before, after))
    return 0


def _newest_plan(view: StreamView) -> tuple[EpochView, RoundView] | None:
    planned = [(epoch, one) for epoch in view.epochs for one in epoch.rounds if one.plan is not None]
    return planned[-1] if planned else None


def _why_no_plan(view: StreamView) -> int:
    last = view.epochs[-1]
    reason = last.gated or last.pinned or {}
    words = [str(reason[name]) for name in ("reason", "detail", "by", "value") if reason.get(name)]
    say(f"no plan was made{': ' + ' '.join(words) if words else ' yet'}")
    return FINDING


def _differences(view: StreamView, epoch: EpochView) -> list[dict[str, Any]]:
    """Return the parts of the fingerprint that differ from the epoch before."""
    index = view.epochs.index(epoch)
    return fingerprint_changes(view.epochs[index - 1].fingerprint, epoch.fingerprint) if index else []


def _lines(one: RoundView, *, different: list[dict[str, Any]]) -> list[str]:
    plan = dict(one.plan or {})
    lines = [f"round {one.number} is {one.state}: placement {short(one.placement)}, planned from {one.source or '-'}"]
    lines += [f"the worker had changed since the epoch before: {change_text(part)}" for part in different]
    inputs: dict[str, Any] = plan.get("inputs") or {}
    lines += [*measurement_lines(inputs), *budget_lines(inputs), *plan_lines(plan)]
    return [*lines, f"verdict: {verdict_text(one)}"]


def _object(
    one: RoundView, *, different: list[dict[str, Any]], before: Placement | None, after: Placement | None
) -> dict[str, Any]:
    return {
        "round": one.number,
        "epoch": one.epoch,
        "state": one.state,
        "source": one.source,
        "fingerprint_differences": different,
        "before": placement_object(before) if before else None,
        "placement": placement_object(after) if after else None,
        "plan": one.plan,
        "outcome": one.outcome,
    }
