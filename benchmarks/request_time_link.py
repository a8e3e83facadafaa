"""The link between host and device: how fast it copies, and requests while a second stream keeps it busy."""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.request_time_rows import Row, run_job
from residency.gpu.host_memory import allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from benchmarks.request_time_shards import Job
    from residency.gpu.device import Device

# Its events and streams have types in some versions of torch only.
_cuda: Any = torch.cuda

MIB = 2**20
SIZES = (MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
COPIES = 6  # back to back, as the engine queues them; the first one does not count
PIN_BYTES = 1024 * MIB
# Small and few, so that whoever waits for the whole device waits a few milliseconds at most for copies in flight.
BUSY_COPY_BYTES = 64 * MIB
BUSY_COPIES_AHEAD = 4


def measure(job: Job, device: Device, row: Row) -> None:
    """Do the job of measuring the link."""
    row.add(link=link_row(device))


def link_row(device: Device) -> dict[str, Any]:
    """Return the link's speeds in bytes/s: both directions, pinned and pageable, and to the device by copy size."""
    reading = device.measure_link()
    row: dict[str, Any] = {
        "to_device_pinned": reading.to_device_pinned,
        "to_device_pageable": reading.to_device_pageable,
        "to_host_pinned": reading.to_host_pinned,
        "to_host_pageable": reading.to_host_pageable,
    }
    if device.torch_device.type == "cuda":
        row["by_size"] = {str(size): speed for size, speed in copy_speeds(device, SIZES).items()}
        row["pin_s_per_gib"] = _pin_seconds(device)
    return row


def copy_speeds(device: Device, sizes: Sequence[int]) -> dict[int, float]:
    """Return size -> bytes/s of page-locked copies of that size to the device, queued back to back on an idle card."""
    if device.torch_device.type != "cuda":
        return dict.fromkeys(sizes, device.measure_link().to_device_pinned)
    with _pinned(device, max(sizes)) as host:
        target = torch.empty(max(sizes), dtype=torch.uint8, device=device.torch_device)
        return {size: _copy_speed(target[:size], host[:size]) for size in sizes}


def layer_speed(speeds: Mapping[int, float], layer_bytes: Sequence[int]) -> float:
    """Return the speed, in bytes/s, at which all layers of some sizes cross the link, each at its own size's speed."""
    return sum(layer_bytes) / sum(size / speeds[size] for size in layer_bytes)


@contextlib.contextmanager
def busy_link(device: Device) -> Iterator[Callable[[], int]]:
    """Keep the link to a CUDA device busy with copies of another stream while inside; yields a count of their bytes."""
    stop = threading.Event()
    done_bytes = [0]
    with _pinned(device, BUSY_COPY_BYTES) as host:
        target = torch.empty(BUSY_COPY_BYTES, dtype=torch.uint8, device=device.torch_device)

        def copy() -> None:
            stream = _cuda.Stream(device.torch_device)
            ends: list[Any] = []
            with _cuda.stream(stream):
                while not stop.is_set():
                    target.copy_(host, non_blocking=True)
                    ends.append(_cuda.Event())
                    ends[-1].record(stream)
                    if len(ends) > BUSY_COPIES_AHEAD:
                        ends.pop(0).synchronize()
                        done_bytes[0] += BUSY_COPY_BYTES
            stream.synchronize()

        thread = threading.Thread(target=copy, name="busy link")
        thread.start()
        try:
            yield lambda: done_bytes[0]
        finally:
            stop.set()
            thread.join()


def busy_figures(
    device: Device, components: Mapping[str, nn.Module], run: Callable[[], object], *, num: int
) -> dict[str, Any]:
    """Return what requests take while the link is busy, and how much slower each component computes then.

    slowdown: component -> its compute beside that on an idle link, from CUDA events around it; 'request' for the whole.
    """
    idle = _component_ms(device, components, run)
    with busy_link(device) as copied:
        _timed(device, run)
        started, before = time.perf_counter(), copied()
        samples = [_timed(device, run) for _ in range(num)]
        speed = (copied() - before) / (time.perf_counter() - started)
        busy = _component_ms(device, components, run)
    return {
        "samples_s": samples,
        "median_s": statistics.median(samples),
        "link_bytes_per_s": speed,
        "slowdown": {name: busy[name] / idle[name] for name in idle if idle[name] > 0 and name in busy},
    }


def _timed(device: Device, run: Callable[[], object]) -> float:
    """Return the seconds of one request; waits for its own stream, not for the copies beside it."""
    stream = _cuda.current_stream(device.torch_device)
    stream.synchronize()
    started = time.perf_counter()
    run()
    stream.synchronize()
    return time.perf_counter() - started


def _component_ms(device: Device, components: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, float]:
    """Return component -> ms of the device that it computes in one request, and 'request' for all of it."""
    spans: list[tuple[str, Any, Any]] = []
    open_spans: list[tuple[str, Any]] = []

    def enter(name: str) -> None:
        event = _cuda.Event(enable_timing=True)
        event.record()
        open_spans.append((name, event))

    def leave() -> None:
        name, start = open_spans.pop()
        end = _cuda.Event(enable_timing=True)
        end.record()
        spans.append((name, start, end))

    with contextlib.ExitStack() as stack:
        for name, module in components.items():
            # A decoder is entered through `decode`, not through the component's own forward.
            part = getattr(module, "decoder", module)
            before = part.register_forward_pre_hook(lambda *_, name=name: enter(name))
            stack.callback(before.remove)
            stack.callback(part.register_forward_hook(lambda *_: leave()).remove)
        enter("request")
        run()
        leave()
    _cuda.current_stream(device.torch_device).synchronize()
    total: dict[str, float] = {}
    for name, start, end in spans:
        total[name] = total.get(name, 0.0) + start.elapsed_time(end)
    return total


@contextlib.contextmanager
def _pinned(device: Device, num_bytes: int) -> Iterator[torch.Tensor]:
    """Page-locked bytes of exactly that size; raises RuntimeError if the host refuses."""
    storage = allocate(num_bytes)
    host = torch.empty(0, dtype=torch.uint8).set_(storage)
    host.fill_(1)
    if not device.pin(storage):
        raise RuntimeError(f"the host refuses to page-lock {num_bytes} bytes; raise its limit of locked memory")
    try:
        yield host
    finally:
        device.unpin(storage)


def _copy_speed(target: torch.Tensor, host: torch.Tensor) -> float:
    stream = _cuda.Stream(target.device)
    with _cuda.stream(stream):
        target.copy_(host, non_blocking=True)
        start, end = (_cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        for _ in range(COPIES):
            target.copy_(host, non_blocking=True)
        end.record(stream)
    stream.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return COPIES * target.nbytes / (elapsed_ms / 1e3)


def _pin_seconds(device: Device) -> float:
    """Return the seconds that page-locking a GiB of touched memory takes."""
    storage = allocate(PIN_BYTES)
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(1)
    started = time.perf_counter()
    device.pin(storage)
    seconds = time.perf_counter() - started
    device.unpin(storage)
    return seconds * 2**30 / PIN_BYTES


if __name__ == "__main__":
    run_job(sys.argv[1:], measure)
