"""Host memory: cgroups of both versions on fake trees, the pin budget, and exact mappings."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from residency.gpu.host_memory import allocate, booked_against_kernel, copy_into, locked_bytes, read_host, trim

MIB = 2**20
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


@pytest.mark.parametrize("host_ram_bytes", [None, 40 * GIB])
def test_the_ranks_of_a_host_share_its_budget_also_a_granted_one(tmp_path: Path, host_ram_bytes: int | None) -> None:
    root = make_tree(tmp_path, HOST)
    whole = read_host(root, host_ram_bytes=host_ram_bytes)
    part = read_host(root, host_ram_bytes=host_ram_bytes, num_local_ranks=4)
    assert part.pin_budget_bytes * 4 == whole.pin_budget_bytes
    assert part.available_bytes == whole.available_bytes == 80 * GIB


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


STATUS = """Name:\tpython
VmLck:\t    2048 kB
VmPin:\t    1024 kB
VmSwap:\t     512 kB
RssAnon:\t  102400 kB
RssFile:\t   20480 kB
RssShmem:\t   4096 kB
"""


def test_what_is_booked_is_told_beside_what_the_kernel_counts(tmp_path: Path) -> None:
    root = make_tree(tmp_path, {"proc/self/status": STATUS})
    usage = booked_against_kernel(60 * MIB, root)
    figures = (usage.anonymous_bytes, usage.shared_bytes, usage.file_bytes, usage.swapped_bytes, usage.locked_bytes)
    assert figures == (100 * MIB, 4 * MIB, 20 * MIB, MIB // 2, 3 * MIB)
    assert (usage.unbooked_bytes, usage.missing_bytes) == (44 * MIB + MIB // 2, 0)
    assert booked_against_kernel(200 * MIB, root).missing_bytes == 95 * MIB + MIB // 2
    assert locked_bytes(root) == 3 * MIB


def test_a_kernel_that_tells_nothing_counts_as_nothing(tmp_path: Path) -> None:
    usage = booked_against_kernel(MIB, tmp_path)
    assert (usage.held_bytes, usage.locked_bytes, usage.missing_bytes) == (0, 0, MIB)


def test_touched_copies_show_in_the_kernels_figures_and_leave_them() -> None:
    before = booked_against_kernel(0)
    tensor = torch.empty(0, dtype=torch.uint8).set_(allocate(64 * MIB)).fill_(1)
    grown = booked_against_kernel(64 * MIB)
    del tensor
    after = booked_against_kernel(0)
    assert abs(grown.held_bytes - before.held_bytes - 64 * MIB) < 4 * MIB
    assert abs(after.held_bytes - before.held_bytes) < 4 * MIB


def test_what_the_kernel_knows_to_be_locked_is_told() -> None:
    storage = allocate(2 * mmap.PAGESIZE)
    before, libc = locked_bytes(), ctypes.CDLL(None)
    place = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
    assert libc.mlock(*place) == 0
    assert locked_bytes() - before == 2 * mmap.PAGESIZE
    assert libc.munlock(*place) == 0


TRIM = """
import ctypes
from residency.gpu.host_memory import booked_against_kernel, trim
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
# Small enough for the heap; the last one keeps the others' memory from being given back when they are freed.
blocks = [libc.malloc(65_536) for _ in range(1_024)]
for block in blocks:
    ctypes.memset(block, 1, 65_536)
for block in blocks[:-1]:
    libc.free(block)
before = booked_against_kernel(0).anonymous_bytes
print(trim(), before - booked_against_kernel(0).anonymous_bytes)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_freed_heap_memory_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", TRIM], capture_output=True, text=True, check=True, timeout=60)
    was_any, given_back = done.stdout.split()
    assert was_any == "True"
    assert int(given_back) > 50 * MIB


def test_trimming_without_glibc_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not trim()


def flags_of(storage: torch.UntypedStorage) -> set[str]:
    text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text):
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", part)
        if found and int(found[1], 16) <= storage.data_ptr() < int(found[2], 16):
            flags = re.search(r"VmFlags: (.*)", part)
            return set(flags[1].split()) if flags else set()
    return set()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="the kernel has no transparent huge pages"
)
def test_huge_pages_are_asked_for_where_one_fits() -> None:
    assert "hg" in flags_of(allocate(8 * MIB))
    assert "hg" not in flags_of(allocate(8 * MIB, huge_pages=False))
    small = allocate(MIB // 2)
    assert small.nbytes() == MIB // 2


def test_a_copy_goes_where_it_should_and_nowhere_else() -> None:
    target = torch.zeros(64, dtype=torch.uint8)
    source = torch.arange(1, 17, dtype=torch.uint8)
    copy_into(target.untyped_storage(), source.untyped_storage(), offset_bytes=48)
    copy_into(target.untyped_storage(), torch.empty(0).untyped_storage(), offset_bytes=64)
    assert torch.equal(target[48:], source)
    assert not target[:48].any()


@pytest.mark.parametrize("offset_bytes", [-1, 49, 2**62])
def test_a_copy_that_does_not_fit_is_refused(offset_bytes: int) -> None:
    target, source = torch.zeros(64, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="16 bytes at .* do not fit into a storage of 64 bytes"):
        copy_into(target.untyped_storage(), source.untyped_storage(), offset_bytes=offset_bytes)
    assert not target.any()


def test_a_copy_outside_host_memory_is_refused() -> None:
    on_meta = torch.empty(4, device="meta").untyped_storage()
    with pytest.raises(ValueError, match="from meta to cpu is not one within host memory"):
        copy_into(allocate(16), on_meta)
