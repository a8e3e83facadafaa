"""Time packing and page-locking of host copies for every number of threads, with huge pages and without."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
import time
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from residency.gpu.cuda import CudaDevice
from residency.gpu.emulated import EmulatedDevice
from residency.gpu.host_memory import allocate, booked_against_kernel, copy_into, read_host
from residency.gpu.pinning import PinningBounds, pin_all

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 2**20
GIB = 2**30
ALIGNMENT_BYTES = 512
WEIGHTS_PER_LAYER = 16  # Storages of their own before they are packed, as checkpoints are loaded.
SAMPLE_S = 0.005


class Times:
    """Seconds that a step took, summed over all threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def of(self, step: str) -> Iterator[None]:
        """Add what passes inside to a step."""
        started = time.perf_counter()
        yield
        with self._lock:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - started


class Packed:
    """One mapping for all weights of a layer."""

    def __init__(self, num_bytes: int, *, huge_pages: bool) -> None:
        self.num_bytes = num_bytes
        self.storage = allocate(num_bytes, huge_pages=huge_pages)


class Layer:
    """Touched weights that are packed, registered and let go, as a host store does it."""

    def __init__(self, num_bytes: int, device: CudaDevice | EmulatedDevice, times: Times, *, huge_pages: bool) -> None:
        size = num_bytes // WEIGHTS_PER_LAYER // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.weights = [torch.empty(size, dtype=torch.uint8).fill_(1) for _ in range(WEIGHTS_PER_LAYER)]
        self.num_bytes = size * WEIGHTS_PER_LAYER
        self._device = device
        self._times = times
        self._huge_pages = huge_pages
        self._packed: Packed | None = None

    def pack(self) -> Packed:
        """Copy every weight into one mapping."""
        with self._times.of("pack"):
            packed, offset = Packed(self.num_bytes, huge_pages=self._huge_pages), 0
            for weight in self.weights:
                copy_into(packed.storage, weight.untyped_storage(), offset_bytes=offset)
                offset += weight.nbytes
            return packed

    def register(self, packed: Packed) -> None:
        """Page-lock it, on CUDA; raises MemoryError if the host refuses."""
        with self._times.of("register"):
            if isinstance(self._device, CudaDevice) and not self._device.pin(packed.storage):
                raise MemoryError(f"the host refuses to page-lock {packed.num_bytes} bytes")

    def adopt_packed(self, packed: Packed) -> None:
        """Let go of the weights as they were."""
        with self._times.of("adopt"):
            self._packed = packed
            self.weights.clear()

    def discard(self, packed: Packed) -> None:
        """Release the page lock."""
        with self._times.of("unregister"):
            if isinstance(self._device, CudaDevice):
                self._device.unpin(packed.storage)

    def drop(self) -> None:
        """Release everything."""
        packed, self._packed = self._packed, None
        if packed is not None:
            self.discard(packed)


class Peak:
    """The largest anonymous memory of this process while it is entered, in bytes."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Peak:  # noqa: PYI034 - a benchmark needs no subclasses
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, booked_against_kernel(0).anonymous_bytes)


def measure(
    sizes: list[int],
    device: CudaDevice | EmulatedDevice,
    bounds: PinningBounds,
    *,
    huge_pages: bool,
    with_fork: bool,
) -> dict[str, object]:
    """Return the figures of one combination, from plain weights that were touched."""
    times = Times()
    before = time.perf_counter()
    layers = [Layer(size, device, times, huge_pages=huge_pages) for size in sizes]
    made = time.perf_counter()
    weights_bytes = booked_against_kernel(0).anonymous_bytes
    try:
        with Peak() as peak:
            num_bytes = pin_all(layers, device, bounds=bounds)
        ended = time.perf_counter()
        usage = booked_against_kernel(num_bytes)
        fork = fork_cost() if with_fork else None
    finally:
        for layer in layers:
            layer.drop()
    seconds = ended - made
    return {
        "threads": bounds.num_threads,
        "in_flight": bounds.num_in_flight,
        "huge_pages": huge_pages,
        "seconds": round(seconds, 3),
        "gib_per_s": round(num_bytes / GIB / seconds, 2),
        "thread_seconds": {step: round(value, 3) for step, value in sorted(times.seconds.items())},
        "register_s_per_gib": round(times.seconds.get("register", 0.0) * GIB / num_bytes, 4),
        "peak_beyond_weights_mib": round((peak.peak_bytes - weights_bytes) / MIB),
        "largest_layers_mib": round(sum(sorted(sizes)[-bounds.num_in_flight :]) / MIB),
        "kernel_locked_mib": round(usage.locked_bytes / MIB),
        "kernel_shared_mib": round(usage.shared_bytes / MIB),
        "making_the_weights_s": round(made - before, 2),
        "fork": fork,
    }


def fork_cost() -> dict[str, float]:
    """Return how long a fork takes, and how much less memory is available while the child lives.

    A kernel copies pages that a driver holds for a device at once, instead of sharing them until somebody writes.
    """
    available = read_host().available_bytes
    reader, writer = os.pipe()
    started = time.perf_counter()
    child = os.fork()
    if not child:
        os.read(reader, 1)
        os._exit(0)
    seconds = time.perf_counter() - started
    less = available - read_host().available_bytes
    os.write(writer, b"x")
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    return {"seconds": round(seconds, 3), "less_available_mib": round(less / MIB)}


def sizes_of(total_bytes: int, layer_bytes: list[int]) -> list[int]:
    """Return layer sizes, in turn, until together they are as large as asked for."""
    sizes: list[int] = []
    for size in cycle(layer_bytes):
        if sum(sizes) + size > total_bytes and sizes:
            return sizes
        sizes.append(size)
    return sizes


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: nothing is page-locked")
    parser.add_argument("--gib", type=float, default=16.0, help="all layers together")
    parser.add_argument("--layer-mib", type=float, nargs="+", default=[648.0, 270.0, 270.0], help="sizes, in turn")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--in-flight", type=int, default=0, help="copies beside the weights; 0: one more than threads")
    parser.add_argument("--pages", choices=["both", "huge", "small"], default="both")
    parser.add_argument("--limit-s", type=float, default=58.0, help="combinations that would end later are left out")
    parser.add_argument("--fork", action="store_true", help="fork once, while all is page-locked")
    return parser.parse_args()


def main() -> None:
    """Print one JSON object with the machine and all runs."""
    started = time.perf_counter()
    options = arguments()
    device: CudaDevice | EmulatedDevice = CudaDevice() if options.device == "cuda" else EmulatedDevice()
    device.synchronize()
    sizes = sizes_of(int(options.gib * GIB), [int(mib * MIB) for mib in options.layer_mib])
    # The quick ones first, so that a limit leaves out those that matter least.
    pages = {"both": [True, False], "huge": [True], "small": [False]}[options.pages]
    combinations = [(huge, threads) for huge in pages for threads in sorted(options.threads, reverse=True)]
    runs, longest_s = list[dict[str, object]](), 0.0
    for index, (huge, threads) in enumerate(combinations):
        run_started = time.perf_counter()
        if run_started - started + longest_s > options.limit_s:
            runs.append({"threads": threads, "huge_pages": huge, "left_out": True})
            continue
        bounds = PinningBounds(num_threads=threads, num_in_flight=options.in_flight or threads + 1)
        runs.append(measure(sizes, device, bounds, huge_pages=huge, with_fork=options.fork and index == 0))
        longest_s = max(longest_s, time.perf_counter() - run_started)
        sys.stderr.write(json.dumps(runs[-1]) + "\n")
    machine: dict[str, object] = {
        "device": device.reading().name,
        "driver": device.reading().driver,
        "torch": str(torch.__version__),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "layers": len(sizes),
        "gib": round(sum(sizes) / GIB, 2),
    }
    with suppress(OSError):
        path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        machine["transparent_hugepage"] = path.read_text(encoding="utf-8").strip()
    machine["seconds"] = round(time.perf_counter() - started, 1)
    sys.stdout.write(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
