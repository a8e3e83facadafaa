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
    file = SlotFile(path)
    try:
        file.change(lambda _: content)
    finally:
        file.close()


class SlotFile:
    """Such a file, kept open from one change to the next. Whoever else may change it must be kept out meanwhile.

    In place and without a change of the file's size, a change takes a disk a fraction of what a new file does; and as
    long as nobody else comes between, what is there needs no decoding.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = os.fspath(path)
        self._descriptor: int | None = None
        self._key: tuple[int, int] | None = None
        # What the file holds after a change of ours, and what `_look` would find in it.
        self._there = b""
        self._found = _Found()

    def change(self, change: Callable[[bytes], bytes]) -> None:
        """Have the file hold what becomes of its content, as `write_slot` does.

        change: gets the newest content that is whole, or all that there is if nothing is; empty without a file.

        Raises:
            OSError: as `write_slot`.
        """
        num_bytes = self._opened()
        if num_bytes is None:
            _make(self._path, _text(1, change(b"")))
            return
        try:
            self._change(num_bytes, change)
        except BaseException:
            # What is there now, the next change looks for itself.
            self.close()
            raise

    def close(self) -> None:
        """Close the file. A second call is a no-op; a change opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        self._key, self._there = None, b""
        if descriptor is not None:
            os.close(descriptor)

    def _opened(self) -> int | None:
        """Open the file that has the name now. Returns its size, 0 if it is no file, None if it must be made."""
        try:
            found = os.lstat(self._name)
            if self._descriptor is not None and (found.st_dev, found.st_ino) == self._key:
                return found.st_size
            self.close()
            # Whatever somebody put there, a named pipe even, must not make a worker wait.
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
            self._descriptor = os.open(self._name, flags)
            found = os.fstat(self._descriptor)
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                return None
            raise
        # What is no file is looked at again each time.
        is_file = stat.S_ISREG(found.st_mode)
        self._key = (found.st_dev, found.st_ino) if is_file else None
        return found.st_size if is_file else 0

    def _change(self, num_bytes: int, change: Callable[[bytes], bytes]) -> None:
        descriptor = self._descriptor
        assert descriptor is not None
        there = os.pread(descriptor, num_bytes, 0) if num_bytes else b""
        found = self._found if there and there == self._there else _look(there)
        size = len(there) // 2
        content = change(there if found.content is None else found.content)
        text = _text(found.number + 1, content)
        is_ours = found.content is not None and size % _SLOT_BYTES_MIN == 0 and len(there) == 2 * size
        if not is_ours or len(text) >= size:
            self.close()
            _make(self._path, text)
            return
        line = text.ljust(size - 1) + b"\n"
        os.pwrite(descriptor, line, found.other * size)
        os.fdatasync(descriptor)
        self._there = line + there[size:] if found.other == 0 else there[:size] + line
        self._found = _Found(number=found.number + 1, content=content, other=1 - found.other)


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds: the newest content, None if none is whole, its number, and which slot is written next."""

    number: int = 0
    content: bytes | None = None
    other: int = 0


def _look(there: bytes) -> _Found:
    size = len(there) // 2
    slots = [_slot(there[:size]), _slot(there[size:])]
    whole = [slot for slot in slots if isinstance(slot, Slot)]
    newest = max(whole, key=lambda slot: slot.number, default=None)
    if newest is None:
        return _Found()
    return _Found(number=newest.number, content=bytes(newest.content), other=1 if slots[0] is newest else 0)


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
    # As msgspec encodes a Slot.
    return b'{"number":%d,"sha256":"%s","content":%s}' % (number, _sha256(number, content).encode(), content)


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
