"""The head witness of a journal on a server: kept on the worker's host, so that what the server loses is noticed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from residency.errors import JournalError
from residency.journal.files import make_folder
from residency.journal.location import lock_path
from residency.journal.locks import FileLock
from residency.journal.witness import Witness, check_witness

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from residency.journal.events import Event
    from residency.journal.head import StreamHead
    from residency.journal.pg_location import ServerLocation

log = logging.getLogger(__name__)

# Other workers of the host write theirs in about a millisecond each.
_WAIT_S = 2.0


class ServerWitness:
    """The witness that all workers of one host share for one journal. None of its methods raises for a bad disk:

    the events are durable on the server, and only the proof that they were would be missing.
    """

    def __init__(self, location: ServerLocation, folder: Path, *, clock_ns: Callable[[], int]) -> None:
        self.path = location.witness_path(folder)
        self._journal = str(location)
        self._clock_ns = clock_ns
        self._witness = Witness(self.path)

    def check(
        self,
        journal_id: str,
        hash_at: Callable[[str, int], bytes | None],
        was_pruned: Callable[[str, StreamHead], bool],
    ) -> None:
        """Compare the witness with the journal; one that contradicts it is told, and kept under another name."""
        try:
            if self.path.parent.is_dir():
                check_witness(
                    self.path,
                    journal=self._journal,
                    journal_id=journal_id,
                    hash_at=hash_at,
                    clock_ns=self._clock_ns,
                    was_pruned=was_pruned,
                )
        except OSError as error:
            log.warning("journal %s: the head witness cannot be kept: %s", self._journal, error)

    def write(self, journal_id: str, last: Event) -> None:
        """Note how far a stream has come."""
        guard = None
        try:
            make_folder(self.path.parent)
            guard = FileLock(lock_path(self.path))
            guard.acquire(wait_s=_WAIT_S)
            self._witness.write(journal_id, last)
        except JournalError as error:
            log.warning("journal %s: the head witness cannot be written: %s", self._journal, error)
        finally:
            if guard is not None:
                guard.close()

    def close(self) -> None:
        """Let go of the file. A second call is a no-op."""
        self._witness.close()
