"""The decision over ranks as a small model: every order of messages, losses, delays, crashes and restarts.

Ranks prepare durably, vote, and take what one register of the group's store says; whoever voted and cannot reach the
store ends. A life is one start of all ranks, with a store of its own; facts are what a rank's journal keeps. Loss of a
message is an operation of which its rank never learns whether it took effect; delay is that anybody may give up waiting
at any time; a crash may come between any two steps, of a rank or of the store. `explore` visits every state there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INITIAL = 0  # the placement that nobody has to commit


class Variant(Enum):
    """What is explored: the protocol, or one with something left out."""

    CHOSEN = "chosen"
    ONE_PHASE = "commits as soon as it has validated, and tells the others"
    NO_REGISTER = "commits on seeing all votes, rolls back on waiting too long"
    UNDECIDED_ROLLS_BACK = "rolls back, instead of ending, if the store is lost after its vote"
    OWN_MEMORY = "restores what its own journal committed last"
    VOTES_BEFORE_PREPARING = "votes first, and writes that it is prepared afterwards"


class Phase(Enum):
    """Where a rank is."""

    JOINING = "joining"
    WORKING = "working"  # measures, plans, applies, validates
    PREPARED = "prepared"
    VOTED = "voted"
    DECIDED = "decided"  # to commit, which its journal does not say yet
    SERVING = "serving"
    ENDED = "ended"


class Fact(NamedTuple):
    """What a journal keeps of a round."""

    round: int
    value: int
    committed: bool


class Rank(NamedTuple):
    """One rank: its life, phase and number of its round in it, what it serves, and its journal."""

    life: int
    phase: Phase
    number: int
    value: int
    proposal: int
    facts: tuple[Fact, ...]


class Store(NamedTuple):
    """The group's store in one life: per round the votes and the register; what ranks reported when all had joined."""

    up: bool
    votes: tuple[frozenset[int], ...]
    register: tuple[str, ...]
    reports: tuple[tuple[Fact, ...], ...] | None


class World(NamedTuple):
    """Everything: the ranks, and a store for every life."""

    ranks: tuple[Rank, ...]
    stores: tuple[Store, ...]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How far to explore."""

    num_ranks: int
    num_lives: int
    num_rounds: int  # of one life


@dataclass(kw_only=True)
class Found:
    """What an exploration found. broken: the first world that breaks an invariant, with the way there."""

    num_states: int = 0
    broken: str | None = None
    way: tuple[str, ...] = ()
    committed: int = 0  # worlds in which all ranks serve one committed value
    restored: int = 0  # of them, in a later life
    survived: int = 0  # worlds in which a rank has ended and another serves


def agreed(reports: tuple[tuple[Fact, ...], ...]) -> int:
    """The newest round that all prepared and at least one committed; INITIAL if there is none."""
    common = set.intersection(*({(one.round, one.value) for one in facts} for facts in reports))
    decided = {(one.round, one.value) for facts in reports for one in facts if one.committed}
    return max(common & decided, default=(0, INITIAL))[1]


class Model:
    """The steps that are possible in a world."""

    def __init__(self, variant: Variant, bounds: Bounds) -> None:
        self.variant, self.bounds = variant, bounds

    def begin(self) -> World:
        """All ranks come to the first life."""
        rank = Rank(1, Phase.JOINING, 0, INITIAL, INITIAL, ())
        rounds = self.bounds.num_rounds
        store = Store(True, (frozenset(),) * rounds, ("",) * rounds, None)
        return World((rank,) * self.bounds.num_ranks, (store,) * self.bounds.num_lives)

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Every step that anybody can take: its name, and the world after it."""
        everyone, stores = world
        for index, store in enumerate(stores):
            life = index + 1
            if store.reports is None and all(one.life == life and one.phase is Phase.JOINING for one in everyone):
                reports = tuple(one.facts for one in everyone)
                yield (
                    f"all have joined life {life}",
                    World(everyone, _put(stores, life, store._replace(reports=reports))),
                )
            if store.up and store.reports is not None and any(one.life == life for one in everyone):
                yield f"the store of life {life} is lost", World(everyone, _put(stores, life, store._replace(up=False)))
        for who, rank in enumerate(everyone):
            for name, after, store in self._of(who, rank, stores[rank.life - 1]):
                ranks = everyone[:who] + (after,) + everyone[who + 1 :]
                yield f"rank {who} {name}", World(ranks, _put(stores, rank.life, store))

    def _of(self, who: int, rank: Rank, store: Store) -> Iterator[tuple[str, Rank, Store]]:
        ended = rank._replace(phase=Phase.ENDED, value=INITIAL, proposal=INITIAL, number=0)
        if rank.phase is Phase.ENDED:
            if rank.life < self.bounds.num_lives:
                yield "starts again", rank._replace(life=rank.life + 1, phase=Phase.JOINING), store
            return
        yield "crashes, or gives up and ends", ended, store
        if rank.phase is Phase.JOINING and store.up and store.reports is not None:
            yield "learns what was agreed", self._joined(who, rank, store.reports), store
        elif rank.phase is Phase.WORKING:
            yield from self._working(who, rank, store)
        elif rank.phase is Phase.PREPARED:
            yield from self._voting(who, rank, store, ended)
        elif rank.phase is Phase.VOTED:
            yield from self._deciding(rank, store, ended)
        elif rank.phase is Phase.DECIDED:
            yield "writes its commit", self._committed(rank), store
        elif rank.phase is Phase.SERVING and rank.number + 1 < self.bounds.num_rounds:
            proposal = rank.life * 10 + rank.number + 1
            yield "begins a round", rank._replace(phase=Phase.WORKING, number=rank.number + 1, proposal=proposal), store

    def _joined(self, who: int, rank: Rank, reports: tuple[tuple[Fact, ...], ...]) -> Rank:
        base = agreed(reports)
        if self.variant is Variant.OWN_MEMORY:
            base = max(((one.round, one.value) for one in reports[who] if one.committed), default=(0, INITIAL))[1]
        return rank._replace(phase=Phase.WORKING, proposal=base or rank.life * 10)

    def _working(self, who: int, rank: Rank, store: Store) -> Iterator[tuple[str, Rank, Store]]:
        if self.variant is Variant.ONE_PHASE:
            yield "commits", self._committed(rank), store
        elif self.variant is Variant.VOTES_BEFORE_PREPARING:
            yield from self._voting(who, rank, store, rank._replace(phase=Phase.ENDED))
        else:
            prepared = Fact(_number(rank), rank.proposal, False)
            yield "prepares", rank._replace(phase=Phase.PREPARED, facts=(*rank.facts, prepared)), store
        yield "fails", self._served_as_before(rank), _cas(store, rank.number, "abort")

    def _voting(self, who: int, rank: Rank, store: Store, ended: Rank) -> Iterator[tuple[str, Rank, Store]]:
        votes = store.votes[rank.number] | {who}
        voted = store._replace(votes=store.votes[: rank.number] + (votes,) + store.votes[rank.number + 1 :])
        if store.up:
            yield "votes", rank._replace(phase=Phase.VOTED), voted
            yield "votes, and never learns that it did", ended, voted
        yield "gives up before its vote", self._served_as_before(rank), _cas(store, rank.number, "abort")

    def _deciding(self, rank: Rank, store: Store, ended: Rank) -> Iterator[tuple[str, Rank, Store]]:
        all_in = len(store.votes[rank.number]) == self.bounds.num_ranks
        if self.variant is Variant.NO_REGISTER:
            if store.up and all_in:
                yield "sees all votes", rank._replace(phase=Phase.DECIDED), store
            yield "waits no longer", self._served_as_before(rank), store
            return
        if not store.up:
            if self.variant is Variant.UNDECIDED_ROLLS_BACK:
                yield "rolls back, undecided", self._served_as_before(rank), store
            return  # it can only end
        for word in ("commit", "abort") if all_in else ("abort",):
            after = _cas(store, rank.number, word)
            yield f"asks for {word}", self._told(rank, after.register[rank.number]), after
            yield f"asks for {word}, and never learns the answer", ended, after
        if store.register[rank.number]:
            yield "reads the register", self._told(rank, store.register[rank.number]), store

    def _told(self, rank: Rank, word: str) -> Rank:
        return rank._replace(phase=Phase.DECIDED) if word == "commit" else self._served_as_before(rank)

    def _committed(self, rank: Rank) -> Rank:
        number = _number(rank)
        facts = (*(one for one in rank.facts if one.round != number), Fact(number, rank.proposal, True))
        return rank._replace(phase=Phase.SERVING, value=rank.proposal, proposal=INITIAL, facts=facts)

    def _served_as_before(self, rank: Rank) -> Rank:
        return rank._replace(phase=Phase.SERVING, proposal=INITIAL)


def _number(rank: Rank) -> int:
    return rank.life * 10 + rank.number


def _put(stores: tuple[Store, ...], life: int, store: Store) -> tuple[Store, ...]:
    return stores[: life - 1] + (store,) + stores[life:]


def _forgotten(world: World) -> World:
    """A world without what nobody can see any more: stores of lives that all have left, facts aside."""
    alive = {one.life for one in world.ranks if one.phase is not Phase.ENDED}
    first = min(one.life for one in world.ranks)
    stores = tuple(
        store
        if index + 1 in alive or index + 1 > first
        else store._replace(up=False, votes=(), register=(), reports=())
        for index, store in enumerate(world.stores)
    )
    return World(world.ranks, stores)


def _cas(store: Store, index: int, word: str) -> Store:
    if not store.up or store.register[index]:
        return store
    return store._replace(register=store.register[:index] + (word,) + store.register[index + 1 :])


def serves_two(world: World) -> str | None:
    """Say so if ranks serve different committed rounds: the invariant."""
    served = {one.value for one in world.ranks if one.phase is Phase.SERVING and one.value != INITIAL}
    if len(served) > 1:
        return f"ranks serve different committed rounds: {sorted(served)}"
    return None


def forgets(world: World) -> str | None:
    """Say so if a round was committed, so that it may have been served, and a restart would not find it."""
    newest = max(((one.round, one.value) for rank in world.ranks for one in rank.facts if one.committed), default=None)
    if newest is not None and agreed(tuple(one.facts for one in world.ranks)) != newest[1]:
        return f"round {newest[0]} was committed and served, and a restart would not find it"
    return None


def explore(variant: Variant, bounds: Bounds, *invariants: Callable[[World], str | None]) -> Found:
    """Visit every world that can be reached, the nearest first, up to the first that breaks an invariant."""
    model, found = Model(variant, bounds), Found()
    begin = model.begin()
    came_from: dict[World, tuple[World, str] | None] = {begin: None}
    queue = [begin]
    while queue and found.broken is None:
        later: list[World] = []
        for world in queue:
            for name, further in model.steps(world):
                after = _forgotten(further)
                if after in came_from:
                    continue
                came_from[after] = world, name
                later.append(after)
                broken = next(filter(None, (invariant(after) for invariant in invariants)), None)
                if found.broken is None and broken is not None:
                    found.broken, found.way = broken, _way(came_from, after)
                _count(found, after)
        queue = later
    found.num_states = len(came_from)
    return found


def _count(found: Found, world: World) -> None:
    values = {one.value for one in world.ranks if one.phase is Phase.SERVING}
    if values and INITIAL not in values and all(one.phase is Phase.SERVING for one in world.ranks):
        found.committed += 1
        found.restored += world.ranks[0].life > 1 and min(values) < world.ranks[0].life * 10
    if values and any(one.phase is Phase.ENDED for one in world.ranks):
        found.survived += 1


def _way(came_from: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    names: list[str] = []
    before = came_from[world]
    while before is not None:
        world, name = before
        names.append(name)
        before = came_from[world]
    return tuple(reversed(names))
