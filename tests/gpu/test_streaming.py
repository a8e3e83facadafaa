"""Streaming through the window: overlap, order that is learned, held layers, yields, and bounds on memory."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from residency.gpu.clock import ModelledSpeeds
from residency.gpu.emulated import EmulatedDevice
from residency.gpu.measure import measure_request
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT, ComponentPlacement, HostTier, Mode
from residency.gpu.records import RequestKind
from residency.gpu.specs import window_bytes
from residency.gpu.window import Window
from residency.gpu.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from residency.gpu.device import Mark

WIDTH = 64
BLOCK_BYTES = WIDTH * WIDTH * 4 + 3 * 512  # one matrix and three vectors, each at a multiple of 512 bytes


def layerwise(
    *, resident: tuple[int, ...] = (), held: tuple[int, ...] = (), slots: int = 2, window: int = 0, yields: int = 0
) -> ComponentPlacement:
    return ComponentPlacement(
        mode=Mode.LAYERWISE_OFFLOAD,
        tier=HostTier.PINNED,
        resident_layers={"blocks": resident} if resident else {},
        held_layers={"blocks": held} if held else {},
        num_slots=slots,
        window_bytes=window,
        yield_bytes=yields,
    )


class Bench:
    """Two nets that run one after the other, the second as often as there are steps, with what they should give."""

    def __init__(self, toys: Any, placements: Mapping[str, ComponentPlacement], *, num_blocks: int = 6) -> None:
        # Slow enough that a block's copy takes twice as long as its computation.
        speeds = ModelledSpeeds(launch_ns=2_000, to_device_pinned=10**9)
        self.device = EmulatedDevice(total_bytes=2**24, speeds=speeds)
        self.nets = {name: toys.net(seed=i, width=WIDTH, num_blocks=num_blocks) for i, name in enumerate("ab")}
        self.value = toys.value(WIDTH)
        self.steps = 3
        self.expected = self.compute()
        self.pipeline = ManagedPipeline(self.nets, device=self.device)
        for name in self.nets:
            self.pipeline.place(name, RESIDENT)
        for name, placement in placements.items():
            self.pipeline.place(name, placement)

    def compute(self) -> torch.Tensor:
        with torch.no_grad():
            value = self.nets["a"](self.value)
            for _ in range(self.steps):
                value = self.nets["b"](value)
            result: torch.Tensor = value
            return result.clone()

    def request(self) -> int:
        """Serve one request that is right; returns how long it took by the modelled clock."""
        started = self.device.now_ns()
        with self.pipeline.request():
            found = self.compute()
        assert torch.equal(found, self.expected)
        return self.device.now_ns() - started


@pytest.fixture
def make(toys: Any) -> Callable[..., Bench]:
    def build(*, a: ComponentPlacement = RESIDENT, b: ComponentPlacement = RESIDENT, num_blocks: int = 6) -> Bench:
        return Bench(toys, {"a": a, "b": b}, num_blocks=num_blocks)

    return build


def test_copies_run_under_what_is_computed(make: Callable[..., Bench]) -> None:
    resident = make().request()
    one_by_one = make(b=layerwise(slots=1))
    ahead = make(b=layerwise(slots=4))
    for bench in (one_by_one, ahead):
        for _ in range(3):
            bench.request()
    copies = ahead.steps * 6 * BLOCK_BYTES  # ns at one byte a ns
    exposed = ahead.request()
    assert max(resident, copies) <= exposed < copies + resident
    assert exposed < one_by_one.request()


def test_what_the_link_brings_under_the_computing_costs_nothing(make: Callable[..., Bench]) -> None:
    resident = make().request()
    bench = make(b=layerwise(resident=(0, 1, 3, 4, 5), slots=2))
    for _ in range(3):
        bench.request()
    assert bench.request() <= resident * 1.01


def test_in_a_steady_request_nothing_waits_that_is_used_in_the_same_order_again(make: Callable[..., Bench]) -> None:
    bench = make(a=layerwise(resident=(0, 1, 2)), b=layerwise(resident=(0, 2, 4)))
    times = [bench.request() for _ in range(6)]
    assert times[0] > times[-1] == times[-2] == times[-3]


def test_every_streamed_layer_is_brought_once_a_use_and_every_held_one_once_a_request(
    make: Callable[..., Bench],
) -> None:
    bench = make(b=layerwise(resident=(0,), held=(1, 2)))
    for _ in range(3):
        bench.request()
    before = bench.device.moved_bytes()[0]
    bench.request()
    sizes = bench.pipeline.component("b").spec.groups[0].slot_bytes
    assert bench.device.moved_bytes()[0] - before == sum(sizes[3:]) * bench.steps + sizes[1] + sizes[2]
    assert bench.device.moved_bytes()[1] == 0


def test_the_window_is_there_once_and_nothing_else_is_taken(make: Callable[..., Bench]) -> None:
    bench = make(a=layerwise(), b=layerwise(resident=(0, 3), held=(1,)))
    bench.request()
    specs, placement = bench.pipeline.specs, bench.pipeline.placement
    idle = sum(spec.device_bytes(placement.components[spec.name], in_use=False) for spec in specs)
    window = window_bytes(specs, placement)
    assert bench.pipeline.window_bytes == window
    assert bench.device.memory().allocated_bytes - idle - window < 4 * BLOCK_BYTES // 10  # inputs and outputs alone
    bench.device.reset_peaks()
    bench.request()
    assert bench.device.memory().allocated_peak_bytes - idle - window < 4 * BLOCK_BYTES // 10


def test_a_component_has_what_is_yielded_to_it_and_the_window_grows_back(make: Callable[..., Bench]) -> None:
    size = 6 * BLOCK_BYTES
    bench = make(
        a=layerwise(slots=2, window=size),
        b=ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED, yield_bytes=4 * BLOCK_BYTES),
    )
    seen: list[int] = []
    head = bench.nets["b"].head
    plain = head.forward

    def watch(value: torch.Tensor) -> torch.Tensor:
        seen.append(bench.device.memory().allocated_bytes)
        result: torch.Tensor = plain(value)
        return result

    head.forward = watch
    for _ in range(3):
        with bench.pipeline.request():
            assert bench.pipeline.window_bytes == size
            bench.compute()
        assert bench.pipeline.window_bytes == 2 * BLOCK_BYTES
    rest = bench.pipeline.component("a").spec.outside_bytes + bench.pipeline.component("b").spec.total_bytes
    assert all(0 <= allocated - rest - 2 * BLOCK_BYTES < BLOCK_BYTES // 4 for allocated in seen)


def test_what_is_used_after_a_yield_lies_where_the_window_stays(make: Callable[..., Bench]) -> None:
    bench = make(
        a=layerwise(slots=2, window=6 * BLOCK_BYTES),
        b=ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED, yield_bytes=4 * BLOCK_BYTES),
    )
    bench.request()
    bench.request()
    before = bench.device.moved_bytes()[0]
    bench.request()
    moved = bench.device.moved_bytes()[0] - before
    sizes = bench.pipeline.component("a").spec.groups[0].slot_bytes
    # Were a layer put where the window is given back, it would come twice. The other component stays once loaded.
    assert moved - bench.device.moved_bytes()[1] == sum(sizes) + _packed_bytes(bench.nets["b"])


def test_every_weight_in_the_window_is_aligned_whatever_size_was_asked_for(make: Callable[..., Bench]) -> None:
    bench = make(a=layerwise(held=(0, 1), window=5 * BLOCK_BYTES + 7), b=layerwise(held=(1, 3), yields=BLOCK_BYTES + 1))
    bench.request()
    bench.request()
    rooms = [layer.room for layer in bench.pipeline._streamer._loaded if layer.room is not None]
    assert rooms and all(room.start % 512 == 0 for room in rooms)


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [0, 0, 5], [1], [2, 0, 2, 0], [], [0, 1, 2, 3, 4, 5] * 2])
def test_layers_skipped_repeated_or_reversed_are_right_and_learned(
    make: Callable[..., Bench], order: list[int]
) -> None:
    bench = make(a=layerwise(held=(1, 2)), b=layerwise(held=(4,), slots=3))
    bench.request()
    for net in bench.nets.values():
        net.order = order
    with bench.pipeline.device.moving():
        bench.expected = _reference(bench)
    for _ in range(4):
        bench.request()
    first, second = bench.request(), bench.request()
    assert first == second


def test_requests_that_are_not_bracketed_are_learned_as_a_whole(make: Callable[..., Bench]) -> None:
    bench = make(a=layerwise(), b=layerwise(resident=(0, 2, 4)))
    bracketed = [bench.request() for _ in range(5)][-1]

    def request() -> int:
        started = bench.device.now_ns()
        assert torch.equal(bench.compute(), bench.expected)
        return bench.device.now_ns() - started

    times = [request() for _ in range(6)]
    before = bench.device.moved_bytes()[0]
    assert times[-1] == times[-2] <= bracketed * 1.01
    request()
    sizes = bench.pipeline.component("a").spec.groups[0].slot_bytes
    assert bench.device.moved_bytes()[0] - before == sum(sizes) + 3 * bench.steps * sizes[0]


def test_a_request_of_more_steps_than_the_last_is_right(make: Callable[..., Bench]) -> None:
    bench = make(a=layerwise(), b=layerwise(held=(0, 3)))
    for steps in (3, 7, 1, 5, 2):
        bench.steps = steps
        bench.expected = _reference(bench)
        bench.request()


def test_a_weight_changed_on_the_host_after_it_was_fetched_ahead_is_what_is_used(make: Callable[..., Bench]) -> None:
    bench = make(a=layerwise(slots=4))
    bench.request()
    bench.request()  # The first layers of the next request are in the window by now.
    with torch.no_grad():
        bench.nets["a"].blocks[0].linear.weight.mul_(2)
    bench.expected = _reference(bench)
    bench.request()
    bench.request()


def test_a_weight_changed_on_the_device_is_kept(make: Callable[..., Bench]) -> None:
    bench = make(a=layerwise(held=(1,)), b=layerwise(held=(1, 2)))
    nets = bench.nets

    def halve(module: Any, args: Any) -> None:
        module.linear.weight.mul_(0.5)

    for name in nets:
        plain = nets[name].blocks[1].linear.forward
        weight = nets[name].blocks[1].linear.weight
        nets[name].blocks[1].linear.forward = lambda value, plain=plain, weight=weight: (
            plain(value),
            weight.mul_(0.5),
        )[0]
    before = [net.blocks[1].linear.weight.clone() for net in nets.values()]
    with torch.no_grad(), bench.pipeline.request():
        bench.compute()
    for net, uses, weight in zip(nets.values(), (1, bench.steps), before, strict=True):
        assert torch.equal(net.blocks[1].linear.weight, weight * 0.5**uses)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_a_layer_leaves_every_layer_free_and_the_next_request_right(
    make: Callable[..., Bench], error: type[BaseException]
) -> None:
    bench = make(a=layerwise(held=(1,)), b=layerwise(held=(0,)))
    bench.request()
    plain = bench.nets["b"].blocks[3].linear.forward

    def fail(value: torch.Tensor) -> torch.Tensor:
        raise error

    bench.nets["b"].blocks[3].linear.forward = fail
    with pytest.raises(error), bench.pipeline.request():
        bench.compute()
    bench.nets["b"].blocks[3].linear.forward = plain
    host = [tensor for net in bench.nets.values() for block in net.blocks for tensor in block.parameters()]
    assert not any(bench.device.holds(tensor.untyped_storage()) for tensor in host)
    bench.request()


@pytest.mark.parametrize("error", [MemoryError, TimeoutError])
def test_a_copy_that_could_not_be_made_fails_one_request_and_is_made_for_the_next(
    make: Callable[..., Bench], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(a=layerwise(), b=layerwise(held=(0,)))
    bench.request()
    plain, left = bench.device.wait_for, 2

    def fail(mark: Mark) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error("no page")
        plain(mark)

    monkeypatch.setattr(bench.device, "wait_for", fail)
    with pytest.raises(error, match="no page"), bench.pipeline.request():
        bench.compute()
    monkeypatch.undo()
    before = bench.device.moved_bytes()[0]
    bench.request()
    assert bench.device.moved_bytes()[0] > before
    assert bench.pipeline.window_bytes


def test_a_copy_whose_asking_is_interrupted_has_ended_before_its_room_is_given_to_others(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(a=layerwise(), b=layerwise())
    bench.request()
    plain, given, done = bench.device.copy_ahead, Window.give, list[str]()

    def interrupt(copies: Any, *, after: Any) -> Mark:
        plain(copies, after=after)
        monkeypatch.setattr(bench.device, "copy_ahead", plain)
        done.append("asked")
        raise KeyboardInterrupt

    def give(self: Window, room: Any, *, after: Any) -> None:
        done.append("given")
        given(self, room, after=after)

    monkeypatch.setattr(bench.device, "copy_ahead", interrupt)
    monkeypatch.setattr(bench.device, "synchronize", lambda: done.append("waited for"))
    monkeypatch.setattr(Window, "give", give)
    with pytest.raises(KeyboardInterrupt), bench.pipeline.request():
        bench.compute()
    asked = done.index("asked")
    assert done[asked : asked + 3] == ["asked", "waited for", "given"]
    monkeypatch.undo()
    bench.request()


def test_without_memory_for_the_window_requests_are_right_and_slower(toys: Any, make: Callable[..., Bench]) -> None:
    bench = make(b=layerwise(slots=4))
    bench.device.limit(bench.device.memory().allocated_bytes + 2 * BLOCK_BYTES)
    bench.request()
    assert bench.pipeline.window_bytes == 0
    bench.device.limit(2**24)
    bench.request()
    assert bench.pipeline.window_bytes == 4 * BLOCK_BYTES


def test_a_window_smaller_than_a_layer_serves_it_all_the_same(make: Callable[..., Bench]) -> None:
    bench = make(b=layerwise(slots=2), num_blocks=6)
    bench.pipeline._streamer.configure(window_bytes=BLOCK_BYTES // 2, yields={})
    bench.request()
    bench.request()


def test_moving_a_component_lets_go_of_the_window_and_detach_of_everything(make: Callable[..., Bench]) -> None:
    bench = make(b=layerwise(slots=4))
    bench.request()
    assert bench.pipeline.window_bytes
    bench.pipeline.place("b", RESIDENT)
    weights = sum(spec.total_bytes for spec in bench.pipeline.specs)
    assert bench.pipeline.window_bytes == 0
    assert bench.device.memory().allocated_bytes - weights < BLOCK_BYTES // 4
    bench.pipeline.place("b", layerwise())
    bench.request()
    bench.pipeline.detach()
    assert (bench.pipeline.window_bytes, bench.pipeline.num_hooks) == (0, 0)
    assert torch.equal(bench.compute(), bench.expected)


PLACED = [
    layerwise(resident=(1,), held=(2,), window=4 * BLOCK_BYTES),
    ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PINNED),
    RESIDENT,
]


@pytest.mark.parametrize("placement", PLACED)
def test_a_change_of_weights_on_the_device_is_kept_in_every_mode(
    make: Callable[..., Bench], placement: ComponentPlacement
) -> None:
    bench = make(a=layerwise(), b=placement)
    bench.request()
    host_bytes = bench.pipeline.component("b").host_bytes
    with bench.pipeline.whole("b") as module, torch.no_grad():
        weights = [*module.parameters(), *module.buffers()]
        assert all(bench.device.holds(weight.untyped_storage()) for weight in weights)
        assert bench.pipeline.window_bytes == 0
        for block in bench.nets["b"].blocks:
            block.linear.weight.mul_(0.5)
    assert bench.pipeline.component("b").host_bytes == host_bytes
    bench.expected = _reference(bench)
    bench.request()
    bench.request()
    back = bench.device.moved_bytes()[1]
    bench.request()
    assert bench.device.moved_bytes()[1] == back


def test_a_change_of_weights_within_a_request_is_a_memory_phase_of_its_own(make: Callable[..., Bench]) -> None:
    bench = make(a=layerwise(), b=layerwise())

    def request() -> torch.Tensor:
        with bench.pipeline.whole("b"), torch.no_grad():
            bench.nets["b"].blocks[0].linear.weight.add_(0)
        return bench.compute()

    workload = Workload(width=8, height=8, frames=1, steps=3, batch=1)
    record, _ = measure_request(bench.pipeline, request, kind=RequestKind.BASELINE, workload=workload, target_steps=3)
    phase = next(phase for phase in record.phases if phase.whole)
    assert (phase.key, phase.whole, phase.active) == ("whole:b", ("b",), ())
    specs = {spec.name: spec for spec in bench.pipeline.specs}
    assert phase.allocated_peak_bytes >= specs["b"].total_bytes + specs["a"].outside_bytes
    assert sum(phase.duration_ns for phase in record.phases) <= record.duration_ns


def test_what_does_not_fit_whole_is_out_of_memory_and_nothing_is_lost(make: Callable[..., Bench]) -> None:
    bench = make(a=layerwise(), b=layerwise(slots=2))
    bench.request()
    bench.device.limit(bench.device.memory().allocated_bytes)
    with pytest.raises(torch.OutOfMemoryError), bench.pipeline.whole("b"):
        raise AssertionError
    bench.device.limit(2**24)
    bench.request()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_placement_and_any_order_gives_what_resident_modules_give(data: st.DataObject, toys: Any) -> None:
    indices = st.sets(st.integers(0, 4))

    def placement() -> ComponentPlacement:
        kind = data.draw(st.sampled_from(["resident", "whole", "layers", "layers"]))
        yields = data.draw(st.sampled_from([0, 0, BLOCK_BYTES, 3 * BLOCK_BYTES]))
        if kind == "resident":
            return ComponentPlacement(mode=Mode.RESIDENT, yield_bytes=yields)
        if kind == "whole":
            return ComponentPlacement(mode=Mode.COMPONENT_OFFLOAD, tier=HostTier.PAGEABLE, yield_bytes=yields)
        resident = tuple(sorted(data.draw(indices)))
        held = tuple(sorted(data.draw(indices) - set(resident)))
        window = data.draw(st.sampled_from([0, BLOCK_BYTES, 4 * BLOCK_BYTES]))
        slots = data.draw(st.integers(1, 4))
        return layerwise(resident=resident, held=held, slots=slots, window=window, yields=yields)

    bench = Bench(toys, {"a": placement(), "b": placement()}, num_blocks=5)
    for _ in range(data.draw(st.integers(1, 5))):
        bench.steps = data.draw(st.integers(0, 3))
        for net in bench.nets.values():
            net.order = data.draw(st.lists(st.integers(0, 4), max_size=8))
        bench.expected = _reference(bench)
        bench.request()
        specs, placed = bench.pipeline.specs, bench.pipeline.placement
        assert bench.pipeline.window_bytes <= window_bytes(specs, placed)
    bench.device.close()


def _packed_bytes(net: Any) -> int:
    """Return the bytes of a net's weights, each storage once."""
    tensors = [*net.parameters(), *net.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _reference(bench: Bench) -> torch.Tensor:
    """Compute as if nobody managed the nets: their weights, wherever they are, copied."""
    with torch.no_grad(), bench.device.moving():
        nets = {name: copy.deepcopy(net) for name, net in bench.nets.items()}
        value = nets["a"](bench.value)
        for _ in range(bench.steps):
            value = nets["b"](value)
        result: torch.Tensor = value
        return result
