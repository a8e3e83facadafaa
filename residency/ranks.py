"""Attaching one rank of a worker whose pipeline runs in several processes."""

from __future__ import annotations

import itertools
import platform
from dataclasses import dataclass, field
from typing import Any

from residency.errors import SettingsError
from residency.gpu.collective_watch import Dealings
from residency.gpu.collectives import GroupFacts, StoreTransport, group_facts, refuse_to_join
from residency.statemachine.ranks import Alone, RankLimits, Workspaces
from residency.statemachine.ranks_together import Together
from residency.statemachine.ranks_words import abort_word, ended

_attached: dict[tuple[int, ...], itertools.count[int]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes that run one pipeline together; every one attaches its own part, and all decide as one.

    group: a torch.distributed group, None for the whole world. store: a torch.distributed store that all of them reach,
    None for the one that torch.distributed was initialized with. rank, size: with a store, where torch.distributed is
    not initialized. workspaces: what the ranks build together, if a
    measurement has to drop it. limits: how long they wait for each other. host: the name of this machine, by which
    ranks are told to share its memory; None for the name it has.

    It has to be asked for: in a world of several processes some pipelines run on all of them, and some on each of them.
    """

    group: Any = None
    store: Any = None
    rank: int | None = None
    size: int | None = None
    workspaces: Workspaces | None = None
    limits: RankLimits = field(default_factory=RankLimits)
    host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one attach stands in its group, the same name on all ranks."""

    facts: GroupFacts
    name: str
    given: Ranks

    def open(self) -> Together:
        """Return the other ranks. Raises RankFailed if the store cannot be reached."""
        limits, given = self.given.limits, self.given
        last_words: list[Together] = []
        dealings = Dealings(
            step_s=limits.step_s,
            silence_s=limits.silence_s,
            grace_s=limits.grace_s,
            store_s=limits.store_s,
            ended=ended,
            abort=lambda rank, why: abort_word(rank, why, pinned=False),
            interrupt=None if given.workspaces is None else given.workspaces.interrupt,
            on_fatal=lambda why: last_words[0].on_fatal(why),
        )
        transport = StoreTransport(
            self.facts.store, rank=self.facts.rank, size=self.facts.size, name=self.name, dealings=dealings
        )
        host = given.host or platform.node()
        together = Together(transport, host=host, limits=limits, workspaces=given.workspaces)
        last_words.append(together)
        return together

    def refuse(self, why: str) -> None:
        """Tell the others that this rank does not come. Raises nothing."""
        refuse_to_join(self.facts, self.name, why, answer_s=self.given.limits.store_s)


def find_place(given: object) -> Place | None:
    """Return where this process stands, None without other ranks. Raises SettingsError."""
    if given is None:
        return None
    if not isinstance(given, Ranks):
        raise SettingsError(f"ranks is a {type(given).__name__}; pass residency.Ranks(group=...), or leave it out")
    facts = group_facts(given.group, store=given.store, rank=given.rank, size=given.size)
    # All ranks of a group attach in one order, so that they count alike.
    number = next(_attached.setdefault(facts.members, itertools.count()))
    return Place(facts=facts, name=f"residency/{'.'.join(map(str, facts.members))}/{number}", given=given)


def open_ranks(place: Place | None) -> Alone:
    """Return the other ranks; one that is alone without any."""
    return Alone() if place is None else place.open()
