"""Looks at SQLite's write-ahead log as bytes: whether it holds frames that SQLite, without a word, does not read."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# A WAL is written back at 4 MiB; one this large was kept from it by a reader, and would take seconds to look at.
WAL_BYTES_MAX = 256 * 2**20

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = 0x377F0682  # its last bit says in which byte order checksums are taken
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """Frames that are there and are not read. frame: the number of the damaged one, from 1; 0 for the header."""

    frame: int
    num_after: int

    @property
    def text(self) -> str:
        """What to tell people."""
        what = f"frame {self.frame}" if self.frame else "the header"
        return (
            f"{what} of the WAL is damaged, so that SQLite reads neither it nor the {self.num_after} frames after it; "
            "what they committed is lost, if it was acknowledged"
        )


def unreachable(wal: Path) -> Unreachable | None:
    """Return what the log holds behind damage; None if nothing, if there is no log, or if it is too large. Read-only.

    A frame that is only cut off, or half written at the very end, is what a crash leaves; nothing hangs on it.

    Raises:
        OSError: it cannot be read.
    """
    try:
        if wal.stat().st_size > WAL_BYTES_MAX:
            return None
        content = wal.read_bytes()
    except FileNotFoundError:
        return None
    return damage(content)


def damage(content: bytes) -> Unreachable | None:
    """Return what the bytes of a log hold behind damage."""
    if len(content) < _HEADER.size:
        return None
    magic, _, page_bytes, _, *salts, sum1, sum2 = _HEADER.unpack_from(content)
    size = _FRAME.size + page_bytes
    is_big = bool(magic & 1)
    sums = _checksum(content[:24], is_big, 0, 0)
    if magic & ~1 != _MAGIC or sums != (sum1, sum2):
        num = (len(content) - _HEADER.size) // (_FRAME.size + _page_bytes(page_bytes))
        return Unreachable(frame=0, num_after=num) if num else None
    starts = range(_HEADER.size, len(content) - size + 1, size)
    for number, start in enumerate(starts, start=1):
        page, commit, salt1, salt2, *stored = _FRAME.unpack_from(content, start)
        del page, commit
        if [salt1, salt2] == salts:
            sums = _checksum(content[start : start + 8], is_big, *sums)
            sums = _checksum(content[start + _FRAME.size : start + size], is_big, *sums)
            if list(sums) == stored:
                continue
        later = [frame for s in starts[number:] if list((frame := _FRAME.unpack_from(content, s))[2:4]) == salts]
        # Without a commit among them they are of a transaction that never ended: the next one, which writes over them,
        # was torn by a crash.
        return Unreachable(frame=number, num_after=len(later)) if any(frame[1] for frame in later) else None
    return None


def _page_bytes(stated: int) -> int:
    # A damaged header may say anything.
    return stated if 512 <= stated <= 65536 and not stated & (stated - 1) else 4096


def _checksum(content: bytes, is_big: bool, first: int, second: int) -> tuple[int, int]:
    words = struct.unpack(f"{'>' if is_big else '<'}{len(content) // 4}I", content)
    for index in range(0, len(words), 2):
        first = (first + words[index] + second) & _MASK
        second = (second + words[index + 1] + first) & _MASK
    return first, second
