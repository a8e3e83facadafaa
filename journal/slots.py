"""A small file that always holds a whole content: two slots, the older one written over in place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# What a disk writes as one, so that a power loss in the middle of one slot cannot reach the other.
_SLOT_BYTES_MIN = 4096


class Slot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One slot: a line of JSON, filled up with spaces. The higher number is the newer.

    sha256: in hex, of the number in decimal, a newline, and the content as it stands.
    """

    number: int
    sha256: str
    content: msgspec.Raw


_decoder = msgspec.json.Decoder(Slot)


def read_slots(content: bytes) -> tuple[Slot | None, int]:
    """Return the newest whole slot of a file, None if there is none, and how many are neither whole nor empty."""
    size = len(content) // 2
    slots = [_slot(content[:size]), _slot(content[size:])]
    whole = [slot for slot in slots if isinstance(slot, Slot)]
    return max(whole, key=lambda slot: slot.number, default=None), slots.count(False)


def write_slot(path: Path, content: bytes) -> None:
    """Have a file hold this JSON text. Blocks until it is on disk; after a crash it holds the old or the new one.

    Raises:
        OSError: the disk is full, or the file or its folder cannot be written.
    """
    change_slot(path, lambda _: content)


def change_slot(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Have a file hold what becomes of its content, as `write_slot` does.

    change: gets the newest content that is whole, or all that there is if nothing is; empty without a file.
    In place and without a change of the file's size, which takes a disk a fraction of what a new file does.

    Raises:
        OSError: as `write_slot`.
    """
    # Whatever somebody put there, a named pipe even, must not make a worker wait.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            raise
        _make(path, _text(1, change(b"")))
        return
    try:
        found = os.fstat(descriptor)
        there = os.pread(descriptor, found.st_size, 0) if stat.S_ISREG(found.st_mode) else b""
        size = len(there) // 2
        slots = _slot(there[:size]), _slot(there[size:])
        whole = [slot for slot in slots if isinstance(slot, Slot)]
        newest = max(whole, key=lambda slot: slot.number, default=None)
        known = 0 if newest is None else newest.number
        text = _text(known + 1, change(there if newest is None else bytes(newest.content)))
        if newest is not None and len(text) < size and size % _SLOT_BYTES_MIN == 0 and len(there) == 2 * size:
            os.pwrite(descriptor, text.ljust(size - 1) + b"\n", size if slots[0] is newest else 0)
            os.fdatasync(descriptor)
            return
    finally:
        os.close(descriptor)
    _make(path, text)


def _slot(line: bytes) -> Slot | bool:
    """Return a slot; True if it is empty, False if it is damaged."""
    if not line.strip():
        return True
    try:
        slot = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return slot if slot.sha256 == _sha256(slot.number, bytes(slot.content)) else False


def _text(number: int, content: bytes) -> bytes:
    return msgspec.json.encode(Slot(number=number, sha256=_sha256(number, content), content=msgspec.Raw(content)))


def _sha256(number: int, content: bytes) -> str:
    return hashlib.sha256(b"%d\n" % number + content).hexdigest()


def _make(path: Path, text: bytes) -> None:
    """Make the file under another name, and rename it: with room to grow, and its second slot empty."""
    size = _SLOT_BYTES_MIN
    while size < 2 * len(text):
        size *= 2
    temporary = path.with_name(path.name + ".tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(text.ljust(size - 1) + b"\n" + b" " * (size - 1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
