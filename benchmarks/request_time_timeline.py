"""Where the time of one request goes: when the link copies, when the device computes, and which layer, from a trace."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, record_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from residency.gpu.device import Device

Interval = tuple[float, float]

PREFIX = "layer "
# Token ids and scheduler tables cross the link, too, but they are no weights.
COPY_BYTES_MIN = 64 * 1024
GAP_MS = 0.05  # kernels closer than this are one stretch of computing: launches leave such gaps
US_PER_MS = 1e3


def profile_request(device: Device, layers: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, Any]:
    """Run one request under torch's profiler and return its timeline. Its own duration is no measurement."""
    device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        with _annotated(layers), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
            device.synchronize()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return timeline_of(trace["traceEvents"])


def timeline_of(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the timeline of a trace: ms since its first event on the device.

    copies: [start, end, bytes] to the device. to_host: the same from it. compute: [start, end] of stretches without a
    gap. layers: [name, start, end]. busy_ms: how long only one of both, both or none of them went on.
    """
    copies: list[tuple[float, float, int]] = []
    to_host: list[tuple[float, float, int]] = []
    kernels: list[Interval] = []
    layers: list[tuple[str, float, float]] = []
    for event in events:
        span = _span(event)
        kind, name = event.get("cat", ""), str(event.get("name", ""))
        if span is None:
            continue
        if kind == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            nbytes = int(event.get("args", {}).get("bytes", 0))
            if nbytes >= COPY_BYTES_MIN:
                (copies if "HtoD" in name else to_host).append((*span, nbytes))
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(span)
        elif kind == "gpu_user_annotation" and name.startswith(PREFIX):
            layers.append((name.removeprefix(PREFIX), *span))
    start = min((one[0] for one in (*copies, *kernels)), default=0.0)
    end = max((one[1] for one in (*copies, *kernels)), default=0.0)
    compute = merged(kernels, gap_ms=GAP_MS)
    moving = merged([(one[0], one[1]) for one in copies], gap_ms=0.0)
    return {
        "span_ms": round(end - start, 3),
        "to_device_bytes": sum(one[2] for one in copies),
        "busy_ms": overlap(compute, moving, span_ms=end - start),
        "copies": sorted([round(a - start, 3), round(b - start, 3), nbytes] for a, b, nbytes in copies),
        "to_host": sorted([round(a - start, 3), round(b - start, 3), nbytes] for a, b, nbytes in to_host),
        "compute": [[round(a - start, 3), round(b - start, 3)] for a, b in compute],
        "layers": [[name, round(a - start, 3), round(b - start, 3)] for name, a, b in sorted(layers, key=_start)],
    }


def merged(intervals: Sequence[Interval], *, gap_ms: float) -> list[Interval]:
    """Return intervals in order, those closer together than a gap as one."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start - found[-1][1] <= gap_ms:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def overlap(compute: Sequence[Interval], copies: Sequence[Interval], *, span_ms: float) -> dict[str, float]:
    """Return for how many ms there is only computing, only copying, both, and neither."""
    both = sum(
        max(0.0, min(end, other_end) - max(start, other))
        for start, end in compute
        for other, other_end in copies
        if other < end and start < other_end
    )
    computing, copying = (sum(end - start for start, end in intervals) for intervals in (compute, copies))
    return {
        "compute_only": round(computing - both, 3),
        "copy_only": round(copying - both, 3),
        "both": round(both, 3),
        "neither": round(span_ms - computing - copying + both, 3),
    }


def _span(event: Mapping[str, Any]) -> Interval | None:
    if event.get("ph") != "X" or not isinstance(event.get("ts"), (int, float)):
        return None
    start = event["ts"] / US_PER_MS
    return start, start + event.get("dur", 0) / US_PER_MS


def _start(layer: tuple[str, float, float]) -> float:
    return layer[1]


@contextlib.contextmanager
def _annotated(layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let every run of a layer be an annotation of the trace while inside."""
    inside: list[Any] = []

    def enter(name: str) -> None:
        inside.append(record_function(PREFIX + name))
        inside[-1].__enter__()

    def leave() -> None:
        inside.pop().__exit__(None, None, None)

    with contextlib.ExitStack() as stack:
        for name, module in layers.items():
            before = module.register_forward_pre_hook(lambda *_, name=name: enter(name))
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(lambda *_: leave()).remove)
        yield
