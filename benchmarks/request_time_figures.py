"""What rows say together: ratios to bound, resident and peers; how noisy they are; and several files as one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from benchmarks.request_time_shards import OURS, PLANNED, RESIDENT, Mode, Settings
from residency.gpu.placement import Placement
from residency.gpu.specs import ComponentSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

Document = dict[str, Any]

FORMAT = 1
GIB = 2**30
NS_PER_S = 1e9
# A timeline's lists are long; merged files keep them for the worst request of each group only.
TIMELINE_LISTS = ("copies", "to_host", "compute", "layers")


class Group(NamedTuple):
    """What runs must share to be compared. steps: None for as many as the pipeline's own workload has."""

    pipeline: str
    steps: int | None
    compiled: bool
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured mode with what follows from the rows beside it. Times in s; None where it is not known.

    bound_s, best_bound_s, busy_*: see `request_time_placing.Planned`. resident_s: all-resident, the same run if it has
    one. peer_s: the best peer under the same cap, and which. host_bytes: of host memory beyond that of an all-resident
    run, and host_beyond_bytes beyond the weights that have to be there as well. is_equal: output as all-resident.
    """

    row: Mapping[str, Any]
    group: Group
    bound_s: float | None = None
    best_bound_s: float | None = None
    busy_bound_s: float | None = None
    busy_best_bound_s: float | None = None
    resident_s: float | None = None
    peer_s: float | None = None
    peer: str | None = None
    host_bytes: int | None = None
    host_beyond_bytes: int | None = None
    is_equal: bool | None = None

    @property
    def median_s(self) -> float | None:
        """The median of the timed requests."""
        return self.row.get("median_s")

    @property
    def name(self) -> str:
        """The mode's name."""
        return str(self.row["name"])

    def over(self, other_s: float | None) -> float | None:
        """Return its median over another time."""
        return None if self.median_s is None or not other_s else self.median_s / other_s


def read_document(path: Path) -> Document:
    """Return a results file. Raises ValueError if it is none of this benchmark's."""
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT or not isinstance(document.get("runs"), list):
        raise ValueError(f"{path} holds no results of this benchmark in format {FORMAT}")
    return document


def merge(documents: Sequence[Document]) -> Document:
    """Return the runs of several files as one, oldest first, each run once."""
    runs = {
        (run["started_at"], run["shard"], json.dumps(run["settings"], sort_keys=True)): run
        for document in documents
        for run in document["runs"]
    }
    merged: Document = {"format": FORMAT, "runs": [runs[key] for key in sorted(runs)]}
    kept = {id(one.row) for one in worst(figures(merged)).values()}
    for run in merged["runs"]:
        for row in run["rows"]:
            if "timeline" in row and id(row) not in kept:
                row["timeline"] = {k: v for k, v in row["timeline"].items() if k not in TIMELINE_LISTS}
    return merged


def group_of(run: Mapping[str, Any]) -> Group:
    """Return the group of a run."""
    settings = msgspec.convert(run["settings"], type=Settings)
    return Group(settings.pipeline, settings.steps, settings.compiled, settings.device)


def figures(document: Document) -> list[Figure]:
    """Return every row that serves requests, errors included, with what follows from the others of its group."""
    found = []
    by_group: dict[Group, list[Mapping[str, Any]]] = {}
    for run in document["runs"]:
        by_group.setdefault(group_of(run), []).extend(run["rows"])
    for run in document["runs"]:
        group = group_of(run)
        resident = _resident(run["rows"]) or _resident(by_group[group])
        for row in run["rows"]:
            mode = Mode(kind=row["kind"], cap_bytes=row["cap_bytes"])
            if mode.kind in (RESIDENT, *PLANNED) or mode.is_peer:
                found.append(_figure(row, group, resident, run["rows"], by_group[group]))
    return found


def worst(found: Iterable[Figure]) -> dict[Group, Figure]:
    """Return for every group the request of ours that is farthest above its bound and has a timeline."""
    result: dict[Group, Figure] = {}
    for one in found:
        ratio = one.over(one.bound_s)
        if ratio is None or "copies" not in one.row.get("timeline", {}):
            continue
        best = result.get(one.group)
        if best is None or ratio > (best.over(best.bound_s) or 0.0):
            result[one.group] = one
    return result


def noise_of(document: Document) -> dict[Group, float]:
    """Return group -> how far apart equal things are, as a part: medians of one mode in several runs, or samples of it.

    Of the samples of one process it is half the range of the middle ones that counts, of several runs all of it.
    """
    noise: dict[Group, float] = {}
    medians: dict[tuple[Group, str], list[float]] = {}
    for run in document["runs"]:
        for row in run["rows"]:
            samples = sorted(row.get("samples_s", []))
            if not samples:
                continue
            group = group_of(run)
            medians.setdefault((group, row["name"]), []).append(row["median_s"])
            middle = samples[1:-1] if len(samples) > 3 else samples
            noise[group] = max(noise.get(group, 0.0), (middle[-1] - middle[0]) / 2 / row["median_s"])
    for (group, _), values in medians.items():
        noise[group] = max(noise.get(group, 0.0), (max(values) - min(values)) / statistics.median(values))
    return noise


def _resident(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return next((row for row in rows if row["kind"] == RESIDENT and "median_s" in row), None)


def _figure(
    row: Mapping[str, Any],
    group: Group,
    resident: Mapping[str, Any] | None,
    beside: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
) -> Figure:
    plan = row.get("plan", {})
    bounds = {
        f"{name}_s": plan[f"{name}_ns"] / NS_PER_S if plan.get(f"{name}_ns") is not None else None
        for name in ("bound", "best_bound", "busy_bound", "busy_best_bound")
    }
    # A peer of the same run has met the same machine; only without one, another run's counts.
    peers = _peers(beside, row["cap_bytes"]) or _peers(others, row["cap_bytes"])
    peer = min(peers, key=lambda one: one["median_s"], default=None) if row["kind"] == OURS else None
    host_bytes, beyond_bytes = _host(row, resident)
    digests = (row.get("digest"), resident.get("digest") if resident else None)
    return Figure(
        row=row,
        group=group,
        **bounds,
        resident_s=resident["median_s"] if resident else None,
        peer_s=peer["median_s"] if peer else None,
        peer=peer["kind"] if peer else None,
        host_bytes=host_bytes,
        host_beyond_bytes=beyond_bytes,
        is_equal=digests[0] == digests[1] if all(digests) else None,
    )


def _peers(rows: Iterable[Mapping[str, Any]], cap_bytes: int | None) -> list[Mapping[str, Any]]:
    return [
        row
        for row in rows
        if Mode(kind=row["kind"]).is_peer and row["cap_bytes"] == cap_bytes and row.get("median_s") is not None
    ]


def _host(row: Mapping[str, Any], resident: Mapping[str, Any] | None) -> tuple[int | None, int | None]:
    """Return the host memory beyond an all-resident run's, and beyond the weights that the host has to keep."""
    if resident is None or "host" not in row or "host" not in resident:
        return None, None
    extra = _taken(row["host"]) - _taken(resident["host"])
    specs = msgspec.convert(resident.get("specs", []), type=tuple[ComponentSpec, ...])
    if row["kind"] == OURS and "plan" in row:
        placement = msgspec.convert(row["plan"]["placement"], type=Placement).components
        away = sum(spec.total_bytes - spec.device_bytes(placement[spec.name], in_use=False) for spec in specs)
    else:
        away = 0 if row["kind"] == RESIDENT else sum(spec.total_bytes for spec in specs)
    return extra, extra - away


def _taken(host: Mapping[str, int]) -> int:
    """Return anonymous memory and what is page-locked outside of it: torch's own may count as shared or not at all."""
    return host.get("anonymous_bytes", 0) + max(host.get("shared_bytes", 0), host.get("torch_pinned_bytes", 0))
