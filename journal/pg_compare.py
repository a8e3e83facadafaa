"""Compares the tables and triggers of a journal on PostgreSQL with what they were made as."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from residency.journal.pg_schema import TABLES, TRIGGERS, function_body, trigger_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Rows = Callable[[str, Sequence[Any]], Sequence[Sequence[Any]]]

_TRIGGERS = """
SELECT c.relname, t.tgname, t.tgtype, t.tgenabled::text, n.nspname, p.proname, p.prosrc,
    t.tgqual IS NULL AND t.tgnargs = 0 AND t.tgattr = '' AND NOT t.tgdeferrable
FROM pg_catalog.pg_trigger t
JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid
JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid
JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
JOIN pg_catalog.pg_namespace s ON s.oid = c.relnamespace
WHERE s.nspname = %s AND NOT t.tgisinternal
"""

_COLUMNS = """
SELECT c.relname, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull
FROM pg_catalog.pg_attribute a
JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
JOIN pg_catalog.pg_namespace s ON s.oid = c.relnamespace
WHERE s.nspname = %s AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
"""

# Not their text: servers of different versions write it differently.
_CONSTRAINTS = """
SELECT k.conname
FROM pg_catalog.pg_constraint k
JOIN pg_catalog.pg_namespace s ON s.oid = k.connamespace
WHERE s.nspname = %s AND k.contype IN ('p', 'u', 'c') AND k.convalidated
"""

# How the server stores when a trigger fires, in bits.
_BITS = {"ROW": 1, "BEFORE": 2, "INSERT": 4, "DELETE": 8, "UPDATE": 16, "TRUNCATE": 32}

# Column -> type, with a '?' where it may be NULL.
COLUMNS = {
    "events": {
        "position": "bigint",
        "stream": "text",
        "stream_version": "bigint",
        "event_id": "text",
        "epoch": "text",
        "round": "bigint",
        "rank": "bigint",
        "type": "text",
        "schema_version": "bigint",
        "from_state": "text?",
        "to_state": "text?",
        "trigger": "text?",
        "recorded_at": "bigint",
        "boot_id": "text",
        "pid": "bigint",
        "causation": "text?",
        "payload": "bytea",
        "previous_hash": "bytea",
        "hash": "bytea",
    },
    "blobs": {"digest": "text", "content": "bytea"},
    "meta": {"key": "text", "value": "text"},
    "migrations": {"number": "integer", "applied_at": "timestamp with time zone"},
}

CONSTRAINTS = frozenset(
    {
        "events_pkey",
        "events_position_check",
        "events_stream_check",
        "events_stream_version_check",
        "events_stream_stream_version_key",
        "events_event_id_key",
        "events_round_check",
        "events_rank_check",
        "events_previous_hash_check",
        "events_hash_check",
        "blobs_pkey",
        "blobs_digest_check",
        "meta_pkey",
        "migrations_pkey",
        "migrations_number_check",
    }
)


def schema_problems(rows: Rows, schema: str) -> Iterator[str]:
    """Yield what is missing, changed or not ours. rows: runs one reading statement with '%s' for its parameters."""
    found: dict[str, dict[str, str]] = {}
    for table, column, kind, not_null in rows(_COLUMNS, (schema,)):
        found.setdefault(str(table), {})[str(column)] = f"{kind}{'' if not_null else '?'}"
    for table in TABLES:
        if table not in found:
            yield f"table {table} is missing"
        elif found[table] != COLUMNS[table]:
            yield f"table {table} is not as it was made"
    there = {str(row[0]) for row in rows(_CONSTRAINTS, (schema,))}
    for name in sorted(CONSTRAINTS - there):
        yield f"constraint {name} is missing"
    yield from _trigger_problems(rows(_TRIGGERS, (schema,)), schema)


def _trigger_problems(rows: Sequence[Sequence[Any]], schema: str) -> Iterator[str]:
    found = {(str(row[0]), str(row[1])): list(row[2:]) for row in rows}
    for name, (when, function) in TRIGGERS.items():
        there = found.pop((trigger_table(name), name), None)
        bits = sum(bit for word, bit in _BITS.items() if word in when.split())
        # A for ALWAYS; and with no condition, no arguments and no columns.
        made = [bits, "A", schema, function, function_body(function, schema), True]
        if there is None:
            yield f"trigger {name} is missing"
        elif there != made:
            yield f"trigger {name} is not as it was made"
    for _, name in sorted(found):
        yield f"trigger {name} is not one of ours"
