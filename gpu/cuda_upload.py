"""Pageable host memory to the device, faster than the driver does it: all cores fill what the link empties."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from residency.gpu.host_memory import allocate

if TYPE_CHECKING:
    from residency.gpu.cuda_pins import CudaPins

BUFFER_BYTES = 32 * 2**20
NUM_BUFFERS = 3  # one is filled, one is copied, one is on its way out
DIRECT_BYTES_MAX = 2**20  # Below it a copy by the driver is over before threads have begun.


class StagedUpload:
    """Copies through a few page-locked buffers, made at the first use and kept.

        pageable memory --(all cores)--> [buffer] [buffer] [buffer] --(link)--> device

    Blocks until the source has been read; the last copies may still be on the link, in the order of the caller's
    stream. One caller at a time; others wait.
    """

    def __init__(self, pins: CudaPins) -> None:
        self._pins = pins
        self._lock = threading.Lock()
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event]] | None = None
        self._is_refused = False  # To ask the driver again for every weight would cost more than copies without it.
        self._turn = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes, uint8 of one shape (nbytes,), from host to device memory."""
        nbytes = source.numel()
        with self._lock:
            if nbytes <= DIRECT_BYTES_MAX or not self._have_buffers():
                target.copy_(source, non_blocking=False)
                return
            assert self._buffers is not None
            for start in range(0, nbytes, BUFFER_BYTES):
                length = min(BUFFER_BYTES, nbytes - start)
                buffer, was_read = self._buffers[self._turn]
                self._turn = (self._turn + 1) % len(self._buffers)
                was_read.synchronize()
                buffer[:length].copy_(source[start : start + length], non_blocking=False)
                target[start : start + length].copy_(buffer[:length], non_blocking=True)
                was_read.record(torch.cuda.current_stream(target.device))

    def close(self) -> None:
        """Let go of the buffers. A second call is a no-op."""
        with self._lock:
            self._buffers, self._is_refused = None, False

    def _have_buffers(self) -> bool:
        if self._buffers is None and not self._is_refused:
            storages = [allocate(BUFFER_BYTES) for _ in range(NUM_BUFFERS)]
            buffers = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages]
            for buffer in buffers:
                buffer.zero_()  # Registered when touched: ten times as fast.
            try:
                self._is_refused = not all(self._pins.pin(storage) for storage in storages)
                if not self._is_refused:
                    self._buffers = [(one, torch.cuda.Event()) for one in buffers]  # type: ignore[no-untyped-call]
            finally:
                if self._buffers is None:
                    for storage in storages:
                        self._pins.unpin(storage)
        return self._buffers is not None
