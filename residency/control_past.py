"""What became of a control request that an earlier life of the worker was asked, by the journal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from residency.errors import JournalError
from residency.journal.events import EventType, payload
from residency.journal.fold import fold_stream
from residency.statemachine.deaths import Death
from residency.statemachine.states import SETTLED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from residency.journal.events import Event
    from residency.journal.store import Journal
    from residency.journal.views import EpochView

_SETTLED = frozenset(state.value for state in SETTLED)


def what_became(journal: Journal, *, stream: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the journal knows of a request, {verb, epoch, round, attempt}; None if it knows no such epoch.

    outcome: the one that was journaled, None without one. round, state: of the first round of that epoch after the one
    the request names, None if none was begun. done: False if it is sure that the request was not done. why: in words.
    Read-only.
    """
    outcomes: list[Mapping[str, Any]] = []

    def watched() -> Iterator[Event]:
        for event in journal.events(stream=stream):
            if event.type == EventType.CONTROL.value and event.epoch == request["epoch"]:
                told = payload(event)
                if _is_same(told.get("request"), request):
                    outcomes.append(told["outcome"])
            yield event

    try:
        view = fold_stream(watched(), stream)
    except JournalError:
        return None
    if outcomes:
        last = outcomes[-1]
        told = {name: last.get(name) for name in ("outcome", "round", "state")}
        return {**told, "done": None, "why": last.get("reason")}
    epoch = next((one for one in view.epochs if one.epoch == request["epoch"]), None)
    return None if epoch is None else _unanswered(epoch, after_round=request["round"])


def _is_same(told: object, request: Mapping[str, Any]) -> bool:
    return isinstance(told, dict) and all(told.get(name) == request[name] for name in ("verb", "round", "attempt"))


def _unanswered(epoch: EpochView, *, after_round: int) -> dict[str, Any]:
    found = next((one for one in epoch.rounds if one.number > after_round), None)
    ending = _ending(epoch)
    if found is None:
        why = f"no round was begun for it; {ending}"
        return {"outcome": None, "round": None, "state": None, "done": False if epoch.ended else None, "why": why}
    is_settled = found.state in _SETTLED
    how = f"ended in {found.state}, and no outcome was journaled" if is_settled else f"never got beyond {found.state}"
    return {
        "outcome": None,
        "round": found.number,
        "state": found.state,
        "done": False if epoch.ended and not is_settled else None,
        "why": f"round {found.number} {how}; {ending}",
    }


def _ending(epoch: EpochView) -> str:
    """Return in words how an epoch ended."""
    if epoch.poisoned is not None:
        return f"it lost the device: {epoch.poisoned.get('problem')}"
    if (death := Death.of(epoch)) is not None:
        return f"it died, which blames {death.blames}: {death.why}"
    if epoch.stopped is not None:
        return f"it stopped ({epoch.stopped.get('signal') or epoch.stopped.get('reason')})"
    return "it is not known to have ended"
