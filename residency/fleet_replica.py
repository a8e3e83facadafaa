"""A request to one replica, from looking at it to knowing what became of the request, or that nobody knows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from residency.control import Verb
from residency.fleet_exchange import GRACE_S, Heard, Unheard, exchange
from residency.statemachine.replicas import Fault, ReplicaOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx2

TRIES_MAX = 3  # of one request in a row without an answer; each repetition has the same four values
PAUSE_S = 0.2  # before the first repetition; twice as long before each further one, and up to half as long again
WAIT_S = 20  # a replica says "not yet" at the latest then: silent connections are cut after a minute or so
POLL_S_MIN = 1.0  # even if a replica says "not yet" at once
REASON_CHARACTERS_MAX = 2_000

_OUTCOMES = {outcome.value: outcome for outcome in ReplicaOutcome if outcome is not ReplicaOutcome.ANSWERED}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAnswer:
    """What is known of one replica after a request.

    fault: why there is no proper answer, None if there is one. reason: in words, the replica's or ours. epoch, round,
    state, placement, ready, decision, control: as it told last, None if it never did. request: the four values that
    were sent, to be sent again; None if nothing was. repeated: whether the outcome is one that was journaled before.
    same_as: the URL at which the same worker was asked instead. num_tries: how often it was tried to send the request.
    """

    url: str
    outcome: ReplicaOutcome
    fault: Fault | None = None
    reason: str = ""
    epoch: str | None = None
    round: int | None = None
    state: str | None = None
    placement: str | None = None
    ready: bool | None = None
    decision: str | None = None
    control: Mapping[str, Any] | None = None
    request: Mapping[str, Any] | None = None
    repeated: bool = False
    same_as: str | None = None
    num_tries: int = 0
    elapsed_s: float = 0.0


class Conversation:
    """A request to one replica. `run` once; `give_up` at any time says what is known by then.

    claim: takes an epoch and returns the URL that already speaks with it, or None. told: is called with a line on what
    the replica is doing. again: the four values of an earlier request, which may have been done.
    """

    def __init__(
        self,
        http: httpx2.AsyncClient,
        url: str,
        verb: Verb,
        *,
        attempt: int,
        answer_s: float,
        claim: Callable[[str], str | None],
        told: Callable[[str], None],
        again: Mapping[str, Any] | None = None,
    ) -> None:
        self._http, self.url, self._verb, self._attempt = http, url, verb, attempt
        self._answer_s, self._claim, self._told = answer_s, claim, told
        self._four, self._may_be_done = again, again is not None
        self._num_tries = 0
        self._now: Mapping[str, Any] = {}
        self._begun_s = self._clock()

    async def run(self, deadline_s: float) -> ReplicaAnswer:
        """Speak until something is known, at most until a time of the loop's clock. Raises CancelledError only."""
        self._begun_s = self._clock()
        if self._four is None:
            if (ended := await self._look(deadline_s)) is not None:
                return ended
            self._four = {
                "verb": self._verb.value,
                "epoch": self._now["epoch"],
                "round": self._now["round"],
                "attempt": self._attempt,
            }
        return await self._ask(self._four, deadline_s)

    def give_up(self, fault: Fault, reason: str) -> ReplicaAnswer:
        """Return what is known if nothing more is done: unknown if the request may have been done, else refused."""
        unknown = self._may_be_done or self._verb is Verb.STATUS
        return self._answer(ReplicaOutcome.UNKNOWN if unknown else ReplicaOutcome.REFUSED, fault, reason)

    async def _look(self, deadline_s: float) -> ReplicaAnswer | None:
        """Ask for the status, which changes nothing. Return the end of the conversation, None if it goes on."""
        heard = await self._repeat({"verb": Verb.STATUS.value}, deadline_s, wait_s=None)
        if isinstance(heard, Unheard):
            return self._unheard(heard)
        problem = _status_problem(heard.body) if heard.status == 200 else "not yet"
        if problem is not None:
            return self.give_up(Fault.RUBBISH, f"what it answers is no status: {problem}")
        self._now = heard.body
        elsewhere = self._claim(heard.body["epoch"])
        if elsewhere is not None:
            return self._answer(ReplicaOutcome.ANSWERED, None, f"the same worker as {elsewhere}", same_as=elsewhere)
        return self._answer(ReplicaOutcome.ANSWERED, None, "") if self._verb is Verb.STATUS else None

    async def _ask(self, four: Mapping[str, Any], deadline_s: float) -> ReplicaAnswer:
        """Send the request until there is an outcome. Sending it again is safe: the four make it the same request."""
        while True:
            was_sent_before, begun_s = self._may_be_done, self._clock()
            heard = await self._repeat({**four, "args": {}}, deadline_s, wait_s=WAIT_S)
            if isinstance(heard, Unheard):
                return self._unheard(heard)
            if heard.status == 200:
                return self._judge(four, heard.body, was_sent_before=was_sent_before or self._num_tries > 1)
            if heard.body.get("request") != four:
                return self.give_up(Fault.RUBBISH, "it says 'not yet' to another request")
            self._now = {**self._now, **_told(heard.body)}
            working, elapsed_s = heard.body.get("working"), heard.body.get("elapsed_s")
            self._told(f"{working}, {elapsed_s} s")
            await asyncio.sleep(max(0.0, min(begun_s + POLL_S_MIN, deadline_s) - self._clock()))

    async def _repeat(self, request: Mapping[str, Any], deadline_s: float, *, wait_s: int | None) -> Heard | Unheard:
        """Send a request until an answer is heard, a few times at most."""
        heard = Unheard(Fault.OUT_OF_TIME, "the time for all replicas is over", was_sent=False)
        is_asking = wait_s is not None
        for index in range(TRIES_MAX):
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                return heard
            limit_s = min(left_s, (wait_s or 0) + (GRACE_S if is_asking else self._answer_s))
            try:
                answer = await self._exchange(request, limit_s=limit_s, wait_s=wait_s)
                self._may_be_done = self._may_be_done or is_asking
                return answer
            except Unheard as unheard:
                heard = unheard
                if is_asking and heard.was_sent and not heard.is_refusal:
                    self._may_be_done = True
            # A replica that does not even tell its status in time is not asked for it again.
            if not heard.is_worth_repeating or (heard.fault is Fault.TIMEOUT and not is_asking):
                return heard
            pause_s = PAUSE_S * 2**index * (1 + random.random() / 2)
            if index + 1 == TRIES_MAX or self._clock() + pause_s >= deadline_s:
                return heard
            await asyncio.sleep(pause_s)
        return heard

    async def _exchange(self, request: Mapping[str, Any], *, limit_s: float, wait_s: int | None) -> Heard:
        if wait_s is not None:
            self._num_tries += 1
            wait_s = max(1, min(wait_s, int(limit_s / 2)))
        try:
            return await exchange(self._http, self.url, request, limit_s=limit_s, wait_s=wait_s)
        except asyncio.CancelledError:
            # It may have left.
            self._may_be_done = self._may_be_done or self._verb.value == request["verb"] != Verb.STATUS.value
            raise

    def _unheard(self, heard: Unheard) -> ReplicaAnswer:
        if heard.is_refusal and not self._may_be_done:
            return self._answer(ReplicaOutcome.REFUSED, heard.fault, heard.text)
        return self.give_up(heard.fault, heard.text)

    def _judge(self, four: Mapping[str, Any], body: Mapping[str, Any], *, was_sent_before: bool) -> ReplicaAnswer:
        """Return what an answer with an outcome comes to."""
        outcome, reason = _OUTCOMES.get(str(body.get("outcome"))), str(body.get("reason"))
        problem = _status_problem(body)
        if outcome is None or problem is not None:
            return self.give_up(Fault.RUBBISH, f"what it answers is no outcome: {problem or body.get('outcome')!r}")
        if body.get("request") != four:
            return self.give_up(Fault.RUBBISH, "what it answers is the outcome of another request")
        self._now = {**self._now, **_told(body)}
        is_stale = outcome is ReplicaOutcome.REFUSED and reason.startswith("stale:")
        if body["epoch"] != four["epoch"]:
            if not is_stale:
                return self.give_up(Fault.ANOTHER_EPOCH, f"another life of the worker says {outcome.value}: {reason}")
            return self._of_another_life(body, reason, was_sent_before=was_sent_before)
        fault = None
        if is_stale:
            fault = Fault.STALE
        elif outcome is ReplicaOutcome.REFUSED and reason.startswith("busy:"):
            fault = Fault.BUSY
        return self._answer(outcome, fault, reason, repeated=body.get("repeated") is True)

    def _of_another_life(self, body: Mapping[str, Any], reason: str, *, was_sent_before: bool) -> ReplicaAnswer:
        """Return what became of a request whose worker has been restarted, as its journal tells the new life."""
        if not was_sent_before:
            return self._answer(ReplicaOutcome.REFUSED, Fault.ANOTHER_EPOCH, reason)
        became = body.get("became")
        if not isinstance(became, dict):
            return self.give_up(
                Fault.ANOTHER_EPOCH, f"the worker was restarted, and its journal knows nothing: {reason}"
            )
        text = f"the worker was restarted; its journal says: {became.get('why')}"
        outcome = _OUTCOMES.get(str(became.get("outcome")))
        if outcome is None and became.get("done") is False:
            outcome = ReplicaOutcome.REFUSED
        return self._answer(outcome or ReplicaOutcome.UNKNOWN, Fault.ANOTHER_EPOCH, text, repeated=True)

    def _answer(
        self,
        outcome: ReplicaOutcome,
        fault: Fault | None,
        reason: str,
        *,
        repeated: bool = False,
        same_as: str | None = None,
    ) -> ReplicaAnswer:
        now = self._now
        return ReplicaAnswer(
            url=self.url,
            outcome=outcome,
            fault=fault,
            reason=reason[:REASON_CHARACTERS_MAX],
            epoch=now.get("epoch"),
            round=now.get("round"),
            state=now.get("state"),
            placement=now.get("placement"),
            ready=now.get("ready"),
            decision=now.get("decision"),
            control=now.get("control"),
            request=self._four if self._may_be_done or self._num_tries else None,
            repeated=repeated,
            same_as=same_as,
            num_tries=self._num_tries,
            elapsed_s=round(self._clock() - self._begun_s, 3),
        )

    @staticmethod
    def _clock() -> float:
        return asyncio.get_running_loop().time()


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "epoch": str,
    "round": int,
    "state": str,
    "placement": str,
    "ready": bool,
    "decision": (str, type(None)),
    "control": dict,
}
_LENGTH_MAX = 200  # of an epoch, a state or a digest


def _told(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an answer says of the replica, and nothing else."""
    return {name: body[name] for name in _KINDS if name in body and _is_right(name, body[name])}


def _status_problem(body: Mapping[str, Any]) -> str | None:
    """Return what is wrong with what an answer says of the replica, None if nothing is."""
    needed = ("epoch", "round", "state", "placement")
    wrong = [name for name in needed if not _is_right(name, body.get(name))]
    return f"{', '.join(wrong)} missing or of a wrong kind" if wrong else None


def _is_right(name: str, value: object) -> bool:
    if isinstance(value, bool) and name != "ready":
        return False
    return isinstance(value, _KINDS[name]) and not (isinstance(value, str) and len(value) > _LENGTH_MAX)
