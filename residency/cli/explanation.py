"""Why a plan is what it is, in words: its measurements, its limits, its prediction and what else was possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from residency.rendering import duration, placement_text, short, size, table
from residency.statemachine.fingerprint import differences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Everything here reads journaled plans, of this program or of an older one, so that a missing part is left out.
Plain = dict[str, Any]

SIZES = frozenset({"cap", "cgroup", "host_ram"})  # parts of a fingerprint that are bytes and do not say so
VALUE_SHOWN = 60  # characters of a fingerprint's part; digests are longer, and nobody compares them by eye


def measurement_lines(inputs: Plain, others: Sequence[Plain] = ()) -> list[str]:
    """Return a table of the requests that the plan rests on, and of others that its round ran: those that validated."""
    records: Sequence[Plain] = [*(inputs.get("records") or ()), *others]
    if not records:
        return ["measured: nothing"]
    headings = ("MEASURED", "SHAPE", "PLACEMENT", "ALLOCATED PEAK", "RESERVED PEAK", "TIME", "RESULT")
    return ["", *table(headings, (_record_row(record) for record in records)), ""]


def _record_row(record: Plain) -> tuple[str, ...]:
    phases: Sequence[Plain] = record.get("phases") or ()
    allocated = max((phase["allocated_peak_bytes"] for phase in phases), default=record["baseline_allocated_bytes"])
    reserved = max((phase["reserved_peak_bytes"] for phase in phases), default=record["baseline_reserved_bytes"])
    result = (
        "ok" if record["succeeded"] else "out of memory" if record["out_of_memory"] else f"failed: {record['error']}"
    )
    where = short(record["placement_digest"])
    took = duration(record["duration_ns"])
    return record["kind"], shape_text(record["workload"]), where, size(allocated), size(reserved), took, result


def shape_text(workload: Mapping[str, Any]) -> str:
    """Return a request shape in words: '1024x1024, 28 steps', with frames and batch where they are not 1."""
    text = f"{workload['width']}x{workload['height']}, {workload['steps']} steps"
    text += f", {workload['frames']} frames" if workload["frames"] != 1 else ""
    return text + (f", batch {workload['batch']}" if workload["batch"] != 1 else "")


def budget_lines(inputs: Plain) -> list[str]:
    """Return the limits that the plan had to keep."""
    lines = []
    if "workload" in inputs:
        lines.append(f"planned for {shape_text(inputs['workload'])}")
    if "cap_bytes" in inputs:
        factor = inputs.get("reserve_factor", 1)
        doubled = f", reserves times {factor:g} after a death" if factor != 1 else ""
        lines.append(f"device memory: cap {size(inputs['cap_bytes'])}{doubled}")
    if host := inputs.get("host"):
        lines.append(f"host memory: {size(host['pin_budget_bytes'])} may be pinned")
    if link := inputs.get("link"):
        pinned, pageable = size(link["to_device_pinned"]), size(link["to_device_pageable"])
        lines.append(f"link to the device: {pinned}/s from pinned, {pageable}/s from pageable memory")
    lines += [
        f"{name} stays as configured: {reason}" for name, reason in sorted((inputs.get("configured") or {}).items())
    ]
    if excluded := inputs.get("excluded"):
        lines.append(f"never chosen: {', '.join(map(short, excluded))}")
    return lines


def plan_lines(plan: Plain) -> list[str]:
    """Return what the plan promises, what bound it, and what else was weighed."""
    steps = ((plan.get("inputs") or {}).get("workload") or {}).get("steps")
    lines = [*_prediction_lines(plan.get("prediction") or {}, steps)]
    if bound := plan.get("bound_by"):
        lines.append(bound_text(str(bound)))
    if following := plan.get("next_cheapest"):
        lines.append(f"next cheapest change: {next_text(following)}")
    if plan.get("relaxed"):
        lines.append("nothing fits by the estimate: it only avoids growing, or is tried because what ran before fails")
    if binding := plan.get("binding"):
        lines.append("little is left of: " + ", ".join(_binding_text(one) for one in binding))
    if plan.get("exact") is False:
        gap_ns = plan.get("gap_ns")
        by = f", faster by at most {duration(gap_ns)}" if gap_ns else ""
        lines.append(f"the search ended before it had seen all: a better placement may exist{by}")
    if counts := plan.get("num_candidates"):
        lines.append("candidates weighed: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    alternatives: Sequence[Plain] = plan.get("alternatives") or ()
    if alternatives:
        headings = ("ALTERNATIVE", "PLACEMENT", "REQUEST TIME", "HELD ON DEVICE", "PINNED", "FITS")
        lines += ["", *table(headings, (_alternative_row(one) for one in alternatives)), ""]
    if prices := plan.get("prices"):
        lines += ["", *table(("COMPONENT", "A GiB LESS", "A GiB MORE"), (_price_row(one) for one in prices)), ""]
    return lines


def bound_text(bound: str) -> str:
    """Return why there is nothing faster. The journal names the phase in which the next faster change would not fit."""
    if bound.startswith("nothing"):
        return bound.partition(": ")[2] or "no placement is faster"
    _, found, phase = bound.partition("phase ")
    if not found:
        return f"a faster placement would not fit: {bound}"
    return f"a faster placement would not fit in phase {phase}"


def _prediction_lines(prediction: Plain, steps: object) -> list[str]:
    if "duration_ns" not in prediction:
        return []
    parts = f"{duration(prediction['compute_ns'])} of compute and {duration(prediction['transfer_ns'])} of transfers"
    of_steps = f" of {steps} steps" if steps else ""
    timed = f"{duration(prediction['duration_ns'])} a request{of_steps} ({parts})"
    held = f"{size(prediction['device_bytes'])} held on the device, {size(prediction['pinned_bytes'])} pinned"
    basis = "" if prediction.get("measured", True) else ", extrapolated from a smaller shape"
    lines = [f"predicted: {timed if prediction.get('timed', True) else 'no time, nothing ran'}; {held}{basis}"]
    if times := prediction.get("time_phases"):
        headings = ("TIME PHASE", "PASSES", "COMPUTE", "WAITS FOR WEIGHTS")
        lines += ["", *table(headings, (_time_row(one) for one in times))]
    phases: Sequence[Plain] = prediction.get("phases") or ()
    rows = (
        (one["key"], size(one["peak_bytes"]), size(one["reserve_bytes"]), size(one["limit_bytes"]))
        for one in phases
    )  # fmt: skip
    return [*lines, "", *table(("MEMORY PHASE", "PEAK", "RESERVE", "LIMIT"), rows), ""] if phases else lines


def next_text(following: Plain) -> str:
    """Return the change that more memory would allow. An estimate, and said to be one: nothing does it by itself."""
    change = f"{following['component']} {placement_text(following['placement'])}"
    basis = "" if following.get("measured", True) else " from a smaller shape"
    return (
        f"{size(following['extra_bytes'])} more would allow {change}: -{duration(following['gain_ns'])} a request "
        f"(estimated{basis}; needs a higher cap and a new calibration)"
    )


def _alternative_row(one: Plain) -> tuple[str, ...]:
    fits = "yes" if one["feasible"] else "no"
    figures = duration(one["duration_ns"]), size(one["device_bytes"]), size(one["pinned_bytes"])
    return one["name"], short(one["digest"]), *figures, fits


def _time_row(one: Plain) -> tuple[str, ...]:
    return one["name"], str(one["passes"]), duration(one["compute_ns"]), duration(one["exposed_ns"])


def _binding_text(one: Plain) -> str:
    what = {"device": f"the cap in phase {one['name']}", "pinned": "what may be pinned"}.get(one["kind"], "host memory")
    return f"{what} ({size(one['slack_bytes'])})"


def _price_row(one: Plain) -> tuple[str, ...]:
    loss_ns, gain_ns = one["loss_ns_per_gib"], one["gain_ns_per_gib"]
    return one["component"], f"+{duration(loss_ns)}" if loss_ns else "-", f"-{duration(gain_ns)}" if gain_ns else "-"


def _is_size(value: object, name: str) -> TypeGuard[int]:
    return (name in SIZES or name.endswith("_bytes")) and isinstance(value, int)


def fingerprint_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Plain]:
    """Return the parts of the fingerprint that differ, with both values."""
    return [{"part": name, "before": old.get(name), "now": new.get(name)} for name in differences(old, new)]


def change_text(change: Plain) -> str:
    """Return one part that differs in words; of parts with parts of their own only what differs."""
    before, now = change["before"], change["now"]
    if isinstance(before, dict) and isinstance(now, dict):
        names = differences(before, now)
        before, now = ({name: part[name] for name in names if name in part} for part in (before, now))
    part = str(change["part"])
    return f"{part} was {_brief(before, part)}, is {_brief(now, part)}"


def _brief(value: object, part: str) -> str:
    if _is_size(value, part):
        return size(value)
    if isinstance(value, dict):
        value = {name: size(one) if _is_size(one, name) else one for name, one in value.items()}
    text = "none" if value is None else msgspec.json.encode(value, order="sorted").decode()
    return text if len(text) <= VALUE_SHOWN else f"{text[:VALUE_SHOWN]}..."
