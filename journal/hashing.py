"""How an event is hashed, and how a blob is named: the bytes that the chain stands on."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.journal.events import Event

# Before the first event of every stream.
ZERO_HASH = bytes(32)

# Other uses of SHA-256 can never produce an event's hash.
_DOMAIN = b"residency.journal.event.1\x00"

_PREFIX = struct.Struct(">cQ")

Column = int | str | bytes | None


def hash_columns(columns: Sequence[Column]) -> bytes:
    """Return the SHA-256 over all columns of an event but its hash, in table order.

    Every value is written as its type, its length (8 bytes, big-endian) and its bytes (integers in decimal, text in
    UTF-8), so that no two different rows share an input.
    """
    return hashlib.sha256(b"".join((_DOMAIN, *map(_part, columns)))).digest()


def _part(value: Column) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, str):
        kind, content = b"t", value.encode()
    elif isinstance(value, bytes):
        kind, content = b"b", value
    elif isinstance(value, int):
        kind, content = b"i", b"%d" % value
    else:
        # In a damaged file only; it must not look like any of the others.
        kind, content = b"?", repr(value).encode()
    return _PREFIX.pack(kind, len(content)) + content


# The prefixes of integers by their digits, of an event_id, and of a hash.
_INTEGERS = tuple(_PREFIX.pack(b"i", length) for length in range(21))
_ID = _PREFIX.pack(b"t", 36)
_HASH = _PREFIX.pack(b"b", 32)

# Neighbouring columns whose values come again and again -> what is hashed of them.
_known: dict[tuple[Column, ...], bytes] = {}
_KNOWN_MAX = 4096


def _remember(columns: tuple[Column, ...]) -> bytes:
    if len(_known) >= _KNOWN_MAX:
        _known.clear()
    found = _known[columns] = b"".join(map(_part, columns))
    return found


def hash_row(row: Sequence[Column]) -> bytes:
    """Return the hash that a row with all columns of an event must carry: what `hash_columns` returns of all but it.

    In a third of the time.
    """
    (
        position, stream, version, event_id, epoch, number, rank, kind, schema_version,
        from_state, to_state, trigger, recorded_at, boot_id, pid, causation, payload, previous_hash, _,
    ) = row  # fmt: skip
    if not (
        # As any event is that was not damaged. In a dictionary 1 and 1.0 would be the same.
        type(position) is type(version) is type(number) is type(rank) is int
        and type(schema_version) is type(recorded_at) is type(pid) is int
        and type(event_id) is str
        and type(payload) is type(previous_hash) is bytes
        and len(previous_hash) == 32  # pyright: ignore[reportArgumentType]
        and len(identifier := event_id.encode()) == 36
    ):
        return hash_columns(row[:-1])
    first, second, third = b"%d" % position, b"%d" % version, b"%d" % recorded_at
    of_epoch, of_kind, of_process = (
        (epoch, number),
        (rank, kind, schema_version, from_state, to_state, trigger),
        (boot_id, pid),
    )
    parts = (
        _DOMAIN,
        _INTEGERS[len(first)],
        first,
        _known.get((stream,)) or _remember((stream,)),
        _INTEGERS[len(second)],
        second,
        _ID,
        identifier,
        _known.get(of_epoch) or _remember(of_epoch),
        _known.get(of_kind) or _remember(of_kind),
        _INTEGERS[len(third)],
        third,
        _known.get(of_process) or _remember(of_process),
        b"n" if causation is None else _part(causation),
        _PREFIX.pack(b"b", len(payload)),  # pyright: ignore[reportArgumentType]
        payload,
        _HASH,
        previous_hash,
    )
    return hashlib.sha256(b"".join(parts)).digest()  # pyright: ignore[reportArgumentType]


def hash_event(event: Event) -> bytes:
    """Return the hash that the event must carry, whatever it carries."""
    return hash_row(event)


def blob_digest(content: bytes) -> str:
    """Return the name of a blob: the hex SHA-256 of its bytes."""
    return hashlib.sha256(content).hexdigest()
