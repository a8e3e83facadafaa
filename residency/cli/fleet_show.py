"""How the verb `fleet` shows what it hears: progress, tables for people, JSON Lines, and reading those again."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from residency.cli.common import say, show_json, show_lines
from residency.control import Verb, read_request
from residency.errors import SettingsError
from residency.rendering import printable, short, table
from residency.statemachine.replicas import ReplicaOutcome

if TYPE_CHECKING:
    from pathlib import Path

    from residency.fleet import FleetReport
    from residency.fleet_replica import ReplicaAnswer

_SHOWN_EVERY_S = 0.1
_LINE_CHARACTERS_MAX = 100
_LINES_BYTES_MAX = 64 * 1024 * 1024


class Progress:
    """Tells on the standard error how far a fan-out is: one line that changes on a terminal, else a line a replica.

    With as_json each answer is a line of the standard output as soon as it is there.
    """

    def __init__(self, verb: Verb, *, num_replicas: int, as_json: bool) -> None:
        self.answers: list[ReplicaAnswer] = []
        self._verb, self._num_replicas, self._as_json = verb, num_replicas, as_json
        self._is_terminal = sys.stderr.isatty()
        self._news = ""
        self._shown_s = 0.0

    def note(self, answer: ReplicaAnswer) -> None:
        """Take a replica's answer."""
        self.answers.append(answer)
        if self._as_json:
            show_json([answer_object(answer)])
            sys.stdout.flush()
        if self._is_terminal:
            self._draw(is_last=len(self.answers) == self._num_replicas)
        elif not self._as_json:
            say(f"{len(self.answers)}/{self._num_replicas} {answer.url}: {_outcome_text(answer)}")

    def news(self, url: str, line: str) -> None:
        """Take a line on what a replica is doing."""
        self._news = f"{url}: {line}"
        if self._is_terminal:
            self._draw(is_last=False)

    def close(self) -> None:
        """Leave the terminal's line empty."""
        if self._is_terminal:
            click.echo("\r\x1b[K", nl=False, err=True)

    def _draw(self, *, is_last: bool) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s < _SHOWN_EVERY_S and not is_last:
            return
        self._shown_s = now_s
        num_bad = sum(one.outcome in (ReplicaOutcome.UNKNOWN, ReplicaOutcome.REFUSED) for one in self.answers)
        text = f"{self._verb.value}: {len(self.answers)} of {self._num_replicas} done"
        text += f", {num_bad} without an outcome" if num_bad else ""
        text += f"; {self._news}" if self._news else ""
        click.echo(f"\r\x1b[K{printable(text)[:_LINE_CHARACTERS_MAX]}", nl=False, err=True)


def show_report(report: FleetReport, *, as_json: bool, is_interrupted: bool) -> None:
    """Print what a request came to; of JSON only the last line, since the others are there already."""
    if as_json:
        show_json([merged_object(report, is_interrupted=is_interrupted)])
        return
    rows = _status_rows(report) if report.verb is Verb.STATUS else _outcome_rows(report)
    show_lines(table(rows[0], rows[1:]))
    merged = report.merged
    counts = ", ".join(f"{count} {outcome.value}" for outcome, count in merged.counts.items())
    mixed = " (mixed)" if merged.mixed else ""
    different = f"; {merged.num_placements} different placements" if merged.num_placements > 1 else ""
    click.echo(f"\n{report.verb.value}: {merged.outcome.value}{mixed}: {counts}{different}")
    if is_interrupted:
        say("interrupted; a worker that has a request goes on with it")
    if report.verb is not Verb.STATUS and ReplicaOutcome.UNKNOWN in merged.counts:
        say("ask again what became of it: with --again and the output of --json, or look with 'residency fleet status'")


def answer_object(answer: ReplicaAnswer) -> dict[str, Any]:
    """Return an answer as it is shown in JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(answer)
    return plain


def merged_object(report: FleetReport, *, is_interrupted: bool) -> dict[str, Any]:
    """Return the outcome over all replicas as it is shown in JSON."""
    return {
        "merged": report.merged.outcome.value,
        "verb": report.verb.value,
        "mixed": report.merged.mixed,
        "counts": {outcome.value: count for outcome, count in report.merged.counts.items()},
        "num_replicas": sum(report.merged.counts.values()),
        "num_placements": report.merged.num_placements,
        "interrupted": is_interrupted,
    }


def read_answers(path: Path, verb: Verb) -> tuple[dict[str, Any], ...]:
    """Return {url, request} of every replica whose outcome an earlier call left unknown; of those that have one.

    Raises SettingsError for what no call has printed, or one of another verb.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(_LINES_BYTES_MAX + 1)
        if len(content) > _LINES_BYTES_MAX:
            raise ValueError(f"it has over {_LINES_BYTES_MAX} bytes")
        lines = [msgspec.json.decode(line, type=dict[str, Any]) for line in content.splitlines() if line.strip()]
        return tuple(_earlier(line, verb) for line in lines if "url" in line and _is_open(line))
    except (OSError, ValueError, KeyError, TypeError, msgspec.DecodeError, SettingsError) as error:
        raise SettingsError(
            f"{str(path)!r} cannot be asked again: {' '.join(str(error).split())[:200]}; "
            f"name what 'residency fleet {verb.value.replace('_', '-')} --json' printed"
        ) from error


def _is_open(line: dict[str, Any]) -> bool:
    return line["outcome"] == ReplicaOutcome.UNKNOWN.value and line["request"] is not None


def _earlier(line: dict[str, Any], verb: Verb) -> dict[str, Any]:
    asked = read_request(line["request"])
    if asked.verb is not verb:
        raise ValueError(f"what was asked there is {asked.verb.value}, not {verb.value}")
    return {"url": str(line["url"]), "request": asked.four}


def _outcome_text(answer: ReplicaAnswer) -> str:
    if answer.same_as is not None:
        return printable(answer.reason)
    return answer.outcome.value + (f" ({answer.fault.value})" if answer.fault else "")


def _outcome_rows(report: FleetReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("URL", "OUTCOME", "ROUND", "STATE", "PLACEMENT", "WHY")]
    for one in report.replicas:
        why = f"{one.fault.value}: {one.reason}" if one.fault else one.reason
        if one.repeated:
            why = f"done before: {why}"
        rows.append((one.url, one.outcome.value, _number(one), one.state or "-", short(one.placement), why or "-"))
    return rows


def _status_rows(report: FleetReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("URL", "READY", "STATE", "ROUND", "PLACEMENT", "DECISION", "REQUESTS")]
    for one in report.replicas:
        ready = "-" if one.ready is None else "yes" if one.ready else "no"
        what = f"{one.fault.value}: {one.reason}" if one.fault else one.reason or _requests_text(one)
        rows.append((one.url, ready, one.state or "-", _number(one), short(one.placement), one.decision or "-", what))
    return rows


def _number(answer: ReplicaAnswer) -> str:
    return "-" if answer.round is None else str(answer.round)


def _requests_text(answer: ReplicaAnswer) -> str:
    """Return which control request a replica serves, and what the last one came to."""
    control = answer.control or {}
    running, last = control.get("running"), control.get("last")
    parts = []
    if isinstance(running, dict):
        parts.append(f"{running.get('verb')} runs for {running.get('elapsed_s')} s")
    if isinstance(last, dict):
        parts.append(f"{last.get('verb')} was {last.get('outcome')} in round {last.get('round')}")
    return "; ".join(parts) or "-"
