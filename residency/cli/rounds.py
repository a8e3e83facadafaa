"""The verbs `rounds` and `show`: all rounds of a worker, and one of them with its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from residency.cli.common import (
    FINDING,
    exit_codes,
    open_reader,
    reading_options,
    say,
    show_json,
    show_lines,
    utc_option,
)
from residency.cli.events import describe
from residency.cli.views import find_round, read_view
from residency.gpu.placement import Placement
from residency.moments import rfc3339
from residency.rendering import duration, event_object, placement_text, round_object, short, table
from residency.statemachine.deaths import Death
from residency.statemachine.source import SourceKind
from residency.statemachine.states import SETTLED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

    from residency.journal.events import Event
    from residency.journal.reader import JournalReader
    from residency.journal.views import EpochView, RoundView

_SETTLED = frozenset(state.value for state in SETTLED)


# Only the worker itself, or its next start, knows which: nobody else may look at another process.
IN_FLIGHT = "in flight or died"


@click.command(epilog=exit_codes())
@reading_options
@utc_option
def rounds(*, journal: str | None, stream: str | None, as_json: bool, zone: tzinfo | None) -> None:
    """List the rounds of a worker, newest first: how each ended, and what that blames."""
    with open_reader(journal) as reader:
        view = read_view(reader, stream)
    newest_first = [(epoch, one) for epoch in view.epochs for one in epoch.rounds][::-1] if view else []
    if as_json:
        show_json(_summary(*one) for one in newest_first)
    elif newest_first:
        headings = ("ROUND", "STATE", "PLAN FROM", "PLACEMENT", "EFFECTS", "STARTED", "TOOK", "VERDICT")
        show_lines(table(headings, (_row(*one, zone=zone) for one in newest_first)))
    elif view:
        say("no rounds yet")
    if view and view.pruned is not None:
        say(f"{view.pruned.num_rounds} older rounds, up to round {view.pruned.highest_round}, were pruned")


def _summary(epoch: EpochView, one: RoundView) -> dict[str, Any]:
    """A round without its plan's inputs, which `show` and `explain` print, and without its moves, which `show` does."""
    plain = round_object(one)
    plain.pop("plan")
    plain.pop("moves")
    death = death_in(epoch, one)
    return {**plain, "death": death._asdict() if death else None}


def _row(epoch: EpochView, one: RoundView, *, zone: tzinfo | None) -> tuple[str, ...]:
    took = duration(one.ended_at - one.started_at) if one.ended_at is not None else IN_FLIGHT
    started = rfc3339(one.started_at, digits=0, zone=zone)
    effects = str(one.num_intents) + (f" ({len(one.open_intents)} in doubt)" if one.open_intents else "")
    source = one.source or "-"
    return str(one.number), one.state, source, short(one.placement), effects, started, took, ending_text(epoch, one)


def is_settled(one: RoundView) -> bool:
    """Whether a round ended by itself: committed or rolled back."""
    return one.state in _SETTLED


def death_in(epoch: EpochView, one: RoundView) -> Death | None:
    """Return the death of a worker in this very round, as the recovery judged it; None if it did not die in it."""
    return Death.of(epoch) if one.number == epoch.round and not is_settled(one) else None


def ending_text(epoch: EpochView, one: RoundView) -> str:
    """Return how a round ended: its verdict, or whom its worker's death blames; '-' while neither is known."""
    if death := death_in(epoch, one):
        return f"died: blames {death.blames}: {death.why}"
    if epoch.poisoned is not None and one.number == epoch.round and not is_settled(one):
        return f"the device was lost in it, and nothing moved back: {epoch.poisoned.get('problem')}"
    if epoch.stopped is not None and not is_settled(one):
        return f"stopped in it ({epoch.stopped.get('signal') or epoch.stopped.get('reason')})"
    return _verdict_text(one)


def source_text(one: RoundView) -> str | None:
    """Return what a plan that was not measured in its own round rests on."""
    of_round = f" of round {number}" if (number := (one.plan or {}).get("from_round")) else ""
    if one.source == SourceKind.JOURNAL.value:
        return (
            f"restored: the last committed placement{of_round}, under the same fingerprint; only validated again, "
            "with nothing measured or planned anew"
        )
    if one.source == SourceKind.SUSPECT.value:
        return (
            f"planned again from the measurements{of_round}, whose worker died in it with a plan that was never "
            "committed; with a larger reserve, and nothing measured anew"
        )
    return None


def _verdict_text(one: RoundView) -> str:
    verdict = (one.outcome or {}).get("verdict") or {}
    words = [str(verdict[name]) for name in ("blames", "reason", "detail") if verdict.get(name)]
    return ": ".join(words) if words else "-"


@click.command(epilog=exit_codes({1: "there is no round of that number"}))
@click.argument("number", metavar="ROUND", type=click.IntRange(min=1))
@reading_options
@utc_option
def show(*, number: int, journal: str | None, stream: str | None, as_json: bool, zone: tzinfo | None) -> int:
    """Show one round: what it changed, how it ended, and its events."""
    with open_reader(journal) as reader:
        view = read_view(reader, stream)
        found = find_round(view, number) if view else None
        if view is None or found is None:
            return FINDING
        epoch, one = found
        events = tuple(round_events(reader, view.stream, one))
        before, after = read_placement(reader, one.previous), read_placement(reader, one.placement)
    if as_json:
        show_json([{**round_object(one), "events": [event_object(event) for event in events]}])
        return 0
    show_lines(_facts(epoch, one, zone=zone))
    click.echo("")
    show_lines(changes(before, after))
    click.echo("")
    rows = ((str(e.position), rfc3339(e.recorded_at, digits=3, zone=zone), e.type, describe(e)) for e in events)
    show_lines(table(("POSITION", "TIME", "EVENT", "WHAT"), rows))
    return 0


def round_events(reader: JournalReader, stream: str, one: RoundView) -> Iterator[Event]:
    """Yield the events of one round, oldest first."""
    span = reader.events(stream, after=one.first_position - 1, before=one.last_position + 1)
    return (event for event in span if event.epoch == one.epoch and event.round == one.number)


def _facts(epoch: EpochView, one: RoundView, *, zone: tzinfo | None) -> list[str]:
    ended = rfc3339(one.ended_at, digits=3, zone=zone) if one.ended_at is not None else IN_FLIGHT
    facts = {
        "round": str(one.number),
        "epoch": one.epoch,
        "state": one.state,
        "plan from": one.source or "-",
        "placement": one.placement or "-",
        "before it": one.previous or "-",
        "started": rfc3339(one.started_at, digits=3, zone=zone),
        "ended": ended,
        "verdict": ending_text(epoch, one),
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
