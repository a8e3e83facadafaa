"""The one session that a worker has on a server: made anew when it is lost, and every error of it explained."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy import create_engine, exc
from sqlalchemy.pool import NullPool

from residency.errors import JournalError
from residency.journal.postgresql import FAILURES, explain, is_answered, may_be_retried
from residency.journal.sqlite import abandon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Connection

    from residency.journal.pg_location import ServerLocation
    from residency.journal.postgresql import Session


class ConnectionLost(JournalError):
    """Raised when the session ended while it was used; with it ended every lock that it held."""


class Conflict(JournalError):
    """Raised when the server undid a transaction because of another one; it may be tried again."""


class ServerSession:
    """One connection through SQLAlchemy, kept for the life of a journal. One thread at a time.

    make: opens a session, in autocommit mode. welcome: called with every new connection before it is used.
    """

    def __init__(
        self,
        location: ServerLocation,
        *,
        wait_s: float,
        make: Callable[[], Session],
        welcome: Callable[[Connection], None],
    ) -> None:
        self._location = location
        self._wait_s = wait_s
        self._make = make
        self._welcome = welcome
        self._raw: Session | None = None
        self._connection: Connection | None = None
        # The driver's own transactions; no pool, no second connection, and no values in the text of errors.
        self._engine = create_engine(
            "postgresql+psycopg://",
            creator=self._create,
            poolclass=NullPool,
            hide_parameters=True,
            use_native_hstore=False,
        )

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None

    def is_alive(self) -> bool:
        """Whether the connection stands, and the server has answered to everything that was asked."""
        return self._raw is not None and is_answered(self._raw)

    @contextmanager
    def using(self, *, wait_s: float | None = None) -> Iterator[Connection]:
        """Use the connection, which is made anew if it was lost. What is not committed inside is undone.

        wait_s: how long all that is done inside may take, if not as long as an append may wait.

        Raises:
            ConnectionLost: it was lost inside.
            Conflict: the server undid the transaction because of another one.
            JournalError: it cannot be made, or the database reports something else.
        """
        connection = self._connected()
        assert self._raw is not None
        try:
            with self._raw.within(self._wait_s if wait_s is None else wait_s):
                yield connection
                connection.rollback()
        except BaseException as error:
            self._undo()
            if isinstance(error, (exc.SQLAlchemyError, *FAILURES)):
                raise self._explained(error, is_lost=self._connection is None) from error
            raise

    def close(self) -> None:
        """Close the connection, and with it end its locks. Raises nothing; a second call is a no-op."""
        self.drop()
        self._engine.dispose()

    def abandon(self) -> None:
        """Let go of the connection in a forked child: it stays the parent's, and ends with the parent."""
        if self._raw is None or self._connection is None or self._raw.closed:
            return
        abandon(self._connection)
        # The child's copy of the socket would keep the session, and its locks, beyond the parent's death.
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, self._raw.fileno(), inheritable=False)
        os.close(nothing)

    def _create(self) -> Session:
        self._raw = self._make()
        self._raw.autocommit = False
        return self._raw

    def _connected(self) -> Connection:
        if self._connection is None:
            try:
                self._connection = self._engine.connect()
                self._welcome(self._connection)
                self._connection.rollback()
            except BaseException as error:
                self.drop()
                if isinstance(error, (exc.SQLAlchemyError, *FAILURES)):
                    raise self._explained(error) from error
                raise
        return self._connection

    def _undo(self) -> None:
        """Undo the transaction; where nobody knows what the server is still doing, end the session."""
        connection = self._connection
        if connection is None:
            return
        # An interrupt may have come between a question and its answer.
        if not self.is_alive() or connection.invalidated:
            self.drop()
            return
        try:
            connection.rollback()
        except (exc.SQLAlchemyError, *FAILURES):
            self.drop()

    def drop(self) -> None:
        """End the connection, and with it its locks; the next use makes another. Raises nothing."""
        connection, self._connection = self._connection, None
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()
        if connection is not None:
            # Closed as it is: nothing can be undone on it.
            connection.invalidate()
            connection.close()

    def _explained(self, error: BaseException, *, is_lost: bool = False) -> JournalError:
        said = error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error
        found = explain(said, location=self._location, wait_s=self._wait_s)
        if is_lost:
            return ConnectionLost(**found.fields)
        return Conflict(**found.fields) if may_be_retried(said) else found
