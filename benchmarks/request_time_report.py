"""What the figures look like: tables in Markdown, and a comparison with older results."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.request_time_figures import GIB, NS_PER_S, figures, group_of, noise_of
from benchmarks.request_time_shards import LINK, OURS, RESIDENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.request_time_figures import Document, Figure, Group


def compare(old: Document, new: Document) -> list[str]:
    """Return a line for every mode that both have: medians, their ratio, and whether it is more than the noise."""
    before, after, noises = _medians(old), _medians(new), (noise_of(old), noise_of(new))
    lines = ["| mode | before s | now s | now / before | noise | verdict |", "|---|---|---|---|---|---|"]
    for key in sorted(before.keys() & after.keys(), key=str):
        group, name = key
        noise = max(one.get(group, 0.0) for one in noises)
        ratio = after[key] / before[key]
        verdict = "equal within noise" if abs(ratio - 1) <= noise else "faster" if ratio < 1 else "slower"
        lines.append(
            f"| {title(group)}: {name} | {before[key]:.3f} | {after[key]:.3f} | {ratio:.3f} | {noise:.1%} | {verdict} |"
        )
    if len(lines) == 2:
        lines.append("| nothing is in both | | | | | |")
    return lines


def tables(document: Document) -> list[str]:
    """Return the results as Markdown, group by group."""
    found, noises, lines = figures(document), noise_of(document), list[str]()
    for group in dict.fromkeys(group_of(run) for run in document["runs"]):
        mine = sorted((one for one in found if one.group == group), key=_order)
        lines += [f"## {title(group)}", "", *_links(document, group), f"Noise: {noises.get(group, 0.0):.1%}.", ""]
        lines += [*_time_table(mine), "", *_memory_table(mine), "", *_where_table(mine), ""]
    return lines


def title(group: Group) -> str:
    """Return a group's name for people."""
    text = group.pipeline + (f", {group.steps} steps" if group.steps else "") + (", compiled" if group.compiled else "")
    return text if group.device != "cpu" else f"{text}, emulated device (no figure of it says anything about speed)"


def _medians(document: Document) -> dict[tuple[Group, str], float]:
    values: dict[tuple[Group, str], list[float]] = {}
    for one in figures(document):
        if one.median_s is not None:
            values.setdefault((one.group, one.name), []).append(one.median_s)
    return {key: statistics.median(many) for key, many in values.items()}


def _order(one: Figure) -> tuple[float, int, str]:
    cap = one.row["cap_bytes"]
    kinds = {RESIDENT: 0, OURS: 1}
    return -(cap if cap is not None else float("inf")), kinds.get(one.row["kind"], 2), one.name


def _links(document: Document, group: Group) -> list[str]:
    """Return one line for every run: when, on what, and how fast its link is."""
    lines = []
    for run in document["runs"]:
        if group_of(run) != group:
            continue
        link = next((row["link"] for row in run["rows"] if row["kind"] == LINK and "link" in row), None)
        device = next((row["device"]["name"] for row in run["rows"] if "device" in row), "no device")
        text = f"{run['started_at']}, {run['shard']}, {device}"
        if link is not None:
            text += ", link in GiB/s: " + ", ".join(
                f"{name.replace('_', ' ')} {link[name] / GIB:.1f}"
                for name in ("to_device_pinned", "to_device_pageable", "to_host_pinned", "to_host_pageable")
            )
        lines += [f"{text}.", ""]
    return lines


def _time_table(found: Sequence[Figure]) -> list[str]:
    head = "mode|median s|least s|n|cold s|set-up s|bound s|/ bound|/ busy bound|bound / best|/ resident|best peer / it"
    lines = [f"| {' | '.join(head.split('|'))} |", "|---" * len(head.split("|")) + "|"]
    for one in found:
        row = one.row
        if one.median_s is None:
            lines.append(f"| {one.name} | {row.get('error', 'nothing was measured')} |" + " |" * 10)
            continue
        ratio = one.bound_s / one.best_bound_s if one.bound_s and one.best_bound_s else None
        peer = f"{one.peer_s / one.median_s:.2f} ({one.peer})" if one.peer_s else ""
        cells = [
            one.name,
            *(_number(row.get(key), 3) for key in ("median_s", "min_s")),
            str(row.get("num_requests", len(row.get("samples_s", [])))),
            _number(row.get("cold_s"), 2),
            _number(row.get("setup_s"), 1),
            _number(one.bound_s, 3),
            _number(one.over(one.bound_s), 3),
            _number(one.over(one.busy_bound_s), 3),
            _number(ratio, 3),
            _number(one.over(one.resident_s), 3),
            peer,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _memory_table(found: Sequence[Figure]) -> list[str]:
    head = (
        "mode|allocated GiB|reserved GiB|context GiB|to device GiB|to host GiB|retries|host GiB beyond resident|"
        "beyond weights|host peak GiB|recompiled|output"
    )
    lines = [f"| {' | '.join(head.split('|'))} |", "|---" * len(head.split("|")) + "|"]
    for one in found:
        row = one.row
        if one.median_s is None:
            continue
        peaks = [row[key] for key in ("setup_peaks", "cold_peaks", "peaks") if key in row]
        output = {True: "equal", False: "differs", None: ""}[one.is_equal] + (
            "" if row.get("is_finite", True) else ", not finite"
        )
        cells = [
            one.name,
            *(_gib(max((p[f"{key}_peak_bytes"] for p in peaks), default=None)) for key in ("allocated", "reserved")),
            *(_gib(row.get(key)) for key in ("context_bytes", "to_device_bytes", "to_host_bytes")),
            "" if row.get("alloc_retries") is None else str(row["alloc_retries"]),
            _gib(one.host_bytes),
            _gib(one.host_beyond_bytes),
            _gib(row.get("host", {}).get("peak_bytes")),
            _recompiled(row),
            output,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _where_table(found: Sequence[Figure]) -> list[str]:
    """Return where the time of our requests goes: by the model, by the engine's own record, and by the profiler."""
    head = "mode|simulated s|observed s|of it waiting s|computes and copies ms|only computes|only copies|neither"
    lines = [f"| {' | '.join(head.split('|'))} |", "|---" * len(head.split("|")) + "|"]
    for one in found:
        if one.row["kind"] != OURS or one.median_s is None:
            continue
        record, busy = one.row.get("record"), one.row.get("timeline", {}).get("busy_ms", {})
        waits_ns = sum(phase["wait_ns"] for phase in record["phases"]) if record else None
        cells = [
            one.name,
            _number(one.row["plan"]["simulated_ns"] / NS_PER_S, 3),
            _number(record["duration_ns"] / NS_PER_S if record else None, 3),
            _number(waits_ns / NS_PER_S if waits_ns is not None else None, 3),
            *(_number(busy.get(key), 0) for key in ("both", "compute_only", "copy_only", "neither")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _recompiled(row: Mapping[str, Any]) -> str:
    """Return how many frames Dynamo compiled during the timed requests."""
    before, after = row.get("compiled_cold"), row.get("compiled")
    if not before or not after:
        return ""
    return str(after.get("frames", {}).get("total", 0) - before.get("frames", {}).get("total", 0))


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _gib(value: int | None) -> str:
    return "" if value is None else f"{value / GIB:.2f}"
