"""The devices of a process: one object each, and the cap set before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from residency.errors import SettingsError
from residency.gpu.devices import close_devices, limit_device, open_device

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_devices() -> Iterator[None]:
    close_devices()
    yield
    close_devices()


def test_the_same_device_comes_back_at_every_call() -> None:
    assert open_device("cpu", cap_bytes=None) is open_device("cpu", cap_bytes=2**20)


def test_a_cap_set_before_is_in_force_when_the_device_is_opened() -> None:
    limit_device("cpu", cap_bytes=2**20)
    assert open_device("cpu", cap_bytes=None).reading().cap_bytes == 2**20


def test_a_later_cap_replaces_the_earlier_one() -> None:
    limit_device("cpu", cap_bytes=2**20)
    assert open_device("cpu", cap_bytes=2**21).reading().cap_bytes == 2**21
    assert open_device("cpu", cap_bytes=None).reading().cap_bytes == 2**21


def test_an_absurd_cap_is_refused_and_not_remembered() -> None:
    limit_device("cpu", cap_bytes=2**20)
    with pytest.raises(SettingsError, match="memory cap is 0 bytes") as caught:
        limit_device("cpu", cap_bytes=0)
    assert caught.value.exit_code == 2
    assert open_device("cpu", cap_bytes=None).reading().cap_bytes == 2**20


def test_an_absurd_first_cap_opens_nothing() -> None:
    with pytest.raises(SettingsError):
        open_device("cpu", cap_bytes=-1)
    device = open_device("cpu", cap_bytes=None)
    assert device.reading().cap_bytes == device.reading().total_bytes


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(SettingsError, match="device 'tpu' is unknown; use one of auto, cpu, cuda"):
        open_device("tpu", cap_bytes=None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a host without CUDA")
def test_without_cuda_auto_is_the_emulated_device_and_cuda_is_refused() -> None:
    assert open_device("auto", cap_bytes=None) is open_device("cpu", cap_bytes=None)
    with pytest.raises(SettingsError, match="no CUDA device is available; use device 'cpu' or 'auto'"):
        open_device("cuda", cap_bytes=None)


def test_allocator_settings_are_told_once_they_are_known() -> None:
    assert open_device("cpu", cap_bytes=None).reading().allocator_settings == ""
    device = open_device("cpu", cap_bytes=None, allocator_settings="expandable_segments:True")
    assert device.reading().allocator_settings == "expandable_segments:True"
    assert open_device("cpu", cap_bytes=None).reading().allocator_settings == "expandable_segments:True"


@pytest.mark.gpu
def test_with_cuda_auto_is_the_cuda_device() -> None:
    assert open_device("auto", cap_bytes=None) is open_device("cuda", cap_bytes=None)
    assert open_device("auto", cap_bytes=None).torch_device.type == "cuda"
