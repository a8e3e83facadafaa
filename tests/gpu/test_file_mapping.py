"""Which host memory is a mapped file: by the kernel's own word, never by the way it was loaded."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from residency.gpu.file_mapping import file_backed, is_file_backed
from residency.gpu.host_memory import allocate

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 2**20
PAGE = mmap.PAGESIZE


def is_mapped(tensor: torch.Tensor) -> bool:
    return is_file_backed(tensor.data_ptr(), tensor.nbytes)


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Three weights of a safetensors file, as they are loaded: the middle one is large."""
    names = {"first": 1000, "large": MIB, "last": 5000}
    save_file({name: torch.ones(size) for name, size in names.items()}, tmp_path / "model.safetensors")
    return load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("is_touched", [False, True])
def test_weights_of_a_safetensors_file_are_mapped_read_or_not(
    weights: dict[str, torch.Tensor], *, is_touched: bool
) -> None:
    if is_touched:
        assert all(bool((weight == 1).all()) for weight in weights.values())
    ranges = [(weight.data_ptr(), weight.nbytes) for weight in weights.values()]
    assert file_backed(ranges) == [True, True, True]


def test_a_weight_that_was_written_to_is_no_longer_the_files(weights: dict[str, torch.Tensor]) -> None:
    weights["large"][MIB // 2] = 2
    assert not is_mapped(weights["large"])
    assert is_mapped(weights["large"][: MIB // 4])
    assert is_mapped(weights["last"])


def test_clones_conversions_and_fresh_tensors_are_not_mapped(weights: dict[str, torch.Tensor]) -> None:
    made = [weights["last"].clone(), weights["last"].to(torch.bfloat16), torch.ones(5000), torch.empty(3 * MIB)]
    assert not any(is_mapped(tensor) for tensor in made)
    mapping = allocate(MIB)
    assert not is_file_backed(mapping.data_ptr(), MIB)
    assert not is_mapped(torch.ones(MIB).share_memory_())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("is_shared", [False, True])
def test_tensors_and_storages_of_a_plain_file_are_mapped(tmp_path: Path, *, is_shared: bool) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(4 * PAGE))
    tensor = torch.from_file(str(path), shared=is_shared, size=4 * PAGE, dtype=torch.uint8)
    storage = torch.UntypedStorage.from_file(str(path), shared=is_shared, nbytes=4 * PAGE)
    assert is_mapped(tensor)
    assert is_file_backed(storage.data_ptr(), 4 * PAGE)
    tensor[PAGE] = 1
    # What is written through a shared mapping is in the file; a private page is this process's own.
    assert is_mapped(tensor) == is_shared
    assert is_file_backed(storage.data_ptr(), 4 * PAGE)


def test_a_deleted_file_does_not_count(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").unlink()
    assert not is_mapped(weights["large"])


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm to write to")
def test_a_file_in_shared_memory_is_a_file() -> None:
    path = Path("/dev/shm") / f"residency-test-{os.getpid()}"
    path.write_bytes(bytes(PAGE))
    try:
        assert is_mapped(torch.from_file(str(path), shared=True, size=PAGE, dtype=torch.uint8))
    finally:
        path.unlink()


@pytest.fixture
def page_sandwich(tmp_path: Path) -> Iterator[int]:
    """The address of a file's page, a page of nothing but memory, and another page of the file, one after the other."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    path = tmp_path / "two pages (deleted)x\n"
    path.write_bytes(bytes(2 * PAGE))
    address = libc.mmap(None, 3 * PAGE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    with path.open("rb") as file:
        for index in (0, 2):
            fixed = mmap.MAP_PRIVATE | 0x10  # MAP_FIXED
            assert libc.mmap(address + index * PAGE, PAGE, mmap.PROT_READ, fixed, file.fileno(), 0) is not None
    yield address
    libc.munmap(address, 3 * PAGE)


def test_every_byte_of_a_range_must_be_in_a_file(page_sandwich: int) -> None:
    file, hole, again = page_sandwich, page_sandwich + PAGE, page_sandwich + 2 * PAGE
    ranges = [(file, PAGE), (file + 10, 100), (again, PAGE), (hole, PAGE), (file, PAGE + 1), (hole + 1, PAGE)]
    assert file_backed([*ranges, (file, 3 * PAGE), (file, 0)]) == [True] * 3 + [False] * 5


def test_a_range_may_go_over_several_mappings_of_files(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(4 * PAGE))
    tensor = torch.from_file(str(path), shared=True, size=4 * PAGE, dtype=torch.uint8)
    libc = ctypes.CDLL(None)
    # Another protection for one page splits the mapping in three.
    assert libc.mprotect(ctypes.c_void_p(tensor.data_ptr() + PAGE), ctypes.c_size_t(PAGE), mmap.PROT_READ) == 0
    assert is_mapped(tensor)


def test_mappings_of_devices_do_not_count(tmp_path: Path) -> None:
    lines = [
        "10000-20000 rw-s 00000000 00:05 77 /dev/nvidia0",
        "20000-30000 rw-s 00000000 00:1b 78 /dev/shm/weights",
        "30000-40000 rw-s 00000000 00:01 79 /memfd:weights (deleted)",
        "40000-50000 rw-s 00000000 fe:00 80 /models/with spaces.bin",
        "50000-60000 rw-p 00000000 00:00 0 [heap]",
        "60000-70000 rw-p 00000000 fe:00 81 /models/private.bin",
    ]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/maps").write_text("\n".join(lines) + "\n", encoding="utf-8")
    # Without a pagemap nobody can tell whether a private mapping was written to.
    expected = [False, True, False, True, False, False]
    assert file_backed([(start * 0x10000, 0x10000) for start in range(1, 7)], tmp_path) == expected


def test_a_kernel_that_tells_nothing_has_no_mapped_files(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert file_backed([(weights["large"].data_ptr(), 4)], tmp_path) == [False]
    assert file_backed([]) == []
