"""Whether a database holds a journal of ours that this role may use; makes one where there is none."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from residency.errors import JournalCorrupt, JournalError, JournalNewer
from residency.journal.meta import new_meta
from residency.journal.pg_compare import schema_problems
from residency.journal.pg_schema import TABLES, known_format, lock_key, migrate
from residency.journal.schema import EVENT_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable

    from residency.journal.pg_location import ServerLocation
    from residency.journal.postgresql import Session

log = logging.getLogger(__name__)

# What an administrator runs where a role may not.
_MAKE = "let an administrator run what 'python -m residency.journal.pg_schema' prints"


class SchemaKind(Enum):
    """What a schema is."""

    MISSING = "missing"
    EMPTY = "empty"
    OURS = "ours"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A journal that can be used. created: whether it was made just now."""

    journal_id: str
    created: bool


def open_for_writing(session: Session, location: ServerLocation, *, now_ns: Callable[[], int] | None) -> Opened:
    """Check the journal, and make or migrate it where that is to be done. Needs autocommit.

    now_ns: the clock, None where a journal that is not there any more must not be made anew.

    Raises:
        JournalNewer: made by a newer program.
        JournalCorrupt: something else lies in its schema, or a table of it is damaged.
        JournalError: it is not there, and this role may not make it; or this role may not append to it.
        psycopg.Error: whatever the driver says.
    """
    created = False
    if now_ns is None:
        open_for_reading(session, location)
    elif inspect(session, location) is not SchemaKind.OURS or read_format(session, location) < known_format():
        with session.transaction():
            # Two starts must not make the same journal.
            session.rows("SELECT pg_catalog.pg_advisory_xact_lock(%s)", (lock_key(location.schema, "schema"),))
            created = _make(session, location, created_at_ns=now_ns())
    check_columns(session)
    _check_rights(session, location)
    if problems := list(schema_problems(session.rows, location.schema)):
        log.warning("journal %s: %s; see 'residency verify'", location, "; ".join(problems))
    return Opened(journal_id=read_id(session, location), created=created)


def open_for_reading(session: Session, location: ServerLocation) -> None:
    """Check that a journal of a known format is there. Read-only.

    Raises:
        JournalNewer: made by a newer program.
        JournalCorrupt: something else lies in its schema, or a table of it is damaged.
        JournalError: there is none.
        psycopg.Error: whatever the driver says.
    """
    kind = inspect(session, location)
    if kind is not SchemaKind.OURS:
        raise JournalError(
            journal=str(location), problem="does not exist", remedy="start a worker with it, or name another journal"
        )
    read_format(session, location)
    check_columns(session)


def inspect(session: Session, location: ServerLocation) -> SchemaKind:
    """Return what the schema is; a foreign one is an error. Read-only.

    Raises:
        JournalCorrupt: something else lies in it, or parts of a journal.
        JournalError: this role may not look into it.
    """
    found = session.rows(
        "SELECT oid, pg_catalog.has_schema_privilege(oid, 'USAGE') FROM pg_catalog.pg_namespace WHERE nspname = %s",
        (location.schema,),
    )
    if not found:
        return SchemaKind.MISSING
    ((oid, may_use),) = found
    if not may_use:
        raise JournalError(
            journal=str(location),
            problem=f"this role may not use the schema {location.schema}",
            remedy=f"GRANT USAGE ON SCHEMA {location.schema} TO it, or {_MAKE}",
        )
    names = {
        str(name)
        for (name,) in session.rows(
            "SELECT relname FROM pg_catalog.pg_class WHERE relnamespace = %s AND relkind IN ('r', 'p', 'v', 'm', 'f')",
            (oid,),
        )
    }
    if not names:
        return SchemaKind.EMPTY
    if not {"meta", "migrations"} <= names:
        raise _foreign(location)
    if missing := sorted(set(TABLES) - names):
        raise JournalCorrupt(
            journal=str(location),
            problem=f"it is damaged (missing tables: {', '.join(missing)})",
            remedy="keep it as evidence and name another schema, or restore a backup",
        )
    return SchemaKind.OURS


def read_format(session: Session, location: ServerLocation) -> int:
    """Return the format of a journal, which this program knows. Read-only.

    Raises:
        JournalNewer: it does not.
        JournalCorrupt: it is no journal of ours.
    """
    if session.rows("SELECT value FROM meta WHERE key = 'format'") != [("residency.journal",)]:
        raise _foreign(location)
    found = int(session.rows("SELECT coalesce(max(number), 0) FROM migrations")[0][0])
    if found > known_format():
        raise JournalNewer(journal=str(location), found=found, known=known_format())
    return found


def read_id(session: Session, location: ServerLocation) -> str:
    """Return the journal's id. Read-only; raises JournalCorrupt where there is none."""
    found = session.rows("SELECT value FROM meta WHERE key = 'journal_id'")
    if not found:
        raise JournalCorrupt(
            journal=str(location), problem="it is damaged (it has no id)", remedy="restore a backup of it"
        )
    return str(found[0][0])


def check_columns(session: Session) -> None:
    """Read no row of any column; the driver's error says what is missing. Read-only."""
    columns = ", ".join(f'"{name}"' for name in EVENT_COLUMNS)
    session.rows(f"SELECT {columns} FROM events LIMIT 0")
    session.rows("SELECT digest, content FROM blobs LIMIT 0")


def _make(session: Session, location: ServerLocation, *, created_at_ns: int) -> bool:
    """Make or migrate the journal, unless another start has done so meanwhile. Returns whether there was none."""
    kind, schema = inspect(session, location), location.schema
    found = read_format(session, location) if kind is SchemaKind.OURS else 0
    if found == known_format():
        return False
    if kind is SchemaKind.MISSING:
        _check_may_make(session, location, "pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')")
        session.rows(f"CREATE SCHEMA {schema}")
    _check_may_make(session, location, f"pg_catalog.has_schema_privilege('{schema}', 'CREATE')", found=found)
    for statement in migrate(schema, found=found, meta=new_meta(created_at_ns=created_at_ns)):
        session.rows(statement)
    return found == 0


def _check_may_make(session: Session, location: ServerLocation, condition: str, *, found: int = 0) -> None:
    if not session.rows(f"SELECT {condition}")[0][0]:
        wanted = f"format {known_format()} is needed, {found} is there" if found else "it does not exist"
        raise JournalError(
            journal=str(location), problem=f"{wanted}, and this role may not make it", remedy=_make_remedy(found)
        )


def _make_remedy(found: int) -> str:
    return _MAKE.replace("pg_schema'", f"pg_schema --found {found}'") if found else _MAKE


# Table -> what a worker does with it.
_RIGHTS = (("events", "SELECT, INSERT"), ("blobs", "SELECT, INSERT"), ("meta", "SELECT"), ("migrations", "SELECT"))


def _check_rights(session: Session, location: ServerLocation) -> None:
    """Find out before a round, and not in the middle of it, that this role may not append."""
    for table, rights in _RIGHTS:
        for right in rights.split(", "):
            name = f"{location.schema}.{table}"
            if not session.rows("SELECT pg_catalog.has_table_privilege(%s, %s)", (name, right))[0][0]:
                raise JournalError(
                    journal=str(location),
                    problem=f"this role may not {right} in {name}",
                    remedy=f"GRANT {rights} ON {name} TO it",
                )


def _foreign(location: ServerLocation) -> JournalCorrupt:
    return JournalCorrupt(
        journal=str(location),
        problem=f"the schema {location.schema} holds something that is not a residency journal",
        remedy="name another schema (?schema=...); this one is left",
    )
