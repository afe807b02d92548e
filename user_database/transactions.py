"""Runs transactions in the user's database, which is given as an engine or a URL. I/O: SQL."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import create_engine
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from ..protocol.errors import ConfigError, KeylaneError, StorageError
from ..protocol.text import UNREADABLE_URL, url_problem
from .autocommit import check_transaction

P = ParamSpec("P")
T = TypeVar("T")
EngineOrUrl = AsyncEngine | Engine | URL | str
AGAIN_AFTER_S = (0.05, 0.1, 0.2, 0.4)
"""Pauses between tries to create tables, in seconds: if several processes create them at the same
moment, all but one fail, and find the tables when they try again.
"""
_MADE_ELSEWHERE = re.compile("already exists|duplicate|unique|locked", re.IGNORECASE)


class UserDatabase:
    """
    The database behind an engine or a URL.

    An async engine is used in the event loop, a blocking one in threads of the loop's executor.

    Args:
        missing_error: returns the typed error if an error of SQLAlchemy says that one of our
            tables does not exist, else None.
        options: execution options for every database but SQLite.
    """

    def __init__(
        self,
        engine_or_url: EngineOrUrl,
        missing_error: Callable[[SQLAlchemyError], KeylaneError | None],
        **options: Any,
    ) -> None:
        """Raise ConfigError if the argument is neither an engine nor the URL of a database whose
        driver is installed.
        """
        self._missing_error = missing_error
        self._own = not isinstance(engine_or_url, AsyncEngine | Engine)
        engine = (
            engine_or_url
            if isinstance(engine_or_url, AsyncEngine | Engine)
            else _engine(engine_or_url)
        )
        self._engine: AsyncEngine | Engine = engine
        if options and engine.dialect.name != "sqlite":
            self._engine = engine.execution_options(**options)

    async def run(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """
        Return what `work` returns in a transaction of its own.

        Raises:
            KeylaneError: a table is missing.
            InvalidRequestError: the engine has AUTOCOMMIT.
            StorageError: the database answered with an error; the transaction may be committed.
            What `work` raises; nothing is committed.
        """
        engine = self._engine

        def checked(connection: Connection) -> T:
            check_transaction(connection)
            return work(connection, *args, **kwargs)

        try:
            if isinstance(engine, AsyncEngine):
                async with engine.begin() as connection:
                    return await connection.run_sync(checked)
            return await asyncio.to_thread(_run, engine, checked)
        except SQLAlchemyError as error:
            raise self._missing_error(error) or _storage_error(error) from error
        except OSError as error:
            raise _storage_error(error) from error

    async def close(self) -> None:
        """Close what was opened here; an engine that was given stays open."""
        if not self._own:
            return
        if isinstance(self._engine, AsyncEngine):
            await self._engine.dispose()
        else:
            self._engine.dispose()


async def make_tables(make: Callable[[], Awaitable[None]]) -> None:
    """
    Call `make`, which creates missing tables, and repeat it if another process creates them at the
    same moment.

    Raises:
        StorageError: it failed for another reason, or every time.
    """
    for pause_s in (*AGAIN_AFTER_S, None):
        try:
            await make()
            break
        except StorageError as error:
            if pause_s is None or _MADE_ELSEWHERE.search(error.message) is None:
                raise
            await asyncio.sleep(pause_s)


def _run(engine: Engine, work: Callable[[Connection], T]) -> T:
    with engine.begin() as connection:
        return work(connection)


def _engine(url: URL | str) -> AsyncEngine | Engine:
    try:
        parsed = make_url(url)
        if isinstance(url, str) and (unescaped := url_problem(url)):
            raise ConfigError(f"the URL of the database cannot be read: {unescaped}")
        if parsed.get_dialect().is_async:
            return create_async_engine(parsed)
        return create_engine(parsed)
    except (ArgumentError, ImportError, SQLAlchemyError) as error:
        raise ConfigError(f"an engine or the URL of a database is needed: {error}") from error
    except ValueError:  # its text may contain a part of the password
        raise ConfigError(f"the URL of the database cannot be read: {UNREADABLE_URL}") from None


def _storage_error(error: Exception) -> StorageError:
    said = str(getattr(error, "orig", None) or error).partition("\n")[0]
    return StorageError(f"the user's database answered: {said}", operation="query")
