"""The SQLAlchemy engine of a writer: one connection, durable settings, and transactions that begin IMMEDIATE."""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING

from sqlalchemy import Engine, column, create_engine, event, table
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from residency.errors import JournalError
from residency.journal import migrations
from residency.journal.file_system import shared_file_system
from residency.journal.schema import APPLICATION_ID, EVENT_COLUMNS
from residency.journal.sqlite import connect, driver

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy.engine import Connection
    from sqlalchemy.engine.interfaces import DBAPIConnection

log = logging.getLogger(__name__)

EVENTS = table("events", *(column(name) for name in EVENT_COLUMNS))
BLOBS = table("blobs", column("digest"), column("content"))
META = table("meta", column("key"), column("value"))

# PRAGMA synchronous: FULL is what keeps an acknowledged commit through a power loss in WAL mode.
_FULL = 2

# Journals that are kept without a WAL, each told once.
_warned: set[Path] = set()


def make_engine(path: Path, *, wait_s: float) -> Engine:
    """Return an engine on an existing file. Connects on use; each connection is durable and checked to be.

    Every transaction is BEGIN IMMEDIATE: a transaction that reads before it writes would otherwise fail at the write
    when another writer came between, without waiting.
    """
    engine = create_engine(
        "sqlite+pysqlite://",
        module=driver,
        creator=lambda: connect(path, mode="rw", wait_s=wait_s),
        # One connection, held by the journal; a pool would only keep others open.
        poolclass=NullPool,
    )

    def on_connect(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        try:
            for pragma in (
                # Without a WAL, EXTRA also puts the removal of its rollback journal on disk.
                f"synchronous = {'FULL' if shared_file_system(path) is None else 'EXTRA'}",
                "foreign_keys = ON",
                # Whoever commits as the WAL has grown so far writes it back, while all others wait: 1 MiB, not 4.
                "wal_autocheckpoint = 250",
                "recursive_triggers = ON",  # INSERT OR REPLACE meets the delete trigger
            ):
                cursor.execute(f"PRAGMA {pragma}")
            # A build may have another default, and a misspelt pragma is no error.
            cursor.execute("PRAGMA synchronous")
            found = cursor.fetchone()
        finally:
            cursor.close()
        if found is None or found[0] < _FULL:
            raise JournalError(
                journal=str(path),
                problem=f"SQLite does not write durably (synchronous is {found}, not {_FULL})",
                remedy="install the package pysqlite3",
            )

    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)
    return engine


def create_tables(connection: Connection, meta: dict[str, str]) -> None:
    """Make an empty file a journal, in one transaction.

    The file changes to WAL only afterwards (use_wal), so that its own header says that it is ours from the first
    commit on; in a WAL the header would stay empty until a checkpoint.
    """
    with connection.begin():
        for statement in chain.from_iterable(migrations.MIGRATIONS):
            connection.exec_driver_sql(statement)
        for pragma in (f"application_id = {APPLICATION_ID}", f"user_version = {migrations.known_format()}"):
            connection.exec_driver_sql(f"PRAGMA {pragma}")
        connection.execute(META.insert(), [{"key": key, "value": value} for key, value in meta.items()])


def use_wal(connection: Connection, path: Path) -> None:
    """Put the file into WAL mode, so that readers never hold up a writer. A second call changes nothing.

    Where several hosts may share the file it goes without: as durable, slower, and readers wait for writers.
    """
    shared = shared_file_system(path)
    raw = connection.connection
    cursor = raw.cursor()
    try:
        cursor.execute(f"PRAGMA journal_mode = {'WAL' if shared is None else 'DELETE'}")
        found = cursor.fetchone()
    finally:
        cursor.close()
    mode = None if found is None else found[0]
    if shared is not None and path not in _warned:
        _warned.add(path)
        log.warning(
            "journal %s is on %s, which several hosts may share, and there a WAL loses events; it is kept without one "
            "(mode %s): keep it on a local disk, one journal a host, or on a server",
            path, shared, mode,
        )  # fmt: skip
    if shared is None and mode != "wal":
        log.warning("journal %s: SQLite cannot use a WAL there (it uses %s); move it to a local disk", path, mode)
