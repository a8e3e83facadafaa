"""The verbs `rounds` and `show`: all rounds of a worker, and one of them with its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from residency.cli_common import FINDING, find_round, open_reader, read_view, reading_options, show_json, show_lines
from residency.cli_log import describe
from residency.gpu.placement import Placement
from residency.moments import rfc3339
from residency.rendering import duration, event_object, placement_text, round_object, short, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.journal.events import Event
    from residency.journal.reader import JournalReader
    from residency.journal.views import RoundView


@click.command()
@reading_options
def rounds(*, journal: str | None, stream: str | None, as_json: bool) -> None:
    """List the rounds of a worker, newest first."""
    with open_reader(journal) as reader:
        view = read_view(reader, stream)
    newest_first = tuple(reversed(view.rounds)) if view else ()
    if as_json:
        show_json(_summary(one) for one in newest_first)
    elif newest_first:
        headings = ("ROUND", "STATE", "PLAN FROM", "PLACEMENT", "EFFECTS", "STARTED", "TOOK", "VERDICT")
        show_lines(table(headings, (_row(one) for one in newest_first)))
    elif view:
        click.echo("no rounds yet", err=True)


def _summary(one: RoundView) -> dict[str, Any]:
    """A round without its plan's inputs, which `show` and `explain` print."""
    plain = round_object(one)
    plain.pop("plan")
    return plain


def _row(one: RoundView) -> tuple[str, ...]:
    took = duration(one.ended_at - one.started_at) if one.ended_at is not None else "in flight"
    started = rfc3339(one.started_at, digits=0)
    effects = str(one.num_intents) + (f" ({len(one.open_intents)} in doubt)" if one.open_intents else "")
    source = one.source or "-"
    return str(one.number), one.state, source, short(one.placement), effects, started, took, verdict_text(one)


def verdict_text(one: RoundView) -> str:
    """Return whom and what a round's verdict names, '-' without a verdict."""
    verdict = (one.outcome or {}).get("verdict") or {}
    words = [str(verdict[name]) for name in ("blames", "reason", "detail") if verdict.get(name)]
    return ": ".join(words) if words else "-"


@click.command()
@click.argument("number", metavar="ROUND", type=click.IntRange(min=1))
@reading_options
def show(*, number: int, journal: str | None, stream: str | None, as_json: bool) -> int:
    """Show one round: what it changed, how it ended, and its events."""
    with open_reader(journal) as reader:
        view = read_view(reader, stream)
        found = find_round(view, number) if view else None
        if view is None or found is None:
            return FINDING
        one = found[1]
        events = tuple(_events(reader, view.stream, one))
        before, after = read_placement(reader, one.previous), read_placement(reader, one.placement)
    if as_json:
        show_json([{**round_object(one), "events": [event_object(event) for event in events]}])
        return 0
    show_lines(_facts(one))
    click.echo("")
    show_lines(changes(before, after))
    click.echo("")
    rows = ((str(e.position), rfc3339(e.recorded_at, digits=3), e.type, describe(e)) for e in events)
    show_lines(table(("POSITION", "TIME", "EVENT", "WHAT"), rows))
    return 0


def _events(reader: JournalReader, stream: str, one: RoundView) -> Iterator[Event]:
    span = reader.events(stream, after=one.first_position - 1, before=one.last_position + 1)
    return (event for event in span if event.epoch == one.epoch and event.round == one.number)


def _facts(one: RoundView) -> list[str]:
    ended = rfc3339(one.ended_at, digits=3) if one.ended_at is not None else "in flight"
    facts = {
        "round": str(one.number),
        "epoch": one.epoch,
        "state": one.state,
        "plan from": one.source or "-",
        "placement": one.placement or "-",
        "before it": one.previous or "-",
        "started": rfc3339(one.started_at, digits=3),
        "ended": ended,
        "verdict": verdict_text(one),
    }
    in_doubt = ", ".join(intent.component for intent in one.open_intents)
    return [f"{name:<10} {value}" for name, value in facts.items()] + ([f"in doubt   {in_doubt}"] if in_doubt else [])


def read_placement(reader: JournalReader, digest: str | None) -> Placement | None:
    """Return the placement of a digest, None for no digest."""
    return Placement.from_bytes(reader.blob(digest)) if digest is not None else None


def changes(before: Placement | None, after: Placement | None) -> list[str]:
    """Return a table of what a plan changes, component by component."""
    if after is None:
        return ["no plan was made"]
    old = before.components if before else {}
    rows = [
        (name, placement_text(old[name]) if name in old else "-", placement_text(after.components[name]))
        for name in sorted(after.components)
        if old.get(name) != after.components[name]
    ]
    return table(("COMPONENT", "BEFORE", "PLANNED"), rows) if rows else ["the plan changes nothing"]


def placement_object(placement: Placement) -> dict[str, Any]:
    """Return a placement as it is shown in JSON: component -> where its weights live."""
    plain: dict[str, Any] = msgspec.to_builtins(placement)
    components: dict[str, Any] = plain["components"]
    return components
