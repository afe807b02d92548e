"""Runs transactions in the user's database, given as an engine or a URL. I/O: SQL."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import create_engine
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from ..protocol.errors import ConfigError, KeylaneError, MissingExtraError, StorageError
from ..protocol.text import UNREADABLE_URL, url_problem
from .autocommit import check_transaction

P = ParamSpec("P")
T = TypeVar("T")
EngineOrUrl = AsyncEngine | Engine | URL | str
RETRY_PAUSES_S = (0.05, 0.1, 0.2, 0.4)
"""Backoff times, in seconds, for creating tables: if several processes create them at once, all but
one of these fail, and find the tables when they retry.
"""
_CREATED_BY_OTHER = re.compile("already exists|duplicate|unique|locked", re.IGNORECASE)


class UserDatabase:
    """
    The database behind an engine or a URL.

    An async engine is used in the event loop, a blocking one in threads of the loop's executor.

    Args:
        missing_error: converts a SQLAlchemy error about a missing keylane table to the error to
            raise; returns None for other errors.
        options: execution options; ignored for SQLite.
    """

    def __init__(
        self,
        engine_or_url: EngineOrUrl,
        missing_error: Callable[[SQLAlchemyError], KeylaneError | None],
        **options: Any,
    ) -> None:
        """Create the engine if it is given as a URL. Raises ConfigError if the argument is neither
        an engine nor the URL of a database whose driver is installed.
        """
        self._missing_error = missing_error
        self._owns_engine = not isinstance(engine_or_url, AsyncEngine | Engine)
        engine = (
            engine_or_url
            if isinstance(engine_or_url, AsyncEngine | Engine)
            else _create_engine(engine_or_url)
        )
        self._engine: AsyncEngine | Engine = engine
        if options and engine.dialect.name != "sqlite":
            self._engine = engine.execution_options(**options)

    async def run(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """
        Call `work` in a new transaction, and return its result. If `work` raises an error, nothing
        is committed.

        Raises:
            KeylaneError: a table is missing.
            InvalidRequestError: the engine is in AUTOCOMMIT mode.
            StorageError: the database reported an error; the transaction may be committed.
        """
        engine = self._engine

        def checked_work(connection: Connection) -> T:
            check_transaction(connection)
            return work(connection, *args, **kwargs)

        try:
            if isinstance(engine, AsyncEngine):
                async with engine.begin() as connection:
                    return await connection.run_sync(checked_work)
            return await asyncio.to_thread(_run, engine, checked_work)
        except SQLAlchemyError as error:
            raise self._missing_error(error) or _storage_error(error) from error
        except OSError as error:
            raise _storage_error(error) from error

    async def close(self) -> None:
        """Close the engine if it was created from a URL; an engine passed by the caller stays
        open.
        """
        if not self._owns_engine:
            return
        if isinstance(self._engine, AsyncEngine):
            await self._engine.dispose()
        else:
            self._engine.dispose()


async def create_missing_tables(create: Callable[[], Awaitable[None]]) -> None:
    """
    Call `create`, which creates missing tables, and retry if another process creates them at the
    same time.

    Raises:
        StorageError: `create` failed for another reason, or on every attempt.
    """
    for pause_s in (*RETRY_PAUSES_S, None):
        try:
            await create()
            break
        except StorageError as error:
            if pause_s is None or _CREATED_BY_OTHER.search(error.message) is None:
                raise
            await asyncio.sleep(pause_s)


def _run(engine: Engine, work: Callable[[Connection], T]) -> T:
    with engine.begin() as connection:
        return work(connection)


def _create_engine(url: URL | str) -> AsyncEngine | Engine:
    try:
        parsed_url = make_url(url)
        if isinstance(url, str) and (problem := url_problem(url)):
            raise ConfigError(f"the URL of the database cannot be read: {problem}")
        if parsed_url.get_dialect().is_async:
            return create_async_engine(parsed_url)
        return create_engine(parsed_url)
    except ModuleNotFoundError as error:
        raise MissingExtraError.of_driver(error) from error
    except (ArgumentError, ImportError, SQLAlchemyError) as error:
        raise ConfigError(f"an engine or the URL of a database is needed: {error}") from error
    except ValueError:  # the error's text may contain part of the password
        raise ConfigError(f"the URL of the database cannot be read: {UNREADABLE_URL}") from None


def _storage_error(error: Exception) -> StorageError:
    text = str(getattr(error, "orig", None) or error).partition("\n")[0]
    return StorageError(f"the user's database reported an error: {text}", operation="query")
