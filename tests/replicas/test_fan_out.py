"""A request to many replicas at once: bounded, merged, each worker once, and interrupted with what is known."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.fleet_replicas import Manager, black_hole, dies_in_mid_answer
from residency.control import Verb
from residency.errors import RollbackFailed, SettingsError
from residency.fleet import AsyncFleetClient, FleetClient
from residency.statemachine.replicas import Fault, ReplicaOutcome
from residency.statemachine.states import State


def test_of_64_replicas_with_three_dead_in_three_ways_each_is_told(servers: Any) -> None:
    managers = [Manager() for _ in range(61)]
    dead = {
        servers.dead(): Fault.REFUSED_CONNECTION,
        servers.broken(black_hole): Fault.TIMEOUT,
        servers.broken(dies_in_mid_answer): Fault.DIED,
    }
    urls = [*dead, *map(servers.replica, managers)]
    urls[30:30] = urls[:3]

    report = FleetClient(urls, answer_s=5, concurrency=32).calibrate()

    assert [one.url for one in report.replicas] == list(dict.fromkeys(urls))
    assert {one.url: one.fault for one in report.replicas if one.fault} == dead
    assert report.merged.counts == {ReplicaOutcome.REFUSED: 3, ReplicaOutcome.COMMITTED: 61}
    assert (report.merged.outcome, report.merged.mixed) == (ReplicaOutcome.REFUSED, True)
    assert [one.num_rounds for one in managers] == [1] * 61


def test_replicas_that_end_in_different_ways_are_mixed_and_the_worst_wins(servers: Any) -> None:
    managers = [
        Manager(digest="b" * 64),
        Manager(kept=True),
        Manager(state=State.ROLLED_BACK),
        Manager(error=RollbackFailed(round_number=2, problems=("x",))),
    ]
    report = FleetClient(map(servers.replica, managers)).calibrate()

    assert [one.outcome.value for one in report.replicas] == ["committed", "kept", "rolled-back", "rollback-failed"]
    assert (report.merged.outcome, report.merged.mixed) == (ReplicaOutcome.ROLLBACK_FAILED, True)
    assert report.merged.num_placements == 2


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_replicas_than_allowed_are_at_it_at_a_time(servers: Any, concurrency: int) -> None:
    running, most, lock = 0, 0, threading.Lock()

    class Counting(Manager):
        def _run_round(self, source: Any) -> Any:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            result = super()._run_round(source)
            with lock:
                running -= 1
            return result

    urls = [servers.replica(Counting(round_s=0.05)) for _ in range(6)]
    report = FleetClient(urls, concurrency=concurrency).validate()

    assert report.merged.counts == {ReplicaOutcome.COMMITTED: 6}
    assert most == concurrency


def test_a_replica_whose_turn_does_not_come_is_refused_and_was_never_asked(servers: Any) -> None:
    slow, waiting = Manager(hold=threading.Event()), Manager()
    urls = [servers.replica(slow), servers.replica(waiting)]

    report = FleetClient(urls, concurrency=1).calibrate(timeout_s=2)
    assert slow.hold is not None
    slow.hold.set()

    assert [one.outcome for one in report.replicas] == [ReplicaOutcome.UNKNOWN, ReplicaOutcome.REFUSED]
    assert report.replicas[1].fault is Fault.OUT_OF_TIME
    assert waiting.num_handled == 0


def test_a_worker_at_two_urls_is_asked_once_and_counted_once(servers: Any) -> None:
    manager = Manager()
    first, second, other = servers.replica(manager), servers.replica(manager), servers.replica()

    report = FleetClient([first, f"{first}/", second, other]).calibrate()

    assert manager.num_rounds == 1 and len(report.replicas) == 3
    assert report.merged.counts == {ReplicaOutcome.COMMITTED: 2}
    (same,) = [one for one in report.replicas if one.same_as is not None]
    assert {same.url, same.same_as} == {first, second}
    assert same.outcome is ReplicaOutcome.COMMITTED


def test_answers_are_told_as_they_come(servers: Any) -> None:
    held = threading.Event()
    slow, quick = servers.replica(Manager(hold=held)), servers.replica()
    told: list[str] = []

    def hear(one: Any) -> None:
        told.append(one.url)
        held.set()

    FleetClient([slow, quick], answer_s=30).ask(Verb.CALIBRATE, timeout_s=60, on_answer=hear)

    assert told == [quick, slow]


def test_cancelled_it_tells_of_every_replica_what_is_known_and_asks_no_more(servers: Any) -> None:
    held, late = Manager(hold=threading.Event()), Manager()
    quick = Manager()
    urls = [servers.replica(one) for one in (quick, held, late)]
    told: list[Any] = []

    async def interrupted() -> None:
        fleet = AsyncFleetClient(urls, concurrency=1)
        asking = asyncio.create_task(fleet.ask(Verb.CALIBRATE, timeout_s=30, on_answer=told.append))
        while held.num_rounds == 0:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(interrupted())

    assert {one.url: (one.outcome.value, one.fault) for one in told} == {
        urls[0]: ("committed", None),
        urls[1]: ("unknown", Fault.INTERRUPTED),
        urls[2]: ("refused", Fault.INTERRUPTED),
    }
    assert late.num_handled == 0
    # What was left unknown can be asked again, and was done once.
    assert held.hold is not None
    held.hold.set()
    again = {one.url: one.request for one in told if one.outcome is ReplicaOutcome.UNKNOWN}
    report = FleetClient(again).ask(Verb.CALIBRATE, timeout_s=60, again=again)
    assert (report.merged.outcome, held.num_rounds) == (ReplicaOutcome.COMMITTED, 1)


def test_what_is_asked_again_is_what_was_asked() -> None:
    with pytest.raises(SettingsError, match="was a 'validate'"):
        FleetClient(["http://worker"]).ask(Verb.CALIBRATE, timeout_s=1, again={"http://worker": {"verb": "validate"}})


def test_two_callers_at_once_run_one_round_and_the_other_is_refused(servers: Any) -> None:
    manager = Manager(hold=threading.Event())
    url = servers.replica(manager)

    def call() -> Any:
        return FleetClient([url], answer_s=30).calibrate().replicas[0]

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(call)
        while manager.num_rounds == 0:
            time.sleep(0.01)
        second = call()
        assert manager.hold is not None
        manager.hold.set()

        assert (second.outcome, second.fault) == (ReplicaOutcome.REFUSED, Fault.BUSY)
        assert first.result().outcome is ReplicaOutcome.COMMITTED
    assert manager.num_rounds == 1


def test_many_dead_urls_are_bounded_in_time_and_files(servers: Any) -> None:
    dead = servers.dead()
    urls = [f"{dead}/{index}" for index in range(600)]
    begun_s = time.monotonic()

    report = FleetClient(urls, concurrency=256).status(timeout_s=2)

    assert report.merged.counts == {ReplicaOutcome.UNKNOWN: 600}
    assert time.monotonic() - begun_s < 20
