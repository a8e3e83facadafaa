"""Components together: who is on the device when, one request at a time, and an exact way back."""

from __future__ import annotations

import copy
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from residency.errors import PipelineBusy, SettingsError, UnknownComponent
from residency.gpu.emulated import EmulatedDevice
from residency.gpu.pipeline import ManagedPipeline
from residency.gpu.placement import RESIDENT, Mode

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

WIDTH = 32
# Inputs and activations that outlive a request; the weights of one layer are more.
SMALL_BYTES = 2_000


class Watcher:
    """Notes what is on the device whenever a component is entered or left."""

    def __init__(self, pipeline: ManagedPipeline) -> None:
        self._pipeline = pipeline
        self.events: list[tuple[str, str, int]] = []

    def entered(self, component: str) -> None:
        self.events.append(("entered", component, self._pipeline.device.memory().allocated_bytes))

    def loaded(self, component: str) -> None:
        pass

    def made_whole(self, component: str) -> None:
        pass

    def was_whole(self, component: str) -> None:
        pass

    def left(self, component: str) -> None:
        self.events.append(("left", component, self._pipeline.device.memory().allocated_bytes))


def make(toys: Any, device: EmulatedDevice, **options: Any) -> tuple[ManagedPipeline, Callable[[], torch.Tensor]]:
    nets = {name: toys.net(seed=seed, width=WIDTH) for seed, name in enumerate(("first", "second"))}
    value = toys.value(WIDTH)

    def run() -> torch.Tensor:
        with torch.no_grad():
            middle = nets["first"](value)
            result: torch.Tensor = nets["second"](nets["first"](middle))
            return result

    return ManagedPipeline(nets, device=device, **options), run


def test_construction_moves_nothing_and_says_where_weights_are(toys: Any, device: EmulatedDevice) -> None:
    pipeline, _ = make(toys, device)
    assert device.moved_bytes() == (0, 0)
    assert {component.mode for component in pipeline.placement.components.values()} == {Mode.COMPONENT_OFFLOAD}
    assert [spec.name for spec in pipeline.specs] == ["first", "second"]


def test_an_offloaded_component_stays_until_another_one_is_entered(toys: Any, device: EmulatedDevice) -> None:
    pipeline, run = make(toys, device)
    watcher = Watcher(pipeline)
    total = pipeline.component("first").spec.total_bytes
    with pipeline.observing(watcher), pipeline.request():
        run()
    uses = [("entered", "first"), ("left", "first")] * 2 + [("entered", "second"), ("left", "second")]
    assert [event[:2] for event in watcher.events] == uses
    entered_second = next(size for what, name, size in watcher.events if (what, name) == ("entered", "second"))
    assert entered_second < SMALL_BYTES < total  # the first one left before the second came
    assert device.moved_bytes()[0] == 2 * total  # two uses of the first in a row are one load
    assert device.memory().allocated_bytes < SMALL_BYTES


def test_calls_without_a_bracket_are_requests_of_their_own(toys: Any, device: EmulatedDevice) -> None:
    pipeline, run = make(toys, device)
    run()
    assert device.moved_bytes()[0] == 3 * pipeline.component("first").spec.total_bytes
    assert device.memory().allocated_bytes < SMALL_BYTES


def test_every_entry_point_loads_its_component(toys: Any, device: EmulatedDevice) -> None:
    pipeline, _ = make(toys, device)
    net: Any = pipeline.component("first").module
    with torch.no_grad():
        net.encode(toys.value(WIDTH))
    assert device.moved_bytes()[0] == pipeline.component("first").spec.total_bytes


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", ["offload", "offload_pinned", "layerwise", "layerwise_pinned"])
def test_an_exception_in_mid_request_leaves_the_state_before_it(
    toys: Any, device: EmulatedDevice, error: type[BaseException], mode: str
) -> None:
    pipeline, run = make(toys, device)
    for name in ("first", "second"):
        pipeline.place(name, getattr(toys, mode))
    expected = run().clone()
    idle = device.memory().allocated_bytes
    net: Any = pipeline.component("second").module
    inner = net.blocks[2].linear

    def fail(value: torch.Tensor) -> torch.Tensor:
        raise error

    inner.forward = fail
    with pytest.raises(error), pipeline.request():
        run()
    del inner.forward
    assert abs(device.memory().allocated_bytes - idle) < SMALL_BYTES
    assert torch.equal(run(), expected)


def test_a_load_that_runs_out_of_memory_fails_the_request_and_nothing_else(toys: Any) -> None:
    device = EmulatedDevice(total_bytes=2**20)
    pipeline, run = make(toys, device)
    expected = run().clone()
    device.limit(1_000)
    with pytest.raises(torch.OutOfMemoryError), pipeline.request():
        run()
    device.limit(2**20)
    assert torch.equal(run(), expected)


def test_another_thread_waits_for_the_request_in_flight(toys: Any, device: EmulatedDevice) -> None:
    _, run = make(toys, device)
    expected = run().clone()
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(torch.equal(run(), expected))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def in_thread(action: Callable[[], object]) -> BaseException | None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            action()
        except PipelineBusy as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return caught[0] if caught else None


def test_a_request_of_another_thread_is_refused_after_the_bound(toys: Any, device: EmulatedDevice) -> None:
    pipeline, run = make(toys, device)
    pipeline.request_wait_s = 0.01
    with pipeline.exclusive("round 3", 0.0):
        run()  # this thread's own warmup
        refusal = in_thread(run)
    assert isinstance(refusal, PipelineBusy) and "round 3" in str(refusal)
    assert in_thread(run) is None


def test_a_round_is_refused_while_a_request_runs(toys: Any, device: EmulatedDevice) -> None:
    pipeline, _ = make(toys, device)

    def take() -> None:
        with pipeline.exclusive("round 1", 0.01):
            pass

    with pipeline.request():
        assert isinstance(in_thread(take), PipelineBusy)
        with pytest.raises(PipelineBusy, match="of this thread"):
            take()
        with pytest.raises(PipelineBusy):
            pipeline.place("first", RESIDENT)
    take()


def test_the_callback_runs_once_before_each_outermost_request_but_not_in_a_round(
    toys: Any, device: EmulatedDevice
) -> None:
    pipeline, run = make(toys, device)
    calls: list[str] = []

    def before() -> None:
        calls.append("called")
        with pipeline.exclusive("taking the worker back", 0.0):
            pipeline.place("second", RESIDENT)
        run()

    pipeline.before_request = before
    with pipeline.request(), pipeline.request():
        run()
    assert calls == ["called"]
    with pipeline.exclusive("round 1", 0.0):
        run()
    assert calls == ["called"]
    assert pipeline.placement.components["second"] == RESIDENT


def test_a_minimal_pipeline_has_no_hooks_unless_the_placement_needs_them(toys: Any, device: EmulatedDevice) -> None:
    pipeline, run = make(toys, device, minimal=True)
    assert pipeline.num_hooks == 4
    for name in ("first", "second"):
        pipeline.place(name, RESIDENT)
    assert pipeline.num_hooks == 0
    run()
    pipeline.place("first", toys.layerwise)
    assert pipeline.num_hooks == 8
    pipeline.detach()
    assert pipeline.num_hooks == 0


def test_placing_twice_and_detaching_twice_are_no_ops(toys: Any, device: EmulatedDevice) -> None:
    pipeline, run = make(toys, device)
    expected = run().clone()
    pipeline.place("first", toys.layerwise)
    hooks, moved = pipeline.num_hooks, device.moved_bytes()
    pipeline.place("first", toys.layerwise)
    assert (pipeline.num_hooks, device.moved_bytes()) == (hooks, moved)
    pipeline.detach()
    pipeline.detach()
    assert torch.equal(run(), expected)
    with pytest.raises(SettingsError, match="after detach"):
        pipeline.place("first", RESIDENT)


def test_detach_gives_back_weights_hooks_and_attributes_exactly(toys: Any, device: EmulatedDevice) -> None:
    net = toys.net()

    def own(value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = net.head(value)
        return result

    net.encode = own  # someone else's wrapper is put back, too
    modules = {"net": net, "other": toys.net(seed=1)}
    before = {name: (vars(m).copy(), [t.data_ptr() for t in m.parameters()]) for name, m in net.named_modules()}
    pipeline = ManagedPipeline(modules, device=device)
    for placement in (toys.layerwise, RESIDENT, toys.offload):
        pipeline.place("net", placement)
        net(toys.value())
    pipeline.detach()
    assert {n: (vars(m), [t.data_ptr() for t in m.parameters()]) for n, m in net.named_modules()} == before
    assert net.encode is own


def test_detach_brings_a_released_component_back_to_the_host(toys: Any, device: EmulatedDevice) -> None:
    pipeline, run = make(toys, device)
    expected = run().clone()
    pipeline.place("first", RESIDENT)
    pipeline.place("second", toys.layerwise_pinned)
    pipeline.commit()
    pipeline.detach()
    assert pipeline.pinned_bytes == 0
    assert torch.equal(run(), expected)
    tensors = [tensor for name in ("first", "second") for tensor in pipeline.component(name).module.parameters()]
    assert not any(device.holds(tensor.untyped_storage()) for tensor in tensors)


def test_detach_attempts_every_component_and_can_be_repeated(toys: Any) -> None:
    class Refusing(EmulatedDevice):
        refuse = True

        def download(self, source: Any, *, into: Any = None) -> Any:
            if self.refuse:
                raise RuntimeError("the card has fallen off the bus")
            return super().download(source, into=into)

    device = Refusing(total_bytes=2**24)
    pipeline, run = make(toys, device)
    expected = run().clone()
    for name in ("first", "second"):
        pipeline.place(name, RESIDENT)
    pipeline.commit()
    with pytest.raises(RuntimeError, match="fallen off") as caught:
        pipeline.detach()
    assert any("then also" in note for note in caught.value.__notes__)
    device.refuse = False
    pipeline.detach()
    assert torch.equal(run(), expected)


def test_a_module_cannot_have_two_owners(toys: Any, device: EmulatedDevice) -> None:
    net = toys.net()
    pipeline = ManagedPipeline({"net": net}, device=device)
    with pytest.raises(SettingsError, match="managed by another pipeline"):
        ManagedPipeline({"inner": net.blocks[0]}, device=device)
    pipeline.detach()
    ManagedPipeline({"inner": net.blocks[0]}, device=device).detach()


def test_an_unknown_component_is_named_with_the_known_ones(toys: Any, device: EmulatedDevice) -> None:
    pipeline, _ = make(toys, device)
    with pytest.raises(UnknownComponent, match="first, second"):
        pipeline.place("third", RESIDENT)


def test_the_placement_asked_for_in_mid_move_is_the_one_before_it(toys: Any) -> None:
    answers: list[object] = []

    class Asking(EmulatedDevice):
        def upload(self, source: Any, *, pinned: bool) -> Any:
            answers.append(pipeline.placement)
            return super().upload(source, pinned=pinned)

    device = Asking(total_bytes=2**24)
    pipeline, _ = make(toys, device)
    before = pipeline.placement
    pipeline.place("first", RESIDENT)
    assert answers and all(answer == before for answer in answers)


def test_a_deep_copy_of_a_managed_module_is_a_plain_module(toys: Any, device: EmulatedDevice) -> None:
    pipeline, _ = make(toys, device)
    original: Any = pipeline.component("first").module
    twin = copy.deepcopy(original)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
        assert not twin(toys.value(WIDTH)).any()
        assert original(toys.value(WIDTH)).any()


def test_a_change_made_by_a_forward_survives_requests(toys: Any, device: EmulatedDevice) -> None:
    pipeline, run = make(toys, device)
    net: Any = pipeline.component("first").module
    shift = net.blocks[0].shift
    before = shift.clone()
    run()
    with pipeline.request(), torch.no_grad():
        net(toys.value(WIDTH))
        shift.add_(1)  # while it lingers on the device
    assert torch.equal(shift, before + 1)


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line that the mechanism itself executes."""

    files = ("pipeline.py", "component.py", "storage.py", "gate.py", "inventory.py")

    def __init__(self, line: int) -> None:
        self._left = line

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.endswith(self.files) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        return self._line


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts inside a generator's end
@pytest.mark.parametrize("line", range(15, 1_000, 60))
def test_an_interrupt_at_any_line_leaves_a_pipeline_that_serves(toys: Any, device: EmulatedDevice, line: int) -> None:
    pipeline, run = make(toys, device)
    pipeline.place("first", toys.offload_pinned)
    pipeline.place("second", toys.layerwise)
    expected, idle = run().clone(), device.memory().allocated_bytes
    tracer = sys.gettrace()
    sys.settrace(InterruptAt(line))
    try:
        with pytest.raises(KeyboardInterrupt), pipeline.request():
            run()
    finally:
        sys.settrace(tracer)
    pipeline.request_wait_s = 0.0
    assert abs(device.memory().allocated_bytes - idle) < SMALL_BYTES
    with pipeline.exclusive("a round", 0.0):
        assert torch.equal(run(), expected)
    pipeline.detach()
    assert pipeline.num_hooks == pipeline.pinned_bytes == 0


def test_a_weight_shared_with_a_pipeline_that_is_managed_already_is_refused() -> None:
    device = EmulatedDevice(total_bytes=2**30)
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    second.weight = first.weight
    pipeline = ManagedPipeline({"a": first}, device=device)
    with pytest.raises(SettingsError, match="a weight of it"):
        ManagedPipeline({"b": second}, device=device)
    pipeline.detach()
    ManagedPipeline({"b": second}, device=device).detach()
    device.close()
