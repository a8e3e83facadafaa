"""Pinning many stores: bounded copies, everything or a clean way back, one registration at a time on a host."""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from residency.gpu import pinning_watch
from residency.gpu.emulated import EmulatedDevice
from residency.gpu.host_memory import allocate, booked_against_kernel, copy_into
from residency.gpu.pinning import PinningBounds, pin_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from residency.gpu.pinning import Packable

MIB = 2**20


@dataclass
class Host:
    """The books of a driver that page-locks; `at_register` is called with the number of the registration."""

    at_register: Callable[[int], None] = lambda number: None
    registered: set[int] = field(default_factory=set)
    threads: set[int] = field(default_factory=set)
    num_calls: int = 0
    copies: list[weakref.ref[Copy]] = field(default_factory=list)
    num_adopted: int = 0
    in_flight_peak: int = 0

    @property
    def num_copies(self) -> int:
        """How many copies live."""
        return sum(copy() is not None for copy in list(self.copies))

    def register(self, address: int) -> None:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        self.threads.add(threading.get_ident())
        self.at_register(number)
        self.registered.add(address)


class Copy:
    """What a store packs."""

    def __init__(self, source: torch.UntypedStorage) -> None:
        self.num_bytes = source.nbytes()
        self.storage = allocate(self.num_bytes)
        copy_into(self.storage, source)
        self.address = self.storage.data_ptr()


class Store:
    """One weight that keeps the contract of a store."""

    def __init__(self, host: Host, *, seed: int, num_bytes: int = MIB) -> None:
        self.host = host
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, generator=generator)
        self.expected = self.weight.clone()
        self.packed: Copy | None = None
        self.pack_thread = self.adopt_thread = 0
        self.at_pack: Callable[[], None] = lambda: None
        self.at_adopt: Callable[[], None] = lambda: None

    def pack(self) -> Copy | None:
        self.pack_thread = threading.get_ident()
        if self.packed is not None:
            return None
        self.at_pack()
        copy = Copy(self.weight.untyped_storage())
        self.host.copies.append(weakref.ref(copy))
        in_flight = self.host.num_copies - self.host.num_adopted
        self.host.in_flight_peak = max(self.host.in_flight_peak, in_flight)
        return copy

    def register(self, packed: Copy) -> None:
        self.host.register(packed.address)

    def adopt_packed(self, packed: Copy) -> None:
        self.adopt_thread = threading.get_ident()
        self.packed = packed
        self.weight = torch.empty(0, dtype=torch.uint8).set_(packed.storage)
        self.host.num_adopted += 1
        self.at_adopt()

    def discard(self, packed: Copy) -> None:
        self.host.registered.discard(packed.address)

    def unpin(self) -> None:
        if self.packed is not None:
            self.discard(self.packed)

    @property
    def is_pinned(self) -> bool:
        return self.packed is not None and self.packed.address in self.host.registered


def stores_of(host: Host, num_stores: int = 12, **kwargs: int) -> list[Store]:
    return [Store(host, seed=seed, **kwargs) for seed in range(num_stores)]


def our_threads() -> list[str]:
    # One whose start was interrupted is listed for ever, and never alive.
    return [t.name for t in threading.enumerate() if t.name.startswith("residency-") and t.is_alive()]


def refuse_at(number: int, error: BaseException) -> Callable[[int], None]:
    def at_register(current: int) -> None:
        if current == number:
            raise error

    return at_register


def left_behind(stores: Sequence[Store], adopted: list[Packable[Copy]]) -> dict[str, object]:
    """What is not as it must be: weights, copies, page locks, threads. A store may be told as adopted and not be."""
    host, bound = stores[0].host, [store for store in stores if store.packed is not None]
    found = {
        "weights": [store for store in stores if not torch.equal(store.weight, store.expected)],
        "not told": [store for store in bound if store not in adopted],
        "told": [store for store in adopted[:-1] if store not in bound],
        "copies": host.num_copies - len(bound),
        "locks": host.registered - {store.packed.address for store in bound if store.packed is not None},
        "threads": our_threads(),
    }
    return {name: value for name, value in found.items() if value}


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def device() -> EmulatedDevice:
    return EmulatedDevice()


@pytest.fixture
def pin(tmp_path: Path, device: EmulatedDevice) -> Callable[..., int]:
    def call(stores: Sequence[Packable[Any]], **kwargs: Any) -> int:
        return pin_all(stores, device, lock_path=tmp_path / "lock", **kwargs)

    return call


@pytest.mark.parametrize(("num_threads", "num_in_flight"), [(1, 1), (1, 2), (3, 4), (8, 3)])
def test_all_are_pinned_with_few_copies_beside_the_weights(
    host: Host, pin: Callable[..., int], num_threads: int, num_in_flight: int
) -> None:
    stores = stores_of(host)
    originals = [weakref.ref(store.weight.untyped_storage()) for store in stores]
    adopted: list[Packable[Copy]] = []
    bounds = PinningBounds(num_threads=num_threads, num_in_flight=num_in_flight)
    assert pin(stores, bounds=bounds, adopted=adopted) == 12 * MIB
    assert adopted == stores
    assert all(store.is_pinned and torch.equal(store.weight, store.expected) for store in stores)
    assert host.in_flight_peak <= num_in_flight
    assert host.num_copies == len(stores)
    assert not any(original() for original in originals)
    assert not our_threads()


def test_copies_are_made_by_several_threads_and_bound_by_the_caller(host: Host, pin: Callable[..., int]) -> None:
    stores = stores_of(host)
    together = threading.Barrier(3)

    def meet() -> None:
        together.wait(10)

    for store in stores[:3]:
        store.at_pack = meet
    pin(stores, bounds=PinningBounds(num_threads=3, num_in_flight=4))
    assert len({store.pack_thread for store in stores}) == 3
    assert {store.adopt_thread for store in stores} == {threading.get_ident()}
    assert len(host.threads) == 1
    assert not host.threads & {threading.get_ident()}


def test_what_is_pinned_already_is_passed_over(host: Host, pin: Callable[..., int]) -> None:
    stores = stores_of(host, 5)
    pin(stores[1:3])
    adopted: list[Packable[Copy]] = []
    assert pin(stores, adopted=adopted) == 3 * MIB
    assert adopted == [stores[0], *stores[3:]]
    assert pin(stores) == pin([]) == 0


@pytest.mark.parametrize("number", [0, 5, 11])
@pytest.mark.parametrize("error", [MemoryError("refused"), KeyboardInterrupt(), SystemExit(3), OSError("driver")])
def test_a_registration_that_fails_leaves_a_clean_way_back(
    host: Host, pin: Callable[..., int], number: int, error: BaseException
) -> None:
    host.at_register = refuse_at(number, error)
    stores, adopted = stores_of(host), list[Any]()
    with pytest.raises(type(error)) as caught:
        pin(stores, adopted=adopted)
    assert caught.value is error
    assert adopted == stores[: len(adopted)]
    assert len(adopted) <= number
    assert not left_behind(stores, adopted)  # While the exception, with its traceback, is still there.
    for store in stores:
        store.unpin()
    assert not host.registered


@pytest.mark.parametrize("error", [MemoryError("no mapping"), SystemExit(), KeyboardInterrupt()])
def test_a_copy_that_fails_leaves_a_clean_way_back(host: Host, pin: Callable[..., int], error: BaseException) -> None:
    def fail() -> None:
        raise error

    stores, adopted = stores_of(host), list[Any]()
    stores[7].at_pack = fail
    with pytest.raises(type(error)):
        pin(stores, adopted=adopted)
    assert len(adopted) <= 7
    assert not left_behind(stores, adopted)


def test_an_interrupt_while_weights_are_bound_unlocks_them_again(host: Host, pin: Callable[..., int]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    stores, adopted = stores_of(host), list[Any]()
    stores[4].at_adopt = interrupt
    with pytest.raises(KeyboardInterrupt):
        pin(stores, adopted=adopted)
    assert adopted == stores[:5]
    assert [store.is_pinned for store in stores] == [True] * 4 + [False] * 8
    assert not left_behind(stores, adopted)


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Has the main thread interrupted after so many seconds, wherever it is."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda after_s: signal.setitimer(signal.ITIMER_REAL, after_s) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# An interrupt that hits a callback of the interpreter's own is swallowed there, with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_leaves_a_clean_way_back(
    pin: Callable[..., int], alarm: Callable[[float], None]
) -> None:
    chance, num_interrupted = random.Random(7), 0
    for _ in range(60):
        host = Host(at_register=lambda number: time.sleep(0.001))
        stores, adopted = stores_of(host, num_bytes=64 * 1024), list[Any]()
        try:
            alarm(chance.uniform(0.0005, 0.025))
            pin(stores, adopted=adopted)
            alarm(0)
        except KeyboardInterrupt:
            num_interrupted += 1
        deadline = time.monotonic() + 10  # An interrupt that hits the way back does not wait for it.
        while our_threads() and time.monotonic() < deadline:
            time.sleep(0.001)
        # A thread whose start was interrupted may come to life later; it finds that there is nothing to do.
        assert not left_behind(stores, adopted).keys() - {"threads"}
        for store in stores:
            store.unpin()
        assert not host.registered
    assert num_interrupted >= 10


def test_a_registration_that_takes_long_is_told_with_its_bytes_and_its_store(
    host: Host, pin: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    host.at_register = lambda number: time.sleep(0.5) if number == 1 else None
    stores = stores_of(host, 3)
    with caplog.at_level(logging.WARNING):
        pin(stores, names=["a", "blocks.1", "c"], bounds=PinningBounds(slow_s=0.3))
    assert f"page-locking {MIB} bytes of blocks.1 takes long" in caplog.text
    assert caplog.text.count("takes long") == 1
    assert all(store.is_pinned for store in stores)


def test_a_long_run_tells_how_far_it_is(
    host: Host, pin: Callable[..., int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning_watch, "PROGRESS_S", 0.02)
    host.at_register = lambda number: time.sleep(0.02)
    with caplog.at_level(logging.INFO):
        pin(stores_of(host, 8))
    assert "page-locking: 4 of 8 host copies, 0.00 GiB" in caplog.text
    assert "page-locked 8 of 8 host copies" in caplog.text


def test_a_registration_that_hangs_is_given_up_and_its_memory_given_back_when_it_returns(
    host: Host, pin: Callable[..., int]
) -> None:
    returns = threading.Event()

    def hang(number: int) -> None:
        if number == 2:
            returns.wait(30)

    host.at_register = hang
    stores, adopted = stores_of(host), list[Any]()
    with pytest.raises(TimeoutError, match=f"page-locking {MIB} bytes of host copy 3 of 12 since") as caught:
        pin(stores, adopted=adopted, bounds=PinningBounds(stall_s=0.3))
    assert "its memory is given back when it ends" in caught.value.__notes__[0]
    assert adopted == stores[:2]
    returns.set()
    deadline = time.monotonic() + 10
    while our_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    caught.value.__traceback__ = None
    assert not left_behind(stores, adopted)


def test_a_copy_that_cannot_be_given_back_does_not_keep_the_others(
    host: Host, pin: Callable[..., int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.at_register = refuse_at(3, MemoryError("refused"))
    stores, adopted = stores_of(host), list[Any]()

    def fail(packed: Copy) -> None:
        raise OSError("the driver does not answer")

    monkeypatch.setattr(stores[3], "discard", fail)
    with pytest.raises(MemoryError):
        pin(stores, adopted=adopted)
    assert "giving back the copy of host copy 4 of 12 failed: OSError" in caplog.text
    assert not left_behind(stores, adopted)


@pytest.mark.parametrize("is_shared", [True, False])
def test_ranks_that_share_a_lock_never_register_at_once(
    tmp_path: Path, device: EmulatedDevice, *, is_shared: bool
) -> None:
    inside, refused = threading.Semaphore(1), list[BaseException]()

    def at_register(number: int) -> None:
        # A driver that fails when two enter at once.
        if not inside.acquire(blocking=False):
            raise MemoryError("two at once")
        time.sleep(0.005)
        inside.release()

    def rank(lock_path: Path) -> None:
        try:
            pin_all(stores_of(Host(at_register)), device, lock_path=lock_path)
        except MemoryError as error:
            refused.append(error)

    # Two open files of one process exclude each other as those of two processes do.
    paths = [tmp_path / f"lock-{0 if is_shared else index}" for index in range(2)]
    ranks = [threading.Thread(target=rank, args=(path,)) for path in paths]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert (not refused) == is_shared


def test_the_heap_does_not_keep_what_held_the_weights_before(host: Host, pin: Callable[..., int]) -> None:
    before = booked_against_kernel(0).held_bytes
    del_mapped = torch.ones(24 * MIB, dtype=torch.uint8)
    del del_mapped  # From now on the C library takes blocks of this size from its heap, and keeps them when freed.
    stores = stores_of(host, 24, num_bytes=4 * MIB)
    for store in stores:
        del store.expected
    pin(stores)
    assert booked_against_kernel(0).held_bytes - before - 24 * 4 * MIB < 16 * MIB


@pytest.mark.parametrize("bad", [{"num_threads": 0}, {"num_in_flight": 0}, {"stall_s": -1}])
def test_bounds_that_leave_nothing_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="leaves nothing to work with"):
        PinningBounds(**bad)
