"""Which host memory is a mapping of a file, so that it can be read again from there."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# /proc/<pid>/pagemap holds one 64-bit word a page, in the machine's own byte order.
_ENTRY_BYTES = 8
# Bit 63, the sign of the word, tells that the page is in memory.
_IS_SWAPPED = 1 << 62
_IS_OF_FILE = 1 << 61  # "page is file-page or shared-anon"
_ENTRIES_PER_READ = 2**17  # 1 MiB, for 512 MiB of memory
# Mappings of devices have an inode, too, and pinned memory of drivers is one; /dev/shm holds files.
_DEVICES, _SHARED_FILES = "/dev/", "/dev/shm/"
_DELETED = " (deleted)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapping:
    start: int
    end: int
    is_private: bool


def is_file_backed(address: int, nbytes: int) -> bool:
    """Whether all of a range is what a file holds. As `file_backed`, which reads the mappings once for many ranges."""
    return file_backed([(address, nbytes)])[0]


def file_backed(ranges: Sequence[tuple[int, int]], root: Path = Path("/")) -> list[bool]:
    """Return of each (address, bytes) range whether all of it is in mappings of files and still is what they hold.

    A page of a private mapping that this process has written to is its own memory from then on, and no longer the
    file's; one such page in the range makes it False. A file on tmpfs counts as a file. False as well: files that were
    deleted since (memory that processes share looks the same), mappings of devices, empty ranges, and whatever the
    kernel does not tell. Read-only; costs about 5 ms a GiB.

    Not covered: whether somebody changes or cuts the file later (a page beyond its new end ends the process with
    SIGBUS), and what this process writes after the call.
    """
    mappings = _file_mappings(root / "proc/self/maps")
    starts = [mapping.start for mapping in mappings]
    found = []
    with _Pages(root / "proc/self/pagemap") as pages:
        for address, nbytes in ranges:
            parts = _parts(mappings, starts, address, nbytes)
            is_kept = all(not is_private or pages.are_of_file(start, end) for start, end, is_private in parts)
            found.append(bool(parts) and is_kept)
    return found


class _Pages:
    """What the kernel tells of single pages of this process; nothing, if it refuses."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = None
        return self

    def __exit__(self, *exc: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def are_of_file(self, start: int, end: int) -> bool:
        """Whether no page of a range was written to: each is the file's own, or is not in memory at all."""
        first, last = start // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)
        while first < last:
            num_entries = min(last - first, _ENTRIES_PER_READ)
            entries = self._read(first, num_entries)
            if entries is None or _has_written(entries):
                return False
            first += num_entries
        return True

    def _read(self, first: int, num_entries: int) -> torch.Tensor | None:
        if self._descriptor is None:
            return None
        data = bytearray(num_entries * _ENTRY_BYTES)
        try:
            num_read = os.preadv(self._descriptor, [data], first * _ENTRY_BYTES)
        except OSError:
            return None
        return torch.frombuffer(data, dtype=torch.int64) if num_read == len(data) else None


def _has_written(entries: torch.Tensor) -> bool:
    """Whether one of the pages is in memory or swapped out without being the file's."""
    is_somewhere = (entries < 0) | (entries & _IS_SWAPPED != 0)
    return bool((is_somewhere & (entries & _IS_OF_FILE == 0)).any())


def _file_mappings(path: Path) -> list[_Mapping]:
    """Return the mappings of files in the order of their addresses; none if the kernel does not tell."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    mappings = []
    for line in lines:
        # start-end, permissions, offset, device, inode, path; anonymous memory has inode 0.
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or fields[4] == "0" or not _is_file(fields[5]):
            continue
        start, _, end = fields[0].partition("-")
        mappings.append(_Mapping(start=int(start, 16), end=int(end, 16), is_private="p" in fields[1]))
    return mappings


def _is_file(name: str) -> bool:
    is_device = name.startswith(_DEVICES) and not name.startswith(_SHARED_FILES)
    return name.startswith("/") and not is_device and not name.endswith(_DELETED)


def _parts(mappings: list[_Mapping], starts: list[int], address: int, nbytes: int) -> list[tuple[int, int, bool]]:
    """Return a range as (start, end, is private) parts in file mappings; empty unless they cover all of it."""
    parts, end = [], address + nbytes
    index = bisect_right(starts, address) - 1
    while address < end:
        if not 0 <= index < len(mappings) or not mappings[index].start <= address < mappings[index].end:
            return []
        mapping = mappings[index]
        part_end = min(end, mapping.end)
        parts.append((address, part_end, mapping.is_private))
        address, index = part_end, index + 1
    return parts
