"""The user's database: transactions of the outbox itself.  I/O: SQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import create_engine
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from ..protocol.errors import ConfigError, StorageError
from .tables import OutboxTables

P = ParamSpec("P")
T = TypeVar("T")
EngineOrUrl = AsyncEngine | Engine | URL | str
_LOCKS_ROWS_ONLY = {"isolation_level": "READ COMMITTED"}
"""PostgreSQL and MySQL: each statement sees what is committed, and no gap between rows is locked."""


class Transactions(Protocol):
    """What the outbox needs of a database."""

    async def run(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """
        Return what `work` returns in a transaction of its own.

        Raises:
            OutboxMissingError: a table is missing.
            StorageError: the database answered with an error; the transaction may be committed.
            What `work` raises; nothing is committed.
        """
        ...

    async def close(self) -> None:
        """Close what was opened here."""
        ...


class OutboxDatabase:
    """
    The database behind an engine or a URL.

    An async engine is used in the event loop, another one on threads of the event loop's executor.
    """

    def __init__(self, engine_or_url: EngineOrUrl, tables: OutboxTables) -> None:
        """Raises ConfigError: what is given is neither an engine nor the URL of a database with an installed driver."""
        self._tables = tables
        self._own = not isinstance(engine_or_url, AsyncEngine | Engine)
        engine = engine_or_url if isinstance(engine_or_url, AsyncEngine | Engine) else _engine(engine_or_url)  # fmt: skip
        self._engine: AsyncEngine | Engine = engine
        if engine.dialect.name != "sqlite":
            self._engine = engine.execution_options(**_LOCKS_ROWS_ONLY)

    async def run(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See `Transactions.run`."""
        engine = self._engine
        try:
            if isinstance(engine, AsyncEngine):
                async with engine.begin() as connection:
                    return await connection.run_sync(work, *args, **kwargs)
            return await asyncio.to_thread(
                _run, engine, lambda connection: work(connection, *args, **kwargs)
            )
        except SQLAlchemyError as error:
            missing = self._tables.missing_error(error)
            raise missing or database_error(error) from error
        except OSError as error:
            raise database_error(error) from error

    async def close(self) -> None:
        """See `Transactions.close`; an engine that was given stays open."""
        if not self._own:
            return
        if isinstance(self._engine, AsyncEngine):
            await self._engine.dispose()
        else:
            self._engine.dispose()


def _run(engine: Engine, work: Callable[[Connection], T]) -> T:
    with engine.begin() as connection:
        return work(connection)


def _engine(url: URL | str) -> AsyncEngine | Engine:
    try:
        parsed = make_url(url)
        if parsed.get_dialect().is_async:
            return create_async_engine(parsed)
        return create_engine(parsed)
    except (ArgumentError, ImportError, SQLAlchemyError) as error:
        raise ConfigError(f"an outbox needs an engine or the URL of a database: {error}") from error


def database_error(error: Exception) -> StorageError:
    """The StorageError for an error of a database."""
    said = str(getattr(error, "orig", None) or error).partition("\n")[0]
    return StorageError(f"the outbox's database answered: {said}", operation="query")
