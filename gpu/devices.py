"""The devices of this process: one object for each, and the cap that is in force."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from residency.errors import SettingsError
from residency.gpu.cuda import CudaDevice
from residency.gpu.emulated import EmulatedDevice

if TYPE_CHECKING:
    from residency.gpu.device import Device

DEVICE_KINDS = ("auto", "cpu", "cuda")

_lock = threading.Lock()
_opened: dict[torch.device, CudaDevice | EmulatedDevice] = {}
_cap_bytes: int | None = None


def open_device(kind: str, *, cap_bytes: int | None, allocator_settings: str = "") -> Device:
    """Return this process's device of a kind, the same object at every call; "auto" is CUDA where there is one.

    "cuda" is torch's current CUDA device, "cpu" the emulated one. cap_bytes: the cap from now on; None leaves the
    one in force, at first the device's own, which is what it has room for. allocator_settings: what the device's
    reading tells of them from now on, unless empty. Raises SettingsError if there is no such device, or the cap is
    not within its memory.
    """
    global _cap_bytes
    torch_device = _resolve(kind)
    with _lock:
        device = _opened.get(torch_device)
        if device is None:
            cap_bytes = _cap_bytes if cap_bytes is None else cap_bytes
            device = _opened[torch_device] = _make(torch_device, cap_bytes=cap_bytes)
        elif cap_bytes is not None:
            device.limit(cap_bytes)
        if cap_bytes is not None:
            _cap_bytes = cap_bytes
        device.allocator_settings = allocator_settings or device.allocator_settings
        return device


def limit_device(kind: str = "auto", *, cap_bytes: int) -> Device:
    """Cap this process's device before anything is loaded, and return it. Raises as `open_device`."""
    return open_device(kind, cap_bytes=cap_bytes)


def close_devices() -> None:
    """Close every opened device and forget the cap; the next `open_device` makes a new one."""
    global _cap_bytes
    with _lock:
        for device in _opened.values():
            device.close()
        _opened.clear()
        _cap_bytes = None


def _resolve(kind: str) -> torch.device:
    if kind not in DEVICE_KINDS:
        raise SettingsError(f"device {kind!r} is unknown; use one of {', '.join(DEVICE_KINDS)}", device=repr(kind))
    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise SettingsError("no CUDA device is available; use device 'cpu' or 'auto'", device=kind)
    if kind == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _make(torch_device: torch.device, *, cap_bytes: int | None) -> CudaDevice | EmulatedDevice:
    if torch_device.type == "cpu":
        return EmulatedDevice(cap_bytes=cap_bytes)
    return CudaDevice(torch_device.index, cap_bytes=cap_bytes)
