"""The journal's only writer: appends events durably, and opens, creates or sets aside its file."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from sqlalchemy import Engine, exc, select

from residency.errors import JournalCorrupt, JournalError
from residency.journal.check import check_file
from residency.journal.encode import as_unicode
from residency.journal.engine import EVENTS, META, make_engine, use_wal
from residency.journal.files import create_journal, make_folder, set_aside, set_head_aside
from residency.journal.head import Head, HeadUnreadable, StreamHead, contradictions, read_head, write_head
from residency.journal.header import FileKind, foreign, inspect, note_closed, note_open, unusable
from residency.journal.insert import Prepared, insert_events
from residency.journal.location import journal_path, lock_path
from residency.journal.locks import FileLock, StreamLock
from residency.journal.reader import JournalReader
from residency.journal.sqlite import FAILURES, abandon, explain, warn_if_unsafe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from sqlalchemy.engine import Connection

    from residency.journal.events import Draft, Event

log = logging.getLogger(__name__)

# The longest append seen with eight writers was 1.1 s; ten times that means that a writer is stuck.
WAIT_S = 10.0

_journals: weakref.WeakSet[Journal] = weakref.WeakSet()


class Journal:
    """One journal file, open for writing. Safe to use from several threads and processes; not across fork.

    location: the absolute path. created: whether this open made it. set_aside: where a corrupt journal of ours
    went, None if there was none. spent_ns: time spent in append() so far.
    """

    def __init__(self, path: Path, guard: FileLock, *, clock_ns: Callable[[], int], wait_s: float) -> None:
        self.path = path
        self.location = str(path)
        self.created = False
        self.set_aside: str | None = None
        self.spent_ns = 0
        self._guard = guard
        self._clock_ns = clock_ns
        self._wait_s = wait_s
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._writing = False
        self._closed = False
        self._engine: Engine | None = None
        self._connection: Connection | None = None
        self._reader: JournalReader | None = None
        self._key: tuple[int, int] | None = None
        self._journal_id = ""
        _journals.add(self)

    @classmethod
    def open(
        cls, url: str | os.PathLike[str], *, clock_ns: Callable[[], int] = time.time_ns, wait_s: float = WAIT_S
    ) -> Self:
        """Open a journal for writing; make it, and its folder, if there is none.

        url: a path or a sqlite:/// URL. wait_s: how long this and every append waits for other writers.
        A file of ours that is damaged is renamed, with a warning, and a new one is begun. A file that is not ours is
        never touched.

        Raises:
            JournalNewer: written by a newer program.
            JournalCorrupt: not a journal of ours, or damaged and impossible to set aside.
            JournalError: a directory, read-only, locked for too long, no room on the disk, or a URL of another kind.
        """
        warn_if_unsafe()
        path = journal_path(url)
        # Before anything is made beside it.
        if inspect(path) is FileKind.FOREIGN:
            raise foreign(path)
        make_folder(path.parent)
        guard = FileLock(lock_path(path))
        journal = cls(path, guard, clock_ns=clock_ns, wait_s=wait_s)
        try:
            guard.acquire(wait_s=wait_s)
            journal._open_or_create()
        except OSError as error:
            journal._abort()
            raise unusable(path, error) from error
        except (exc.DBAPIError, *FAILURES) as error:
            journal._abort()
            raise journal._explained(error) from error
        except BaseException:
            journal._abort()
            raise
        guard.release()
        return journal

    def append(
        self, drafts: Sequence[Draft], *, stream: str, epoch: str, rank: int = 0, witness: bool = False
    ) -> tuple[Event, ...]:
        """Write the events in one transaction, all or none, and return them. Blocks until they are on disk.

        witness: also write the head witness, so that a later loss of these events is noticed. If only that fails, the
        events are written all the same and a warning is logged.
        After an error it can be tried again. After an I/O error, or an interrupt, the events may have been written.

        Raises:
            JournalError: the disk is full or failing, the file is read-only, moved, or locked for too long; a
                payload is not JSON; the journal is closed, or was carried over a fork.
            JournalCorrupt: the file is damaged.
        """
        started_ns = time.perf_counter_ns()
        prepared = [Prepared.of(draft) for draft in drafts]
        if not prepared:
            return ()
        with self._alone():
            try:
                events = self._insert(prepared, stream=as_unicode(stream), epoch=epoch, rank=rank)
                if witness:
                    self._witness(events[-1])
            finally:
                self.spent_ns += time.perf_counter_ns() - started_ns
        return events

    def events(self, *, stream: str | None = None, after: int = 0, limit: int | None = None) -> Iterator[Event]:
        """Yield events by position, oldest first, those after a position only. Read-only.

        Raises:
            JournalCorrupt: the file is damaged where it is read.
            JournalError: it can no longer be read.
        """
        return self._reading().events(stream, after=after, limit=limit)

    def blob(self, digest: str) -> bytes:
        """Return the blob of this digest, checked against it. Read-only.

        Raises:
            JournalError: the journal has no such blob.
            JournalCorrupt: the blob is damaged.
        """
        return self._reading().blob(digest)

    def hold(self, stream: str) -> StreamLock:
        """Take the stream for a live epoch, without waiting. The lock ends with the process, however that ends.

        Raises:
            StreamInUse: another live epoch holds it.
            JournalError: the lock file cannot be used.
        """
        self._check_process()
        return StreamLock.take(self.path, as_unicode(stream))

    def close(self) -> None:
        """Close it. A second call is a no-op, and so is one in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                # The last one to close writes the WAL back, and that must not meet another writer's commit.
                self._guard.acquire(wait_s=self._wait_s)
            except JournalError as error:
                log.warning("journal %s: closed without its lock: %s", self.path, error)
            self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_or_create(self) -> None:
        """Needs the write lock, which keeps two starts from making the same file."""
        kind = inspect(self.path)
        if kind is FileKind.FOREIGN:
            raise foreign(self.path)
        if kind is not FileKind.OURS:
            if kind is FileKind.MISSING:
                self._set_aside("orphan")
            self._create()
        try:
            self._open_existing()
        except JournalCorrupt as damaged:
            self._disconnect()
            self.set_aside = self._set_aside("corrupt")
            log.warning("%s; it was set aside as %s and a new one is begun", damaged, self.set_aside)
            self._create()
            self._open_existing()

    def _create(self) -> None:
        create_journal(self.path, created_at_ns=self._clock_ns(), wait_s=self._wait_s)
        self.created = True

    def _set_aside(self, why: str) -> str | None:
        kept = set_aside(self.path, why=why, now_ns=self._clock_ns())
        return None if kept is None else str(kept)

    def _open_existing(self) -> None:
        if self._key is not None:
            note_closed(self._key)
        self._key = note_open(self.path)
        check_file(self.path, wait_s=self._wait_s)
        self._engine = make_engine(self.path, wait_s=self._wait_s)
        try:
            connection = self._connected()
            use_wal(connection, self.path)
            # The transaction is IMMEDIATE: a file that cannot be written fails here, and not in mid-round.
            with connection.begin():
                self._journal_id = connection.execute(
                    select(META.c.value).where(META.c.key == "journal_id")
                ).scalar_one()
                self._check_head(connection)
        except (exc.DBAPIError, *FAILURES) as error:
            raise self._explained(error) from error
        except exc.NoResultFound as error:
            raise explain(ValueError("malformed: it has no id"), journal=self.path) from error

    def _check_head(self, connection: Connection) -> None:
        def hash_at(stream: str, version: int) -> bytes | None:
            of_version = (EVENTS.c.stream == stream) & (EVENTS.c.stream_version == version)
            return connection.execute(select(EVENTS.c.hash).where(of_version)).scalar_one_or_none()

        try:
            head = read_head(self.path)
            problems = () if head is None else contradictions(head, journal_id=self._journal_id, hash_at=hash_at)
        except HeadUnreadable as error:
            problems = (f"the head witness cannot be read: {error}",)
        if problems:
            kept = set_head_aside(self.path, now_ns=self._clock_ns())
            log.warning("journal %s: %s; the witness is kept as %s", self.path, "; ".join(problems), kept)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep every other writer out: other threads, then other processes."""
        self._check_process()
        with self._lock:
            if self._writing:
                raise JournalError(
                    journal=self.location,
                    problem="an append is under way on this very thread",
                    remedy="do not append in a signal handler",
                )
            if self._closed:
                raise JournalError(journal=self.location, problem="is closed", remedy="open it again")
            try:
                self._writing = True
                self._guard.acquire(wait_s=self._wait_s)
                self._check_file_in_place()
                yield
            finally:
                self._guard.release()
                self._writing = False

    def _insert(self, prepared: Sequence[Prepared], *, stream: str, epoch: str, rank: int) -> tuple[Event, ...]:
        try:
            connection = self._connected()
            with connection.begin():
                return insert_events(
                    connection, prepared, stream=stream, epoch=epoch, rank=rank, clock_ns=self._clock_ns
                )
        except BaseException as error:
            # Whatever it was, the next append begins with a fresh connection.
            self._disconnect()
            if isinstance(error, (exc.DBAPIError, *FAILURES)):
                raise self._explained(error) from error
            raise

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise JournalError(
                journal=self.location,
                problem=f"was opened by process {self._pid} and is used by its child {os.getpid()}",
                remedy="open the journal in the child",
            )

    def _check_file_in_place(self) -> None:
        # Rows written into a file that has lost its name would be gone with the process.
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise unusable(self.path, error) from error
        if (found.st_dev, found.st_ino) != self._key:
            raise JournalError(
                journal=self.location,
                problem="the file was replaced since it was opened",
                remedy="restart the worker to use the new one",
            )

    def _connected(self) -> Connection:
        if self._connection is None:
            assert self._engine is not None
            self._connection = self._engine.connect()
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _explained(self, error: BaseException) -> JournalError:
        said = error.orig if isinstance(error, exc.DBAPIError) else None
        return explain(said or error, journal=self.path, wait_s=self._wait_s)

    def _witness(self, last: Event) -> None:
        streams: dict[str, StreamHead] = {}
        try:
            known = read_head(self.path)
            if known is not None and known.journal_id == self._journal_id:
                streams = dict(known.streams)
        except HeadUnreadable as error:
            log.warning("journal %s: the head witness cannot be read and is written anew: %s", self.path, error)
        streams[last.stream] = StreamHead(
            position=last.position, stream_version=last.stream_version, hash=last.hash.hex()
        )
        try:
            write_head(self.path, Head(journal_id=self._journal_id, position=last.position, streams=streams))
        except OSError as error:
            # The events are on disk; only the proof that they were is missing.
            log.warning("journal %s: the head witness cannot be written: %s", self.path, error)

    def _reading(self) -> JournalReader:
        self._check_process()
        with self._lock:
            if self._closed:
                raise JournalError(journal=self.location, problem="is closed", remedy="open it again")
            if self._reader is None:
                self._reader = JournalReader.open(self.path)
            return self._reader

    def _abort(self) -> None:
        """Let go of everything."""
        self._closed = True
        if self._reader is not None:
            self._reader.close()
        self._disconnect()
        if self._engine is not None:
            self._engine.dispose()
        if self._key is not None:
            note_closed(self._key)
            self._key = None
        self._guard.close()

    def _abandon(self) -> None:
        if self._connection is not None:
            abandon(self._connection)


def _abandon_in_child() -> None:
    for journal in list(_journals):
        journal._abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
