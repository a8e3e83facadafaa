"""The emulated device under real pipelines: same output, every stray kernel caught, every byte given back."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from residency.gpu.emulated import EmulatedDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


def used_weights(pipe: Any) -> Iterator[torch.Tensor]:
    """One weight of every component that a request reads; a request only decodes with the vae."""
    for name, module in pipe.components.items():
        if isinstance(module, torch.nn.Module):
            prefix = "decoder." if name == "vae" else ""
            yield next(weight for key, weight in module.named_parameters() if key.startswith(prefix))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pipeline_computes_the_same_bits_under_the_device(
    subject: Any, device: EmulatedDevice, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    with mode():
        plain = subject.request()
        with device.running():
            guarded = subject.request()
    assert torch.equal(plain, guarded)
    assert device.now_ns() > 0


def test_memory_and_modelled_time_of_a_request_repeat_exactly_and_its_output_is_given_back(
    subject: Any, device: EmulatedDevice
) -> None:
    figures = []
    with device.running():
        for _ in range(3):
            gc.collect()
            device.reset_peaks()
            before_bytes, started_ns = device.memory().allocated_bytes, device.now_ns()
            output = subject.request()
            gc.collect()
            with_output = device.memory()
            duration_ns = device.now_ns() - started_ns
            output_bytes = output.untyped_storage().nbytes()
            del output
            assert device.memory().allocated_bytes == with_output.allocated_bytes - output_bytes
            figures.append((before_bytes, duration_ns, with_output.allocated_bytes, with_output.allocated_peak_bytes))
    # The first request also brings in the weights, which nothing has uploaded here.
    assert figures[1] == figures[2]


def test_a_request_fails_while_one_weight_it_uses_is_on_the_host(subject: Any) -> None:
    for weight in used_weights(subject.pipe):
        device = EmulatedDevice()
        device.claim_host(weight.untyped_storage())
        with device.running(), pytest.raises(RuntimeError, match="same device"):
            subject.request()


def test_out_of_memory_is_raised_at_the_cap_and_the_next_request_serves(subject: Any, device: EmulatedDevice) -> None:
    with device.running():
        plain = subject.request()
        gc.collect()
        before_bytes = device.memory().allocated_bytes
        peak_bytes = device.memory().allocated_peak_bytes
        device.limit(before_bytes + (peak_bytes - before_bytes) // 2)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            subject.request()
        gc.collect()
        device.limit(device.reading().total_bytes)
        assert torch.equal(subject.request(), plain)
        gc.collect()
        assert device.memory().allocated_bytes == before_bytes
