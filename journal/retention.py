"""What of a stream may go and what must stay: a pure choice of whole epochs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from residency.journal.views import EpochView, RoundView, StreamView

DAY_NS = 86_400 * 10**9

# Of those under which a worker once ran, and does not in the epochs that are kept anyway. A worker that goes back
# further than that is measured anew.
FINGERPRINTS_KEPT = 16

_WORD = re.compile(r"(?P<days>[0-9]+)\s*d(?:\s*,\s*(?P<epochs>[0-9]+))?")

# The journal's own spelling, as far as it decides what recovery can still need.
_COMMITTED, _ROLLED_BACK, _PLAN, _EARLY, _SURVIVED = "committed", "rolled-back", "plan", "early", "survived"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much of a stream is kept: every epoch of the last days, and the last epochs whenever they were.

    Raises ValueError if there would be nothing left.
    """

    days: int = 90  # of incidents that somebody still asks about
    epochs: int = 50  # of a worker that is seldom started

    def __post_init__(self) -> None:
        if self.days < 0 or self.epochs < 1:
            raise ValueError(f"retention of {self.days} days and {self.epochs} epochs; keep at least 1 epoch")

    @classmethod
    def parse(cls, text: str) -> Retention | None:
        """Return what '90d', '90d,50' or 'off' say; None for 'off'.

        Raises:
            ValueError: it says something else.
        """
        word = text.strip().lower()
        if word == "off":
            return None
        found = _WORD.fullmatch(word)
        if found is None:
            raise ValueError(f"{text!r} is no retention; write days as '90d', days and epochs as '90d,50', or 'off'")
        default = cls()
        return cls(days=int(found["days"]), epochs=int(found["epochs"] or default.epochs))

    def since_ns(self, now_ns: int) -> int:
        """Return the time up to which epochs may go, ns since the Unix epoch."""
        return now_ns - self.days * DAY_NS


def removable(view: StreamView, *, since_ns: int | None, num_kept: int) -> tuple[EpochView, ...]:
    """Return the epochs of a stream that may go, oldest first. Pure.

    An epoch stays if it is one of the last `num_kept`, if its last event came at `since_ns` or later, if it may be
    alive or was never closed, or if a start can still need it (`needed`).
    """
    old = [
        epoch
        for epoch in view.epochs[: max(0, len(view.epochs) - num_kept)]
        if (since_ns is None or epoch.last_at < since_ns) and _is_closed(epoch)
    ]
    if not old:
        return ()
    kept = needed(view, num_recent=num_kept)
    return tuple(epoch for epoch in old if epoch.epoch not in kept)


def needed(view: StreamView, *, num_recent: int) -> frozenset[str]:
    """Return the ids of the epochs on which a decision of a start can rest. Pure.

    For each fingerprint of the last `num_recent` epochs, and for the last sixteen others: of every placement the last
    commit and the measurements that it rests on, every death and every rollback blamed on it since, and what forgave
    them; and the last plan of all. Then the last deaths in a row, and whatever an operator cleared.
    """
    groups: dict[str, _Group] = {}
    for epoch in view.epochs:
        digest = str(epoch.started.get("fingerprint_digest", ""))
        # The latest comes last.
        group = groups[digest] = groups.pop(digest, _Group())
        group.add(epoch)
    recent = {str(epoch.started.get("fingerprint_digest", "")) for epoch in view.epochs[-num_recent:]}
    others = [digest for digest in groups if digest not in recent]
    found: set[str] = set(_last_in_a_row(view))
    for digest in (*recent, *others[-FINGERPRINTS_KEPT:]):
        found |= groups[digest].needed()
    found.update(epoch.epoch for epoch in view.epochs if epoch.clearings)
    return frozenset(found)


@dataclass(slots=True)
class _Group:
    """The epochs under one fingerprint: placement -> ids of the epochs that matter for it."""

    commits: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    round_deaths: dict[str, list[str]] = field(default_factory=dict)
    serving_deaths: dict[str, list[str]] = field(default_factory=dict)
    forgiven: dict[str, str] = field(default_factory=dict)
    ever_early: set[str] = field(default_factory=set)
    last_plan: str | None = None

    def add(self, epoch: EpochView) -> None:
        for one in epoch.rounds:
            self._add_round(one, epoch)
        death = _object(_object(epoch.recovered).get("death"))
        ended_well = epoch.stopped is not None and epoch.poisoned is None
        if epoch.serving is not None and (ended_well or death.get("kind") == _SURVIVED):
            placement = str(epoch.serving.get("placement", epoch.placement))
            self.serving_deaths.pop(placement, None)
            if placement in self.ever_early:
                self.forgiven[placement] = epoch.epoch
        blamed = death.get("placement")
        if death.get("blames") == _PLAN and isinstance(blamed, str):
            is_early = death.get("kind") == _EARLY
            deaths = self.serving_deaths if is_early else self.round_deaths
            deaths.setdefault(blamed, []).append(epoch.epoch)
            self.ever_early |= {blamed} if is_early else set()

    def _add_round(self, one: RoundView, epoch: EpochView) -> None:
        if one.placement is None:
            return
        self.last_plan = epoch.epoch
        if one.state == _COMMITTED:
            self.commits[one.placement] = epoch.epoch
            self.round_deaths.pop(one.placement, None)
            self.failed.pop(one.placement, None)
            if _object(one.plan).get("inputs"):
                self.origins[one.placement] = epoch.epoch
        elif one.state == _ROLLED_BACK and _object(_object(one.outcome).get("verdict")).get("blames") == _PLAN:
            self.failed.setdefault(one.placement, []).append(epoch.epoch)

    def needed(self) -> set[str]:
        single = (self.commits, self.origins, self.forgiven)
        found = {epoch for placements in single for epoch in placements.values()}
        for held in (self.failed, self.round_deaths, self.serving_deaths):
            found.update(epoch for epochs in held.values() for epoch in epochs)
        return found if self.last_plan is None else {*found, self.last_plan}


def _last_in_a_row(view: StreamView) -> Iterable[str]:
    """Yield the epochs at the end that died early while serving, and the one before them that did not.

    That is at least the last one that is over, whose fingerprint the next start compares with its own.
    """
    for epoch in reversed(view.epochs):
        if not epoch.ended:
            continue
        yield epoch.epoch
        if _object(_object(epoch.recovered).get("death")).get("kind") != _EARLY:
            return


def _is_closed(epoch: EpochView) -> bool:
    """Whether nothing is left in it for a later start to close."""
    if any(one.open_intents for one in epoch.rounds) or not epoch.ended:
        return False
    # An orderly end does not say what a lost device, or a move cut off, is blamed on: the next start does.
    unsettled = any(one.num_intents and one.state not in (_COMMITTED, _ROLLED_BACK) for one in epoch.rounds)
    return epoch.recovered is not None or (epoch.poisoned is None and not unsettled)


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
