"""How a start is agreed on with the other ranks: what each found goes around, and all do what follows from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from residency.errors import RankFailed
from residency.statemachine.gate import Facts, Gate, check_gate
from residency.statemachine.ranks_start import (
    StartReport,
    agree,
    decision_of,
    prepared_facts,
    usable_rounds,
)
from residency.statemachine.ranks_together import Together
from residency.statemachine.recovery import Decision

if TYPE_CHECKING:
    from residency.journal.store import Journal
    from residency.journal.views import StreamView
    from residency.statemachine.source import Source
    from residency.worker_setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What this rank does.

    gate: closed for all. pinned_by: the rank whose kill switch is on. recovery: what follows.
    """

    gate: Gate | None
    pinned_by: int | None
    recovery: Decision | None


def agree_on_start(
    setup: Setup,
    *,
    pinned: bool,
    gate: Gate | None,
    recovery: Decision | None,
    view: StreamView | None,
    journal: Journal | None,
) -> Start:
    """Return what all ranks do, after exchanging what each found; what one finds alone without any others.

    Raises JournalError if the own journal cannot be read, before anybody waits for this rank.
    """
    ranks = setup.ranks
    if not isinstance(ranks, Together):
        return Start(gate=gate, pinned_by=ranks.rank if pinned else None, recovery=recovery)
    facts = {} if journal is None or view is None else prepared_facts(journal.events(stream=setup.stream))
    rounds = () if view is None else _rounds(setup, view, facts)
    report = StartReport(
        alike=_alike(setup),
        pinned=pinned,
        gate=None if gate is None else (gate.reason.value, gate.detail),
        rounds=rounds,
        **_of(recovery),
    )
    try:
        found = ranks.exchange_start(report)
        agreement = agree([msgspec.convert(one, StartReport) for one in found])
    except RankFailed as error:
        return Start(gate=check_gate(Facts(rank_problem=str(error))), pinned_by=None, recovery=recovery)
    finally:
        ranks.begun()
    if recovery is not None and view is not None:
        recovery = decision_of(agreement, recovery, view, facts)
    return Start(gate=agreement.gate, pinned_by=agreement.pinned_by, recovery=recovery)


def is_the_same_everywhere(setup: Setup, source: Source) -> bool:
    """Return whether all ranks begin the round that this one would. Raises RankFailed."""
    found = setup.ranks.consult("source", [source.kind.value, source.from_round])
    return all(one == found[0] for one in found)


def _rounds(setup: Setup, view: StreamView, facts: dict[tuple[str, int], Any]) -> tuple[Any, ...]:
    return usable_rounds(view, facts, fingerprint_digest=setup.fingerprint_digest, policy=setup.policy)


def _of(recovery: Decision | None) -> dict[str, Any]:
    if recovery is None:
        return {}
    one = recovery.round
    return {
        "kind": recovery.kind.value,
        "from_round": None if one is None else (one.epoch, one.number),
        "reserve_factor": recovery.reserve_factor,
    }


def _alike(setup: Setup) -> str:
    """Return a digest of what ranks have to agree on before they can run the same requests and rounds."""
    parts = [setup.version, setup.workload, setup.workloads, setup.policy]
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()
