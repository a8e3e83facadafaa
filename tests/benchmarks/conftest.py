"""Results as the benchmark writes them, small enough to reckon by hand; and the checkout on the path, last."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
# The benchmarks are no part of the package. At the end, so that the folders at the root shadow nothing.
sys.path.append(str(ROOT))

GIB = 2**30
Row = dict[str, Any]


def make_row(kind: str, cap_gib: float | None, samples: list[float], **more: Any) -> Row:
    """A row of a mode whose requests took these seconds."""
    cap_bytes = None if cap_gib is None else int(cap_gib * GIB)
    ordered = sorted(samples)
    peak = {"allocated_peak_bytes": 2 * GIB, "reserved_peak_bytes": 3 * GIB}
    return {
        "name": kind if cap_gib is None else f"{kind}@{cap_gib:g}GiB",
        "kind": kind,
        "cap_bytes": cap_bytes,
        "samples_s": samples,
        "median_s": ordered[len(ordered) // 2],
        "min_s": ordered[0],
        "num_requests": len(samples),
        "cold_s": ordered[-1] * 2,
        "setup_s": 4.0,
        "peaks": peak,
        "digest": "d1",
        "is_finite": True,
        "alloc_retries": 0,
        **more,
    }


def make_plan(*, bound_s: float, best_s: float, busy_s: float | None = None) -> Row:
    """What was planned for a row of ours: bounds in s; nothing is resident but the vae."""
    busy_ns = None if busy_s is None else int(busy_s * 1e9)
    return {
        "placement": {
            "components": {
                "transformer": {"mode": "component-offload", "tier": "pinned"},
                "vae": {"mode": "resident"},
            }
        },
        "bound_ns": int(bound_s * 1e9),
        "best_bound_ns": int(best_s * 1e9),
        "busy_bound_ns": busy_ns,
        "busy_best_bound_ns": busy_ns,
        "simulated_ns": int(bound_s * 1e9),
    }


SPECS = [
    {
        "name": name,
        "class_name": name,
        "total_bytes": num_gib * GIB,
        "groups": [],
        "modes": ["resident", "component-offload"],
        "fixed_reason": None,
        "weights_digest": "",
        "entry_points": ["forward"],
    }
    for name, num_gib in (("transformer", 20), ("vae", 1))
]


def make_document(*rows: Row, started_at: str = "2026-01-01T00:00:00+00:00", **settings: Any) -> Row:
    """A results file of one run."""
    run = {
        "shard": "custom",
        "settings": {"pipeline": "flux", **settings},
        "started_at": started_at,
        "machine": {},
        "rows": [*rows],
    }
    return {"format": 1, "runs": [run]}


@pytest.fixture
def row() -> Callable[..., Row]:
    """Make a row of a mode."""
    return make_row


@pytest.fixture
def plan() -> Callable[..., Row]:
    """Make what was planned for a row of ours."""
    return make_plan


@pytest.fixture
def make() -> Callable[..., Row]:
    """Make a results file of one run from rows."""
    return make_document


@pytest.fixture
def document() -> Row:
    """One run: all-resident in 1 s, ours and two peers at 24 GiB, ours and a failed peer at 8 GiB."""
    link = {f"to_{place}_{tier}": 50.0 * GIB for place in ("device", "host") for tier in ("pinned", "pageable")}
    timeline = {
        "span_ms": 100.0,
        "to_device_bytes": GIB,
        "busy_ms": {"compute_only": 20.0, "copy_only": 30.0, "both": 45.0, "neither": 5.0},
        "copies": [[0.0, 75.0, GIB]],
        "to_host": [],
        "compute": [[10.0, 75.0]],
        "layers": [["transformer.blocks.0", 10.0, 40.0]],
    }
    host = {"anonymous_bytes": 2 * GIB, "torch_pinned_bytes": 0, "peak_bytes": 4 * GIB}
    return make_document(
        {"name": "link", "kind": "link", "cap_bytes": None, "link": link, "device": {"name": "a card"}},
        make_row("resident", None, [1.0, 1.02, 0.98], specs=SPECS, host=host),
        make_row(
            "ours",
            24,
            [1.1, 1.12, 1.08],
            plan=make_plan(bound_s=1.0, best_s=0.8, busy_s=1.05),
            timeline=timeline,
            host={**host, "anonymous_bytes": 23 * GIB},
        ),
        make_row("ours", 8, [2.0, 2.0, 2.0], plan=make_plan(bound_s=1.6, best_s=1.6), timeline=timeline),
        make_row("group-leaf", 24, [2.2, 2.2], host={**host, "torch_pinned_bytes": 28 * GIB}),
        make_row("group-block", 24, [7.0, 7.0], digest="d2"),
        {"name": "group-leaf@8GiB", "kind": "group-leaf", "cap_bytes": 8 * GIB, "error": "OutOfMemoryError: no room"},
    )
