"""The tables of a SQLite journal, as plain SQL: what they are, and the triggers that keep them append-only."""

from __future__ import annotations

# "RsJ1" in the header of the file, so that a journal is known without being parsed.
APPLICATION_ID = 0x52734A31
# Of the file; the migrations are numbered by it.
FORMAT = 1

# In the order of the table and of the fields of Event. `hash` is last: it covers every column before it.
EVENT_COLUMNS = (
    "position",
    "stream",
    "stream_version",
    "event_id",
    "epoch",
    "round",
    "rank",
    "type",
    "schema_version",
    "from_state",
    "to_state",
    "trigger",
    "recorded_at",
    "boot_id",
    "pid",
    "causation",
    "payload",
    "previous_hash",
    "hash",
)

_EVENTS = """
CREATE TABLE events (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    stream TEXT NOT NULL CHECK (stream <> ''),
    stream_version INTEGER NOT NULL CHECK (stream_version >= 1),
    event_id TEXT NOT NULL UNIQUE,
    epoch TEXT NOT NULL,
    round INTEGER NOT NULL CHECK (round >= 0),
    rank INTEGER NOT NULL CHECK (rank >= 0),
    type TEXT NOT NULL,
    schema_version INTEGER NOT NULL,
    from_state TEXT,
    to_state TEXT,
    "trigger" TEXT,
    recorded_at INTEGER NOT NULL,
    boot_id TEXT NOT NULL,
    pid INTEGER NOT NULL,
    causation TEXT,
    payload BLOB NOT NULL,
    previous_hash BLOB NOT NULL CHECK (length(previous_hash) = 32),
    hash BLOB NOT NULL CHECK (length(hash) = 32),
    UNIQUE (stream, stream_version)
) STRICT
"""

# Pages of one stream are read by position; without it a quiet stream among busy ones is a scan of the journal.
INDEXES: dict[str, str] = {"events_by_stream": "CREATE INDEX events_by_stream ON events (stream, position)"}

_BLOBS = """
CREATE TABLE blobs (
    digest TEXT NOT NULL PRIMARY KEY CHECK (length(digest) = 64),
    content BLOB NOT NULL
) STRICT
"""

_META = """
CREATE TABLE meta (
    key TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) STRICT
"""

_EVENT_EXISTS = """
SELECT 1 FROM events
WHERE position = NEW.position
    OR event_id = NEW.event_id
    OR (stream = NEW.stream AND stream_version = NEW.stream_version)
"""

# The zero hash stands before the first event of every stream.
_EVENT_CONTINUES = """
NEW.position > (SELECT coalesce(max(position), 0) FROM events)
AND NEW.stream_version = (SELECT coalesce(max(stream_version), 0) + 1 FROM events WHERE stream = NEW.stream)
AND NEW.previous_hash = coalesce(
    (SELECT hash FROM events WHERE stream = NEW.stream ORDER BY stream_version DESC LIMIT 1), zeroblob(32))
"""


def _refuse(name: str, when: str, what: str) -> str:
    return f"CREATE TRIGGER {name} {when}\nBEGIN\n    SELECT RAISE(ABORT, '{what}');\nEND"


# Without recursive_triggers, INSERT OR REPLACE deletes past a delete trigger: every table refuses existing keys, too.
TRIGGERS: dict[str, str] = {
    "events_no_update": _refuse("events_no_update", "BEFORE UPDATE ON events", "events are append-only"),
    "events_no_delete": _refuse("events_no_delete", "BEFORE DELETE ON events", "events are append-only"),
    "events_no_replace": _refuse(
        "events_no_replace", f"BEFORE INSERT ON events WHEN EXISTS ({_EVENT_EXISTS})", "events are append-only"
    ),
    "events_in_order": _refuse(
        "events_in_order",
        f"BEFORE INSERT ON events WHEN NOT ({_EVENT_CONTINUES})",
        "event does not continue its stream",
    ),
    "blobs_no_update": _refuse("blobs_no_update", "BEFORE UPDATE ON blobs", "blobs are append-only"),
    "blobs_no_delete": _refuse("blobs_no_delete", "BEFORE DELETE ON blobs", "blobs are append-only"),
    "blobs_no_replace": _refuse(
        "blobs_no_replace",
        "BEFORE INSERT ON blobs WHEN EXISTS (SELECT 1 FROM blobs WHERE digest = NEW.digest)",
        "blobs are append-only",
    ),
    "meta_no_update": _refuse("meta_no_update", "BEFORE UPDATE ON meta", "meta is append-only"),
    "meta_no_delete": _refuse("meta_no_delete", "BEFORE DELETE ON meta", "meta is append-only"),
    "meta_no_replace": _refuse(
        "meta_no_replace",
        "BEFORE INSERT ON meta WHEN EXISTS (SELECT 1 FROM meta WHERE key = NEW.key)",
        "meta is append-only",
    ),
}

TABLES: dict[str, str] = {"events": _EVENTS, "blobs": _BLOBS, "meta": _META}


def normal_sql(sql: str) -> str:
    """Return the statement with its white space made equal, to compare what a file holds with what it should hold."""
    return " ".join(sql.split())
