"""The verb `diff`: two placements or two rounds, component by component, in bytes and in time."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click
import msgspec

from residency.cli.common import choose_stream, exit_codes, open_reader, reading_options, say, show_json, show_lines
from residency.cli.compare import footprint, moved
from residency.cli.explanation import change_text, fingerprint_changes, shape_text
from residency.cli.rounds import ending_text
from residency.cli.sides import Knowledge
from residency.errors import JournalError
from residency.rendering import duration, short, size, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.cli.compare import Footprint, Moved, Specs
    from residency.cli.sides import Measured, Side

DIFFERENT = 1  # exit code, that of diff(1)


@click.command(
    epilog=exit_codes(
        {0: "the placements are equal", DIFFERENT: "they differ", 2: "usage, or there is no such round or placement"}
    )
)
@click.argument("old", metavar="A")
@click.argument("new", metavar="B")
@reading_options
def diff(*, old: str, new: str, journal: str | None, stream: str | None, as_json: bool) -> int:
    """Compare two placements, or two rounds: what moved, its bytes, and predicted and measured times.

    A and B are each the number of a round, the beginning of a placement's digest, or a file that was exported. Of a
    round its plan's placement is compared, and what differed in its start. Two files need no journal.
    """
    with ExitStack() as stack:
        try:
            reader = stack.enter_context(open_reader(journal))
        except JournalError as error:
            if journal is not None or not (_is_file(old) and _is_file(new)):
                raise
            say(f"without bytes and times: {error}")
            reader = None
        known = Knowledge(reader, None if reader is None else choose_stream(reader, stream))
        sides = known.side(old), known.side(new)
    specs = known.specs()
    changed = moved(sides[0].placement, sides[1].placement, specs)
    if as_json:
        show_json([_object(sides, changed, specs)])
    else:
        show_lines(_lines(sides, changed, specs))
    return DIFFERENT if changed else 0


def _is_file(text: str) -> bool:
    return "/" in text or text.endswith(".json")


def _object(sides: tuple[Side, Side], changed: Sequence[Moved], specs: Specs) -> dict[str, Any]:
    old, new = (_side_object(one, footprint(one.placement, specs)) for one in sides)
    return {
        "equal": not changed,
        "a": old,
        "b": new,
        "components": [msgspec.to_builtins(one) for one in changed],
        "rounds_differ": _rounds_differ(*sides),
    }


def _side_object(side: Side, taken: Footprint | None) -> dict[str, Any]:
    return {
        "label": side.label,
        "digest": side.placement.digest,
        "round": None if side.round is None else side.round.number,
        "footprint": None if taken is None else msgspec.to_builtins(taken),
        "predicted_ns": side.predicted_ns,
        "measured": [one._asdict() for one in side.measured],
    }


def _lines(sides: tuple[Side, Side], changed: Sequence[Moved], specs: Specs) -> list[str]:
    lines = [f"{name} {_label(side)}" for name, side in zip("AB", sides, strict=True)]
    if changed:
        headings = ("COMPONENT", "WHAT MOVED", "HELD ON DEVICE")
        lines += ["", *table(headings, (_row(one) for one in changed)), ""]
    else:
        lines += ["", "the placements are equal", ""]
    lines += [
        *_taken_lines(*(footprint(one.placement, specs) for one in sides)),
        *_time_lines(*sides),
        *(f"the rounds differ in {text}" for text in _rounds_differ(*sides)),
    ]
    return lines


def _label(side: Side) -> str:
    digest = side.placement.digest
    if side.round is None or side.epoch is None:
        return side.label if digest in side.label else f"{side.label}: placement {short(digest)}"
    how = ending_text(side.epoch, side.round)
    return f"{side.label}, {side.round.state}: placement {short(digest)}" + ("" if how == "-" else f" ({how})")


def _row(one: Moved) -> tuple[str, ...]:
    held = "-"
    if one.before_bytes is not None and one.after_bytes is not None:
        held = _bytes_change(one.before_bytes, one.after_bytes)
    return one.component, "; ".join(one.what), held


def _bytes_change(before: int, after: int) -> str:
    if before == after:
        return size(before)
    return f"{size(before)} -> {size(after)} ({'+' if after > before else '-'}{size(abs(after - before))})"


def _taken_lines(old: Footprint | None, new: Footprint | None) -> list[str]:
    if old is None or new is None:
        return []
    return [
        f"weights on the device between requests: {_bytes_change(old.weight_bytes, new.weight_bytes)}",
        f"window for streamed layers: {_bytes_change(old.window_bytes, new.window_bytes)}",
        f"pinned host copies: {_bytes_change(old.pinned_bytes, new.pinned_bytes)}",
    ]


def _time_lines(old: Side, new: Side) -> list[str]:
    lines = []
    if old.predicted_ns is not None or new.predicted_ns is not None:
        lines.append(f"predicted request time: {_time_change(old.predicted_ns, new.predicted_ns)}")
    theirs = {one.shape: one for one in new.measured}
    both = [(one, theirs[one.shape]) for one in old.measured if one.shape in theirs]
    lines += [f"measured request time, {a.shape}: {_measured_change(a, b)}" for a, b in both]
    shared = {a.shape for a, _ in both}
    for name, side in (("A", old), ("B", new)):
        lines += [
            f"measured in {name} only, {one.shape}: {duration(one.median_ns)} (median of {one.num_requests})"
            for one in side.measured
            if one.shape not in shared
        ]
    return lines or ["no request was measured under either"]


def _time_change(old_ns: int | None, new_ns: int | None) -> str:
    before, after = ("unknown" if one is None else duration(one) for one in (old_ns, new_ns))
    if not old_ns or new_ns is None or old_ns == new_ns:
        return f"{before} -> {after}"
    return f"{before} -> {after} ({(new_ns - old_ns) / old_ns:+.1%})"


def _measured_change(old: Measured, new: Measured) -> str:
    return f"{_time_change(old.median_ns, new.median_ns)} (medians of {old.num_requests} and {new.num_requests})"


def _rounds_differ(old: Side, new: Side) -> list[str]:
    """Return in what two rounds differ beside their placements: how they came about, and what they ran under."""
    if old.round is None or new.round is None or old.epoch is None or new.epoch is None:
        return []
    plans = [dict(one.plan or {}) for one in (old.round, new.round)]
    inputs = [plan.get("inputs") or {} for plan in plans]
    facts = {
        "where the plan came from": [old.round.source, new.round.source],
        "the cap": [size(one["cap_bytes"]) if one.get("cap_bytes") else None for one in inputs],
        "the shape planned for": [shape_text(one["workload"]) if one.get("workload") else None for one in inputs],
        "the planner's version": [plan.get("planner_version") for plan in plans],
    }
    words = [f"{name}: {a} -> {b}" for name, (a, b) in facts.items() if a and b and a != b]
    changes = fingerprint_changes(old.epoch.fingerprint, new.epoch.fingerprint)
    return words + [f"the fingerprint: {change_text(one)}" for one in changes]
