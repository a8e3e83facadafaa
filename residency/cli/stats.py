"""The verb `stats`: rounds, restarts, deaths and request times in numbers, and how large the journal is."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from residency.cli.common import (
    choose_stream,
    exit_codes,
    open_reader,
    reading_options,
    say,
    show_json,
    show_lines,
    utc_option,
)
from residency.cli.tally import Tally, Timed, tally
from residency.journal.location import beside
from residency.moments import rfc3339
from residency.rendering import duration, short, size, span, table
from residency.settings import sqlite_path
from residency.statemachine.source import SourceKind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import tzinfo

    from residency.journal.reader import JournalReader

PLACEMENTS_SHOWN = 12  # of a stream, those of most requests; all of them with --json


@click.command(epilog=exit_codes())
@reading_options
@utc_option
def stats(*, journal: str | None, stream: str | None, as_json: bool, zone: tzinfo | None) -> None:
    """Count what a journal holds, stream by stream.

    Rounds by outcome, restarts and why, deaths and whom they blame, calibrations and restores, the median time of
    requests by placement (cold first requests left out), and requests outside what a placement was measured for.
    With --json one object a stream, then one for the journal.
    """
    with open_reader(journal) as reader:
        chosen = choose_stream(reader, stream) if stream is not None else None
        found = tally(reader, chosen)
        whole = _journal_object(reader)
    if as_json:
        show_json([*(_object(one) for one in found.values()), {"journal": whole}])
        return
    if not found:
        say("the journal has no events yet")
    for one in found.values():
        show_lines([*_lines(one, zone), ""])
    show_lines(_journal_lines(whole))


def _journal_object(reader: JournalReader) -> dict[str, Any]:
    """Return how large the journal is: rows, and bytes of its files where it has files."""
    num_events, num_blobs, blob_bytes = reader.query(
        "SELECT (SELECT count(*) FROM events), count(*), coalesce(sum(length(content)), 0) FROM blobs"
    )[0]
    sizes = {}
    path = sqlite_path(reader.location)
    for name, suffix in (("file_bytes", ""), ("wal_bytes", "-wal")):
        with suppress(OSError):  # one that was closed has no -wal
            if path is not None:
                sizes[name] = os.stat(beside(path, suffix)).st_size
    whole = {"location": reader.location, "events": num_events, "blobs": num_blobs, "blob_bytes": blob_bytes}
    return {**whole, **sizes}


def _journal_lines(whole: Mapping[str, Any]) -> list[str]:
    files = [f"{size(whole[name])} {what}" for name, what in _FILES.items() if name in whole]
    held = f"{whole['events']} events, {whole['blobs']} placements ({size(whole['blob_bytes'])})"
    return [f"journal {whole['location']}: {'; '.join([held, *files])}"]


_FILES = {"file_bytes": "in the file", "wal_bytes": "in its -wal"}


def _object(one: Tally) -> dict[str, Any]:
    return {
        "stream": one.stream,
        "events": one.num_events,
        "first_at": rfc3339(one.first_at),
        "last_at": rfc3339(one.last_at),
        "types": _sorted(one.types),
        "starts": one.num_starts,
        "restarts": _sorted(one.restarts),
        "decisions": _sorted(one.decisions),
        "gates": _sorted(one.gates),
        "rounds": _sorted(one.outcomes),
        "sources": [
            {"source": source, "state": state, "rounds": count} for (source, state), count in _most(one.sources)
        ],
        "deaths": [{"blames": blames, "kind": kind, "deaths": count} for (blames, kind), count in _most(one.deaths)],
        "requests": [
            {
                "placement": timed.placement,
                "shape": timed.shape,
                "requests": len(times),
                "median_ns": round(median(times)),
                "least_ns": min(times),
                "most_ns": max(times),
            }
            for timed, times in _by_number(one.requests)
        ],
        "failed_requests": one.failed_requests,
        "outside": _sorted(one.outside),
        "pruned": _pruned(one),
    }


def _lines(one: Tally, zone: tzinfo | None) -> list[str]:
    first, last = (rfc3339(at, digits=0, zone=zone) for at in (one.first_at, one.last_at))
    restores = _num_of(one, SourceKind.JOURNAL)
    facts = {
        "events": f"{one.num_events}, {first} to {last} ({span(one.last_at - one.first_at)})",
        "starts": _counted(one.num_starts, one.decisions),
        "restarts": _counted(sum(one.restarts.values()), one.restarts),
        "deaths": _counted(
            sum(one.deaths.values()), Counter({f"blames {b} ({k})": n for (b, k), n in one.deaths.items()})
        ),
        "gates": _counted(sum(one.gates.values()), one.gates),
        "rounds": _counted(sum(one.outcomes.values()), one.outcomes),
        "plans": f"calibrations {_num_of(one, SourceKind.CALIBRATION)}, restores {restores}"
        + "".join(f", {kind.value} {num}" for kind in _OTHER_PLANS if (num := _num_of(one, kind))),
    }
    if one.outside:
        facts["outside"] = (
            f"requests of other shapes, of lives that were stopped: {_counted(one.outside.total(), one.outside)}"
        )
    if gone := _pruned(one):
        what = f"{gone['events']} events of {gone['epochs']} lives with {gone['rounds']} rounds"
        facts["pruned"] = f"{what} are gone, and not counted"
    lines = [f"stream {one.stream}", *(f"  {name:<9} {text}" for name, text in facts.items())]
    return lines + _request_lines(one)


_OTHER_PLANS = (SourceKind.SUSPECT, SourceKind.PREVIOUS, SourceKind.INITIAL, SourceKind.CURRENT)


def _num_of(one: Tally, kind: SourceKind) -> int:
    return sum(count for (source, _), count in one.sources.items() if source == kind.value)


def _request_lines(one: Tally) -> list[str]:
    if not one.requests:
        return ["  requests  none measured" + (f", {one.failed_requests} failed" if one.failed_requests else "")]
    rows = [
        (short(timed.placement), timed.shape, str(len(times)), *(duration(t) for t in (median(times), min(times))))
        for timed, times in _by_number(one.requests)[:PLACEMENTS_SHOWN]
    ]
    left = len(one.requests) - len(rows)
    lines = [f"  {line}" for line in table(("PLACEMENT", "REQUEST", "MEASURED", "MEDIAN", "LEAST"), rows)]
    return ["", *lines, *([f"  and {left} more (--json has all)"] if left > 0 else [])]


def _pruned(one: Tally) -> dict[str, int] | None:
    gone = one.pruned
    return None if gone is None else {"events": gone.num_events, "epochs": gone.num_epochs, "rounds": gone.num_rounds}


def _counted(total: int, parts: Counter[str]) -> str:
    return f"{total}" + (": " + ", ".join(f"{name} {count}" for name, count in _most(parts)) if parts else "")


def _sorted(parts: Counter[str]) -> dict[str, int]:
    return dict(_most(parts))


def _most(parts: Counter[Any]) -> list[tuple[Any, int]]:
    """Return what is counted, the most first, equal ones by name: the same at every call."""
    return sorted(parts.items(), key=lambda item: (-item[1], str(item[0])))


def _by_number(requests: Mapping[Timed, list[int]]) -> list[tuple[Timed, list[int]]]:
    return sorted(requests.items(), key=lambda item: (-len(item[1]), item[0]))
