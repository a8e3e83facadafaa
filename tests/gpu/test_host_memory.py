"""Host memory: cgroups of both versions on fake trees, the pin budget, and exact mappings."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from residency.gpu.host_memory import allocate, read_host

GIB = 2**30


def make_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def meminfo(*, total: int, available: int) -> dict[str, str]:
    text = f"MemTotal:       {total // 1024} kB\nMemFree:  1 kB\nMemAvailable:   {available // 1024} kB\n"
    return {"proc/meminfo": text}


HOST = meminfo(total=100 * GIB, available=80 * GIB)
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


def test_without_a_cgroup_the_budget_is_what_is_available_less_the_reserve(tmp_path: Path) -> None:
    reading = read_host(make_tree(tmp_path, HOST))
    assert reading.available_bytes == 80 * GIB
    assert reading.cgroup_cap_bytes is None
    assert reading.pin_budget_bytes == 75 * GIB  # 5 % of 100 GiB is more than 2 GiB.


def test_a_small_host_keeps_two_gibibytes(tmp_path: Path) -> None:
    reading = read_host(make_tree(tmp_path, meminfo(total=16 * GIB, available=10 * GIB)))
    assert reading.pin_budget_bytes == 8 * GIB


def test_the_budget_is_never_negative(tmp_path: Path) -> None:
    assert read_host(make_tree(tmp_path, meminfo(total=4 * GIB, available=GIB))).pin_budget_bytes == 0


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{30 * GIB}\n"},
        {"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/memory.max": f"{30 * GIB}\n"},
        {"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/memory.max": f"{30 * GIB}\n", f"{V2}/a/b/memory.max": "max\n"},
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{V2}/a/memory.max": f"{60 * GIB}\n",
            f"{V2}/a/b/memory.max": f"{30 * GIB}\n",
        },
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{V2}/a/memory.max": f"{30 * GIB}\n",
            f"{V2}/a/b/memory.max": f"{60 * GIB}\n",
        },
        {"proc/self/cgroup": "0::/a\n", f"{V2}/a/memory.high": f"{30 * GIB}\n", f"{V2}/a/memory.max": "max\n"},
        # In a container the process may see a path that does not exist there.
        {"proc/self/cgroup": "0::/docker/abc\n", f"{V2}/memory.max": f"{30 * GIB}\n"},
        {"proc/self/cgroup": "0::/../../abc\n", f"{V2}/memory.max": f"{30 * GIB}\n"},
        {"proc/self/cgroup": "4:memory:/x\n0::/\n", f"{V1}/x/memory.limit_in_bytes": f"{30 * GIB}\n"},
        {"proc/self/cgroup": "9:cpu,memory:/x/y\n", f"{V1}/x/memory.limit_in_bytes": f"{30 * GIB}\n"},
        {
            "proc/self/cgroup": "4:memory:/x\n",
            f"{V1}/x/memory.limit_in_bytes": "9223372036854771712\n",
            f"{V1}/x/memory.stat": f"cache 5\nhierarchical_memory_limit {30 * GIB}\n",
        },
        {"proc/self/cgroup": "1:name=systemd:/\n0::/u\n", f"{V2}/unified/u/memory.max": f"{30 * GIB}\n"},
    ],
)
def test_the_least_limit_of_all_levels_is_the_cap(tmp_path: Path, files: dict[str, str]) -> None:
    reading = read_host(make_tree(tmp_path, HOST | files))
    assert reading.cgroup_cap_bytes == 30 * GIB
    assert reading.pin_budget_bytes == 28 * GIB
    assert reading.available_bytes == 80 * GIB


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", str(2**63), str(200 * GIB), "", "-1", "many"])
def test_what_is_no_limit_is_none(tmp_path: Path, limit: str) -> None:
    files = {"proc/self/cgroup": "0::/a\n", f"{V2}/a/memory.max": f"{limit}\n"}
    reading = read_host(make_tree(tmp_path, HOST | files))
    assert reading.cgroup_cap_bytes is None
    assert reading.pin_budget_bytes == 75 * GIB


def test_what_the_cgroup_uses_is_not_there_to_pin_but_clean_file_pages_are(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a\n",
        f"{V2}/a/memory.max": str(30 * GIB),
        f"{V2}/a/memory.current": str(20 * GIB),
        f"{V2}/a/memory.stat": f"anon {15 * GIB}\ninactive_file {5 * GIB}\n",
    }
    assert read_host(make_tree(tmp_path, HOST | files)).pin_budget_bytes == 13 * GIB


def test_a_full_parent_leaves_no_room_in_its_child(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        f"{V2}/a/memory.max": str(60 * GIB),
        f"{V2}/a/memory.current": str(59 * GIB),
        f"{V2}/a/b/memory.max": str(30 * GIB),
        f"{V2}/a/b/memory.current": str(GIB),
    }
    reading = read_host(make_tree(tmp_path, HOST | files))
    assert (reading.cgroup_cap_bytes, reading.pin_budget_bytes) == (30 * GIB, 0)


def test_what_the_user_grants_replaces_the_reserve_but_not_the_facts(tmp_path: Path) -> None:
    root = make_tree(tmp_path, meminfo(total=4 * GIB, available=GIB))
    assert read_host(root, host_ram_bytes=GIB // 2).pin_budget_bytes == GIB // 2
    assert read_host(root, host_ram_bytes=50 * GIB).pin_budget_bytes == GIB
    assert read_host(root, host_ram_bytes=0).pin_budget_bytes == 0


def test_a_host_that_tells_nothing_pins_nothing(tmp_path: Path) -> None:
    reading = read_host(tmp_path)
    assert (reading.available_bytes, reading.cgroup_cap_bytes, reading.pin_budget_bytes) == (0, None, 0)


def test_this_host_can_be_read() -> None:
    reading = read_host()
    assert reading.available_bytes >= 0
    assert reading.pin_budget_bytes >= 0


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 3 * 2**20 + 5])
def test_a_mapping_has_exactly_the_bytes_asked_for(nbytes: int) -> None:
    storage = allocate(nbytes)
    assert storage.nbytes() == nbytes
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    assert not tensor.any()
    tensor.fill_(9)
    assert int(tensor.sum(dtype=torch.int64)) == 9 * nbytes


def test_a_mapping_outlives_the_name_and_ends_with_the_storage() -> None:
    def mapped_bytes() -> int:
        fields = Path("/proc/self/statm").read_text(encoding="utf-8").split()
        return int(fields[0]) * 4096

    before = mapped_bytes()
    tensor = torch.empty(0, dtype=torch.uint8).set_(allocate(512 * 2**20))
    gc.collect()
    tensor[-1] = 5
    assert int(tensor[-1]) == 5
    assert mapped_bytes() >= before + 512 * 2**20
    del tensor
    gc.collect()
    assert mapped_bytes() < before + 256 * 2**20


def test_more_than_the_host_can_map_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="refuses a mapping of"):
        allocate(2**60)
