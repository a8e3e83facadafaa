"""The lines of an export: what each holds, and how it is spelt. See docs/journal-format.md."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Any

import msgspec

from residency.journal.events import Event
from residency.journal.schema import EVENT_COLUMNS

FORMAT_NAME = "residency.journal.export"
VERSION = 1

_HASHES = ("previous_hash", "hash")


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line. journal_format: of the tables. meta: of the journal. streams: those exported, None for all."""

    format: str
    version: int
    journal_format: int
    meta: dict[str, str]
    streams: list[str] | None


class Blob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A blob: its digest, and its bytes as text if they are UTF-8, else in base64."""

    digest: str
    text: str | None = None
    base64: str | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event: every column under its own name. Hashes are in hex; the payload is text as it was hashed."""

    position: int
    stream: str
    stream_version: int
    event_id: str
    epoch: str
    round: int
    rank: int
    type: str
    schema_version: int
    from_state: str | None
    to_state: str | None
    trigger: str | None
    recorded_at: int
    boot_id: str
    pid: int
    causation: str | None
    # Text, or {"base64": ...} for bytes that are no UTF-8.
    payload: str | dict[str, str]
    previous_hash: str
    hash: str


class End(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last line, without which an export was cut short.

    last_position: the last one that was ever given. sha256: of all bytes before this line, in hex.
    """

    events: int
    blobs: int
    last_position: int
    sha256: str


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line: exactly one of these."""

    header: Header | None = None
    blob: Blob | None = None
    event: Row | None = None
    end: End | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


def encode_line(line: Line) -> bytes:
    """Return the line with its newline."""
    return _encoder.encode(line) + b"\n"


def decode_line(line: bytes | str) -> Header | Blob | Row | End:
    """Return what a line holds.

    Raises:
        ValueError: it is no line of an export.
    """
    try:
        found = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(f"is no line of an export ({error})") from error
    parts = [part for part in (found.header, found.blob, found.event, found.end) if part is not None]
    if len(parts) != 1:
        raise ValueError(f"holds {len(parts)} things, not one")
    return parts[0]


def blob_line(digest: str, content: bytes) -> Line:
    """Return the line of a blob."""
    try:
        return Line(blob=Blob(digest=digest, text=content.decode()))
    except UnicodeDecodeError:
        return Line(blob=Blob(digest=digest, base64=b64encode(content).decode()))


def blob_content(blob: Blob) -> bytes:
    """Return a blob's bytes.

    Raises:
        ValueError: it has none, or both kinds.
    """
    if (blob.text is None) == (blob.base64 is None):
        raise ValueError("a blob has either text or base64")
    return blob.text.encode() if blob.text is not None else _bytes_of(blob.base64 or "")


def event_line(event: Event) -> Line:
    """Return the line of an event."""
    columns: dict[str, Any] = {name: getattr(event, name) for name in EVENT_COLUMNS}
    for name in _HASHES:
        columns[name] = columns[name].hex()
    try:
        columns["payload"] = event.payload.decode()
    except UnicodeDecodeError:
        columns["payload"] = {"base64": b64encode(event.payload).decode()}
    return Line(event=Row(**columns))


def event_of(row: Row) -> Event:
    """Return the event of a line.

    Raises:
        ValueError: a hash is no hex, or the payload no bytes.
    """
    columns: dict[str, Any] = {name: getattr(row, name) for name in EVENT_COLUMNS}
    for name in _HASHES:
        columns[name] = _hash_of(name, columns[name])
    if isinstance(row.payload, str):
        columns["payload"] = row.payload.encode()
    elif row.payload.keys() == {"base64"}:
        columns["payload"] = _bytes_of(row.payload["base64"])
    else:
        raise ValueError("the payload is neither text nor base64")
    return Event(**columns)


def _hash_of(name: str, text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if found.hex() != text or len(found) != 32:
        raise ValueError(f"{name} {text!r} is no SHA-256 in hex")
    return found


def _bytes_of(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"is no base64 ({error})") from error
