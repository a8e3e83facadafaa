"""The verb `placement`: where every weight lives, now or at any moment of the journal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from residency.cli.common import (
    FINDING,
    end_of,
    exit_codes,
    open_reader,
    reading_options,
    say,
    show_json,
    show_lines,
    utc_option,
)
from residency.cli.life import pruned_after
from residency.cli.rounds import placement_object, read_placement
from residency.cli.views import read_view
from residency.gpu.placement import ComponentPlacement, Placement
from residency.moments import parse_moment
from residency.rendering import placement_text, size, table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import tzinfo

    from residency.journal.reader import JournalReader
    from residency.journal.views import EpochView, Move


@click.command(epilog=exit_codes({1: "the journal knows of no placement there"}))
@reading_options
@utc_option
@click.option(
    "--at", metavar="POSITION|TIME", help="As it was there: a position with its event, 03:12, '2h ago', or RFC 3339."
)
def placement(*, journal: str | None, stream: str | None, as_json: bool, zone: tzinfo | None, at: str | None) -> int:
    """Show the placement in force; during a round, what was on the device as far as the journal knows.

    An effect with an outcome has moved its component, or moved it back; one without leaves it in doubt.
    """
    with open_reader(journal) as reader:
        moment = moment_of(reader, at, zone=zone, name="--at") if at is not None else None
        view = read_view(reader, stream, before=moment.position + 1 if moment is not None else None)
        if view is None:
            return FINDING
        epoch = view.epochs[-1]
        found = read_placement(reader, epoch.placement)
        num_pruned = pruned_after(reader, view.stream, view.last_position) if moment is not None else 0
    if num_pruned:
        say(f"{num_pruned} events after event {view.last_position} were pruned: what they changed is not known")
    if found is None:
        say(f"epoch {epoch.epoch} has no placement there")
        return FINDING
    moves = last_moves(epoch)
    held, in_doubt = held_at(found, moves)
    if epoch.moving:
        say(f"round {epoch.round} had moved weights and had not settled: this is what the journal knows of the device")
    if epoch.ended:
        say(f"epoch {epoch.epoch} was over by then, with nothing of it left on the device: this is what it held last")
    if as_json:
        facts = {"stream": view.stream, "epoch": epoch.epoch, "round": epoch.round, "state": epoch.state}
        where = {"position": view.last_position, "digest": epoch.placement, "moving": epoch.moving}
        last = {"ended": epoch.ended, "in_doubt": sorted(in_doubt), "moves": list(moves.values())}
        show_json([{**facts, **where, **last, "components": placement_object(held)}])
        return 0
    before = "before it: " if epoch.moving else ""
    click.echo(f"{before}placement {epoch.placement}, {epoch.state} in round {epoch.round} of {view.stream}")
    show_lines(placement_table(held, moves))
    return 0


def last_moves(epoch: EpochView) -> dict[str, Move]:
    """Return component -> the last effect on it, of the rounds that moved weights and have not settled."""
    if not epoch.moving:
        return {}
    unsettled = [move for one in epoch.rounds if one.outcome is None for move in one.moves]
    return {move.component: move for move in unsettled if move.before and move.after}


def held_at(before: Placement, moves: dict[str, Move]) -> tuple[Placement, set[str]]:
    """Return what the device held by the outcomes, and the components in doubt, shown as before the effect in doubt."""
    components = dict(before.components)
    in_doubt = set()
    for name, move in moves.items():
        where = move.leaves
        if where is None:
            in_doubt.add(name)
            where = move.after if move.undo else move.before
        components[name] = msgspec.convert(where, ComponentPlacement)
    return Placement(components=components), in_doubt


class Moment(NamedTuple):
    """What was asked for: the newest position that counts, 0 for none; the time, None where a position was named."""

    position: int
    at_ns: int | None


def moment_of(reader: JournalReader, at: str, *, zone: tzinfo | None, name: str) -> Moment:
    """Return the moment that a position or a time names.

    Raises UsageError for a position that is not there, and SettingsError for what is no time.
    """
    if at.strip().isdecimal():
        position, last = int(at), end_of(reader)
        if not 1 <= position <= last:
            raise click.UsageError(f"{name} {position} is outside the journal; its positions are 1 to {last}")
        return Moment(position, None)
    at_ns = parse_moment(at, now_ns=time.time_ns(), name=name, zone=zone)
    newest = reader.events(until_ns=at_ns, limit=1, newest_first=True)
    return Moment(next((event.position for event in newest), 0), at_ns)


def placement_table(found: Placement, moves: dict[str, Move]) -> list[str]:
    """Return the lines of a placement for people; what a round in flight did to it is one column more."""
    named = sorted(found.components.items())
    columns = {
        "COMPONENT": [name for name, _ in named],
        "MODE": [one.mode.value for _, one in named],
        "HOST COPY": [one.tier.value if one.tier else "-" for _, one in named],
        "SLOTS": [str(one.num_slots or "-") for _, one in named],
        "RESIDENT LAYERS": [_layers(one.resident_layers) for _, one in named],
    }
    later = {
        "HELD LAYERS": [_layers(one.held_layers) for _, one in named],
        "WINDOW": [size(one.window_bytes) if one.window_bytes else "-" for _, one in named],
        "YIELDS": [size(one.yield_bytes) if one.yield_bytes else "-" for _, one in named],
    }
    # Few placements have them.
    columns |= {name: cells for name, cells in later.items() if set(cells) != {"-"}}
    if moves:
        columns["THE ROUND"] = [_move_text(moves.get(name)) for name, _ in named]
    return table(tuple(columns), zip(*columns.values(), strict=True))


def _layers(layers: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{group} {len(indices)}" for group, indices in sorted(layers.items()) if indices) or "-"


def _move_text(move: Move | None) -> str:
    if move is None:
        return "has not touched it"
    if move.leaves is None:
        source, target = (move.after, move.before) if move.undo else (move.before, move.after)
        how = f"the effect's outcome is {move.result}" if move.result else "no outcome is written"
        return f"in doubt: {placement_text(source)} or {placement_text(target)} ({how})"
    if move.result == "failed":
        return "failed to move it"
    return "moved it back" if move.undo else f"moved it, from {placement_text(move.before)}"
