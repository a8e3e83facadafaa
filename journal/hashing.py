"""How an event is hashed, and how a blob is named: the bytes that the chain stands on."""

from __future__ import annotations

import hashlib
import struct
from operator import attrgetter
from typing import TYPE_CHECKING

from residency.journal.schema import EVENT_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.journal.events import Event

# Before the first event of every stream.
ZERO_HASH = bytes(32)

# Other uses of SHA-256 can never produce an event's hash.
_DOMAIN = b"residency.journal.event.1\x00"

_PREFIX = struct.Struct(">cQ")

Column = int | str | bytes | None

_columns_before_hash = attrgetter(*EVENT_COLUMNS[:-1])


def hash_columns(columns: Sequence[Column]) -> bytes:
    """Return the SHA-256 over all columns of an event but its hash, in table order.

    Every value is written as its type, its length (8 bytes, big-endian) and its bytes (integers in decimal, text in
    UTF-8), so that no two different rows share an input.
    """
    parts = [_DOMAIN]
    for value in columns:
        if value is None:
            parts.append(b"n")
        elif isinstance(value, str):
            content = value.encode()
            parts += (_PREFIX.pack(b"t", len(content)), content)
        elif isinstance(value, bytes):
            parts += (_PREFIX.pack(b"b", len(value)), value)
        else:
            content = b"%d" % value
            parts += (_PREFIX.pack(b"i", len(content)), content)
    return hashlib.sha256(b"".join(parts)).digest()


def hash_event(event: Event) -> bytes:
    """Return the hash that the event must carry."""
    return hash_columns(_columns_before_hash(event))


def blob_digest(content: bytes) -> str:
    """Return the name of a blob: the hex SHA-256 of its bytes."""
    return hashlib.sha256(content).hexdigest()
