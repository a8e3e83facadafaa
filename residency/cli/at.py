"""The verb `at`: what was on the GPU at a moment, and why, in one page."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Any

import click

from residency.cli.common import (
    FINDING,
    each_stream,
    exit_codes,
    open_reader,
    reading_options,
    say,
    show_json,
    show_lines,
    utc_option,
)
from residency.cli.events import describe
from residency.cli.explanation import bound_text, next_text
from residency.cli.life import Life, life_at
from residency.cli.placement import Moment, held_at, last_moves, moment_of, placement_table
from residency.cli.rounds import ending_text, placement_object, read_placement, source_text
from residency.moments import rfc3339
from residency.rendering import event_object, short, size, span
from residency.statemachine.deaths import Death
from residency.statemachine.states import State

if TYPE_CHECKING:
    from datetime import tzinfo

    from residency.gpu.placement import Placement
    from residency.journal.events import Event
    from residency.journal.views import EpochView, RoundView


@click.command(epilog=exit_codes({1: "the journal has no event up to there"}))
@click.argument("when", metavar="[WHEN]", default="now")
@reading_options
@utc_option
def at(*, when: str, journal: str | None, stream: str | None, as_json: bool, zone: tzinfo | None) -> int:
    """Tell what was on the GPU at a moment, and why.

    WHEN is a time of day (03:12: the last one), '2h ago', an RFC 3339 time, a position of the journal, or 'now'. Every
    worker of the journal is told of, unless --stream names one.
    """
    with open_reader(journal) as reader:
        moment = moment_of(reader, when, zone=zone, name="WHEN")
        first = next(reader.events(limit=1), None)
        streams = each_stream(reader, stream)
        lives = {name: life_at(reader, name, moment.position) for name in streams}
        placements = {
            name: read_placement(reader, life.then.placement) for name, life in lives.items() if life is not None
        }
    if not placements:
        say(f"the journal has no events up to {_first_text(moment, first, zone)}")
        return FINDING
    found = [(name, life, placements[name]) for name, life in lives.items() if life is not None]
    if as_json:
        show_json(_object(*one, moment) for one in found)
        return 0
    for index, one in enumerate(found):
        show_lines([""] if index else [])
        show_lines(_lines(*one, moment, zone=zone))
    return 0


def _first_text(moment: Moment, first: Event | None, zone: tzinfo | None) -> str:
    asked = "there" if moment.at_ns is None else rfc3339(moment.at_ns, digits=3, zone=zone)
    return asked if first is None else f"{asked}; its first is of {rfc3339(first.recorded_at, digits=3, zone=zone)}"


def _object(stream: str, life: Life, placement: Placement | None, moment: Moment) -> dict[str, Any]:
    moves = last_moves(life.then)
    held, in_doubt = held_at(placement, moves) if placement is not None else (None, set[str]())
    return {
        "stream": stream,
        "asked_for": None if moment.at_ns is None else rfc3339(moment.at_ns),
        "position": life.last.position,
        "epoch": life.then.epoch,
        "pid": life.then.pid,
        "device": life.then.started.get("device"),
        "state": life.then.state,
        "round": life.then.round,
        "serving": life.then.serving,
        "over": life.then.ended,
        "pruned_since": life.num_pruned,
        "maybe_dead": _maybe_dead(life, moment),
        "digest": life.then.placement,
        "moving": life.then.moving,
        "in_doubt": sorted(in_doubt),
        "components": None if held is None else placement_object(held),
        "why": why_lines(life, zone=UTC),
        "last_event": event_object(life.last),
        "next_event": None if life.following is None else event_object(life.following),
        "became": became(life, zone=UTC),
    }


def _lines(stream: str, life: Life, placement: Placement | None, moment: Moment, *, zone: tzinfo | None) -> list[str]:
    then = life.then
    number = f" in round {then.round}" if then.round else ""
    facts = {
        "worker": f"{stream}, epoch {then.epoch[:8]}, process {then.pid}{_device_text(then)}",
        "started": rfc3339(then.started_at, digits=0, zone=zone) + _served_text(then, zone),
        "then": f"{_standing_text(then)}, {then.state}{number}",
        "later": became(life, zone=zone),
        "last event": _event_text(life.last, moment, zone),
        "next event": "none yet" if life.following is None else _event_text(life.following, moment, zone),
    }
    if _maybe_dead(life, moment):
        facts["in doubt"] = "whether it was still alive: it wrote its last event before that, and then died"
    if life.num_pruned:
        facts["pruned"] = f"{life.num_pruned} events between these two are gone, and what they told with them"
    asked = [] if moment.at_ns is None else [f"at          {rfc3339(moment.at_ns, digits=3, zone=zone)}"]
    lines = [*asked, *(f"{name:<11} {text}" for name, text in facts.items())]
    moves = last_moves(then)
    if placement is None:
        lines += ["", "the journal does not say where its weights were"]
    else:
        digest = f"placement {short(then.placement)}"
        what = f"on the way from {digest}; by the journal the device held" if then.moving else digest
        held, _ = held_at(placement, moves)
        lines += ["", what, *placement_table(held, moves)]
    return [*lines, "", "why", *(f"  {line}" for line in why_lines(life, zone=zone)), "", _more(life)]


def _device_text(then: EpochView) -> str:
    device = then.started.get("device") or {}
    if not device.get("name"):
        return ""
    cap = f", cap {size(device['cap_bytes'])}" if device.get("cap_bytes") else ""
    return f", on {device['name']} ({device.get('kind')}:{device.get('index')}{cap})"


def _served_text(then: EpochView, zone: tzinfo | None) -> str:
    return "" if then.serving_at is None else f", serving since {rfc3339(then.serving_at, digits=0, zone=zone)}"


def _standing_text(then: EpochView) -> str:
    if then.ended:
        return "over, with nothing of it left on the device (this is what it held last)"
    if then.poisoned is not None:
        return "ending, for its device was lost"
    if then.moving:
        return "moving weights"
    return "serving" if then.serving is not None else "starting"


def became(life: Life, *, zone: tzinfo | None) -> str:
    """Return what became of the life afterwards, as far as the journal knows today."""
    now = life.now
    if death := Death.of(now):
        return f"it died ({death.why}; that blames {death.blames})"
    if now.stopped is not None:
        return f"it stopped ({now.stopped.get('signal') or now.stopped.get('reason')})"
    if life.next_start is not None:
        return "it ended without a word, before the next start"
    number = f" in round {now.round}" if now.round else ""
    serving = "" if now.serving_at is None else f", serving since {rfc3339(now.serving_at, digits=0, zone=zone)}"
    return f"{now.state}{number}{serving}; alive, or it died: then the next start says so"


def _maybe_dead(life: Life, moment: Moment) -> bool:
    """Whether the worker, which died without a word, may have been dead by then."""
    is_alive_in_journal = not life.then.ended and life.now.stopped is None
    return is_alive_in_journal and life.next_start is not None and (moment.at_ns or 0) > life.now.last_at


def _event_text(event: Event, moment: Moment, zone: tzinfo | None) -> str:
    away = ""
    if moment.at_ns is not None:
        away_ns = event.recorded_at - moment.at_ns
        away = f" ({span(abs(away_ns))} {'after' if away_ns > 0 else 'before'})"
    at_text = rfc3339(event.recorded_at, digits=3, zone=zone)
    return f"{event.position} at {at_text}{away}: {event.type} {describe(event)}".rstrip()


def why_lines(life: Life, *, zone: tzinfo | None) -> list[str]:
    """Return why the placement was what it was: how the life began, what its rounds did, and what bound the plan."""
    then = life.then
    deaths = ((closed.epoch[:8], Death.of(closed)) for closed in life.closed)
    lines = [
        f"its start found epoch {epoch} dead: that blames {death.blames}: {death.why}"
        for epoch, death in deaths
        if death is not None
    ]
    recovery = then.started.get("recovery") or {}
    if recovery.get("reason"):
        lines.append(f"its start decided to {recovery.get('kind')}: {recovery['reason']}")
    for reason in (then.gated, then.pinned):
        if reason is not None:
            words = [str(reason[name]) for name in ("reason", "detail", "by", "value") if reason.get(name)]
            lines.append(f"it did nothing beyond its initial placement: {': '.join(words)}")
    for one in _telling_rounds(then):
        lines += _round_lines(then, one, zone=zone)
    return lines or ["no round had begun: it is the placement that the worker was configured with"]


def _telling_rounds(then: EpochView) -> list[RoundView]:
    """Return the rounds that say why: the last one that committed, and what came of the newest one."""
    committed = [one for one in then.rounds if one.state == State.COMMITTED.value][-1:]
    return [*committed, *(one for one in then.rounds[-1:] if one not in committed)]


def _round_lines(then: EpochView, one: RoundView, *, zone: tzinfo | None) -> list[str]:
    plan = dict(one.plan or {})
    ended = "" if one.ended_at is None else f" at {rfc3339(one.ended_at, digits=0, zone=zone)}"
    how = ending_text(then, one)
    lines = [f"round {one.number} was {one.state}{ended}" + ("" if how == "-" else f": {how}")]
    if (source := source_text(one)) is not None:
        lines.append(source)
    elif one.source is not None:
        lines.append(f"its plan came from {one.source}")
    if bound := plan.get("bound_by"):
        lines.append(bound_text(str(bound)))
    if following := plan.get("next_cheapest"):
        lines.append(f"next cheapest change: {next_text(following)}")
    if one.state == State.ROLLED_BACK.value:
        lines.append("so the placement before that round was in force again")
    return lines


def _more(life: Life) -> str:
    number = life.then.rounds[-1].number if life.then.rounds else 0
    about = f"residency explain {number}; residency show {number}; " if number else ""
    return f"more: {about}residency log --after {life.then.first_position - 1}"
