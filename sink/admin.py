"""Functions for operators and migrations, which take an engine or a database URL and need no
metaserver. I/O: SQL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.ids import check_name
from ..user_database.transactions import EngineOrUrl, UserDatabase, create_missing_tables
from .tables import DEFAULT_PREFIX, SinkTables

T = TypeVar("T")


async def create_tables(engine_or_url: EngineOrUrl, *, prefix: str = DEFAULT_PREFIX) -> None:
    """
    Create the tables of fenced effects. This does nothing if they exist.

    Raises:
        SchemaError: the tables exist but belong to another version of keylane.
        ConfigError: the engine, the URL or the prefix is invalid.
        StorageError: the database reported an error.
    """
    tables = SinkTables(prefix)
    await create_missing_tables(lambda: _run(engine_or_url, tables, tables.create))


async def forget(
    engine_or_url: EngineOrUrl,
    subject: str,
    group: str,
    *,
    fences: bool = False,
    prefix: str = DEFAULT_PREFIX,
) -> int:
    """
    Forget which effects of a consumer group are done. The effects of redelivered messages are then
    applied again.

    Call this while the group has no consumers, either before a `group reset` that is meant to
    repeat effects, or after the group or the subject was deleted.

    Args:
        fences: forget the tokens and the cluster too, so that a group of this name in another
            cluster can use the tables. Nothing refuses paused handlers of the old group afterwards.
        prefix: the prefix of the tables' names.

    Returns:
        The number of partitions that had effects.

    Raises:
        InvalidRequestError: the name of the subject or the group is invalid.
        SchemaError, ConfigError, StorageError: as `create_tables`.
    """
    check_name("subject", subject)
    check_name("consumer group", group)
    tables = SinkTables(prefix)

    def work(connection: Connection) -> int:
        tables.check(connection)
        table, done_ranges = tables.fences, tables.done_ranges
        condition = (table.c.subject == subject) & (table.c.consumer_group == group)
        locked = sa.select(table.c.id).where(condition).with_for_update()
        partitions = len(connection.execute(locked).all())
        # A subquery, because PostgreSQL allows 32,767 parameters and a group has a fence for each
        # partition that it has ever consumed.
        fence_ids = sa.select(table.c.id).where(condition)
        connection.execute(sa.delete(done_ranges).where(done_ranges.c.fence_id.in_(fence_ids)))
        if fences:
            connection.execute(sa.delete(table).where(condition))
        return partitions

    return await _run(engine_or_url, tables, work)


async def _run(
    engine_or_url: EngineOrUrl, tables: SinkTables, work: Callable[[Connection], T]
) -> T:
    """Run `work` in its own transaction, and return its result."""
    database = UserDatabase(engine_or_url, tables.missing_error)
    try:
        return await database.run(work)
    finally:
        await database.close()
