"""The head witness as writers use it: checked when a journal is opened, written after what must not be lost."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from residency.journal.files import set_head_aside
from residency.journal.head import Head, HeadFile, HeadUnreadable, contradictions, read_head

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from residency.journal.events import Event
    from residency.journal.head import StreamHead

log = logging.getLogger(__name__)


def check_witness(
    path: Path,
    *,
    journal: str,
    journal_id: str,
    hash_at: Callable[[str, int], bytes | None],
    clock_ns: Callable[[], int],
    was_pruned: Callable[[str, StreamHead], bool] = lambda _stream, _known: False,
) -> None:
    """Compare the witness beside a path with the journal; one that contradicts it is told, and kept under another name.

    Raises:
        OSError: it cannot be kept, or the disk fails where it is.
    """
    try:
        head = _read(path)
        problems = (
            () if head is None else contradictions(head, journal_id=journal_id, hash_at=hash_at, was_pruned=was_pruned)
        )
    except HeadUnreadable as error:
        if _is_failing(error):
            # It may be whole, and what it says must not be written over unread.
            raise OSError(errno.EIO, f"the head witness cannot be read: {error}") from error
        problems = (f"the head witness cannot be read: {error}",)
    if problems:
        kept = set_head_aside(path, now_ns=clock_ns())
        log.warning("journal %s: %s; the witness is kept as %s", journal, "; ".join(problems), kept)


def _read(path: Path) -> Head | None:
    try:
        return read_head(path)
    except HeadUnreadable as error:
        if _is_failing(error):
            return read_head(path)  # a disk may fail for a moment
        raise


def _is_failing(error: HeadUnreadable) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class Witness:
    """The witness beside a path, as a writer keeps it. Needs a lock that keeps other writers of it out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = HeadFile(path)

    def write(self, journal_id: str, last: Event) -> None:
        """Note how far a stream has come. Blocks until it is on disk.

        A witness that cannot be written is a warning: the events are durable, only the proof that they were is missing.
        """
        try:
            problem = self._file.advance(journal_id, last)
        except OSError as error:
            log.warning("journal %s: the head witness cannot be written: %s", self.path, error)
            return
        if problem is not None:
            log.warning("journal %s: the head witness could not be read and was written anew: %s", self.path, problem)

    def close(self) -> None:
        """Let go of the file. A second call is a no-op."""
        self._file.close()
