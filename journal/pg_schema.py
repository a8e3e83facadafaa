"""The tables of a journal on PostgreSQL, as plain SQL: numbered migrations, grants, and what triggers must look like.

`python -m residency.journal.pg_schema` prints it for an administrator to run.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from typing import TYPE_CHECKING

from residency.errors import JournalError
from residency.journal.meta import new_meta
from residency.journal.pg_location import DEFAULT_SCHEMA, ServerLocation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# In the order of the table and of the fields of Event, like those of SQLite; text sorts by its bytes, as it does there.
_TABLES = """
CREATE TABLE {schema}.events (
    position bigint PRIMARY KEY CHECK (position >= 1),
    stream text COLLATE "C" NOT NULL CHECK (stream <> ''),
    stream_version bigint NOT NULL CHECK (stream_version >= 1),
    event_id text COLLATE "C" NOT NULL UNIQUE,
    epoch text NOT NULL,
    round bigint NOT NULL CHECK (round >= 0),
    rank bigint NOT NULL CHECK (rank >= 0),
    type text NOT NULL,
    schema_version bigint NOT NULL,
    from_state text,
    to_state text,
    "trigger" text,
    recorded_at bigint NOT NULL,
    boot_id text NOT NULL,
    pid bigint NOT NULL,
    causation text,
    payload bytea NOT NULL,
    previous_hash bytea NOT NULL CHECK (length(previous_hash) = 32),
    hash bytea NOT NULL CHECK (length(hash) = 32),
    UNIQUE (stream, stream_version)
);
CREATE INDEX events_by_stream ON {schema}.events (stream, position);
CREATE TABLE {schema}.blobs (
    digest text COLLATE "C" PRIMARY KEY CHECK (length(digest) = 64),
    content bytea NOT NULL
);
CREATE TABLE {schema}.meta (
    key text COLLATE "C" PRIMARY KEY,
    value text NOT NULL
);
CREATE TABLE {schema}.migrations (
    number integer PRIMARY KEY CHECK (number >= 1),
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""

# Every table of a journal.
TABLES = ("events", "blobs", "meta", "migrations")

_REFUSE = """
BEGIN
    RAISE EXCEPTION 'rows of % are append-only', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END
"""

# The lock makes writers that know nothing of it wait, too: no position becomes visible before a lower one. In a
# volatile function every statement sees what was committed before it.
_IN_ORDER = """
DECLARE
    last_position bigint;
    last_version bigint;
    last_hash bytea;
BEGIN
    PERFORM pg_catalog.pg_advisory_xact_lock({append_key});
    SELECT max(position) INTO last_position FROM {schema}.events;
    SELECT stream_version, hash INTO last_version, last_hash
        FROM {schema}.events WHERE stream = NEW.stream ORDER BY stream_version DESC LIMIT 1;
    IF NEW.position IS DISTINCT FROM coalesce(last_position, 0) + 1
        OR NEW.stream_version IS DISTINCT FROM coalesce(last_version, 0) + 1
        OR NEW.previous_hash IS DISTINCT FROM coalesce(last_hash, decode(repeat('00', 32), 'hex'))
    THEN
        RAISE EXCEPTION 'event does not continue its stream' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END
"""

FUNCTIONS = {"refuse_change": _REFUSE, "events_in_order": _IN_ORDER}

# Trigger -> when it fires, and the function it calls. TRUNCATE knows no rows.
TRIGGERS: dict[str, tuple[str, str]] = {
    "events_in_order": ("BEFORE INSERT ON {schema}.events FOR EACH ROW", "events_in_order"),
    **{
        f"{table}_{name}": (f"BEFORE {when} ON {{schema}}.{table} FOR EACH {each}", "refuse_change")
        for table in TABLES
        for name, when, each in (
            ("no_update", "UPDATE", "ROW"),
            ("no_delete", "DELETE", "ROW"),
            ("no_truncate", "TRUNCATE", "STATEMENT"),
        )
    },
}


def lock_key(schema: str, purpose: str, name: str = "") -> int:
    """Return the key of an advisory lock of a journal: 64 bits that mean one thing in one database."""
    digest = hashlib.sha256(f"residency\0{schema}\0{purpose}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def append_key(schema: str) -> int:
    """Return the key of the lock around every append."""
    return lock_key(schema, "append")


def function_body(name: str, schema: str) -> str:
    """Return the source of a trigger function as it was made."""
    return FUNCTIONS[name].format(schema=schema, append_key=append_key(schema))


def trigger_table(name: str) -> str:
    """Return the table that a trigger of ours is on."""
    return TRIGGERS[name][0].partition("{schema}.")[2].partition(" ")[0]


def _first(schema: str) -> list[str]:
    """The first format: everything that there is."""
    functions = [
        f"CREATE FUNCTION {schema}.{name}() RETURNS trigger LANGUAGE plpgsql VOLATILE AS "
        f"$body${function_body(name, schema)}$body$"
        for name in FUNCTIONS
    ]
    triggers = [
        statement
        for name, (when, function) in TRIGGERS.items()
        for statement in (
            f"CREATE TRIGGER {name} {when.format(schema=schema)} EXECUTE FUNCTION {schema}.{function}()",
            # In sessions that replay what another server wrote, too.
            f"ALTER TABLE {schema}.{trigger_table(name)} ENABLE ALWAYS TRIGGER {name}",
        )
    ]
    tables = [statement.strip() for statement in _TABLES.format(schema=schema).split(";")]
    return [*tables, *functions, *triggers]


# Additive only, and never changed once released: what a released program has made must be what this one expects.
MIGRATIONS = (_first,)


def known_format() -> int:
    """Return the newest format that this program knows: the number of its last migration."""
    return len(MIGRATIONS)


def migrate(schema: str, *, found: int, meta: Mapping[str, str]) -> list[str]:
    """Return the statements that bring a journal from one format (0: nothing there yet) to the one known.

    meta: what a new journal says about itself. All statements belong into one transaction; the schema must be there.
    """
    statements: list[str] = []
    for number, migration in enumerate(MIGRATIONS[found:], start=found + 1):
        statements += [*migration(schema), f"INSERT INTO {schema}.migrations (number) VALUES ({number})"]
    if found == 0:
        rows = ", ".join(f"('{key}', '{value}')" for key, value in meta.items())
        statements.append(f"INSERT INTO {schema}.meta (key, value) VALUES {rows}")
    return statements


def grants(schema: str, *, writer: str | None = None, reader: str | None = None) -> list[str]:
    """Return what gives a role the rights of a worker, and another those of somebody who looks."""
    statements: list[str] = []
    for role, on_tables in ((writer, "SELECT, INSERT"), (reader, "SELECT")):
        if role is not None:
            quoted = '"' + role.replace('"', '""') + '"'
            statements += [
                f"GRANT USAGE ON SCHEMA {schema} TO {quoted}",
                f"GRANT {on_tables} ON {schema}.events, {schema}.blobs TO {quoted}",
                f"GRANT SELECT ON {schema}.meta, {schema}.migrations TO {quoted}",
            ]
    return statements


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the statements that make a journal, in one transaction. Connects to nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m residency.journal.pg_schema", description="Print the SQL that makes a journal on PostgreSQL."
    )
    parser.add_argument("--schema", default=DEFAULT_SCHEMA, help="its schema (default: %(default)s)")
    parser.add_argument("--writer", metavar="ROLE", help="also grant this role what a worker needs")
    parser.add_argument("--reader", metavar="ROLE", help="also grant this role what reading needs")
    parser.add_argument(
        "--found", type=int, default=0, metavar="FORMAT", help="the format that is there already (default: none)"
    )
    chosen = parser.parse_args(arguments)
    try:
        ServerLocation.parse(f"postgresql:///any?schema={chosen.schema}")
    except JournalError as error:
        parser.error(str(error))
    schema = str(chosen.schema)
    create = [f"SELECT pg_advisory_xact_lock({lock_key(schema, 'schema')})"]
    create += [f"CREATE SCHEMA IF NOT EXISTS {schema}"] if chosen.found == 0 else []
    made = migrate(schema, found=chosen.found, meta=new_meta(created_at_ns=time.time_ns()))
    allowed = grants(schema, writer=chosen.writer, reader=chosen.reader)
    sys.stdout.write("".join(f"{one};\n" for one in ("BEGIN", *create, *made, *allowed, "COMMIT")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
