"""What `start()` decided, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from residency.gpu.placement import Placement


class Decision(Enum):
    """How a start ended; after each of them the worker is ready."""

    RESTORED = "restored"
    COMMITTED = "committed"
    KEPT = "kept"
    ROLLED_BACK = "rolled-back"
    PINNED = "pinned"
    GATED = "gated"
    WITHOUT_JOURNAL = "without-journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a start decided and what it cost.

    reason: one line for people. error: text of the failure behind it, if there was one.
    placement: in force now. num_probes, num_requests: measured requests this start ran.
    ready_ms: wall time of start(); journal_ms: of it, time spent writing the journal.
    """

    decision: Decision
    reason: str
    epoch: str
    round: int
    placement: Placement
    journal: str | None
    num_probes: int
    num_requests: int
    ready_ms: float
    journal_ms: float
    error: str | None = None
    details: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values, with the placement's digest beside it."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {**plain, "placement_digest": self.placement.digest}
