"""Calls for operators and migrations, on an engine or the URL of a database; no metaserver is asked.  I/O: SQL."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from ..protocol.errors import ConfigError, StorageError
from ..protocol.ids import check_name
from .tables import DEFAULT_PREFIX, SinkTables

T = TypeVar("T")
EngineOrUrl = AsyncEngine | Engine | URL | str
AGAIN_AFTER_S = (0.05, 0.1, 0.2, 0.4)
"""Tables that processes make at the same moment fail in all but one of them, and exist when these try again."""
_MADE_ELSEWHERE = re.compile("already exists|duplicate|unique|locked", re.IGNORECASE)


async def create_tables(engine_or_url: EngineOrUrl, *, prefix: str = DEFAULT_PREFIX) -> None:
    """
    Create the tables of fenced effects, or upgrade older ones; again changes nothing.

    Raises:
        SinkNewerError: a newer keylane made them.
        ConfigError: the engine, the URL or the prefix cannot be used.
        StorageError: the database answered with an error.
    """
    tables = SinkTables(prefix)
    for pause_s in (*AGAIN_AFTER_S, None):
        try:
            await _run(engine_or_url, tables, tables.create)
            break
        except StorageError as error:
            if pause_s is None or _MADE_ELSEWHERE.search(error.message) is None:
                raise
            await asyncio.sleep(pause_s)


async def forget(
    engine_or_url: EngineOrUrl, subject: str, group: str, *, prefix: str = DEFAULT_PREFIX
) -> int:
    """
    Forget which effects of a consumer group are done: messages that are delivered again are done again.

    Call it while the group has no consumers: before a `group reset` that is to repeat effects, or after the group or
    the subject was deleted.

    Returns:
        The number of partitions that had effects.

    Raises:
        SinkMissingError, SinkOlderError, SinkNewerError, InvalidNameError, ConfigError, StorageError
    """
    check_name("subject", subject)
    check_name("consumer group", group)
    tables = SinkTables(prefix)

    def work(connection: Connection) -> int:
        tables.check(connection)
        fences, done = tables.fences, tables.done
        here = (fences.c.subject == subject) & (fences.c.consumer_group == group)
        locked = sa.select(fences.c.id).where(here).with_for_update()
        ids = list(connection.execute(locked).scalars())
        connection.execute(sa.delete(done).where(done.c.fence_id.in_(ids)))
        return len(ids)

    return await _run(engine_or_url, tables, work)


async def _run(
    engine_or_url: EngineOrUrl, tables: SinkTables, work: Callable[[Connection], T]
) -> T:
    """What `work` returns in a transaction of its own."""
    given = isinstance(engine_or_url, AsyncEngine | Engine)
    engine = engine_or_url if isinstance(engine_or_url, AsyncEngine | Engine) else _engine(engine_or_url)  # fmt: skip
    try:
        if isinstance(engine, AsyncEngine):
            async with engine.begin() as connection:
                return await connection.run_sync(work)
        return await asyncio.to_thread(_in_transaction, engine, work)
    except SQLAlchemyError as error:
        raise tables.missing_error(error) or _storage_error(error) from error
    except OSError as error:
        raise _storage_error(error) from error
    finally:
        if not given:
            if isinstance(engine, AsyncEngine):
                await engine.dispose()
            else:
                engine.dispose()


def _in_transaction(engine: Engine, work: Callable[[Connection], T]) -> T:
    with engine.begin() as connection:
        return work(connection)


def _engine(url: URL | str) -> AsyncEngine | Engine:
    try:
        parsed = make_url(url)
        if parsed.get_dialect().is_async:
            return create_async_engine(parsed)
        return sa.create_engine(parsed)
    except (ArgumentError, ImportError, SQLAlchemyError) as error:
        raise ConfigError(
            f"fenced effects need an engine or the URL of a database: {error}"
        ) from error


def _storage_error(error: Exception) -> StorageError:
    said = str(getattr(error, "orig", None) or error).partition("\n")[0]
    return StorageError(f"the database answered: {said}", operation="query")
