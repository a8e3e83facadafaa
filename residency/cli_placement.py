"""The verb `placement`: where every weight lives, now or at any moment of the journal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from residency.cli_common import FINDING, open_reader, read_view, reading_options, say, show_json, show_lines
from residency.cli_rounds import placement_object, read_placement
from residency.moments import parse_moment
from residency.rendering import table

if TYPE_CHECKING:
    from residency.gpu.placement import ComponentPlacement, Placement
    from residency.journal.reader import JournalReader


@click.command()
@reading_options
@click.option("--at", metavar="POSITION|TIME", help="As it was there; a position includes its event.")
def placement(*, journal: str | None, stream: str | None, as_json: bool, at: str | None) -> int:
    """Show the placement in force."""
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
    if epoch.moving:
        say(f"round {epoch.round} was in flight: its effects may have changed this")
    if as_json:
        facts = {"stream": view.stream, "epoch": epoch.epoch, "round": epoch.round, "state": epoch.state}
        where = {"position": view.last_position, "digest": epoch.placement, "moving": epoch.moving}
        show_json([{**facts, **where, "components": placement_object(found)}])
        return 0
    click.echo(f"placement {epoch.placement}, {epoch.state} in round {epoch.round} of {view.stream}")
    show_lines(placement_table(found))
    return 0


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


def placement_table(found: Placement) -> list[str]:
    """Return the lines of a placement for people."""
    headings = ("COMPONENT", "MODE", "HOST COPY", "SLOTS", "RESIDENT LAYERS")
    return table(headings, (_row(name, one) for name, one in sorted(found.components.items())))


def _row(name: str, one: ComponentPlacement) -> tuple[str, ...]:
    layers = ", ".join(f"{group} {len(indices)}" for group, indices in sorted(one.resident_layers.items()))
    return name, one.mode.value, one.tier.value if one.tier else "-", str(one.num_slots or "-"), layers or "-"
