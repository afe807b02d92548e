"""Calls for operators and migrations, on an engine or the URL of a database; no metaserver is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy.engine import Connection

from ..protocol.clock import SystemClock
from .database import EngineOrUrl, OutboxDatabase
from .tables import DEFAULT_PREFIX, OutboxTables
from .upkeep import OutboxStatus, purge, read_status, redrive

P = ParamSpec("P")
T = TypeVar("T")


async def create_tables(engine_or_url: EngineOrUrl, *, prefix: str = DEFAULT_PREFIX) -> None:
    """
    Create the tables of an outbox, or upgrade older ones; again changes nothing.

    Raises:
        OutboxNewerError: a newer keylane made them.
        ConfigError: the engine, the URL or the prefix cannot be used.
        StorageError: the database answered with an error.
    """
    await _run(engine_or_url, prefix, lambda connection, tables: tables.create(connection))


async def outbox_status(
    engine_or_url: EngineOrUrl, *, subject: str | None = None, prefix: str = DEFAULT_PREFIX
) -> OutboxStatus:
    """
    Count the rows of an outbox, of all subjects or one, and tell which process sends them.

    Raises:
        OutboxMissingError, OutboxOlderError, OutboxNewerError, ConfigError, StorageError
    """
    now_ns = SystemClock.wall_ns()
    return await _run(engine_or_url, prefix, read_status, now_ns=now_ns, subject=subject)


async def redrive_failed(
    engine_or_url: EngineOrUrl, *, subject: str | None = None, prefix: str = DEFAULT_PREFIX
) -> int:
    """
    Send failed rows again, each before newer ones of its key: a row that was stored is then stored twice.

    Refused rows are sent again, too, behind what was sent of their keys meanwhile.

    Returns:
        The number of failed and refused rows.

    Raises:
        As `outbox_status`.
    """
    return await _run(engine_or_url, prefix, redrive, subject=subject)


async def purge_failed(
    engine_or_url: EngineOrUrl, *, subject: str | None = None, prefix: str = DEFAULT_PREFIX
) -> int:
    """
    Delete failed and refused rows, and let newer rows of the keys of failed ones be sent.

    Returns:
        The number of failed and refused rows.

    Raises:
        As `outbox_status`.
    """
    return await _run(engine_or_url, prefix, purge, subject=subject)


async def _run(
    engine_or_url: EngineOrUrl,
    prefix: str,
    work: Callable[Concatenate[Connection, OutboxTables, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    tables = OutboxTables(prefix)
    database = OutboxDatabase(engine_or_url, tables)
    try:
        return await database.run(work, tables, *args, **kwargs)
    finally:
        await database.close()
