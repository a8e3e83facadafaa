"""A journal in one SQLite file: opens, creates or sets it aside, and appends to it under a lock beside it."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Self

from sqlalchemy import Engine, exc, select

from residency.errors import JournalCorrupt, JournalError
from residency.journal.check import check_file
from residency.journal.engine import META, make_engine, use_wal
from residency.journal.files import create_journal, make_folder, set_aside
from residency.journal.header import FileKind, check_readable, foreign, inspect, note_closed, note_open, unusable
from residency.journal.insert import Prepared, hash_at
from residency.journal.location import beside, journal_path, lock_path
from residency.journal.locks import FileLock, StreamLock, hold_stream
from residency.journal.migrations import migrate
from residency.journal.reader import JournalReader
from residency.journal.rewrite import Rewrite
from residency.journal.sqlite import FAILURES, abandon, explain, warn_if_unsafe
from residency.journal.sqlite_insert import append_events
from residency.journal.witness import Witness, check_witness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sqlalchemy.engine import Connection

    from residency.journal.events import Event

log = logging.getLogger(__name__)


class FileStore:
    """The file behind a `Journal`, which sees to it that one thread at a time uses it, in one process."""

    def __init__(self, path: Path, guard: FileLock, *, clock_ns: Callable[[], int], wait_s: float) -> None:
        self.path = path
        self.location = str(path)
        self.created = False
        self.set_aside: str | None = None
        self._guard = guard
        self._clock_ns = clock_ns
        self._wait_s = wait_s
        self._engine: Engine | None = None
        self._connection: Connection | None = None
        self._reader: JournalReader | None = None
        self._key: tuple[int, int] | None = None
        # Of the WAL that the connection writes to.
        self._wal_key: tuple[int, int] | None = None
        self._journal_id = ""
        self._witness = Witness(path)
        # Names, because to build a path takes longer than to look at the file.
        self._name, self._wal_name = str(path), str(beside(path, "-wal"))

    @classmethod
    def open(cls, url: str | os.PathLike[str], *, clock_ns: Callable[[], int], wait_s: float) -> Self:
        """Open the file for writing; make it, and its folder, if there is none. Raises what `Journal.open` raises."""
        warn_if_unsafe()
        path = journal_path(url)
        # Before anything is made beside it.
        if inspect(path) is FileKind.FOREIGN:
            raise foreign(path)
        make_folder(path.parent)
        guard = FileLock(lock_path(path))
        store = cls(path, guard, clock_ns=clock_ns, wait_s=wait_s)
        try:
            guard.acquire(wait_s=wait_s)
            store._open_or_create()
        except OSError as error:
            store._abort()
            raise unusable(path, error) from error
        except (exc.DBAPIError, *FAILURES) as error:
            store._abort()
            raise store._explained(error) from error
        except BaseException:
            store._abort()
            raise
        guard.release()
        return store

    def append(
        self, prepared: Sequence[Prepared], *, stream: str, epoch: str, rank: int, witness: bool
    ) -> tuple[Event, ...]:
        """Write the events in one transaction. Raises what `Journal.append` raises."""
        try:
            self._begin()
            events = self._insert(prepared, stream=stream, epoch=epoch, rank=rank)
            if witness:
                self._witness.write(self._journal_id, events[-1])
            self._note_wal()
        finally:
            self._guard.release()
        return events

    def hold(self, stream: str) -> StreamLock:
        """Take the stream, without waiting. Raises what `Journal.hold` raises."""
        return hold_stream(self.path, stream)

    def keep(self) -> None:
        """Do nothing: what is held is held by this process."""

    def reader(self) -> JournalReader:
        """Return a reader of this file, which is closed with the store."""
        if self._reader is None:
            self._reader = JournalReader.open(self.path)
        return self._reader

    def close(self) -> None:
        """Close it. Blocks until other writers are done."""
        try:
            # The last one to close writes the WAL back, and that must not meet another writer's commit.
            self._guard.acquire(wait_s=self._wait_s)
        except JournalError as error:
            log.warning("journal %s: closed without its lock: %s", self.path, error)
        self._abort()

    def abandon(self) -> None:
        """Let go of it in a forked child, without a trace."""
        self._witness.close()
        if self._connection is not None:
            abandon(self._connection)

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
        except JournalCorrupt:
            self._look_again()

    def _look_again(self) -> None:
        """Set the file aside if it is damaged: a disk that failed a moment looks like that, too."""
        self._disconnect()
        try:
            self._open_existing()
        except JournalCorrupt as damaged:
            self._disconnect()
            check_readable(self.path)
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
                migrate(connection, self.path)
                self._journal_id = connection.execute(
                    select(META.c.value).where(META.c.key == "journal_id")
                ).scalar_one()
                check_witness(
                    self.path,
                    journal=self.location,
                    journal_id=self._journal_id,
                    hash_at=partial(hash_at, connection),
                    clock_ns=self._clock_ns,
                )
            self._note_wal()
        except (exc.DBAPIError, *FAILURES) as error:
            raise self._explained(error) from error
        except exc.NoResultFound as error:
            raise explain(ValueError("malformed: it has no id"), journal=self.path) from error

    def _begin(self) -> None:
        """Keep the writers of other processes out, until the lock is given back."""
        self._guard.acquire(wait_s=self._wait_s)
        self._check_file_in_place()

    def _insert(self, prepared: Sequence[Prepared], *, stream: str, epoch: str, rank: int) -> tuple[Event, ...]:
        try:
            return append_events(
                self._connected().connection,  # pyright: ignore[reportArgumentType]
                prepared,
                stream=stream,
                epoch=epoch,
                rank=rank,
                clock_ns=self._clock_ns,
            )
        except BaseException as error:
            # Whatever it was, the next append begins with a fresh connection.
            self._disconnect()
            if isinstance(error, (exc.DBAPIError, *FAILURES)):
                raise self._explained(error) from error
            raise

    def _check_file_in_place(self) -> None:
        # Rows written into a file that has lost its name would be gone with the process.
        try:
            found = os.stat(self._name)
        except OSError as error:
            raise unusable(self.path, error) from error
        if (found.st_dev, found.st_ino) != self._key:
            raise JournalError(
                journal=self.location,
                problem="the file was replaced since it was opened",
                remedy="restart the worker to use the new one",
            )
        wal = _key_of(self._wal_name)
        if self._wal_key is not None and wal != self._wal_key:
            # SQLite still writes into the old one, and what it acknowledges would be gone with the process.
            raise JournalError(
                journal=self.location,
                problem="its WAL was removed or replaced since it was opened",
                remedy="restart the worker, and leave the files beside the journal alone",
            )

    def _note_wal(self) -> None:
        if self._wal_key is None and self._connection is not None:
            self._wal_key = _key_of(self._wal_name)

    def _connected(self) -> Connection:
        if self._connection is None:
            assert self._engine is not None
            self._connection = self._engine.connect()
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        # The last to close removes it.
        self._wal_key = None
        if connection is not None:
            connection.close()

    def _explained(self, error: BaseException) -> JournalError:
        said = error.orig if isinstance(error, exc.DBAPIError) else None
        return explain(said or error, journal=self.path, wait_s=self._wait_s)

    def _abort(self) -> None:
        """Let go of everything."""
        if self._reader is not None:
            self._reader.close()
        self._witness.close()
        self._disconnect()
        if self._engine is not None:
            self._engine.dispose()
        if self._key is not None:
            note_closed(self._key)
            self._key = None
        self._guard.close()

    @contextmanager
    def rewriting(self) -> Iterator[Rewrite]:
        """Yield what rewrites the file in one transaction, for imports and prunes. Raises like an append."""
        try:
            self._begin()
            try:
                connection = self._connected()
                with connection.begin():
                    rewrite = Rewrite(connection, self.location, witness_path=self.path, clock_ns=self._clock_ns)
                    yield rewrite
                    self._journal_id = rewrite.journal_id()
            except BaseException as error:
                self._disconnect()
                if isinstance(error, (exc.DBAPIError, *FAILURES)):
                    raise self._explained(error) from error
                raise
            for event in rewrite.witnesses:
                self._witness.write(self._journal_id, event)
            self._note_wal()
        finally:
            self._guard.release()


def _key_of(path: str) -> tuple[int, int] | None:
    """Return what tells a file from others, None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
