"""Streaming on a real device: copies and computing on two streams must never overtake each other."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.utils import counters

from residency.errors import CaptureRefused
from residency.gpu.cuda import CudaDevice
from residency.gpu.cuda_upload import StagedUpload
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.gpu,
    # What torch's compiler imports, and what it says of a capture that was refused.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The CUDA Graph is empty:UserWarning"),
]

WIDTH = 1024
BLOCK_BYTES = WIDTH * WIDTH * 4 + 3 * WIDTH * 4
NUM_BLOCKS = 8
SLEEP_CYCLES = 2_000_000  # about a millisecond: ten times what the copy of a block takes


def layerwise(
    *, resident: tuple[int, ...] = (), held: tuple[int, ...] = (), slots: int = 2, window: int = 0
) -> ComponentPlacement:
    return ComponentPlacement(
        mode=Mode.LAYERWISE_OFFLOAD,
        tier=HostTier.PINNED,
        resident_layers={"blocks": resident} if resident else {},
        held_layers={"blocks": held} if held else {},
        num_slots=slots,
        window_bytes=window,
    )


class Bench:
    """Two nets on a real device, one after the other, and what they give when all of it is resident."""

    def __init__(self, toys: Any) -> None:
        self.device = CudaDevice()
        self.nets = {name: toys.net(seed=i, width=WIDTH, num_blocks=NUM_BLOCKS) for i, name in enumerate("ab")}
        self.value = toys.value(WIDTH).to(self.device.torch_device)
        self.steps = 3
        self.expected = self.reference()
        self.pipeline = ManagedPipeline(self.nets, device=self.device)

    def place(self, **placements: ComponentPlacement) -> None:
        for name in self.nets:
            self.pipeline.place(name, placements.get(name, RESIDENT))

    def compute(self, nets: Any) -> torch.Tensor:
        with torch.no_grad():
            value = nets["a"](self.value)
            for _ in range(self.steps):
                value = nets["b"](value)
            result: torch.Tensor = value
            return result

    def reference(self) -> torch.Tensor:
        return self.compute({name: copy.deepcopy(net).to("cuda") for name, net in self.nets.items()})

    def check(self) -> None:
        with self.pipeline.request():
            found = self.compute(self.nets)
        assert torch.equal(found, self.expected)


@pytest.fixture
def bench(toys: Any) -> Any:
    bench = Bench(toys)
    yield bench
    bench.pipeline.detach()
    bench.device.close()


PLACEMENTS = [
    {"b": layerwise()},
    {"a": layerwise(slots=1), "b": layerwise(slots=1)},
    {"a": layerwise(resident=(1, 5)), "b": layerwise(resident=(0, 3, 6), slots=3)},
    {"a": layerwise(), "b": layerwise(held=(0, 2, 4), resident=(1,))},
    {
        "a": layerwise(window=5 * BLOCK_BYTES + 7),
        "b": ComponentPlacement(mode=Mode.RESIDENT, yield_bytes=3 * BLOCK_BYTES),
    },
    {
        "a": layerwise(window=6 * BLOCK_BYTES),
        "b": ComponentPlacement(
            mode=Mode.LAYERWISE_OFFLOAD, tier=HostTier.PAGEABLE, num_slots=2, yield_bytes=2 * BLOCK_BYTES
        ),
    },
]


@pytest.mark.parametrize("placements", PLACEMENTS)
@pytest.mark.parametrize("slow", ["nothing", "computing", "copies"])
def test_the_output_is_that_of_resident_weights_whatever_is_slow(
    bench: Bench, placements: dict[str, ComponentPlacement], slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.place(**placements)
    if slow == "computing":
        # The kernel reads its weights long after the host has asked for the next ones.
        for net in bench.nets.values():
            for block in net.blocks:
                monkeypatch.setattr(block.linear, "forward", _after_sleep(block.linear.forward))
    if slow == "copies":
        plain = bench.device.copy_ahead

        def late(copies: Any, *, after: Any) -> Any:
            bench.device.copy_ahead = plain  # type: ignore[method-assign]
            mark = plain([], after=after)
            stream = bench.device._queue._stream
            assert stream is not None
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            bench.device.copy_ahead = late  # type: ignore[method-assign]
            return plain(copies, after=[mark])

        monkeypatch.setattr(bench.device, "copy_ahead", late)
    for _ in range(5):
        bench.check()
    assert bench.device.moved_bytes()[1] == 0


def _after_sleep(plain: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(value: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        return plain(value)

    return forward


def test_layers_in_pageable_memory_are_read_on_a_thread_of_their_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    plain = StagedUpload.copy

    def slow(self: StagedUpload, target: torch.Tensor, source: torch.Tensor) -> None:
        threads.add(threading.current_thread().name)
        time.sleep(0.003)
        plain(self, target, source)

    pageable = replace(layerwise(window=4 * BLOCK_BYTES), tier=HostTier.PAGEABLE)
    bench.place(a=layerwise(window=4 * BLOCK_BYTES), b=pageable)
    monkeypatch.setattr(StagedUpload, "copy", slow)
    for _ in range(5):
        bench.check()
    assert threads == {"residency-copies"}


def test_a_copy_that_could_not_be_made_fails_one_request_and_is_made_for_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.place(b=replace(layerwise(), tier=HostTier.PAGEABLE))
    bench.check()

    def refuse(*_: object) -> None:
        raise MemoryError("no page")

    monkeypatch.setattr(StagedUpload, "copy", refuse)
    with pytest.raises(MemoryError, match="no page"):
        for _ in range(3):  # The first copies may have been asked for before.
            bench.check()
    monkeypatch.undo()
    for _ in range(3):
        bench.check()


def test_a_request_never_waits_on_the_host_nor_for_the_whole_device(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.place(**PLACEMENTS[3])
    for _ in range(2):
        bench.check()
    monkeypatch.setattr(torch.cuda, "synchronize", _forbidden)
    monkeypatch.setattr(torch.cuda.Event, "synchronize", _forbidden)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It is called a prototype.
        torch.cuda.set_sync_debug_mode("error")
    try:
        with bench.pipeline.request():
            found = bench.compute(bench.nets)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")
    monkeypatch.undo()
    assert torch.equal(found, bench.expected)


def _forbidden(*_: object) -> None:
    raise AssertionError("the host waits for the device")


def test_the_allocator_is_not_asked_for_anything_new_in_a_steady_request(bench: Bench) -> None:
    bench.place(**PLACEMENTS[4])
    for _ in range(3):
        bench.check()
    before = torch.cuda.memory_stats()
    for _ in range(3):
        bench.check()
    after = torch.cuda.memory_stats()
    for name in ("num_alloc_retries", "segment.all.allocated", "num_device_alloc", "num_device_free"):
        assert after.get(name) == before.get(name), name


def test_residents_keep_their_addresses_while_others_come_and_go(bench: Bench) -> None:
    bench.place(b=layerwise(resident=(0, 4)))
    before = [tensor.data_ptr() for index in (0, 4) for tensor in bench.nets["b"].blocks[index].parameters()]
    bench.check()
    bench.pipeline.place("a", layerwise())
    bench.check()
    bench.pipeline.place("a", RESIDENT)
    bench.check()
    after = [tensor.data_ptr() for index in (0, 4) for tensor in bench.nets["b"].blocks[index].parameters()]
    assert before == after


def test_compiled_layers_are_served_in_every_mode_and_never_compiled_again(bench: Bench) -> None:
    torch._dynamo.reset()
    counters.clear()
    for net in bench.nets.values():
        for block in net.blocks:
            block.compile(backend="eager")
    offload = ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED)
    bench.place()
    bench.check()
    compiled = dict(counters["stats"]), dict(counters["frames"])
    for placements in [*PLACEMENTS, {"a": offload, "b": offload}, {}]:
        bench.place(**placements)
        bench.check()
        bench.check()
    assert (dict(counters["stats"]), dict(counters["frames"])) == compiled
    torch._dynamo.reset()


def test_layers_that_are_compiled_after_they_were_placed_are_served(bench: Bench) -> None:
    torch._dynamo.reset()
    bench.place(b=layerwise(held=(1,)))
    bench.check()
    for block in bench.nets["b"].blocks:
        block.compile(backend="eager")
    bench.check()
    bench.check()
    torch._dynamo.reset()


def test_a_component_that_streams_is_not_captured_into_a_graph(bench: Bench) -> None:
    bench.place(b=layerwise())
    bench.check()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureRefused), torch.cuda.graph(graph), torch.no_grad():
        bench.nets["b"](bench.value)
    bench.check()


def test_a_component_that_was_captured_keeps_its_addresses(bench: Bench) -> None:
    bench.place()
    bench.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        captured = bench.nets["b"](bench.value)
    with pytest.raises(Exception, match="captured"):
        bench.pipeline.place("b", layerwise())
    bench.pipeline.place("a", layerwise())
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        assert torch.equal(captured, bench.nets["b"](bench.value))
