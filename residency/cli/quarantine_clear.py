"""The verb `quarantine clear`: writes down that what was held against placements counts no more."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from residency.cli.common import (
    FINDING,
    Seconds,
    choose_stream,
    exit_codes,
    journal_option,
    json_option,
    open_reader,
    say,
    show_json,
    stream_option,
)
from residency.cli.quarantine import Quarantined, quarantined
from residency.errors import JournalError, StreamInUse
from residency.journal.events import Draft, EventType
from residency.journal.fold import fold_stream
from residency.journal.store import Journal
from residency.rendering import event_object, short
from residency.settings import journal_location, state_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.journal.events import Event
    from residency.journal.locks import StreamLock

POLL_S = 0.05  # between two looks at a stream that is held: a worker that restarts is gone for seconds
DIGEST_CHARACTERS_MIN = 4


@click.command(epilog=exit_codes({1: "nothing is held against such a placement", 3: "stream-in-use, or no journal"}))
@click.argument("placements", metavar="[PLACEMENT]...", nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="Every placement of the worker, under every fingerprint.")
@click.option("--reason", metavar="TEXT", required=True, help="Why it may be tried again; kept in the journal.")
@click.option(
    "--wait",
    "wait_s",
    metavar="SECONDS",
    type=Seconds(min=0),
    default=0.0,
    help="Wait so long for the worker to end, or to be restarted.",
)
@journal_option
@stream_option
@json_option
def clear(
    *,
    placements: tuple[str, ...],
    is_all: bool,
    reason: str,
    wait_s: float,
    journal: str | None,
    stream: str | None,
    as_json: bool,
) -> int:
    """Forgive what was held against placements so far; later deaths count from one again.

    PLACEMENT is the beginning of a digest, as 'residency quarantine list' shows it. It appends events to the journal
    and removes none. The worker must not run meanwhile; its next start decides anew.
    """
    if is_all == bool(placements):
        raise click.UsageError("name placements, or give --all")
    if not reason.strip():
        raise click.UsageError("--reason is empty; say why it may be tried again")
    location = journal_location(journal)
    # First without a trace: the store would make a journal where there is none.
    with open_reader(journal) as reader:
        chosen = choose_stream(reader, stream)
    if chosen is None:
        say("the journal has no events yet")
        return FINDING
    with ExitStack() as stack:
        store = stack.enter_context(Journal.open(location, state_folder=state_directory()))
        stack.enter_context(_hold(store, chosen, wait_s=wait_s))
        view = fold_stream(store.events(stream=chosen), chosen)
        found = _named(quarantined(view), placements)
        if not found:
            say("nothing is held against such a placement" if placements else "nothing is held against any placement")
            return FINDING
        last = view.epochs[-1]
        drafts = [_draft(one, reason) for one in found]
        events = store.append(drafts, stream=chosen, epoch=last.epoch, rank=last.rank, witness=True)
    _tell(found, events, as_json=as_json)
    return 0


def _hold(store: Journal, stream: str, *, wait_s: float) -> StreamLock:
    """Take the stream; raises JournalError if the worker keeps it for longer than that."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return store.hold(stream)
        except StreamInUse as error:
            if time.monotonic() >= deadline:
                raise JournalError(
                    journal=store.location,
                    problem=f"stream-in-use: stream {stream!r} is held by {error.fields['holder']}",
                    remedy="stop that worker, or give --wait SECONDS and restart it",
                ) from error
        time.sleep(POLL_S)


def _named(found: Sequence[Quarantined], placements: Sequence[str]) -> list[Quarantined]:
    """Return what is to be forgiven, all of it if no placement is named. Raises UsageError for unclear beginnings."""
    if not placements:
        return list(found)
    digests = {one.held.placement for one in found}
    chosen: set[str] = set()
    for prefix in placements:
        matching = sorted(digest for digest in digests if digest.startswith(prefix.lower()))
        if len(prefix) < DIGEST_CHARACTERS_MIN or len(matching) > 1:
            names = ", ".join(map(short, matching or sorted(digests))) or "none"
            raise click.UsageError(f"{prefix!r} must begin one digest, with 4 characters or more; there are: {names}")
        chosen.update(matching)
    return [one for one in found if one.held.placement in chosen]


def _draft(one: Quarantined, reason: str) -> Draft:
    payload = {"fingerprint": one.fingerprint, "placement": one.held.placement, "reason": reason}
    return Draft(type=EventType.QUARANTINE_CLEARED, round=0, payload=payload)


def _tell(found: Sequence[Quarantined], events: Sequence[Event], *, as_json: bool) -> None:
    if as_json:
        show_json(event_object(event) for event in events)
        return
    for one, event in zip(found, events, strict=True):
        num = len(one.held.strikes)
        click.echo(
            f"cleared placement {short(one.held.placement)} ({one.held.standing.value}, {num} "
            f"{'things' if num > 1 else 'thing'} held against it), event {event.position}"
        )
    say("the next start of the worker decides anew; see 'residency replay --dry-run'")
