"""Every reason to do nothing, by name, checked before any cost is paid."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class GateReason(Enum):
    """Why a worker serves its initial placement without a round. The value is the journal's spelling."""

    STREAM_IN_USE = "stream-in-use"
    JOURNAL_NEWER = "journal-newer"
    JOURNAL_UNUSABLE = "journal-unusable"
    SEVERAL_RANKS = "several-ranks"
    RANK_FAILED = "rank-failed"
    RANKS_DIFFER = "ranks-differ"
    NO_WARMUP = "no-warmup"
    NO_WORKLOAD = "no-workload"
    NOTHING_TO_DECIDE = "nothing-to-decide"
    QUARANTINED = "quarantined"
    WARMUP_FAILED = "warmup-failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the gate looks at. Every text is None where there is nothing to say.

    stream_holder: who else holds the stream. journal_newer, journal_problem: why the journal cannot be used.
    num_ranks: of the process group, if nobody said which of them run this pipeline together. rank_problem: what kept
    them from coming together. ranks_differ: in what they were attached differently. num_movable: components that
    residency may move, and that have somewhere to go. fixed: component -> why it is not one of them. quarantine: what
    recovery says. warmup_problem: what a warmup that has been tried did.
    """

    stream_holder: str | None = None
    journal_newer: str | None = None
    journal_problem: str | None = None
    num_ranks: int = 1
    rank_problem: str | None = None
    ranks_differ: str | None = None
    has_warmup: bool = True
    has_workload: bool = True
    num_movable: int = 1
    fixed: tuple[tuple[str, str], ...] = ()
    quarantine: str | None = None
    warmup_problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A closed gate: the reason, what was found, and what would open it."""

    reason: GateReason
    detail: str
    remedy: str

    @property
    def text(self) -> str:
        """One line for people."""
        return f"{self.reason.value}: {self.detail}; {self.remedy}"


def check_gate(facts: Facts) -> Gate | None:
    """Return the first reason to do nothing, or None if a round may run. Pure, and costs nothing."""
    for reason, detail_of, remedy in _TABLE:
        detail = detail_of(facts)
        if detail is not None:
            return Gate(reason=reason, detail=detail, remedy=remedy)
    return None


def _ranks(facts: Facts) -> str | None:
    if facts.num_ranks <= 1:
        return None
    return f"the process group has {facts.num_ranks} ranks, and nobody said which of them run this pipeline together"


def _nothing_to_decide(facts: Facts) -> str | None:
    if facts.num_movable:
        return None
    reasons = ", ".join(f"{name} ({why})" for name, why in facts.fixed)
    return f"no component may be moved: {reasons or 'the pipeline has none with weights'}"


# (reason, what was found if it applies, remedy): the first that applies decides, so what is known for nothing and
# concerns other processes comes first, and what only a warmup can tell comes last.
_TABLE: tuple[tuple[GateReason, Callable[[Facts], str | None], str], ...] = (
    (
        GateReason.STREAM_IN_USE,
        lambda facts: f"the stream is held by {facts.stream_holder}" if facts.stream_holder is not None else None,
        "give each worker its own name (attach(name=...) or RESIDENCY_NAME)",
    ),
    (
        GateReason.JOURNAL_NEWER,
        lambda facts: facts.journal_newer,
        "upgrade residency, or name another journal",
    ),
    (
        GateReason.JOURNAL_UNUSABLE,
        lambda facts: facts.journal_problem,
        "make the journal writable, or name another one (journal=... or RESIDENCY_JOURNAL)",
    ),
    (
        GateReason.SEVERAL_RANKS,
        _ranks,
        "pass attach(ranks=residency.Ranks(group=...)) with the group of those that do, itself alone if it is one",
    ),
    (GateReason.RANK_FAILED, lambda facts: facts.rank_problem, "see the log of that rank; restart all of them"),
    (GateReason.RANKS_DIFFER, lambda facts: facts.ranks_differ, "attach all ranks alike"),
    (
        GateReason.NO_WARMUP,
        lambda facts: None if facts.has_warmup else "there is no warmup to measure with",
        "pass attach(warmup=...), a function that runs one request of the shape it is given",
    ),
    (
        GateReason.NO_WORKLOAD,
        lambda facts: None if facts.has_workload else "the default request shape is not known",
        "pass attach(workload=...)",
    ),
    (GateReason.NOTHING_TO_DECIDE, _nothing_to_decide, "configure fewer components (modes=...)"),
    (
        GateReason.QUARANTINED,
        lambda facts: facts.quarantine,
        "see 'residency quarantine list'; change what differs (a higher cap, another version), or clear it there",
    ),
    (
        GateReason.WARMUP_FAILED,
        lambda facts: facts.warmup_problem,
        "make the warmup run one request of the shape it is given and return its output",
    ),
)
