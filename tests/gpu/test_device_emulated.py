"""What only the emulated device promises: pools, exact counts, threads, and the modelled clock."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from torch import nn

from residency.gpu.clock import ModelledSpeeds
from residency.gpu.emulated import EmulatedDevice

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice()
    yield device
    device.close()


def host_storage(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


@pytest.fixture
def weight(device: EmulatedDevice) -> torch.Tensor:
    weight = nn.Parameter(torch.arange(64.0).reshape(8, 8), requires_grad=False)
    device.claim_host(weight.untyped_storage())
    return weight


def test_inputs_are_counted_when_a_kernel_first_sees_them(device: EmulatedDevice) -> None:
    outside = torch.ones(256)
    with device.running():
        assert device.memory().allocated_bytes == 0
        result = outside + outside.view(16, 16).sum()
    assert device.memory().allocated_bytes == outside.nbytes + result.nbytes
    assert device.holds(outside.untyped_storage())


def test_views_and_in_place_operators_take_no_memory(device: EmulatedDevice) -> None:
    with device.running():
        ones = torch.ones(64, 64)
        before = device.memory()
        ones[3:5].add_(1).view(-1).mul_(2)
        ones.relu_()
        ones[0] = 5
        assert device.memory().allocated_bytes == before.allocated_bytes


def test_a_storage_lives_as_long_as_its_last_view(device: EmulatedDevice) -> None:
    with device.running():
        ones = torch.ones(64, 64)
        view = ones[0]
        del ones
        assert device.memory().allocated_bytes == 64 * 64 * 4
        del view
        assert device.memory().allocated_bytes == 0


def test_a_gathered_cycle_is_given_back(device: EmulatedDevice) -> None:
    with device.running():
        holder: dict[str, Any] = {"tensor": torch.ones(1024)}
        holder["self"] = holder
        del holder
        gc.collect()
        assert device.memory().allocated_bytes == 0


def test_a_resized_tensor_is_counted_by_its_new_size(device: EmulatedDevice) -> None:
    with device.running():
        tensor = torch.empty(10)
        tensor.resize_(1000)
        assert device.memory().allocated_bytes == 4000
        tensor.untyped_storage().resize_(0)
        assert device.memory().allocated_bytes == 0
        assert device.memory().allocated_peak_bytes == 4000


def test_a_resize_past_the_cap_leaves_tensor_and_count_as_they_were(device: EmulatedDevice) -> None:
    device.limit(1000)
    with device.running():
        tensor = torch.ones(100)
        with pytest.raises(torch.OutOfMemoryError):
            tensor.resize_(1000)
        assert tensor.shape == (100,)
        assert tensor.untyped_storage().nbytes() == device.memory().allocated_bytes == 400
        assert tensor.tolist() == [1.0] * 100


def test_an_out_argument_past_the_cap_gives_back_what_it_took(device: EmulatedDevice) -> None:
    device.limit(1000)
    with device.running():
        ones, out = torch.ones(150), torch.empty(0)
        with pytest.raises(torch.OutOfMemoryError):
            torch.mul(ones, 2, out=out)
        assert out.shape == (0,)
        assert device.memory().allocated_bytes == ones.nbytes


def test_every_part_of_a_result_that_does_not_fit_is_dropped(device: EmulatedDevice) -> None:
    device.limit(10_000)
    with device.running():
        ones = torch.ones(1000)
        before = device.memory()
        try:
            torch.sort(ones)
        except torch.OutOfMemoryError as error:
            # The traceback is still alive here, and must hold nothing.
            assert "Tried to allocate" in str(error)
            assert device.memory().allocated_bytes == before.allocated_bytes
        else:
            pytest.fail("4000 + 4000 + 8000 bytes fitted into 10,000")


def test_the_error_text_is_that_of_torch(device: EmulatedDevice) -> None:
    device.limit(2**20)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"Tried to allocate 2\.00 MiB\. Device 0 has a total capacity of 256\.00 GiB of which 1\.00 MiB is free",
    ):
        device.upload(host_storage(2 * 2**20), pinned=False)


def test_an_address_used_again_is_not_taken_for_the_storage_before(device: EmulatedDevice) -> None:
    seen = set()
    for turn in range(300):
        tensor = torch.ones(32)
        storage = tensor.untyped_storage()
        seen.add(storage._cdata)
        assert not device.holds(storage)
        if turn % 2:
            device.claim_host(storage)
            with pytest.raises(RuntimeError, match="same device"), device.running():
                tensor.sum()
        else:
            with device.running():
                tensor.sum()
            assert device.holds(storage)
        del tensor, storage
    assert len(seen) < 300, "no address was used again, so that this test shows nothing"
    assert device.memory().allocated_bytes == 0


def test_claiming_takes_a_storage_out_of_the_device_pool(device: EmulatedDevice) -> None:
    with device.running():
        tensor = torch.ones(100)
    device.claim_host(tensor.untyped_storage())
    device.claim_host(tensor.untyped_storage())
    assert not device.holds(tensor.untyped_storage())
    assert device.memory().allocated_bytes == 0


def test_nothing_is_looked_at_while_moving(device: EmulatedDevice, weight: torch.Tensor) -> None:
    with device.running(), device.moving():
        assert float(weight.sum()) == 2016.0
    assert device.memory().allocated_bytes == 0


def test_moving_ends_with_its_exception(device: EmulatedDevice, weight: torch.Tensor) -> None:
    with device.running():
        with pytest.raises(KeyboardInterrupt), device.moving():
            raise KeyboardInterrupt
        with pytest.raises(RuntimeError, match="same device"):
            weight.sum()


def test_running_ends_with_its_exception(device: EmulatedDevice, weight: torch.Tensor) -> None:
    with pytest.raises(KeyboardInterrupt), device.running(), device.running():
        raise KeyboardInterrupt
    assert float(weight.sum()) == 2016.0


def test_a_guarded_thread_refuses_host_weights_outside_running_and_counts_nothing(
    device: EmulatedDevice, weight: torch.Tensor
) -> None:
    device.guard()
    device.guard()
    with pytest.raises(RuntimeError, match="same device"):
        weight.sum()
    with pytest.raises(RuntimeError, match="same device"):
        weight.clone().sum()
    torch.ones(1000).sum()
    assert device.memory().allocated_bytes == 0
    with device.running():
        kept = torch.ones(1000)
    assert device.memory().allocated_bytes == kept.nbytes
    with pytest.raises(RuntimeError, match="same device"):
        weight.sum()
    device.close()
    assert float(weight.sum()) == 2016.0


def test_guarding_inside_running_lasts(device: EmulatedDevice, weight: torch.Tensor) -> None:
    with device.running():
        device.guard()
    with pytest.raises(RuntimeError, match="same device"):
        weight.sum()


def test_threads_share_one_ledger_and_leave_nothing_behind(device: EmulatedDevice, weight: torch.Tensor) -> None:
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        barrier.wait(timeout=30)
        for _ in range(60):
            with device.running():
                x = torch.randn(64, 64, generator=generator)
                assert torch.isfinite((x @ x).relu_().sum())
                with pytest.raises(RuntimeError, match="same device"):
                    weight.sum()

    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(work, range(4)))
    gc.collect()
    assert device.memory().allocated_bytes == 0
    assert device.memory().allocated_peak_bytes >= 2 * 64 * 64 * 4


def test_running_in_one_thread_does_not_reach_another(device: EmulatedDevice, weight: torch.Tensor) -> None:
    with device.running(), ThreadPoolExecutor(max_workers=1) as pool:
        assert pool.submit(lambda: float(weight.sum())).result(timeout=30) == 2016.0


class Scaled(torch.Tensor):
    """A wrapper subclass: its values are an inner tensor times two."""

    held: torch.Tensor

    def __new__(cls, inner: torch.Tensor) -> Self:
        wrapper: Self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.held = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*(arg.held * 2 if isinstance(arg, Scaled) else arg for arg in args), **(kwargs or {}))


def test_a_wrapper_subclass_is_checked_and_counted_inside(device: EmulatedDevice, weight: torch.Tensor) -> None:
    with torch.no_grad(), device.running():
        assert torch.equal(torch.ones(2, 8) + Scaled(torch.ones(2, 8)), torch.full((2, 8), 3.0))
        with pytest.raises(RuntimeError, match="same device"):
            torch.add(torch.ones(8, 8), Scaled(weight))


def test_meta_and_sparse_tensors_pass(device: EmulatedDevice) -> None:
    with torch.no_grad(), device.running():
        assert (torch.empty(1000, device="meta") + 1).shape == (1000,)
        sparse = torch.eye(3).to_sparse()
        assert torch.equal(torch.sparse.mm(sparse, torch.ones(3, 3)), torch.ones(3, 3))


def test_batched_and_compiled_away_operators_pass(device: EmulatedDevice) -> None:
    with torch.no_grad(), device.running():
        mask = torch.vmap(lambda row: row.cumsum(0) > 2)(torch.ones(3, 4))
        assert mask.sum().item() == 6


def test_generators_draw_the_same_numbers(device: EmulatedDevice) -> None:
    plain = torch.randn(100, generator=torch.Generator().manual_seed(5))
    with device.running():
        assert torch.equal(torch.randn(100, generator=torch.Generator().manual_seed(5)), plain)


def test_the_clock_is_the_modelled_cost_of_what_was_done() -> None:
    speeds = ModelledSpeeds(launch_ns=7, memory=10**9, to_device_pinned=2 * 10**9, to_device_pageable=10**9)
    device = EmulatedDevice(speeds=speeds)
    source = host_storage(1000)
    device.upload(source, pinned=False)
    assert device.now_ns() == 1000
    device.upload(source, pinned=True)
    assert device.now_ns() == 1500
    with device.running():
        ones = torch.ones(25)
        assert device.now_ns() == 1500 + 7 + 100
        ones.view(5, 5).t()
        assert device.now_ns() == 1607
        ones.add_(1)
        assert device.now_ns() == 1607 + 7 + 100


def test_a_link_is_as_fast_as_it_is_said_to_be() -> None:
    speeds = ModelledSpeeds(to_host_pinned=10**9, to_host_pageable=10**8)
    device = EmulatedDevice(speeds=speeds)
    assert device.measure_link().to_host_pageable == 1e8
    uploaded = device.upload(host_storage(1000), pinned=True)
    target = host_storage(1000)
    started_ns = device.now_ns()
    device.download(uploaded, into=target)
    assert device.now_ns() - started_ns == 10_000
    device.pin(target)
    started_ns = device.now_ns()
    device.download(uploaded, into=target)
    assert device.now_ns() - started_ns == 1_000


def test_a_host_that_pins_only_so_much_refuses_the_rest() -> None:
    device = EmulatedDevice(pin_limit_bytes=1500)
    first, second = host_storage(1000), host_storage(1000)
    assert device.pin(first)
    assert not device.pin(second)
    device.unpin(first)
    assert device.pin(second)


def test_what_is_pinned_or_unpinned_twice_counts_once() -> None:
    device = EmulatedDevice(pin_limit_bytes=1500)
    first, second = host_storage(1000), host_storage(500)
    for _ in range(3):
        assert device.pin(first) and device.pin(first) and device.pin(second)
        assert not device.pin(host_storage(1))
        device.unpin(first)
        device.unpin(first)
        assert not device.pin(host_storage(1001))
    device.close()
    assert device.pin(host_storage(1500))


def test_an_operator_costs_microseconds(device: EmulatedDevice) -> None:
    x = torch.ones(8, 8)
    with torch.no_grad(), device.running():
        best_us = float("inf")
        for _ in range(20):
            started = time.perf_counter()
            for _ in range(100):
                torch.addmm(x, x, x)
            best_us = min(best_us, (time.perf_counter() - started) * 1e4)
    # About 20 on an idle machine, and the operator's own 4; the bound only catches a change of its order.
    assert best_us < 200


def test_threads_started_after_the_guard_refuse_host_weights_too() -> None:
    device = EmulatedDevice(total_bytes=2**30)
    weight = torch.ones(4, 4)
    caught: list[str] = []

    def use() -> None:
        try:
            torch.nn.functional.linear(torch.ones(1, 4), weight)
            caught.append("computed")
        except RuntimeError as error:
            caught.append(str(error)[:20])

    def on_a_thread() -> None:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    before = threading.getprofile()
    device.claim_host(weight.untyped_storage())
    device.guard()
    on_a_thread()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(use).result()
    device.unclaim_host(weight.untyped_storage())
    on_a_thread()
    device.close()
    assert caught == ["Expected all tensors", "Expected all tensors", "computed"]
    assert threading.getprofile() is before
