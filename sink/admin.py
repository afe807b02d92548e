"""Calls for operators and migrations, which take an engine or the URL of a database and ask no
metaserver. I/O: SQL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.ids import check_name
from ..user_database.transactions import EngineOrUrl, UserDatabase, make_tables
from .tables import DEFAULT_PREFIX, SinkTables

T = TypeVar("T")


async def create_tables(engine_or_url: EngineOrUrl, *, prefix: str = DEFAULT_PREFIX) -> None:
    """
    Create the tables of fenced effects; a repeated call changes nothing.

    Raises:
        SchemaError: the tables exist, and another version of keylane made them.
        ConfigError: the engine, the URL or the prefix cannot be used.
        StorageError: the database answered with an error.
    """
    tables = SinkTables(prefix)
    await make_tables(lambda: _run(engine_or_url, tables, tables.create))


async def forget(
    engine_or_url: EngineOrUrl, subject: str, group: str, *, prefix: str = DEFAULT_PREFIX
) -> int:
    """
    Forget which effects of a consumer group are done, so that messages that are delivered again
    have their effects again.

    Call it while the group has no consumers: before a `group reset` that is meant to repeat
    effects, or after the group or the subject was deleted.

    Returns:
        The number of partitions that had effects.

    Raises:
        SchemaError, InvalidRequestError, ConfigError,
        StorageError
    """
    check_name("subject", subject)
    check_name("consumer group", group)
    tables = SinkTables(prefix)

    def work(connection: Connection) -> int:
        tables.check(connection)
        fences, done = tables.fences, tables.done
        here = (fences.c.subject == subject) & (fences.c.consumer_group == group)
        locked = sa.select(fences.c.id).where(here).with_for_update()
        partitions = len(connection.execute(locked).all())
        # By a query: PostgreSQL takes 32,767 parameters, and a group has a fence for each partition
        # of its life.
        mine = sa.select(fences.c.id).where(here)
        connection.execute(sa.delete(done).where(done.c.fence_id.in_(mine)))
        return partitions

    return await _run(engine_or_url, tables, work)


async def _run(
    engine_or_url: EngineOrUrl, tables: SinkTables, work: Callable[[Connection], T]
) -> T:
    """Return what `work` returns in a transaction of its own."""
    database = UserDatabase(engine_or_url, tables.missing_error)
    try:
        return await database.run(work)
    finally:
        await database.close()
