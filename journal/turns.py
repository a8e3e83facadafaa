"""The order in which those who wait for a lock get it: a queue in the lock's file, made of locks on single bytes.

The system wakes all who wait for a lock, and whoever asks first has it: mostly the one that has just let go. Here each
who waits locks the byte after the last one's, and waits for that one's byte. Like every lock these end with their
process. They are about fairness alone: what keeps others out is the lock itself, which is taken afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys

# struct flock where a long has 64 bits: type, whence, start, length, and the process, which must be 0.
_FLOCK = struct.Struct("@hhqqi4x")

# The file begins with the number of the next who waits; their bytes come after it, and are never written.
_NUMBER_BYTES = 8
_FIRST_BYTE = 1024
_NUMBERS = 2**48

# Locks of an open file, and not of a process, which would lose them with any other descriptor that it closes.
_HAS_QUEUE = sys.platform == "linux" and sys.maxsize > 2**32 and hasattr(fcntl, "F_OFD_SETLK")


def somebody_waits(descriptor: int) -> bool:
    """Whether somebody has joined the queue in the lock file of this descriptor, and not left it. Does not block."""
    if not _HAS_QUEUE:
        return False
    try:
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, _FIRST_BYTE, 0))
    except OSError:
        return False  # a file system without such locks has no queue
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def join(descriptor: int) -> None:
    """Join the queue, and wait until everybody who came before has left it. Blocks.

    Where that is not possible it returns at once, and there is no order.
    """
    if not _HAS_QUEUE:
        return
    with contextlib.suppress(OSError):
        before = _line_up(descriptor)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _flock(fcntl.F_RDLCK, before, 1))


def leave(descriptor: int) -> None:
    """Leave the queue, also while `join` waits in another thread. Does nothing if it was never joined."""
    if _HAS_QUEUE:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, _FIRST_BYTE, 0))


def _line_up(descriptor: int) -> int:
    """Lock the byte of the next number, and return the byte before it."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _flock(fcntl.F_WRLCK, 0, _NUMBER_BYTES))
    try:
        # Whatever else the file may hold is a number, too.
        number = int.from_bytes(os.pread(descriptor, _NUMBER_BYTES, 0), "little") % _NUMBERS
        own = _FIRST_BYTE + 1 + number
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, own, 1))
        os.pwrite(descriptor, (number + 1).to_bytes(_NUMBER_BYTES, "little"), 0)
    except OSError:
        leave(descriptor)
        raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, 0, _NUMBER_BYTES))
    return own - 1


def _flock(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
