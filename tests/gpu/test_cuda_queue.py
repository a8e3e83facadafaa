"""The queue of copies to a CUDA device, with a stand-in for torch.cuda: its thread, and what it waits for."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from residency.gpu import cuda_pins, cuda_upload
from residency.gpu.copy_thread import CopyThread
from residency.gpu.cuda import CudaDevice
from residency.gpu.cuda_upload import DIRECT_BYTES_MAX, NUM_BUFFERS, StagedUpload
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode

if TYPE_CHECKING:
    from collections.abc import Iterator

INDEX = 3
LARGE_BYTES = DIRECT_BYTES_MAX + 1


class Stream:
    cuda_stream = 7

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_event(self, event: object) -> None:
        """All that was asked for before is done."""


class Event:
    def __init__(self, *, enable_timing: bool = False) -> None:
        self.is_timed = enable_timing

    def record(self, stream: object) -> None:
        """All that was asked for before is done."""

    def synchronize(self) -> None:
        """All that was asked for before is done."""


class Card:
    """What is used of torch.cuda, on a host without one: every copy is done when it is asked for.

    opened: devices on which there is a context. refusals: of page locks, by their number, from 0.
    """

    def __init__(self) -> None:
        self.opened: set[int] = set()
        self.registered: set[int] = set()
        self.refusals: set[int] = set()
        self.num_asked = 0
        self._of_thread = threading.local()

    @property
    def current(self) -> int:
        return int(getattr(self._of_thread, "index", 0))

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._of_thread.index = self.current, device.index or 0
        try:
            yield
        finally:
            self._of_thread.index = before  # torch opens no context for that

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield
        # The stream from before is set again, which makes its device the current one.
        self.opened.add(self.current)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.num_asked += 1
        if self.num_asked - 1 in self.refusals:
            return 2
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    for name, stand_in in {
        "mem_get_info": lambda device: (2**40, 2**40),
        "memory_reserved": lambda device: 0,
        "synchronize": lambda device: None,
        "current_stream": lambda device: Stream(),
        "device": card.device,
        "stream": card.stream,
        "Stream": Stream,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)  # launched to take errors from the driver
    monkeypatch.setattr(cuda_pins, "_runtime", lambda: card)
    return card


@pytest.fixture
def device(card: Card) -> Iterator[CudaDevice]:
    device = CudaDevice(INDEX)
    yield device
    device.close()


def some(nbytes: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def copied(device: CudaDevice, source: torch.Tensor) -> torch.Tensor:
    """Copy pageable bytes through the queue, which a thread of its own does."""
    target = torch.empty_like(source)
    mark: Any = device.copy_ahead([(target, source, False)], after=[])
    assert mark.event is not None
    return target


def test_the_thread_that_copies_opens_no_context_on_the_first_device(card: Card, device: CudaDevice) -> None:
    source = some(LARGE_BYTES)
    assert torch.equal(copied(device, source), source)
    assert card.opened == {INDEX}


@pytest.mark.parametrize("refused", range(NUM_BUFFERS))
def test_without_page_locked_buffers_copies_are_made_all_the_same(card: Card, device: CudaDevice, refused: int) -> None:
    card.refusals = {refused}
    for seed in range(3):
        source = some(LARGE_BYTES, seed=seed)
        assert torch.equal(copied(device, source), source)
    # Asked for once, and what was granted was given back.
    assert card.num_asked == refused + 1
    assert not card.registered


def test_an_interrupt_while_buffers_are_made_leaves_none_page_locked(
    card: Card, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, asked = device._pins.pin, list[object]()

    def interrupted(storage: torch.UntypedStorage) -> bool:
        asked.append(storage)
        if len(asked) == NUM_BUFFERS:
            raise KeyboardInterrupt
        return plain(storage)

    monkeypatch.setattr(device._pins, "pin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copied(device, some(LARGE_BYTES))
    assert not card.registered


def test_a_device_whose_copy_hangs_is_closed_within_a_bound_and_unpins_nothing(
    card: Card, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, gate = some(4096).untyped_storage(), threading.Event()
    assert device.pin(storage)
    monkeypatch.setattr(StagedUpload, "copy", lambda *_: gate.wait(30))
    for method in (CopyThread.close, CopyThread.wait):
        monkeypatch.setattr(method, "__kwdefaults__", {"wait_s": 0.05})
    device.copy_ahead([(some(1), some(1), False)], after=[])
    with pytest.raises(TimeoutError, match="disk of a mapped file"):
        device.unpin(storage)
    with pytest.raises(TimeoutError, match="disk of a mapped file"):
        device.close()
    assert card.registered == {storage.data_ptr()}
    gate.set()
    device._queue._thread.wait(wait_s=30)


class OnHost(CudaDevice):
    """A card whose memory is that of the host: what was copied, and when, is real."""

    def __init__(self) -> None:
        super().__init__(INDEX)
        self._device = self._pins._device = torch.device("cpu")
        self._blocks: list[torch.Tensor] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._blocks.append(super().allocate(nbytes))
        return self._blocks[-1]

    def holds(self, storage: torch.UntypedStorage) -> bool:
        start = storage.data_ptr()
        return any(one.data_ptr() <= start < one.data_ptr() + one.numel() for one in self._blocks)


WIDTH = 64
BLOCK_BYTES = WIDTH * WIDTH * 4 + 3 * 512


def layerwise(
    tier: HostTier, *, held: tuple[int, ...] = (), num_blocks: int = 0, yields: int = 0
) -> ComponentPlacement:
    return ComponentPlacement(
        mode=Mode.LAYERWISE_OFFLOAD,
        tier=tier,
        held_layers={"blocks": held} if held else {},
        num_slots=2,
        window_bytes=num_blocks * BLOCK_BYTES,
        yield_bytes=yields * BLOCK_BYTES,
    )


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (layerwise(HostTier.PINNED), layerwise(HostTier.PAGEABLE)),
        (layerwise(HostTier.PAGEABLE, num_blocks=5), layerwise(HostTier.PINNED, held=(0, 2))),
        (layerwise(HostTier.PAGEABLE, num_blocks=6), layerwise(HostTier.PAGEABLE, yields=2)),
        (layerwise(HostTier.PAGEABLE, num_blocks=4), RESIDENT),
    ],
)
def test_however_late_the_thread_copies_requests_are_right(
    card: Card, toys: Any, monkeypatch: pytest.MonkeyPatch, a: ComponentPlacement, b: ComponentPlacement
) -> None:
    seeded, plain, threads = random.Random(0), StagedUpload.copy, set[str]()

    def late(self: StagedUpload, target: torch.Tensor, source: torch.Tensor) -> None:
        threads.add(threading.current_thread().name)
        time.sleep(seeded.choice((0, 0, 0, 0.002)))
        plain(self, target, source)

    monkeypatch.setattr(StagedUpload, "copy", late)
    # Copies this small would not go through buffers.
    monkeypatch.setattr(cuda_upload, "DIRECT_BYTES_MAX", 1000)
    monkeypatch.setattr(cuda_upload, "BUFFER_BYTES", 5000)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device, value = OnHost(), toys.value(WIDTH)
    nets = {name: toys.net(seed=index, width=WIDTH) for index, name in enumerate("ab")}
    copies = {name: toys.net(seed=index, width=WIDTH) for index, name in enumerate("ab")}
    pipeline = ManagedPipeline(nets, device=device)
    for name, placement in (("a", a), ("b", b)):
        pipeline.place(name, placement)
    with torch.no_grad():
        for _ in range(6):
            # What was asked for ahead is often another layer than the one that is used.
            order = seeded.sample(range(4), seeded.randint(1, 4))
            for net in (*nets.values(), *copies.values()):
                net.order = order
            expected = copies["b"](copies["b"](copies["a"](value)))
            with pipeline.request():
                found = nets["b"](nets["b"](nets["a"](value)))
            assert torch.equal(found, expected)
    assert "residency-copies" in threads
    pipeline.detach()
    device.close()
