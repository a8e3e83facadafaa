"""The journal's only writer: appends events durably, to a file or to a server."""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, Self

from residency.errors import JournalError
from residency.journal.encode import as_unicode
from residency.journal.file_store import FileStore
from residency.journal.insert import Prepared
from residency.journal.location import driver_missing, is_server, shown_location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from residency.journal.events import Draft, Event
    from residency.journal.locks import StreamLock
    from residency.journal.reader import JournalReader
    from residency.journal.rewrite import Rewrite

# The longest append seen with eight writers was 1.1 s; ten times that means that a writer is stuck.
WAIT_S = 10.0


class Store(Protocol):
    """What keeps the events of a journal. One thread at a time uses it, in the process that opened it."""

    location: str
    created: bool
    set_aside: str | None

    def append(
        self, prepared: Sequence[Prepared], *, stream: str, epoch: str, rank: int, witness: bool
    ) -> tuple[Event, ...]:
        """Write the events in one transaction, all or none; blocks until they are durable. Raises JournalError."""
        ...

    def hold(self, stream: str) -> StreamLock:
        """Take the stream for a live epoch. Raises StreamInUse and JournalError."""
        ...

    def keep(self) -> None:
        """See to it that what is held is held still, and that the store can be reached. Raises JournalError."""
        ...

    def reader(self) -> JournalReader:
        """Return a reader, which is closed with the store. Raises JournalError."""
        ...

    def rewriting(self) -> AbstractContextManager[Rewrite]:
        """Return what rewrites the journal in one transaction. Raises JournalError."""
        ...

    def close(self) -> None:
        """Let go of everything. Raises nothing."""
        ...

    def abandon(self) -> None:
        """Let go of it in a forked child, without a trace for the parent."""
        ...


_journals: weakref.WeakSet[Journal] = weakref.WeakSet()


class Journal:
    """One journal, open for writing. Safe to use from several threads and processes; not across fork.

    location: the absolute path, or the server's URL without its password. created: whether this open made it.
    set_aside: where a corrupt journal of ours went, None if there was none. spent_ns: time spent in append() so far.
    """

    def __init__(self, store: Store) -> None:
        self.location = store.location
        self.created = store.created
        self.set_aside = store.set_aside
        self.spent_ns = 0
        self._store = store
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._writing = False
        self._closed = False
        _journals.add(self)

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        wait_s: float = WAIT_S,
        state_folder: Path | None = None,
    ) -> Self:
        """Open a journal for writing; make it, and its folder, if there is none.

        url: a path, a sqlite:/// URL, or a postgresql+psycopg:// URL. wait_s: how long this and every append waits for
        other writers, and for a server. state_folder: where the head witness of a journal on a server is kept on this
        host; without one there is none.
        A file of ours that is damaged is renamed, with a warning, and a new one is begun. A file that is not ours is
        never touched, and on a server nothing is ever renamed.

        Raises:
            JournalNewer: written by a newer program.
            JournalCorrupt: not a journal of ours, or damaged and impossible to set aside.
            JournalError: a directory, read-only, locked for too long, no room on the disk, or a URL of another kind;
                a server that cannot be reached, refuses the role, or lacks its rights.
        """
        if is_server(url):
            return cls(_server_store(os.fspath(url), clock_ns=clock_ns, wait_s=wait_s, state_folder=state_folder))
        return cls(FileStore.open(url, clock_ns=clock_ns, wait_s=wait_s))

    def append(
        self, drafts: Sequence[Draft], *, stream: str, epoch: str, rank: int = 0, witness: bool = False
    ) -> tuple[Event, ...]:
        """Write the events in one transaction, all or none, and return them. Blocks until they are on disk.

        witness: also write the head witness, so that a later loss of these events is noticed. If only that fails, the
        events are written all the same and a warning is logged.
        After an error it can be tried again. After an I/O error, a lost connection or an interrupt, the events may
        have been written.

        Raises:
            JournalError: the disk is full or failing, the journal is read-only, moved, out of reach, or locked for too
                long; a stream that was held is not held any more; a payload is not JSON; the journal is closed, or was
                carried over a fork.
            JournalCorrupt: it is damaged.
        """
        started_ns = time.perf_counter_ns()
        prepared = [Prepared.of(draft) for draft in drafts]
        if not prepared:
            return ()
        with self._alone():
            try:
                return self._store.append(prepared, stream=as_unicode(stream), epoch=epoch, rank=rank, witness=witness)
            finally:
                self.spent_ns += time.perf_counter_ns() - started_ns

    def events(self, *, stream: str | None = None, after: int = 0, limit: int | None = None) -> Iterator[Event]:
        """Yield events by position, oldest first, those after a position only. Read-only.

        What a worker decides rests on them, so that each must be what was written.

        Raises:
            JournalCorrupt: the journal is damaged where it is read, or an event was altered.
            JournalError: it can no longer be read.
        """
        return self._reading().events(stream, after=after, limit=limit, check=True)

    def blob(self, digest: str) -> bytes:
        """Return the blob of this digest, checked against it. Read-only.

        Raises:
            JournalError: the journal has no such blob.
            JournalCorrupt: the blob is damaged.
        """
        return self._reading().blob(digest)

    def hold(self, stream: str) -> StreamLock:
        """Take the stream for a live epoch, without waiting. The lock ends with the process, however that ends.

        On a server it also ends with the connection; then the next append to the stream is an error.

        Raises:
            StreamInUse: another live epoch holds it.
            JournalError: the lock file cannot be used, or the server not be reached.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            return self._store.hold(as_unicode(stream))

    def keep(self) -> None:
        """Before a round: see to it that what is held is held still. A lost connection is made anew.

        Raises:
            JournalError: the server cannot be reached, or another process has taken a stream meanwhile.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            self._store.keep()

    def close(self) -> None:
        """Close it. A second call is a no-op, and so is one in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads out, and this one from appending within an append."""
        self._check_process()
        with self._lock:
            if self._writing:
                raise JournalError(
                    journal=self.location,
                    problem="an append is under way on this very thread",
                    remedy="do not append in a signal handler",
                )
            self._check_open()
            try:
                self._writing = True
                yield
            finally:
                self._writing = False

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise JournalError(
                journal=self.location,
                problem=f"was opened by process {self._pid} and is used by its child {os.getpid()}",
                remedy="open the journal in the child",
            )

    def _check_open(self) -> None:
        if self._closed:
            raise JournalError(journal=self.location, problem="is closed", remedy="open it again")

    def _reading(self) -> JournalReader:
        self._check_process()
        with self._lock:
            self._check_open()
            return self._store.reader()

    def streams(self) -> tuple[str, ...]:
        """Return the names of all streams, sorted. Read-only; raises like `events`."""
        return self._reading().streams()

    @contextmanager
    def rewriting(self) -> Iterator[Rewrite]:
        """Yield what rewrites the journal in one transaction: for imports and prunes, and nobody else.

        Raises:
            JournalError: on a server, the role does not own the tables; or for the reasons of an append.
        """
        with self._alone(), self._store.rewriting() as rewrite:
            yield rewrite


def _server_store(url: str, *, clock_ns: Callable[[], int], wait_s: float, state_folder: Path | None) -> Store:
    try:
        # Only who has a server pays for its driver, or needs it.
        opened = import_module("residency.journal.pg_store").ServerStore.open
    except ImportError as error:
        raise driver_missing(shown_location(url), error) from error
    store: Store = opened(url, clock_ns=clock_ns, wait_s=wait_s, state_folder=state_folder)
    return store


def _abandon_in_child() -> None:
    for journal in list(_journals):
        journal._store.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
