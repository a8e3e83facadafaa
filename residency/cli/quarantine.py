"""The verb `quarantine`: which placements are not tried again, by which deaths and since when; and their clearing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from residency.cli import Verbs
from residency.cli.common import (
    each_stream,
    exit_codes,
    open_reader,
    reading_options,
    say,
    show_json,
    show_lines,
    utc_option,
)
from residency.journal.fold import fold_stream
from residency.moments import rfc3339
from residency.rendering import short, table
from residency.statemachine.deaths import digest_of
from residency.statemachine.history import History
from residency.statemachine.policy import Policy

if TYPE_CHECKING:
    from datetime import tzinfo

    from residency.journal.views import StreamView
    from residency.statemachine.history import Held, Strike

# Verb -> the module it is in. What writes has one of its own: it loads SQLAlchemy.
VERBS = {"list": "residency.cli.quarantine", "clear": "residency.cli.quarantine_clear"}


class Quarantined(NamedTuple):
    """A placement that something is held against under one fingerprint. is_current: that of the newest life."""

    stream: str
    fingerprint: str
    is_current: bool
    held: Held


@click.group(cls=Verbs, verbs=VERBS, epilog=exit_codes())
def quarantine() -> None:
    """List or clear what keeps placements from being tried again.

    A placement blamed for two deaths is not restored any more; after two deaths of plans that were never committed no
    plan is made; one that was rolled back is not planned again. All of it holds for the fingerprint under which it
    happened, until a commit of that placement, or until it is cleared.
    """


@click.command(epilog=exit_codes())
@reading_options
@utc_option
def list_(*, journal: str | None, stream: str | None, as_json: bool, zone: tzinfo | None) -> None:
    """List the placements that something is held against: how they stand, since when, and by which deaths."""
    with open_reader(journal) as reader:
        views = [fold_stream(reader.events(name), name) for name in each_stream(reader, stream)]
    found = [one for view in views for one in quarantined(view)]
    if as_json:
        show_json(_object(one) for one in found)
        return
    for view in views:
        if view.epochs and not view.epochs[-1].ended:
            say(
                f"epoch {view.epochs[-1].epoch[:8]} of {view.stream} runs, or died unnoticed: then the next start "
                "counts that, and 'residency replay --dry-run' says how"
            )
    if not found:
        say("nothing is held against any placement")
        return
    headings = ("STREAM", "PLACEMENT", "STANDING", "SINCE", "FINGERPRINT", "BY")
    show_lines(table(headings, (row for one in found for row in _rows(one, zone))))


def quarantined(view: StreamView) -> tuple[Quarantined, ...]:
    """Return everything that is held against placements of a stream, fingerprint by fingerprint, the newest last."""
    digests = list(dict.fromkeys(digest_of(epoch) for epoch in view.epochs))
    newest = digest_of(view.epochs[-1]) if view.epochs else ""
    policy = Policy()
    return tuple(
        Quarantined(view.stream, digest, digest == newest, held)
        for digest in digests
        for held in History.of(view, fingerprint_digest=digest).held(policy)
    )


def _rows(one: Quarantined, zone: tzinfo | None) -> list[tuple[str, ...]]:
    """Return a row for each thing held against it; what they share is in the first."""
    since = rfc3339(one.held.since_ns, digits=0, zone=zone)
    fingerprint = f"{short(one.fingerprint)} ({'current' if one.is_current else 'another'})"
    first = (one.stream, short(one.held.placement), one.held.standing.value, since, fingerprint)
    heads = [first, *[("",) * len(first)] * (len(one.held.strikes) - 1)]
    return [(*head, _strike_text(strike, zone)) for head, strike in zip(heads, one.held.strikes, strict=True)]


def _strike_text(strike: Strike, zone: tzinfo | None) -> str:
    number = f", round {strike.round}" if strike.round else ""
    return f"epoch {strike.epoch[:8]}{number}, {rfc3339(strike.at_ns, digits=0, zone=zone)}: {strike.why}"


def _object(one: Quarantined) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(one.held)
    plain["since"] = rfc3339(plain.pop("since_ns"))
    for strike in plain["strikes"]:
        strike["at"] = rfc3339(strike.pop("at_ns"))
    return {"stream": one.stream, "fingerprint": one.fingerprint, "current": one.is_current, **plain}
