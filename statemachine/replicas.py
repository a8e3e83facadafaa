"""How the answers of several replicas become one: the worst wins, and replicas that differ are told. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ReplicaOutcome(Enum):
    """How a request ended at one replica, the worst first. The value is the answer's spelling.

    UNKNOWN: it was sent, and whether it was done is not known. REFUSED: it is known that it was not done.
    ANSWERED: it was only asked how it is.
    """

    ROLLBACK_FAILED = "rollback-failed"
    POISONED = "poisoned"
    UNKNOWN = "unknown"
    REFUSED = "refused"
    ROLLED_BACK = "rolled-back"
    APPLIED = "applied"
    COMMITTED = "committed"
    KEPT = "kept"
    PINNED = "pinned"
    SKIPPED = "skipped"
    ANSWERED = "answered"


# The smaller the number, the worse: the order of the enum is the precedence.
_RANK: Mapping[ReplicaOutcome, int] = {outcome: rank for rank, outcome in enumerate(ReplicaOutcome)}


class Fault(Enum):
    """What kept a replica from giving a proper answer. The value is the spelling in JSON."""

    REFUSED_CONNECTION = "connection-refused"  # nobody listens there
    UNREACHABLE = "unreachable"  # no such host, no route, or no connection within its time
    TLS = "tls"  # its certificate, or the handshake
    TIMEOUT = "timeout"  # connected, and no answer within its time
    DIED = "died"  # the connection ended before the whole answer was there
    RUBBISH = "rubbish"  # what came is no answer
    REDIRECTED = "redirected"  # it sends us elsewhere, where the token must not go
    UNAUTHORIZED = "unauthorized"  # no token, a wrong one, or not from there
    HTTP_ERROR = "http-error"  # any other status that is no answer
    ANOTHER_EPOCH = "another-epoch"  # another life of the worker answers than the one that was asked
    STALE = "stale"  # its rounds went on since it was looked at
    BUSY = "busy"  # it serves somebody else's request
    OUT_OF_TIME = "out-of-time"  # the time for all of them ended first
    INTERRUPTED = "interrupted"  # whoever asked stopped waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What a request came to over all replicas.

    outcome: the worst. mixed: whether replicas differ in it. counts: outcome -> how many replicas, the worst first.
    num_placements: how many different placements are in force, as far as they were told.
    """

    outcome: ReplicaOutcome
    mixed: bool
    counts: Mapping[ReplicaOutcome, int]
    num_placements: int


def worst(outcomes: Iterable[ReplicaOutcome]) -> ReplicaOutcome:
    """Return the worst of some outcomes. Raises ValueError without any."""
    return min(outcomes, key=_RANK.__getitem__)


def merge(outcomes: Iterable[ReplicaOutcome], *, placements: Iterable[str | None] = ()) -> Merged:
    """Return what the outcomes of all replicas come to, whatever their order. Raises ValueError without any.

    placements: digests of those in force; None where it is not known.
    """
    counted = Counter(outcomes)
    return Merged(
        outcome=worst(counted),
        mixed=len(counted) > 1,
        counts={outcome: counted[outcome] for outcome in ReplicaOutcome if outcome in counted},
        num_placements=len({one for one in placements if one is not None}),
    )
