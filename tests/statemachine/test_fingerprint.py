"""What must be equal for a placement to be used again, and what need not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from residency.gpu.placement import RESIDENT
from residency.gpu.records import DeviceReading, HostReading
from residency.statemachine.fingerprint import differences, fingerprint, fingerprint_digest

if TYPE_CHECKING:
    from tests.statemachine.conftest import Build

DEVICE = DeviceReading(
    kind="emulated",
    name="emulated",
    index=0,
    total_bytes=2**34,
    cap_bytes=2**33,
    driver="none",
    torch_version="2.13",
    allocator_settings="",
)
HOST = HostReading(available_bytes=2**35, cgroup_cap_bytes=2**36, pin_budget_bytes=2**34)


def parts(build: Build, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "specs": build.specs(),
        "device": DEVICE,
        "host": HOST,
        "workload": build.shape,
        "configured": {},
    }
    return fingerprint(**{**values, **changes})


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("content", {"content": {"vae": "sha256:1"}}),
        ("device", {"device": replace(DEVICE, name="another")}),
        ("device", {"device": replace(DEVICE, total_bytes=1)}),
        ("cap", {"device": replace(DEVICE, cap_bytes=1)}),
        ("driver", {"device": replace(DEVICE, driver="580")}),
        ("torch", {"device": replace(DEVICE, torch_version="2.11")}),
        ("allocator", {"device": replace(DEVICE, allocator_settings="expandable_segments:True")}),
        ("cgroup", {"host": replace(HOST, cgroup_cap_bytes=None)}),
        ("ranks", {"num_ranks": 2}),
        ("compile", {"compile_mode": "max-autotune"}),
        ("workload", {"workload": None}),
        ("configured", {"configured": {"vae": RESIDENT}}),
    ],
)
def test_every_part_changes_the_digest_and_is_named(build: Build, part: str, changes: dict[str, Any]) -> None:
    old, new = parts(build), parts(build, **changes)
    assert differences(old, new) == (part,)
    assert fingerprint_digest(old) != fingerprint_digest(new)


def test_weights_count_by_digest_and_not_by_order(build: Build) -> None:
    specs = build.specs()
    assert fingerprint_digest(parts(build)) == fingerprint_digest(parts(build, specs=specs[::-1]))
    changed = (replace(specs[0], weights_digest="other"), *specs[1:])
    assert differences(parts(build), parts(build, specs=changed)) == ("weights",)


def test_what_varies_from_start_to_start_without_meaning_is_no_part(build: Build) -> None:
    busier = replace(HOST, available_bytes=1, pin_budget_bytes=1)
    other_slot = replace(DEVICE, index=3)
    assert parts(build) == parts(build, host=busier, device=other_slot)


def test_a_fingerprint_read_back_from_the_journal_is_equal(build: Build) -> None:
    new = parts(build, configured={"vae": build.pinned}, content={"vae": "x"})
    old = json.loads(msgspec.json.encode(new))
    assert differences(old, new) == ()
    assert fingerprint_digest(old) == fingerprint_digest(new)


def test_a_part_that_only_one_of_them_has_differs() -> None:
    assert differences({"cap": 1}, {"cap": 1, "driver": None}) == ("driver",)
