"""Control requests to every replica of a fleet: fanned out with bounds, and merged into one outcome."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from residency.control import Verb
from residency.errors import SettingsError
from residency.fleet_exchange import make_client, tls_context
from residency.fleet_names import NameLoop
from residency.fleet_replica import Conversation, ReplicaAnswer
from residency.fleet_urls import replica_url, replica_urls
from residency.settings import control_token
from residency.statemachine.replicas import Fault, Merged, merge

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

STATUS_TIMEOUT_S = 30.0
TIMEOUT_S = 3600.0  # of a calibration that takes minutes, of several replicas one after the other
ANSWER_S = 5.0  # for a status, which no worker has to wait for
CONCURRENCY = 16
CONCURRENCY_MAX = 256  # a process may usually open a thousand files
REPLICAS_MAX = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """What a request came to. replicas: in the order of their URLs. merged: without those that are the same worker."""

    verb: Verb
    replicas: tuple[ReplicaAnswer, ...]
    merged: Merged


class AsyncFleetClient:
    """Asks all replicas of a fleet. Nothing is sent until a verb is called.

    urls: of the replicas' apps, each asked once. token, token_file: as for ControlApp, and from the same variables.
    ca_file: the authorities in PEM format that replicas' certificates are checked against; else those of the system.
    concurrency: how many replicas are spoken with at a time; with 1, a round runs on one after the other.
    answer_s: how long one replica may take to connect or to tell its status.
    Raises SettingsError for what cannot be used.
    """

    def __init__(
        self,
        urls: Iterable[str],
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        concurrency: int = CONCURRENCY,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.urls = replica_urls(urls)
        if len(self.urls) > REPLICAS_MAX:
            raise SettingsError(f"there are {len(self.urls)} replicas; ask at most {REPLICAS_MAX} at once")
        if not 1 <= concurrency <= CONCURRENCY_MAX:
            raise SettingsError(f"concurrency is {concurrency}; it must be from 1 to {CONCURRENCY_MAX}")
        _check_time("answer_s", answer_s)
        self._token = control_token(token, file=token_file)
        self._tls = tls_context(ca_file)
        self._concurrency, self._answer_s = concurrency, answer_s

    async def status(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> FleetReport:
        """Ask every replica how it is."""
        return await self.ask(Verb.STATUS, timeout_s=timeout_s)

    async def calibrate(self, *, timeout_s: float = TIMEOUT_S) -> FleetReport:
        """Have every replica measure and plan anew."""
        return await self.ask(Verb.CALIBRATE, timeout_s=timeout_s)

    async def validate(self, *, timeout_s: float = TIMEOUT_S) -> FleetReport:
        """Have every replica validate its placement again."""
        return await self.ask(Verb.VALIDATE, timeout_s=timeout_s)

    async def roll_back(self, *, timeout_s: float = TIMEOUT_S) -> FleetReport:
        """Have every replica go back to the placement that was committed before, or to its initial one."""
        return await self.ask(Verb.ROLL_BACK, timeout_s=timeout_s)

    async def ask(
        self,
        verb: Verb,
        *,
        timeout_s: float,
        again: Mapping[str, Mapping[str, Any] | None] | None = None,
        on_answer: Callable[[ReplicaAnswer], None] | None = None,
        on_news: Callable[[str, str], None] | None = None,
    ) -> FleetReport:
        """Ask every replica, and return what each answered, within timeout_s. No replica's failure is raised.

        again: URL -> the `request` of an earlier answer with this verb; those replicas are sent the same four values
        once more, and so tell what became of it. on_answer: called as each replica is done.
        on_news: called with a URL and a line on what that replica is doing. If this is cancelled, on_answer is called
        for all that are still open, with what is known by then.
        """
        _check_time("timeout_s", timeout_s)
        asking = _Asking(self.urls, on_answer or _nobody)
        earlier = {replica_url(url): _checked_again(request, verb) for url, request in (again or {}).items()}
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        turns = asyncio.Semaphore(self._concurrency)
        # The same for all: it tells this call from others, and a repetition within it is the same request.
        attempt = secrets.randbits(48)
        client = make_client(
            token=self._token, connect_s=self._answer_s, num_connections=self._concurrency, tls=self._tls
        )
        async with client as http:

            async def converse(url: str) -> None:
                conversation = Conversation(
                    http,
                    url,
                    verb,
                    attempt=attempt,
                    answer_s=self._answer_s,
                    claim=lambda epoch: asking.claim(epoch, url),
                    told=lambda line: None if on_news is None else on_news(url, line),
                    again=earlier.get(url),
                )
                asking.note(await _in_turn(conversation, turns, deadline_s))

            tasks = [asyncio.create_task(converse(url)) for url in self.urls]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return report_of(verb, asking.answers)


class FleetClient:
    """The same for programs without an event loop: every method blocks, for as long as its timeout_s at most.

    An interrupt (Ctrl-C) raises KeyboardInterrupt, after `on_answer` has been called for every replica.
    """

    def __init__(self, urls: Iterable[str], **options: Any) -> None:
        """Take the same as AsyncFleetClient, and raise the same."""
        self._fleet = AsyncFleetClient(urls, **options)

    @property
    def urls(self) -> tuple[str, ...]:
        """The replicas' URLs, each once."""
        return self._fleet.urls

    def status(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> FleetReport:
        """Ask every replica how it is."""
        return self.ask(Verb.STATUS, timeout_s=timeout_s)

    def calibrate(self, *, timeout_s: float = TIMEOUT_S) -> FleetReport:
        """Have every replica measure and plan anew."""
        return self.ask(Verb.CALIBRATE, timeout_s=timeout_s)

    def validate(self, *, timeout_s: float = TIMEOUT_S) -> FleetReport:
        """Have every replica validate its placement again."""
        return self.ask(Verb.VALIDATE, timeout_s=timeout_s)

    def roll_back(self, *, timeout_s: float = TIMEOUT_S) -> FleetReport:
        """Have every replica go back to the placement that was committed before, or to its initial one."""
        return self.ask(Verb.ROLL_BACK, timeout_s=timeout_s)

    def ask(self, verb: Verb, **options: Any) -> FleetReport:
        """Ask as `AsyncFleetClient.ask` does. Raises SettingsError where an event loop runs: await the other one."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            with asyncio.Runner(loop_factory=NameLoop) as runner:
                return runner.run(self._fleet.ask(verb, **options))
        raise SettingsError(
            "FleetClient is called where an event loop runs, which it would block; use AsyncFleetClient"
        )


def report_of(verb: Verb, answers: Iterable[ReplicaAnswer]) -> FleetReport:
    """Return the report over answers, in their order; a second URL of one worker has the outcome of the first."""
    given = tuple(answers)
    by_url = {one.url: one for one in given}
    same = {one.url: by_url[one.same_as] for one in given if one.same_as in by_url}
    outcomes = {url: (first.outcome, first.fault) for url, first in same.items()}
    replicas = tuple(
        replace(one, outcome=outcomes[one.url][0], fault=outcomes[one.url][1]) if one.url in outcomes else one
        for one in given
    )
    counted = [one for one in replicas if one.same_as is None]
    return FleetReport(
        verb=verb,
        replicas=replicas,
        merged=merge((one.outcome for one in counted), placements=(one.placement for one in counted)),
    )


class _Asking:
    """What is known so far of one fan-out."""

    def __init__(self, urls: tuple[str, ...], on_answer: Callable[[ReplicaAnswer], None]) -> None:
        self._urls, self._on_answer = urls, on_answer
        self._answers: dict[str, ReplicaAnswer] = {}
        self._claimed: dict[str, str] = {}

    def claim(self, epoch: str, url: str) -> str | None:
        """Return the URL at which the worker of this epoch is asked already; else it is asked at this one."""
        first = self._claimed.setdefault(epoch, url)
        return None if first == url else first

    def note(self, answer: ReplicaAnswer) -> None:
        self._answers[answer.url] = answer
        self._on_answer(answer)

    @property
    def answers(self) -> tuple[ReplicaAnswer, ...]:
        return tuple(self._answers[url] for url in self._urls)


async def _in_turn(conversation: Conversation, turns: asyncio.Semaphore, deadline_s: float) -> ReplicaAnswer:
    """Speak when it is its turn. Being cancelled is an answer, too: what is known by then."""
    try:
        async with asyncio.timeout_at(deadline_s):
            await turns.acquire()
    except TimeoutError:
        return conversation.give_up(Fault.OUT_OF_TIME, "its turn did not come within the time for all replicas")
    except asyncio.CancelledError:
        return conversation.give_up(Fault.INTERRUPTED, "interrupted before its turn")
    try:
        return await conversation.run(deadline_s)
    except asyncio.CancelledError:
        return conversation.give_up(Fault.INTERRUPTED, "interrupted; a worker that has the request goes on with it")
    finally:
        turns.release()


def _checked_again(request: Mapping[str, Any] | None, verb: Verb) -> Mapping[str, Any] | None:
    if request is not None and request.get("verb") != verb.value:
        raise SettingsError(
            f"what is to be asked again was a {request.get('verb')!r}; ask for that, not for {verb.value}"
        )
    return request


def _check_time(name: str, value_s: float) -> None:
    if not 0 < value_s <= 7 * 24 * 3600:
        raise SettingsError(f"{name} is {value_s:g}; it must be over 0 s and at most a week")


def _nobody(_: ReplicaAnswer) -> None:
    return None
