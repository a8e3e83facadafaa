"""Events as `log` and `show` print them: one line for people, one object for scripts."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

from residency.journal.events import payload
from residency.moments import rfc3339
from residency.rendering import paint, placement_text, printable, short

if TYPE_CHECKING:
    from datetime import tzinfo

    from residency.journal.events import Event

_KIND_WIDTH = 18  # of 'quarantine.cleared', the longest name of an event


def heading(zone: tzinfo | None) -> str:
    """Return the row above the events."""
    return _line("POSITION", "TIME", "ROUND", "EVENT", "WHAT", zone=zone)


def row(event: Event, zone: tzinfo | None) -> str:
    """Return an event as a row of fixed columns, so that rows can be printed as they come; no wider than a terminal."""
    number = str(event.round) if event.round else "-"
    at = rfc3339(event.recorded_at, digits=3, zone=zone)
    return _line(str(event.position), at, number, event.type, printable(describe(event)), zone=zone)


def _line(position: str, at: str, number: str, kind: str, what: str, *, zone: tzinfo | None) -> str:
    width = len(rfc3339(0, digits=3, zone=zone))
    fixed = f"{position:>8}  {at:<{width}}  {number:>5}  "
    text = f"{fixed}{kind:<{_KIND_WIDTH}}  {what}"
    if not sys.stdout.isatty():
        return text.rstrip()
    columns = shutil.get_terminal_size().columns
    cut = what if len(text) <= columns else what[: max(0, columns - len(fixed) - _KIND_WIDTH - 3)] + "…"
    return f"{fixed}{paint(kind)}{' ' * (_KIND_WIDTH - len(kind))}  {cut}".rstrip()


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
    if kind == "ranks":
        digest = f" with plan {short(data['digest'])}" if data.get("digest") else ""
        why = f": {data['why']}" if data.get("why") else ""
        return f"{data.get('what')}{digest}{why}"
    if kind == "control":
        outcome = data.get("outcome", {})
        return f"{outcome.get('verb')}: {outcome.get('outcome')}: {outcome.get('reason')}"
    if kind == "pruned":
        gone = sum(one.get("last_version", 0) - one.get("first_version", 0) + 1 for one in data.get("removed", ()))
        return f"{gone} events of {data.get('num_epochs')} lives, {data.get('num_rounds')} rounds, are gone so far"
    if kind == "quarantine.cleared":
        what = f"placement {short(data['placement'])}" if data.get("placement") else "every placement"
        return f"{what} is forgiven: {data.get('reason')}"
    texts = [data.get(name) for name in ("reason", "detail", "by", "value", "signal", "problems")]
    return " ".join(str(text) for text in texts if text)
