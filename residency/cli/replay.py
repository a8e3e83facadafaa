"""The verbs `replay` and `verify`: what the events add up to, and whether they are all there and untouched."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from residency.cli.common import (
    FINDING,
    choose_stream,
    each_stream,
    exit_codes,
    open_reader,
    reading_options,
    say,
    show_json,
    show_lines,
    utc_option,
)
from residency.journal.fold import fold_stream
from residency.journal.host import boot_id
from residency.journal.verify import verify as find_all
from residency.moments import rfc3339
from residency.rehearsal import rehearse
from residency.rendering import paint, round_object, short, table
from residency.settings import journal_location, kill_switch, sentinel_path
from residency.statemachine.planner.replanning import Sameness, check_plan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

    from residency.journal.findings import Finding
    from residency.journal.reader import JournalReader
    from residency.journal.views import EpochView


@click.command(epilog=exit_codes())
@reading_options
@utc_option
@click.option("--dry-run", is_flag=True, help="Also say what the next start of the worker would recover.")
def replay(*, journal: str | None, stream: str | None, as_json: bool, zone: tzinfo | None, dry_run: bool) -> None:
    """Fold the events into states and print them.

    Nothing is executed again, nothing is written.
    """
    location = journal_location(journal)
    with open_reader(journal) as reader:
        histories = [(name, tuple(reader.events(name))) for name in each_stream(reader, stream)]
    if not histories:
        say("the journal has no events yet")
    thrown = kill_switch(sentinel_path(location)) if dry_run else None
    for name, events in histories:
        view = fold_stream(events, name)
        recovery = None
        if dry_run:
            recovery = rehearse(events, name, boot_id=boot_id(), now_ns=time.time_ns(), pinned_by=thrown)
        if as_json:
            plan = {"recovery": recovery} if recovery is not None else {}
            show_json([{"stream": name, "epochs": [_epoch_object(epoch) for epoch in view.epochs], **plan}])
            continue
        click.echo(f"stream {name}; epochs: {len(view.epochs)}, rounds: {len(view.rounds)}")
        show_lines(table(_HEADINGS, (_row(epoch, zone) for epoch in view.epochs)))
        show_lines(_recovery_lines(recovery) if recovery is not None else ())


_HEADINGS = ("EPOCH", "RANK", "STARTED", "STATE", "ROUND", "PLACEMENT", "MOVING", "DECIDED", "ENDED")


def _row(epoch: EpochView, zone: tzinfo | None) -> tuple[str, ...]:
    decided = (epoch.serving or {}).get("decision") or ("gated" if epoch.gated else "pinned" if epoch.pinned else "-")
    moving = "yes" if epoch.moving else "no"
    when = rfc3339(epoch.started_at, digits=0, zone=zone)
    placement = short(epoch.placement)
    number, ended = str(epoch.round), _ended(epoch)
    return epoch.epoch[:8], str(epoch.rank), when, epoch.state, number, placement, moving, str(decided), ended


def _ended(epoch: EpochView) -> str:
    # Before how it ended after that: a worker that must end for it may do so in an orderly way.
    if epoch.poisoned is not None:
        return "device lost"
    if epoch.rollback_failed is not None:
        return "rollback failed"
    if epoch.stopped is not None:
        return f"stopped ({epoch.stopped.get('signal') or epoch.stopped.get('reason')})"
    return "died" if epoch.recovered is not None else "no"


def _epoch_object(epoch: EpochView) -> dict[str, Any]:
    return {
        "epoch": epoch.epoch,
        "rank": epoch.rank,
        "started_at": rfc3339(epoch.started_at),
        "last_at": rfc3339(epoch.last_at),
        "state": epoch.state,
        "round": epoch.round,
        "placement": epoch.placement,
        "moving": epoch.moving,
        "pinned": epoch.pinned,
        "gated": epoch.gated,
        "serving": epoch.serving,
        "stopped": epoch.stopped,
        "recovered": epoch.recovered,
        "rollback_failed": epoch.rollback_failed,
        "poisoned": epoch.poisoned,
        "rounds": [round_object(one) for one in epoch.rounds],
        "first_position": epoch.first_position,
        "last_position": epoch.last_position,
    }


def _recovery_lines(recovery: dict[str, Any]) -> list[str]:
    lines = [
        f"the next start closes epoch {one['epoch'][:8]} with {', '.join(one['types'])}" for one in recovery["closing"]
    ]
    decision = recovery["decision"]
    target = f" of placement {short(decision['placement'])}" if decision["placement"] else ""
    return [
        *(lines or ["the next start has nothing to close"]),
        f"it then decides, if the worker has not changed: {decision['kind']}{target}: {decision['reason']}",
    ]


@click.command(epilog=exit_codes({1: "something is wrong with the journal, and is listed"}))
@click.option("--plans", is_flag=True, help="Also make every journaled plan again: up to seconds each.")
@reading_options
def verify(*, plans: bool, journal: str | None, stream: str | None, as_json: bool) -> int:
    """Check that a journal is whole and untouched.

    Hash chains, versions, positions, triggers, SQLite's own integrity, blobs, and the head witnessed outside it; with
    --plans also that each plan follows from its measurements, where this version of the planner made it.
    """
    with open_reader(journal) as reader:
        chosen = choose_stream(reader, stream) if stream is not None else None
        findings = [one for one in find_all(reader) if chosen is None or one.stream in (None, chosen)]
        serious = [one for one in findings if not one.is_note]
        # What a damaged journal says of its plans proves nothing.
        checks = list(_plan_checks(reader, stream)) if plans and not serious else []
    others = [one for one in checks if one["plan"] == Sameness.DIFFERENT.value]
    if as_json:
        show_json([*findings, *checks])
    elif findings or checks:
        rows = [(one.kind.value, str(one.position or "-"), one.stream or "-", _finding_text(one)) for one in findings]
        rows += [("plan", str(one["position"]), one["stream"], _plan_text(one)) for one in checks]
        show_lines(table(("KIND", "POSITION", "STREAM", "WHAT"), rows))
    num_serious = len(serious) + len(others)
    say(f"findings: {num_serious}" if num_serious else paint("ok"))
    return FINDING if num_serious else 0


def _plan_checks(reader: JournalReader, stream: str | None) -> Iterator[dict[str, Any]]:
    """Yield, for every round that was planned, whether its inputs still give its plan."""
    for name in each_stream(reader, stream):
        for one in fold_stream(reader.events(name), name).rounds:
            if one.plan is not None:
                sameness, why = check_plan(one.plan)
                yield {
                    "stream": name,
                    "round": one.number,
                    "position": one.first_position,
                    "plan": sameness.value,
                    "why": why,
                }


def _plan_text(one: dict[str, Any]) -> str:
    return f"round {one['round']}: {one['plan']}" + (f": {one['why']}" if one["why"] else "")


def _finding_text(one: Finding) -> str:
    return f"{one.text} (column {one.column})" if one.column is not None else one.text
