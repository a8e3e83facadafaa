"""The verb `placement`: where every weight lives, now or at any moment of the journal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
import msgspec

from residency.cli_common import FINDING, open_reader, read_view, reading_options, say, show_json, show_lines
from residency.cli_rounds import placement_object, read_placement
from residency.gpu.placement import ComponentPlacement, Placement
from residency.moments import parse_moment
from residency.rendering import placement_text, table

if TYPE_CHECKING:
    from residency.journal.reader import JournalReader
    from residency.journal.views import EpochView, Move


@click.command()
@reading_options
@click.option("--at", metavar="POSITION|TIME", help="As it was there; a position includes its event.")
def placement(*, journal: str | None, stream: str | None, as_json: bool, at: str | None) -> int:
    """Show the placement in force; during a round, what was on the device as far as the journal knows.

    An effect with an outcome has moved its component, or moved it back; one without leaves it in doubt.
    """
    with open_reader(journal) as reader:
        position = _position(reader, at) if at is not None else None
        view = read_view(reader, stream, before=position + 1 if position is not None else None)
        if view is None:
            return FINDING
        epoch = view.epochs[-1]
        found = read_placement(reader, epoch.placement)
    if found is None:
        say(f"epoch {epoch.epoch} has no placement there")
        return FINDING
    moves = _last_moves(epoch)
    held, in_doubt = _held(found, moves)
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


def _last_moves(epoch: EpochView) -> dict[str, Move]:
    """Return component -> the last effect on it, of the rounds that moved weights and have not settled."""
    if not epoch.moving:
        return {}
    unsettled = [move for one in epoch.rounds if one.outcome is None for move in one.moves]
    return {move.component: move for move in unsettled if move.before and move.after}


def _held(before: Placement, moves: dict[str, Move]) -> tuple[Placement, set[str]]:
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


def _position(reader: JournalReader, at: str) -> int:
    """Return the last position of a moment: the one named, or that of the newest event up to the time named."""
    if at.strip().isdecimal():
        position = int(at)
        last = next((event.position for event in reader.events(limit=1, newest_first=True)), 0)
        if not 1 <= position <= last:
            raise click.UsageError(f"--at {position} is outside the journal; its positions are 1 to {last}")
        return position
    until_ns = parse_moment(at, now_ns=time.time_ns(), name="--at")
    return next((e.position for e in reader.events(until_ns=until_ns, limit=1, newest_first=True)), 0)


def placement_table(found: Placement, moves: dict[str, Move]) -> list[str]:
    """Return the lines of a placement for people; what a round in flight did to it is one column more."""
    headings = ("COMPONENT", "MODE", "HOST COPY", "SLOTS", "RESIDENT LAYERS", *(["THE ROUND"] if moves else []))
    rows = (
        (name, one, [_move_text(moves.get(name))] if moves else []) for name, one in sorted(found.components.items())
    )
    return table(headings, ((*_row(name, one), *extra) for name, one, extra in rows))


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


def _row(name: str, one: ComponentPlacement) -> tuple[str, ...]:
    layers = ", ".join(f"{group} {len(indices)}" for group, indices in sorted(one.resident_layers.items()))
    return name, one.mode.value, one.tier.value if one.tier else "-", str(one.num_slots or "-"), layers or "-"
