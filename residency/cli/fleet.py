"""The verb `fleet`: control requests to every replica over HTTP, and what they came to."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from residency.cli.common import FINDING, WORKER, Seconds, exit_codes, json_option, say
from residency.cli.fleet_show import Progress, read_answers, show_report
from residency.control import Verb
from residency.statemachine.replicas import ReplicaOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.cli.common import FC
    from residency.fleet import FleetReport

UNKNOWN = 6  # exit code: whether a replica did what was asked is not known
INTERRUPTED = 130
_FAILED = {ReplicaOutcome.ROLLBACK_FAILED: 70, ReplicaOutcome.POISONED: 71, ReplicaOutcome.UNKNOWN: UNKNOWN}
_CODES = {
    FINDING: "a replica did not do it, and that is known: refused, rolled back, pinned or skipped",
    UNKNOWN: "whether a replica did it is not known: ask again",
    70: WORKER[70],
    71: WORKER[71],
    INTERRUPTED: "interrupted; what is known by then is shown",
}
# What is asked for.
_DONE = {
    Verb.STATUS: frozenset({ReplicaOutcome.ANSWERED}),
    Verb.CALIBRATE: frozenset({ReplicaOutcome.COMMITTED, ReplicaOutcome.KEPT, ReplicaOutcome.APPLIED}),
    Verb.VALIDATE: frozenset({ReplicaOutcome.COMMITTED, ReplicaOutcome.KEPT}),
    Verb.ROLL_BACK: frozenset({ReplicaOutcome.ROLLED_BACK}),
}


@click.group(epilog=exit_codes(_CODES, journal=False))
def fleet() -> None:
    """Ask every replica of a fleet over HTTP: its status, or to calibrate, validate or roll back.

    URL is where a worker serves residency's control app, such as http://10.0.0.7:8000. What each replica answers is
    told, and merged into one outcome: the worst wins. Needs 'residency[http]'.
    """


def _options(command: FC) -> FC:
    urls = click.argument("urls", metavar="URL...", nargs=-1)
    token = click.option(
        "--token-file",
        metavar="PATH",
        help="The workers' token; else RESIDENCY_CONTROL_TOKEN, else the file of RESIDENCY_CONTROL_TOKEN_FILE.",
    )
    authorities = click.option(
        "--ca-file", metavar="PATH", help="Authorities for https, in PEM format; else those of the system."
    )
    timeout = click.option(
        "--timeout",
        "timeout_s",
        metavar="SECONDS",
        type=Seconds(min=0, min_open=True),
        help="For all replicas together; 30 for status, else an hour.",
    )
    answer = click.option(
        "--answer-timeout",
        "answer_s",
        metavar="SECONDS",
        type=Seconds(min=0, min_open=True),
        default=5.0,
        show_default=True,
        help="For one replica to connect, and to tell its status.",
    )
    concurrency = click.option(
        "--concurrency",
        metavar="N",
        type=click.IntRange(min=1, max=256),
        default=16,
        show_default=True,
        help="How many replicas at a time; 1 is one after the other.",
    )
    return urls(token(authorities(timeout(answer(concurrency(json_option(command)))))))


_again = click.option(
    "--again",
    metavar="FILE",
    help="Ask once more what an earlier call left unknown; FILE is its output with --json. Without URL: all of those.",
)


@fleet.command(epilog=exit_codes({FINDING: "a replica is not ready", UNKNOWN: "a replica did not tell"}, journal=False))
@_options
def status(**options: Any) -> int:
    """Show how every replica is: ready, its state, its placement, and which request it serves."""
    return _ask(Verb.STATUS, **options)


@fleet.command(epilog=exit_codes(_CODES, journal=False))
@_options
@_again
def calibrate(**options: Any) -> int:
    """Have every replica measure and plan anew; it commits what is better, or keeps what it has."""
    return _ask(Verb.CALIBRATE, **options)


@fleet.command(epilog=exit_codes(_CODES, journal=False))
@_options
@_again
def validate(**options: Any) -> int:
    """Have every replica validate the placement that it serves with once more."""
    return _ask(Verb.VALIDATE, **options)


@fleet.command(name="roll-back", epilog=exit_codes(_CODES, journal=False))
@_options
@_again
def roll_back(**options: Any) -> int:
    """Have every replica go back to the placement that was committed before, or to its initial one."""
    return _ask(Verb.ROLL_BACK, **options)


def _ask(
    verb: Verb,
    *,
    urls: Sequence[str],
    token_file: str | None,
    ca_file: str | None,
    timeout_s: float | None,
    answer_s: float,
    concurrency: int,
    as_json: bool,
    again: str | None = None,
) -> int:
    # Only here: no other verb is to wait for an HTTP library, or to need one.
    clients = import_module("residency.fleet")
    earlier = read_answers(Path(again), verb) if again is not None else ()
    if again is not None and not urls:
        urls = [one["url"] for one in earlier]
        if not urls:
            say("nothing that was asked is unknown there")
            return 0
    client = clients.FleetClient(
        urls, token_file=token_file, ca_file=ca_file, concurrency=concurrency, answer_s=answer_s
    )
    if len(client.urls) < len(urls):
        say(f"{len(urls) - len(client.urls)} of the URLs are given more than once; each is asked once")
    default_s = clients.STATUS_TIMEOUT_S if verb is Verb.STATUS else clients.TIMEOUT_S
    progress = Progress(verb, num_replicas=len(client.urls), as_json=as_json)
    requests = {one["url"]: one["request"] for one in earlier}
    try:
        report = client.ask(
            verb,
            timeout_s=default_s if timeout_s is None else timeout_s,
            again=requests,
            on_answer=progress.note,
            on_news=progress.news,
        )
        code = _code_of(report)
    except KeyboardInterrupt:
        if not progress.answers:
            return INTERRUPTED
        known = {one.url: one for one in progress.answers}
        report, code = clients.report_of(verb, [known[url] for url in client.urls if url in known]), INTERRUPTED
    finally:
        progress.close()
    show_report(report, as_json=as_json, is_interrupted=code == INTERRUPTED)
    return code


def _code_of(report: FleetReport) -> int:
    if report.merged.outcome in _FAILED:
        return _FAILED[report.merged.outcome]
    is_done = report.merged.counts.keys() <= _DONE[report.verb]
    is_ready = report.verb is not Verb.STATUS or all(one.ready for one in report.replicas)
    return 0 if is_done and is_ready else FINDING
