"""The verb `log`: events, oldest first, and those that come."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from residency.cli_common import choose_stream, open_reader, reading_options, say
from residency.journal.events import payload
from residency.moments import parse_moment, rfc3339
from residency.rendering import event_object, json_line, paint, placement_text, printable, short

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.journal.events import Event
    from residency.journal.reader import JournalReader

POLL_S = 0.2  # How late a followed event may show; a poll of an idle journal costs well under a millisecond.
FOLLOWED_BEFORE = 10  # Events shown before following, as `tail` does.


@click.command()
@reading_options
@click.option("-n", "--lines", "last", type=click.IntRange(min=0), help="Only the last N events.")
@click.option("--since", metavar="WHEN", help="Only events since an RFC 3339 time, or '2h ago'.")
@click.option("-f", "--follow", is_flag=True, help="Go on with the events that come, until Ctrl-C.")
def log(
    *, journal: str | None, stream: str | None, as_json: bool, last: int | None, since: str | None, follow: bool
) -> None:
    """List the events of a worker, oldest first."""
    since_ns = parse_moment(since, now_ns=time.time_ns(), name="--since") if since is not None else None
    with open_reader(journal) as reader:
        chosen = choose_stream(reader, stream)
        wanted = FOLLOWED_BEFORE if follow and last is None and since is None else last
        shown = 0
        if not as_json:
            click.echo(_line("POSITION", "TIME", "ROUND", "EVENT", "WHAT"))
        for event in _select(reader, chosen, last=wanted, since_ns=since_ns):
            click.echo(json_line(event_object(event)) if as_json else _row(event))
            shown = event.position
        if follow:
            _follow(reader, stream=stream, after=shown or _end(reader, chosen), as_json=as_json)
        elif not shown:
            say("no events" if since is None else f"no events since {rfc3339(since_ns or 0, digits=0)}")


def _select(reader: JournalReader, stream: str | None, *, last: int | None, since_ns: int | None) -> Iterator[Event]:
    """Yield the events asked for, oldest first. The newest few are found from the end: a journal may be long."""
    if stream is None or last == 0:
        return
    if last is None:
        yield from reader.events(stream, since_ns=since_ns)
        return
    yield from reversed(tuple(reader.events(stream, since_ns=since_ns, limit=last, newest_first=True)))


def _end(reader: JournalReader, stream: str | None) -> int:
    return next((event.position for event in reader.events(stream, limit=1, newest_first=True)), 0)


def _follow(reader: JournalReader, *, stream: str | None, after: int, as_json: bool) -> None:
    """Print events as they are written. Ends by Ctrl-C, or by a usage error when a second stream appears."""
    while True:
        chosen = choose_stream(reader, stream) if stream is None else stream
        for event in reader.events(chosen, after=after) if chosen is not None else ():
            click.echo(json_line(event_object(event)) if as_json else _row(event))
            after = event.position
        sys.stdout.flush()
        time.sleep(POLL_S)


def _line(position: str, at: str, round_number: str, kind: str, what: str) -> str:
    """Return a row of fixed columns, so that rows can be printed as they come; cut to the terminal's width."""
    fixed = f"{position:>8}  {at:<24}  {round_number:>5}  "
    text = f"{fixed}{kind:<17}  {what}"
    if not sys.stdout.isatty():
        return text.rstrip()
    columns = shutil.get_terminal_size().columns
    cut = what if len(text) <= columns else what[: max(0, columns - len(fixed) - 20)] + "…"
    return f"{fixed}{paint(kind)}{' ' * (17 - len(kind))}  {cut}".rstrip()


def _row(event: Event) -> str:
    number = str(event.round) if event.round else "-"
    return _line(
        str(event.position), rfc3339(event.recorded_at, digits=3), number, event.type, printable(describe(event))
    )


def describe(event: Event) -> str:
    """Return what an event says, in one line."""
    data = payload(event)
    if event.type == "transition":
        return f"{event.from_state} -> {event.to_state}{_transition_notes(data)}"
    if event.type == "effect.intent":
        action = "take back" if data.get("undo") else "apply"
        return f"{action} {data.get('component')}: {_change(data)}"
    if event.type == "effect.outcome":
        error = f": {data['error']}" if data.get("error") else ""
        return f"{data.get('component')} {data.get('result')}{error}"
    return _other(event.type, data)


def _transition_notes(data: dict[str, Any]) -> str:
    verdict = data.get("verdict") or {}
    notes = [f"placement {short(data['placement'])}"] if data.get("placement") else []
    if data.get("source"):
        notes.append(f"from {data['source']}")
    if verdict.get("reason"):
        notes.append(": ".join(str(verdict[part]) for part in ("blames", "reason", "detail") if verdict.get(part)))
    return f"  ({'; '.join(notes)})" if notes else ""


def _change(data: dict[str, Any]) -> str:
    before, after = data.get("before"), data.get("after")
    if not isinstance(before, dict) or not isinstance(after, dict):
        return "-"
    return f"{placement_text(before)} -> {placement_text(after)}"


def _other(kind: str, data: dict[str, Any]) -> str:
    if kind == "measured":
        record = data.get("record", {})
        shape = record.get("workload", {})
        size = f"{shape.get('width')}x{shape.get('height')} {shape.get('frames')}f {shape.get('steps')} steps"
        return f"{record.get('kind')} {size}: {'ok' if record.get('succeeded') else record.get('error')}"
    if kind == "epoch.started":
        return f"residency {data.get('version')}, placement {short(data.get('initial_placement'))}"
    if kind == "recovered":
        death = data.get("death", {})
        return f"round {data.get('round')} was {data.get('state')}; blames {death.get('blames')}: {death.get('why')}"
    if kind == "serving":
        return f"{data.get('decision')}, placement {short(data.get('placement'))}"
    if kind == "poisoned":
        return f"the device is lost while {data.get('state')}; nothing is moved back: {data.get('problem')}"
    texts = [data.get(name) for name in ("reason", "detail", "by", "value", "signal", "problems")]
    return " ".join(str(text) for text in texts if text)
