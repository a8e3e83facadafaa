"""The verb `explain`: why this placement, from the plan's own journaled inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from residency.cli.common import FINDING, exit_codes, open_reader, reading_options, say, show_json, show_lines
from residency.cli.explanation import budget_lines, change_text, fingerprint_changes, measurement_lines, plan_lines
from residency.cli.rounds import (
    changes,
    death_in,
    ending_text,
    is_settled,
    placement_object,
    read_placement,
    round_events,
    source_text,
)
from residency.cli.views import find_round, read_view
from residency.journal.events import EventType, payload
from residency.rendering import short
from residency.statemachine.deaths import Death, digest_of
from residency.statemachine.source import SourceKind

if TYPE_CHECKING:
    from residency.gpu.placement import Placement
    from residency.journal.reader import JournalReader
    from residency.journal.views import EpochView, RoundView, StreamView

NEXT_START = "the next start decides, and 'residency replay --dry-run' says what it would do"
# Plans that rest on an earlier round, which the worker must not have changed since.
FROM_EARLIER = frozenset({SourceKind.JOURNAL.value, SourceKind.SUSPECT.value})


@click.command(epilog=exit_codes({1: "there is no such round, or no plan was made, and why"}))
@click.argument("number", metavar="[ROUND]", type=click.IntRange(min=1), required=False)
@reading_options
def explain(*, number: int | None, journal: str | None, stream: str | None, as_json: bool) -> int:
    """Explain why a placement was chosen.

    What was measured, what else was possible, and what bound the choice. Without ROUND: of the newest round that made
    a plan, after what the latest start did instead if it made none.
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
        others = _other_records(reader, view.stream, one)
    different = _differences(view, epoch, one)
    latest = _latest_start(view) if number is None and view.epochs[-1] is not epoch else []
    if as_json:
        explained = _object(epoch, one, different=different, before=before, after=after)
        show_json([{**explained, "other_records": others, "latest_start": latest}])
        return 0
    show_lines([*latest, ""] if latest else ())
    show_lines(_lines(epoch, one, different=different, others=others))
    click.echo("")
    show_lines(changes(before, after))
    return 0


def _newest_plan(view: StreamView) -> tuple[EpochView, RoundView] | None:
    planned = [(epoch, one) for epoch in view.epochs for one in epoch.rounds if one.plan is not None]
    return planned[-1] if planned else None


def _why_no_plan(view: StreamView) -> int:
    closed = _closed(view.epochs[-1])
    for line in _recovery_lines(view):
        say(line)
    say(f"no plan was made{': ' + closed if closed else ' yet'}")
    return FINDING


def _latest_start(view: StreamView) -> list[str]:
    """Return what the latest start did, which made no plan."""
    last = view.epochs[-1]
    words = _closed(last)
    if not words and (death := Death.of(last)):
        words = f"it died: blames {death.blames}: {death.why}"
    if not words and not last.ended:
        words = f"it is {last.state}, or it died: {NEXT_START}"
    return [*_recovery_lines(view), f"the latest start made no plan{': ' + words if words else ''}"]


def _closed(epoch: EpochView) -> str:
    """Return why a life made no plan, '' if nothing says so."""
    if epoch.poisoned is not None:
        return f"the device was lost to it: {epoch.poisoned.get('problem')}"
    reason = epoch.gated or epoch.pinned or {}
    if not reason and epoch.rounds and epoch.rounds[-1].plan is None and is_settled(epoch.rounds[-1]):
        last = epoch.rounds[-1]
        return f"round {last.number} was rolled back: {ending_text(epoch, last)}"
    return " ".join(str(reason[name]) for name in ("reason", "detail", "by", "value") if reason.get(name))


def _recovery_lines(view: StreamView) -> list[str]:
    """Return whom the latest start blamed for the deaths that it found."""
    last = view.epochs[-1]
    dead = [(one, Death.of(one)) for one in view.epochs if (one.recovered or {}).get("by_epoch") == last.epoch]
    return [
        f"the latest start found epoch {epoch.epoch[:8]} dead: blames {death.blames}: {death.why}"
        for epoch, death in dead
        if death is not None
    ]


def _other_records(reader: JournalReader, stream: str, one: RoundView) -> list[dict[str, Any]]:
    """Return the requests that a round ran and its plan does not rest on: validations, and warmups of a rollback."""
    measured = [event for event in round_events(reader, stream, one) if event.type == EventType.MEASURED.value]
    records = [record for event in measured if isinstance(record := payload(event).get("record"), dict)]
    known = ((one.plan or {}).get("inputs") or {}).get("records") or ()
    return [record for record in records if record not in known]


def _differences(view: StreamView, epoch: EpochView, one: RoundView) -> list[dict[str, Any]]:
    """Return the parts of the fingerprint that differ from the life before; of a restore from the one it rests on."""
    index = view.epochs.index(epoch)
    from_round = (one.plan or {}).get("from_round")
    if one.source in FROM_EARLIER or from_round:
        lives = [life for life in view.epochs[: index + 1] if any(r.number == from_round for r in life.rounds)]
        earlier = lives[-1] if lives else None
    else:
        earlier = view.epochs[index - 1] if index else None
    if earlier is None or digest_of(earlier) == digest_of(epoch):
        return []
    return fingerprint_changes(earlier.fingerprint, epoch.fingerprint)


def _lines(
    epoch: EpochView, one: RoundView, *, different: list[dict[str, Any]], others: list[dict[str, Any]]
) -> list[str]:
    plan = dict(one.plan or {})
    lines = [f"round {one.number} is {one.state}: placement {short(one.placement)}, planned from {one.source or '-'}"]
    if (source := source_text(one)) is not None:
        lines.append(source)
    if death := death_in(epoch, one):
        lines.append(f"its worker died in it: the recovery blames {death.blames}: {death.why}")
    elif epoch.poisoned is not None and not is_settled(one):
        lines.append(f"its worker lost the device in it and had to end: {NEXT_START}")
    elif not is_settled(one) and not epoch.ended:
        lines.append(f"it is in flight, or its worker died in it: then {NEXT_START}")
    lines += [f"the worker had changed since the epoch before: {change_text(part)}" for part in different]
    inputs: dict[str, Any] = plan.get("inputs") or {}
    lines += [*measurement_lines(inputs, others), *budget_lines(inputs), *plan_lines(plan)]
    return [*lines, f"verdict: {ending_text(epoch, one)}"]


def _object(
    epoch: EpochView,
    one: RoundView,
    *,
    different: list[dict[str, Any]],
    before: Placement | None,
    after: Placement | None,
) -> dict[str, Any]:
    death = death_in(epoch, one)
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
        "death": death._asdict() if death else None,
    }
