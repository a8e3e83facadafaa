"""What only an import and a prune do to a journal on a server: as the owner of its tables, in one transaction."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from residency.errors import JournalError
from residency.journal.pg_compare import schema_problems
from residency.journal.pg_schema import TABLES, TRIGGERS, trigger_table
from residency.journal.rewrite import Rewrite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from sqlalchemy.engine import Connection

    from residency.journal.events import Event
    from residency.journal.pg_location import ServerLocation

# Of one transaction: an import of a million events takes a few minutes.
REWRITE_S = 1800.0

# A worker's own limits are for an append. A lock is still waited for no longer than by any other writer.
_PATIENCE = """
SELECT pg_catalog.set_config('statement_timeout', %s, true),
    pg_catalog.set_config('idle_in_transaction_session_timeout', %s, true)
"""

# Tables that this role neither owns nor may act as the owner of, and their owner.
_OWNERS = """
SELECT c.relname, pg_catalog.pg_get_userbyid(c.relowner) FROM pg_catalog.pg_class c
WHERE c.relnamespace = %s::regnamespace AND c.relname = ANY(%s)
    AND NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')
ORDER BY c.relname
"""

_HIGHEST = "SELECT coalesce(max(position), 0) FROM events"


class ServerRewrite(Rewrite):
    """One transaction on a server's journal, with the lock around appends held."""

    def __init__(self, connection: Connection, where: ServerLocation, *, clock_ns: Callable[[], int]) -> None:
        super().__init__(connection, str(where), witness_path=None, clock_ns=clock_ns)
        self._schema = where.schema
        limit = f"{round(REWRITE_S * 1000)}ms"
        connection.exec_driver_sql(_PATIENCE, (limit, limit))

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Lift the triggers for the block.

        Raises:
            JournalCorrupt: a table or a trigger is missing, or not as it was made, before or after.
            JournalError: this role does not own the tables.
        """
        self._check_owner()
        self._check_triggers()
        for name in TRIGGERS:
            self._alter(name, "DISABLE")
        yield
        for name in TRIGGERS:
            self._alter(name, "ENABLE ALWAYS")
        self._check_triggers()

    def insert_events(self, events: Sequence[Event]) -> None:
        """Insert events as they are. Raises JournalError for a text that a server cannot hold."""
        for event in events:
            if any(isinstance(value, str) and "\x00" in value for value in event):
                raise JournalError(
                    journal=self.location,
                    problem=f"event {event.position} has a NUL character in a text, which a server cannot hold",
                    remedy="import into a file",
                )
        super().insert_events(events)

    def set_last_position(self, position: int) -> None:
        """See to it that the next event follows this position. Raises JournalError if it would not."""
        last = self._highest_given()
        if position != last:
            raise JournalError(
                journal=self.location,
                problem=f"position {position} was the last that was given, and the last event is {last}: on a server "
                f"the next event would be {last + 1}, a number that was given before",
                remedy="import into a file, which keeps the number, or export all streams and not some",
            )

    def _highest_given(self) -> int:
        return int(self._connection.exec_driver_sql(_HIGHEST).scalar_one())

    def _check_owner(self) -> None:
        others = self._rows(_OWNERS, (self._schema, list(TABLES)))
        if others:
            tables, owners = (", ".join(sorted({str(row[index]) for row in others})) for index in (0, 1))
            raise JournalError(
                journal=self.location,
                problem=f"this role does not own the tables {tables}, and only their owner ({owners}) may do that",
                remedy=f"name the role {owners} in the URL, for this command alone",
            )

    def _check_triggers(self) -> None:
        if problems := list(schema_problems(self._rows, self._schema)):
            raise self._altered(f"tables are not as they were made ({', '.join(problems)})")

    def _alter(self, trigger: str, how: str) -> None:
        table = f"{self._schema}.{trigger_table(trigger)}"
        self._connection.exec_driver_sql(f"ALTER TABLE {table} {how} TRIGGER {trigger}")

    def _rows(self, sql: str, parameters: Sequence[Any]) -> Sequence[Sequence[Any]]:
        return self._connection.exec_driver_sql(sql, tuple(parameters)).all()
