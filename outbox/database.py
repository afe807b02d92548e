"""Runs the outbox's own transactions in the user's database. I/O: SQL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy.engine import Connection

from ..user_database.transactions import EngineOrUrl, UserDatabase
from .tables import OutboxTables

P = ParamSpec("P")
T = TypeVar("T")
_LOCKS_ROWS_ONLY = {"isolation_level": "READ COMMITTED"}
"""With this isolation level, each statement sees the latest commits, and MySQL does not lock gaps
between rows.
"""


class Transactions(Protocol):
    """The database operations that the outbox needs."""

    async def run(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """
        Run `work` in its own transaction, and return its result.

        Raises:
            SchemaError: a table is missing.
            StorageError: the database reported an error; the transaction may be committed. Any
                exception raised by `work`; nothing is committed.
        """
        ...

    async def close(self) -> None:
        """Close the connections that this object opened."""
        ...


class OutboxDatabase(UserDatabase):
    """A user's database with the tables of an outbox."""

    def __init__(self, engine_or_url: EngineOrUrl, tables: OutboxTables) -> None:
        """
        Create the database for an outbox's tables.

        Raises:
            ConfigError: the argument is neither an engine nor the URL of a database whose driver is
                installed.
        """
        super().__init__(engine_or_url, tables.missing_error, **_LOCKS_ROWS_ONLY)
