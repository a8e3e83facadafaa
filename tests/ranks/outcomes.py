"""What must hold of any case of two lives: one with faults, and the start after it."""

from __future__ import annotations

from typing import Any

SERVES = {"committed", "kept", "restored", "rolled-back", "gated", "pinned", "without-journal"}
COMMITTED = {"committed", "kept", "restored"}
# Of a worker that ends with a named error, or because a signal asked for it.
NAMED = {1, 70, 71, 72, 73}
LIFE_S_MAX = 60.0  # far over the limits that one fault can make others wait for: what hangs, hangs for good


def problems(case: list[list[dict[str, Any]]], struck: set[int]) -> list[str]:
    """Return what is wrong; nothing if all is well. struck: the ranks that had a fault."""
    first, second = case
    found = []
    survivors = [rank for rank in range(len(first)) if rank not in struck]
    for rank in range(len(first)):
        one = first[rank]
        if one["over"] and rank not in struck:
            found.append(f"rank {rank} never ended")
        if rank in survivors and one["took"] > LIFE_S_MAX:
            found.append(f"rank {rank} took {one['took']:.1f} s")
        if rank in survivors and one["status"] != 0 and one["status"] not in NAMED:
            found.append(f"rank {rank} ended with {one['status']} and no name for it: {one}")
    serving = [first[rank] for rank in range(len(first)) if first[rank]["status"] == 0 and "decision" in first[rank]]
    if bad := {one["decision"] for one in serving} - SERVES:
        found.append(f"decided {bad}")
    committed = [one for one in serving if one["decision"] in COMMITTED]
    others = [one for one in serving if one["decision"] not in COMMITTED]
    if committed and others:
        found.append(f"some serve what was committed, others do not: {[one.get('decision') for one in first]}")
    if len({one["joint"] for one in committed}) > 1:
        found.append("different committed plans are served")
    if len({one["output"] for one in (*serving, *second) if "output" in one}) > 1:
        found.append("the output differs")
    return found + _after(second, committed)


def _after(second: list[dict[str, Any]], committed: list[dict[str, Any]]) -> list[str]:
    decisions = {one.get("decision") for one in second}
    if len(decisions) != 1 or not decisions <= COMMITTED:
        told = [(one.get("decision"), one["status"], one.get("reason", one.get("text"))) for one in second]
        return [f"the next start is not one: {told}"]
    if len({(one["joint"], one["round"], one["epoch"]) for one in second}) != 1:
        return ["the next start serves several plans"]
    if committed and decisions != {"restored"}:
        return ["what was committed and served is not restored"]
    return []
