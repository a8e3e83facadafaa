"""How a SQLite journal of an older format becomes one of this program's: numbered, additive, all in one transaction."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from residency.errors import JournalError
from residency.journal.schema import INDEXES, TABLES, TRIGGERS, normal_sql
from residency.journal.sqlite import driver

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from sqlalchemy.engine import Connection

# (type, name) -> its table and its statement, of everything that a file defines. SQLite's own have no statement.
Definitions = dict[tuple[str, str], tuple[str, str | None]]

DEFINED = "SELECT type, name, tbl_name, sql FROM sqlite_schema"

# Additive only, and never changed once released: what a released program has made must be what this one expects. A
# table is never altered by copying it, which would drop its triggers without a word.
MIGRATIONS: tuple[tuple[str, ...], ...] = ((*TABLES.values(), *INDEXES.values(), *TRIGGERS.values()),)


def known_format() -> int:
    """Return the newest format that this program knows: the number of its last migration."""
    return len(MIGRATIONS)


def definitions(number: int) -> Definitions:
    """Return what a journal of a format, from 1, defines."""
    return dict(_made_by(MIGRATIONS[:number]))


def triggers() -> dict[str, str]:
    """Return name -> statement of the triggers of the newest format."""
    return {name: sql for (kind, name), (_, sql) in definitions(known_format()).items() if kind == "trigger" and sql}


def as_defined(rows: Iterable[Sequence[object]]) -> Definitions:
    """Return what the rows of `DEFINED` say, with the white space of statements made equal."""
    return {
        (str(kind), str(name)): (str(of_table), None if sql is None else normal_sql(str(sql)))
        for kind, name, of_table, sql in rows
    }


def migrate(connection: Connection, path: Path) -> None:
    """Bring a journal to the newest format, if it is not; needs a transaction that has the write lock.

    Whoever comes second, or after a crash, finds it done, or not begun.

    Raises:
        JournalError: it was not as it was made before, or would not be afterwards; nothing is to be committed then.
        sqlalchemy.exc.DBAPIError: whatever SQLite says.
    """
    found = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    known = known_format()
    if found == known:
        return
    _assert_defined(connection, path, number=found, known=known)
    for statements in MIGRATIONS[found:]:
        for statement in statements:
            connection.exec_driver_sql(statement)
    connection.exec_driver_sql(f"PRAGMA user_version = {known}")
    _assert_defined(connection, path, number=known, known=known)


def _assert_defined(connection: Connection, path: Path, *, number: int, known: int) -> None:
    expected, there = definitions(number), as_defined(connection.exec_driver_sql(DEFINED).all())
    wrong = sorted(name for kind, name in {*expected, *there} if expected.get((kind, name)) != there.get((kind, name)))
    if wrong:
        raise JournalError(
            journal=str(path),
            problem=f"it cannot be brought to format {known}: {', '.join(wrong)} would not be as in format {number}",
            remedy="see 'residency verify'; an export of it can be imported into a new journal",
        )


@lru_cache(maxsize=8)
def _made_by(migrations: tuple[tuple[str, ...], ...]) -> Definitions:
    connection = driver.connect(":memory:", isolation_level=None)
    try:
        for statements in migrations:
            for statement in statements:
                connection.execute(statement)
        return as_defined(connection.execute(DEFINED).fetchall())
    finally:
        connection.close()
