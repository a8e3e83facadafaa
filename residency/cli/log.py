"""The verb `log`: events, oldest first, and those that come."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import tzinfo
from typing import TYPE_CHECKING

import click

from residency.cli.common import (
    FINDING,
    POSITION_MAX,
    Seconds,
    choose_stream,
    end_of,
    exit_codes,
    open_reader,
    reading_options,
    say,
    show_json,
    utc_option,
)
from residency.cli.events import heading, row
from residency.cli.watch import Watch, standing
from residency.moments import parse_moment, rfc3339
from residency.rendering import event_object, json_line
from residency.statemachine.states import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.cli.watch import Ending
    from residency.journal.events import Event
    from residency.journal.reader import JournalReader

POLL_S = 0.2  # How late a followed event may show; a poll of an idle journal costs well under a millisecond.
FOLLOWED_BEFORE = 10  # Events shown before following, as `tail` does.
TIMED_OUT = 124  # exit code, that of timeout(1)

OWN_CODES = {
    0: "all is well; with --until-state, the state was reached",
    1: "with --until-state, the round was rolled back instead, or ended in another way",
    TIMED_OUT: "with --until-state, --timeout passed first",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Which events are asked for, and how they are shown. Positions are exclusive, times inclusive."""

    stream: str | None
    after: int
    since_ns: int | None
    until_ns: int | None
    last: int | None
    as_json: bool
    zone: tzinfo | None

    @property
    def bounds_text(self) -> str:
        """What bounds the events, in words: ' after 12 since 2026-...'."""
        times = (("since", self.since_ns), ("until", self.until_ns))
        texts = [f" {name} {rfc3339(at_ns, digits=0, zone=self.zone)}" for name, at_ns in times if at_ns is not None]
        return (f" after {self.after}" if self.after else "") + "".join(texts)

    def show(self, event: Event) -> None:
        """Print one event."""
        click.echo(json_line(event_object(event)) if self.as_json else row(event, self.zone))


@click.command(epilog=exit_codes(OWN_CODES))
@reading_options
@utc_option
@click.option("-n", "--lines", "last", type=click.IntRange(min=0), help="Only the last N events.")
@click.option("--since", metavar="WHEN", help="Only events since: '2h ago', 03:12 (the last one), or an RFC 3339 time.")
@click.option("--until", metavar="WHEN", help="Only events up to then.")
@click.option(
    "--after",
    metavar="POSITION",
    type=click.IntRange(min=0, max=POSITION_MAX),
    help="Only events after that one. With --json a last line gives the cursor to go on from.",
)
@click.option("-f", "--follow", is_flag=True, help="Go on with the events that come, until Ctrl-C.")
@click.option(
    "--until-state",
    type=click.Choice([state.value for state in State]),
    help="Follow until the worker reaches it; earlier events count only with --after.",
)
@click.option("--timeout", "timeout_s", metavar="SECONDS", type=Seconds(min=0), help="Follow no longer.")
def log(
    *,
    journal: str | None,
    stream: str | None,
    as_json: bool,
    zone: tzinfo | None,
    last: int | None,
    since: str | None,
    until: str | None,
    after: int | None,
    follow: bool,
    until_state: str | None,
    timeout_s: float | None,
) -> int:
    """List the events of a worker, oldest first.

    What is written meanwhile is not listed, except with --follow. A script reads on where it was with --after and the
    position of the last event, or of the line {"cursor": POSITION} at the end.
    """
    follow = follow or until_state is not None
    if follow and until is not None:
        raise click.UsageError("--until and --follow contradict each other; leave one out")
    if timeout_s is not None and not follow:
        raise click.UsageError("--timeout is for --follow and --until-state")
    now_ns = time.time_ns()
    since_ns, until_ns = (
        None if text is None else parse_moment(text, now_ns=now_ns, name=name, zone=zone)
        for name, text in (("--since", since), ("--until", until))
    )
    if follow and last is None and since is None and after is None:
        last = FOLLOWED_BEFORE
    with open_reader(journal) as reader:
        # Before anything else: whatever a busy writer adds comes after it, and is followed or left alone.
        end = end_of(reader)
        chosen = choose_stream(reader, stream)
        wanted = _Wanted(
            stream=chosen,
            after=after or 0,
            since_ns=since_ns,
            until_ns=until_ns,
            last=last,
            as_json=as_json,
            zone=zone,
        )
        if not as_json:
            click.echo(heading(zone))
        if not follow:
            cursor = _list(reader, wanted, end=end)
            if as_json and after is not None:
                show_json([{"cursor": cursor}])
            return 0
        watch = None if until_state is None else _watch(reader, State(until_state), chosen, after=after, end=end)
        following = _Following(reader, wanted, watch=watch, at=end, stream=stream)
        try:
            return following.run(timeout_s, counts_earlier=after is not None)
        finally:
            # Ctrl-C, too, leaves where to go on from.
            if as_json and after is not None:
                show_json([{"cursor": following.at}])


def _list(reader: JournalReader, wanted: _Wanted, *, end: int) -> int:
    """Print what is there, and return the position to go on from."""
    shown = 0
    for event in _select(reader, wanted, end=end):
        wanted.show(event)
        shown = event.position
    if not shown:
        say(f"no events{wanted.bounds_text}")
    # What came after --until is still to be read.
    return max(shown, wanted.after) if wanted.until_ns is not None else max(end, wanted.after)


def _select(reader: JournalReader, wanted: _Wanted, *, end: int) -> Iterator[Event]:
    """Yield the events asked for, oldest first. The newest few are found from the end: a journal may be long."""
    if wanted.stream is None or wanted.last == 0:
        return
    newest_first = wanted.last is not None
    found = reader.events(
        wanted.stream,
        after=wanted.after,
        before=end + 1,
        since_ns=wanted.since_ns,
        until_ns=wanted.until_ns,
        limit=wanted.last,
        newest_first=newest_first,
    )
    yield from reversed(tuple(found)) if newest_first else found


def _watch(reader: JournalReader, state: State, stream: str | None, *, after: int | None, end: int) -> Watch:
    position = end if after is None else after
    served, now = (None, None) if stream is None else standing(reader, stream, position)
    if after is None and now == state.value:
        say(f"it is {now} already; waiting for the next time (--after POSITION counts what came after that event)")
    return Watch(state, served=served)


class _Following:
    """Prints events as they are written. at: the position up to which everything was looked at."""

    def __init__(
        self, reader: JournalReader, wanted: _Wanted, *, watch: Watch | None, at: int, stream: str | None
    ) -> None:
        self._reader, self._wanted, self._watch, self._stream = reader, wanted, watch, stream
        self.at = at

    def run(self, timeout_s: float | None, *, counts_earlier: bool) -> int:
        """Return the exit code. Ends by Ctrl-C, the time, the state, or a usage error when a second stream appears.

        counts_earlier: whether the state may have been reached between --after and now.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ending = self._earlier() if counts_earlier else None
        for event in _select(self._reader, self._wanted, end=self.at):
            self._wanted.show(event)
        while ending is None:
            ending = self._new()
            sys.stdout.flush()
            left_s = POLL_S if deadline is None else deadline - time.monotonic()
            if ending is None and left_s <= 0:
                return self._timed_out(timeout_s)
            if ending is None:
                time.sleep(min(POLL_S, left_s))
        say(ending.text)
        return 0 if ending.reached else FINDING

    def _earlier(self) -> Ending | None:
        if self._watch is None or self._wanted.stream is None:
            return None
        for event in self._reader.events(self._wanted.stream, after=self._wanted.after, before=self.at + 1):
            ending = self._watch.see(event)
            if ending is not None:
                self.at = event.position
                return ending
        return None

    def _new(self) -> Ending | None:
        chosen = choose_stream(self._reader, None) if self._stream is None else self._stream
        for event in self._reader.events(chosen, after=self.at) if chosen is not None else ():
            self._wanted.show(event)
            self.at = event.position
            ending = None if self._watch is None else self._watch.see(event)
            if ending is not None:
                return ending
        return None

    def _timed_out(self, timeout_s: float | None) -> int:
        if self._watch is None:
            return 0
        say(f"timed out after {timeout_s:g} s: not {self._watch.wanted.value}")
        return TIMED_OUT
