"""How values look: tables, sizes and durations for people, plain objects for JSON Lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from residency.journal.events import payload
from residency.moments import rfc3339

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from residency.gpu.placement import ComponentPlacement
    from residency.journal.events import Event
    from residency.journal.views import RoundView

DIGEST_SHOWN = 12  # characters of a digest in a table; as many as git shows of a commit in a large repository
_COLORS = {
    "committed": "green",
    "rolled-back": "yellow",
    "rollback.failed": "red",
    "poisoned": "red",
    "problem": "red",
    "warning": "yellow",
    "ok": "green",
}


def size(num_bytes: float) -> str:
    """Return a size in the largest binary unit that keeps it above 1: '1.50 GiB'."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def duration(num_ns: float) -> str:
    """Return a duration in us, ms or s with three or four figures."""
    value = float(num_ns)
    for unit, ns, below in (("us", 1e3, 1e6), ("ms", 1e6, 1e9)):
        if abs(value) < below:
            return f"{value / ns:.1f} {unit}"
    return f"{value / 1e9:.2f} s"


def span(num_ns: float) -> str:
    """Return a length of time as people say it: '1.3 s', '12 min', '3 h 05 min', '2 d 04 h'."""
    minutes = int(num_ns / 60e9)
    if minutes < 2:
        return duration(num_ns)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24:02} h"


def short(digest: str | None) -> str:
    """Return the first characters of a digest, '-' for none."""
    return digest[:DIGEST_SHOWN] if digest else "-"


def printable(text: str) -> str:
    """Return a text in which nothing breaks a row or steers a terminal: other characters are escaped."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def paint(word: str) -> str:
    """Return a word in the colour of its meaning; plain where there is none. Colour goes away off a terminal."""
    color = _COLORS.get(word)
    return click.style(word, fg=color) if color else word


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table: columns as wide as their widest cell, two spaces apart, the last one ragged."""
    cells = [tuple(headings), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    # Colour codes have no width on a terminal: a cell is painted first and filled up afterwards.
    return [
        "  ".join(paint(cell) + " " * (width - len(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def json_line(value: object) -> str:
    """Return one line of JSON for a value, a dataclass or an object."""
    return msgspec.json.encode(value).decode()


def event_object(event: Event) -> dict[str, Any]:
    """Return an event as it is shown in JSON: the journal's own names, hashes in hex, the time in RFC 3339."""
    return {
        "position": event.position,
        "stream": event.stream,
        "stream_version": event.stream_version,
        "event_id": event.event_id,
        "epoch": event.epoch,
        "round": event.round,
        "rank": event.rank,
        "type": event.type,
        "schema_version": event.schema_version,
        "from_state": event.from_state,
        "to_state": event.to_state,
        "trigger": event.trigger,
        "recorded_at": rfc3339(event.recorded_at),
        "boot_id": event.boot_id,
        "pid": event.pid,
        "causation": event.causation,
        "payload": payload(event),
        "previous_hash": event.previous_hash.hex(),
        "hash": event.hash.hex(),
    }


def round_object(view: RoundView) -> dict[str, Any]:
    """Return a round as it is shown in JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(view)
    plain["started_at"] = rfc3339(view.started_at)
    plain["ended_at"] = rfc3339(view.ended_at) if view.ended_at is not None else None
    return plain


def placement_text(placement: ComponentPlacement | Mapping[str, Any]) -> str:
    """Return one component's placement in words: 'layerwise-offload (pinned, 2 slots, blocks: 12 resident)'."""
    plain: dict[str, Any] = msgspec.to_builtins(placement)
    notes = [str(plain["tier"])] if plain.get("tier") else []
    if plain.get("num_slots"):
        notes.append(f"{plain['num_slots']} slot{'s' if plain['num_slots'] > 1 else ''}")
    for what in ("resident", "held"):
        layers = plain.get(f"{what}_layers") or {}
        notes.extend(f"{group}: {len(indices)} {what}" for group, indices in sorted(layers.items()) if indices)
    if plain.get("window_bytes"):
        notes.append(f"window {size(plain['window_bytes'])}")
    if plain.get("yield_bytes"):
        notes.append(f"yields {size(plain['yield_bytes'])}")
    return f"{plain['mode']} ({', '.join(notes)})" if notes else str(plain["mode"])
