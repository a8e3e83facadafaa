"""What a start puts before the gate, and what it writes about itself first; pure over values of the epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from residency.errors import JournalNewer, StreamInUse
from residency.statemachine.gate import Facts
from residency.statemachine.recovery import DecisionKind

if TYPE_CHECKING:
    from residency.errors import JournalError, WarmupFailed
    from residency.statemachine.recovery import Decision
    from residency.worker_setup import Setup


def gate_facts(
    setup: Setup,
    *,
    problem: JournalError | None,
    recovery: Decision | None,
    failed: WarmupFailed | None = None,
    rank_problem: str | None = None,
) -> Facts:
    """Return what the gate looks at.

    problem: why there is no journal. failed: what the warmup did, once tried. rank_problem: why the ranks did not come
    together.
    """
    movable = [spec for spec in setup.worker.specs if spec.name not in setup.configured and len(spec.modes) > 1]
    is_quarantined = recovery is not None and recovery.kind is DecisionKind.QUARANTINED
    return Facts(
        stream_holder=problem.fields["holder"] if isinstance(problem, StreamInUse) else None,
        journal_newer=str(problem) if isinstance(problem, JournalNewer) else None,
        journal_problem=None if problem is None or isinstance(problem, StreamInUse) else str(problem),
        num_ranks=setup.num_ranks,
        rank_problem=rank_problem,
        has_warmup=setup.has_warmup,
        has_workload=setup.workload is not None,
        num_movable=len(movable),
        fixed=tuple(setup.configured.items()),
        quarantine=recovery.reason if recovery is not None and is_quarantined else None,
        warmup_problem=None if failed is None else f"the warmup {failed.fields['problem']}",
    )


def started_payload(setup: Setup, recovery: Decision | None) -> dict[str, Any]:
    """Return the payload of the event that begins an epoch."""
    return {
        "version": setup.version,
        "fingerprint": setup.fingerprint,
        "fingerprint_digest": setup.fingerprint_digest,
        "initial_placement": setup.initial.digest,
        "configured": dict(setup.configured),
        "specs": msgspec.to_builtins(setup.worker.specs),
        "workload": msgspec.to_builtins(setup.workload),
        "device": msgspec.to_builtins(setup.worker.device()),
        "host": msgspec.to_builtins(setup.worker.host()),
        "recovery": None if recovery is None else _recovery_payload(recovery),
    }


def _recovery_payload(found: Decision) -> dict[str, Any]:
    return {
        "kind": found.kind.value,
        "reason": found.reason,
        "round": None if found.round is None else found.round.number,
        "differences": list(found.differences),
        "excluded": list(found.excluded),
    }
