"""The head witness: a small file beside the journal that says how far it had come, so that a lost tail is noticed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from residency.journal.location import head_path
from residency.journal.slots import SlotFile, read_slots, write_slot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from residency.journal.events import Event

HEAD_FORMAT = 2

# In the names of witnesses that were set aside, because the journal did not bear them out.
CONTRADICTED = "contradicted"


# Structs, because one is made at every append that has a witness, and a dataclass that is frozen takes its time.


class StreamHead(msgspec.Struct, frozen=True, kw_only=True):
    """The last witnessed event of a stream. hash is in hex."""

    position: int
    stream_version: int
    hash: str


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """How far the journal had come. It may lag the journal, never lead it."""

    journal_id: str
    position: int
    streams: dict[str, StreamHead] = msgspec.field(default_factory=dict)
    format: int = HEAD_FORMAT


_decoder = msgspec.json.Decoder(Head)


class HeadUnreadable(ValueError):
    """Raised when the witness is there and cannot be read as one."""


def head_of(event: Event) -> StreamHead:
    """Return the head of a stream that ends with this event."""
    return StreamHead(position=event.position, stream_version=event.stream_version, hash=event.hash.hex())


def read_head(journal: Path) -> Head | None:
    """Return the witness of a journal, None if there is none. Read-only.

    Raises:
        HeadUnreadable: it is damaged, or cannot be read.
    """
    return look_at_head(journal)[0]


def look_at_head(journal: Path) -> tuple[Head | None, bool]:
    """Return the witness of a journal, and whether one of its two copies is damaged, so that it may be the older one.

    Raises:
        HeadUnreadable: both are, or it cannot be read.
    """
    try:
        content = head_path(journal).read_bytes()
        slot, num_damaged = read_slots(content)
        # The first programs wrote one copy, bare.
        text = content if slot is None else bytes(slot.content)
        return _decoder.decode(text), slot is not None and num_damaged > 0
    except FileNotFoundError:
        return None, False
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HeadUnreadable(str(error)) from error


def write_head(journal: Path, head: Head) -> None:
    """Replace the witness: after a crash it is the old one or the new one. Blocks until it is on disk.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    write_slot(head_path(journal), msgspec.json.encode(head, order="sorted"))


class HeadFile:
    """The witness of a journal, kept open by a writer that moves it on again and again.

    Needs a lock that keeps other writers of it out.
    """

    def __init__(self, journal: Path) -> None:
        self._file = SlotFile(head_path(journal))
        # The last content that was written here, and what it says.
        self._written = b""
        self._head: Head | None = None

    def advance(self, journal_id: str, event: Event) -> str | None:
        """Have the witness name this event as the last of its stream; the other streams keep theirs.

        Blocks until it is on disk. Returns why the witness that was there could not be read, None if it could: then,
        and if it was another journal's, it is begun anew.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        problem: str | None = None

        def change(content: bytes) -> bytes:
            nonlocal problem
            known = self._head if content is self._written else None
            if known is None:
                try:
                    known = _decoder.decode(content) if content else None
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    problem = str(error)
            streams = {} if known is None or known.journal_id != journal_id else known.streams
            self._head = Head(
                journal_id=journal_id, position=event.position, streams={**streams, event.stream: head_of(event)}
            )
            self._written = msgspec.json.encode(self._head, order="sorted")
            return self._written

        self._file.change(change)
        return problem

    def close(self) -> None:
        """Close the file. A second call is a no-op; the next advance opens it again."""
        self._file.close()


def contradictions(
    head: Head,
    *,
    journal_id: str,
    hash_at: Callable[[str, int], bytes | None],
    was_pruned: Callable[[str, StreamHead], bool] = lambda _stream, _known: False,
) -> tuple[str, ...]:
    """Return what the witness knows and the journal does not bear out; empty if they agree. Read-only.

    hash_at: the hash of a stream's event by stream_version, None if the journal has no such event. was_pruned: whether
    the journal says that it was removed, and nothing speaks against it; asked where a prune cannot move the witness on.
    """
    if head.journal_id != journal_id:
        return (f"the head witness is of journal {head.journal_id}, this is {journal_id}",)
    found = []
    for stream, known in sorted(head.streams.items()):
        there = hash_at(stream, known.stream_version)
        if there is None and was_pruned(stream, known):
            continue
        if there is None:
            found.append(
                f"stream {stream!r} lost its tail: the head witness saw event {known.stream_version} of it "
                f"at position {known.position}, and the journal has none"
            )
        elif there.hex() != known.hash:
            found.append(
                f"event {known.stream_version} of stream {stream!r} is not the one that the head witness saw "
                f"at position {known.position}"
            )
    return tuple(found)


def heads_set_aside(path: Path) -> tuple[Path, ...]:
    """Return the head witnesses that contradicted this journal, oldest first. Read-only."""
    start = f"{head_path(path).name}.{CONTRADICTED}-"
    try:
        names = sorted(os.listdir(path.parent))
    except OSError:
        return ()
    return tuple(path.with_name(name) for name in names if name.startswith(start) and not name.endswith("-wal"))
