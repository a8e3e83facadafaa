"""What every process of the benchmark does: read its job, open the device under the cap, write down what it learns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.request_time_shards import Job
from residency.errors import describe
from residency.gpu.devices import open_device
from residency.settings import allocator_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from residency.gpu.device import Device


class Row:
    """What a process has measured so far; every addition is on disk at once, so that a kill loses nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fields: dict[str, Any] = {}

    def add(self, **fields: Any) -> None:
        """Set fields. The file is replaced whole."""
        self._fields.update(msgspec.to_builtins(fields, str_keys=True))
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self._fields))
        part.replace(self._path)


def run_job(arguments: Sequence[str], measure: Callable[[Job, Device, Row], None]) -> None:
    """Measure one mode: arguments are a job's file and the result's. What goes wrong is in the result, too."""
    job_file, result_file = arguments
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=Job)
    row = Row(Path(result_file))
    row.add(stage="open")
    try:
        # Before anything is loaded, so that loading is under the cap, too.
        device = open_device(job.settings.device, cap_bytes=job.mode.cap_bytes, allocator_settings=allocator_settings())
        row.add(device=device.reading())
        measure(job, device, row)
        row.add(stage="done")
    except Exception as error:  # noqa: BLE001 - a mode that fails is a row, too
        row.add(error=describe(error))
