"""What must be equal for a remembered placement to be used again."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residency.gpu.placement import ComponentPlacement
    from residency.gpu.records import DeviceReading, HostReading
    from residency.gpu.specs import ComponentSpec
    from residency.gpu.workload import Workload


def fingerprint(
    *,
    specs: Sequence[ComponentSpec],
    device: DeviceReading,
    host: HostReading,
    workload: Workload | None,
    configured: Mapping[str, ComponentPlacement],
    content: Mapping[str, str] | None = None,
    num_ranks: int = 1,
    rank: int | None = None,
    compile_mode: str | None = None,
    host_ram_bytes: int | None = None,
    workloads: Sequence[Workload] = (),
) -> dict[str, Any]:
    """Return part -> JSON value. content: component -> identity of its weights' bytes, as far as it is known.
    rank: of a group that runs the pipeline together; None without one.
    host_ram_bytes: the declared bound on pinned host memory. workloads: shapes beside the default one that must fit.

    What varies from start to start without meaning (free memory, link speed) is no part of it.
    """
    envelope = {"workloads": msgspec.to_builtins(tuple(workloads))} if workloads else {}
    return {
        **envelope,
        "weights": {spec.name: spec.weights_digest for spec in sorted(specs, key=lambda spec: spec.name)},
        "content": dict(content or {}),
        "device": {"kind": device.kind, "name": device.name, "total_bytes": device.total_bytes},
        "cap": device.cap_bytes,
        "driver": device.driver,
        "torch": device.torch_version,
        "allocator": device.allocator_settings,
        "cgroup": host.cgroup_cap_bytes,
        "host_ram": host_ram_bytes,
        "ranks": num_ranks if rank is None else [rank, num_ranks],
        "compile": compile_mode,
        "workload": msgspec.to_builtins(workload),
        "configured": msgspec.to_builtins(dict(configured)),
    }


def fingerprint_digest(parts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical form of a fingerprint, in hex."""
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the parts that differ, sorted; a part that only one of them has differs."""

    # Through JSON, so that a tuple and the list it is read back as are equal.
    def canonical(parts: Mapping[str, Any], name: str) -> bytes | None:
        return msgspec.json.encode(parts[name], order="sorted") if name in parts else None

    return tuple(sorted(n for n in {*old, *new} if canonical(old, n) != canonical(new, n)))
