"""Transactions of the outbox itself in the user's database. I/O: SQL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy.engine import Connection

from ..user_database.transactions import EngineOrUrl, UserDatabase
from .tables import OutboxTables

P = ParamSpec("P")
T = TypeVar("T")
_LOCKS_ROWS_ONLY = {"isolation_level": "READ COMMITTED"}
"""PostgreSQL and MySQL: each statement sees what is committed, and no gap between rows is
locked.
"""


class Transactions(Protocol):
    """The calls of a database that the outbox needs."""

    async def run(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """
        Return what `work` returns in a transaction of its own.

        Raises:
            SchemaError: a table is missing.
            StorageError: the database answered with an error; the transaction may be committed.
            What `work` raises; nothing is committed.
        """
        ...

    async def close(self) -> None:
        """Close the connections that were opened here."""
        ...


class OutboxDatabase(UserDatabase):
    """The database behind an engine or a URL, with the tables of an outbox."""

    def __init__(self, engine_or_url: EngineOrUrl, tables: OutboxTables) -> None:
        """Raise ConfigError if the argument is neither an engine nor the URL of a database whose
        driver is installed.
        """
        super().__init__(engine_or_url, tables.missing_error, **_LOCKS_ROWS_ONLY)
