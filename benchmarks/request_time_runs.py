"""Runs a shard: one process after the other, each with a bound, and every row on disk as soon as it is known."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.planner_baseline import bytes_times_uses
from benchmarks.request_time_placing import Planned, fastest, plan
from benchmarks.request_time_shards import (
    BYTES_USES,
    LINK,
    PACKAGES,
    PLANNED,
    RESIDENT,
    WEIGHTS,
    Job,
    Mode,
    Shard,
    timeout_s,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
# Peers need it to come near a cap; every mode gets the same.
ALLOCATOR = "expandable_segments:True"
# A process that could not even load its weights in what is left is not started.
LEFT_S_MIN = 40.0
LOG_LINES = 4
PROGRAM = "benchmarks.request_time_worker"
PROGRAMS = {LINK: "benchmarks.request_time_link"}  # it need not import any pipeline's classes
MEMORY_FOLDER = Path("/dev/shm")
LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "mmgp")


@dataclass(slots=True, kw_only=True)
class Run:
    """One shard's rows so far. deadline: on the monotonic clock; tell: gets a line for every row."""

    shard: Shard
    deadline: float
    tell: Callable[[str], None]
    save: Callable[[dict[str, Any]], None]
    document: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.document = {
            "shard": self.shard.name,
            "settings": msgspec.to_builtins(self.shard.settings),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "allocator": ALLOCATOR,
            "machine": _machine(),
            "rows": [],
        }

    def add(self, mode: Mode, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row and write everything."""
        row = {"name": mode.name, "kind": mode.kind, "cap_bytes": mode.cap_bytes, **row}
        self.document["rows"].append(row)
        self.save(self.document)
        self.tell(_line(row))
        return row

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


@dataclass(slots=True, kw_only=True)
class Weights:
    """Where the weights' files are. candidates: folders to choose from, separated as in PATH, until one is chosen."""

    candidates: str
    folder: str | None = None


def run_shard(run: Run, weights: Weights) -> None:
    """Measure every mode of a shard; a mode that fails is a row with its error."""
    settings = run.shard.settings
    rows: dict[str, dict[str, Any]] = {}
    for mode in run.shard.modes:
        if mode.kind != LINK and weights.folder is None:
            made = _execute(run, Job(mode=Mode(kind=WEIGHTS), settings=settings, weights=weights.candidates))
            run.add(Mode(kind=WEIGHTS), made)
            if "weights" not in made:
                return
            weights.folder = made["weights"]["folder"]
        job = Job(mode=mode, settings=settings, weights=weights.folder or "")
        if mode.kind not in PLANNED:
            rows[mode.kind] = run.add(mode, _execute(run, job))
            continue
        planned = _plan(mode, rows)
        if isinstance(planned, Planned):
            row = _execute(run, replace(job, placement=planned.placement, timeline=True))
            run.add(mode, {**row, "plan": planned.to_json()})
        else:
            run.add(mode, {"error": planned})


@contextlib.contextmanager
def weights_folder(given: Path | None) -> Iterator[Weights]:
    """Have a folder for weights while inside: the one given, which is kept, or one of our own, which is removed."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        is_made = (given / "weights.json").exists()
        yield Weights(candidates=str(given), folder=str(given) if is_made else None)
        return
    places = [*([MEMORY_FOLDER] if MEMORY_FOLDER.is_dir() else []), Path(tempfile.gettempdir())]
    folders = [tempfile.mkdtemp(prefix="request-time-", dir=place) for place in places]
    try:
        yield Weights(candidates=os.pathsep.join(folders))
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _plan(mode: Mode, rows: dict[str, dict[str, Any]]) -> Planned | str:
    """Return the best placement under a mode's cap, or why there is none."""
    resident, link = rows.get(RESIDENT, {}), rows.get(LINK, {})
    if "specs" not in resident or "link" not in link or mode.cap_bytes is None:
        return "there is no all-resident record, or no link, to plan by"
    try:
        choose = bytes_times_uses if mode.kind == BYTES_USES else fastest
        return plan(resident, link=link, cap_bytes=mode.cap_bytes, choose=choose)
    except Exception as error:  # noqa: BLE001 - a cap that cannot be planned for is a row, too
        return f"no placement: {type(error).__name__}: {error}"


def _execute(run: Run, job: Job) -> dict[str, Any]:
    """Run one process to its end or its bound and return its row."""
    package = PACKAGES.get(job.mode.kind)
    if package is not None and find_spec(package) is None:
        return {"error": f"skipped: {package} is not installed"}
    if run.left_s < LEFT_S_MIN:
        return {"error": f"skipped: {max(0.0, run.left_s):.0f} s are left of the run's budget"}
    limit_s = min(timeout_s(job.mode, job.settings), run.left_s)
    with tempfile.TemporaryDirectory(prefix="request-time-job-") as folder:
        job_file, result_file, log_file = (Path(folder) / name for name in ("job.json", "result.json", "log"))
        job_file.write_bytes(msgspec.json.encode(job))
        started = time.monotonic()
        program = PROGRAMS.get(job.mode.kind, PROGRAM)
        ended = run_program([program, str(job_file), str(result_file)], log_file, limit_s=limit_s)
        row: dict[str, Any] = msgspec.json.decode(result_file.read_bytes()) if result_file.exists() else {}
        row["process_s"] = time.monotonic() - started
        stage = row.pop("stage", "start")
        if stage != "done":
            row["failed_in"] = stage
            row.setdefault("error", _why(ended, limit_s=limit_s, log_file=log_file))
    return row


def run_program(arguments: list[str], log_file: Path, *, limit_s: float) -> int | None:
    """Run a module in a process of its own; return its exit status, None if it was killed at its bound.

    arguments: the module's name, then its own. Whatever happens, the process does not outlive this call.
    """
    command = [sys.executable, "-m", *arguments]
    with log_file.open("wb") as log:
        # A group of its own, so that what a library may have started ends with it.
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=log, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_ALLOC_CONF")}
    return {
        **kept,
        "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def _why(ended: int | None, *, limit_s: float, log_file: Path) -> str:
    if ended is None:
        return f"killed at its bound of {limit_s:.0f} s"
    lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"exit status {ended}: {' | '.join(lines[-LOG_LINES:])}"


def _machine() -> dict[str, Any]:
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "num_cpus": os.cpu_count(),
        "versions": versions,
    }


def _line(row: dict[str, Any]) -> str:
    """Return one line about a row, for whoever watches."""
    text = f"{row['name']:<22} {row.get('process_s', 0):6.1f} s"
    for name, key in (("median", "median_s"), ("least", "min_s"), ("cold", "cold_s"), ("set-up", "setup_s")):
        text += f"  {name} {row[key]:.3f}" if row.get(key) is not None else ""
    return text + (f"  error: {row['error']}" if row.get("error") else "")
