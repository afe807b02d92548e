"""Whether what a transaction of the user writes is committed with it, or each statement by itself."""

from __future__ import annotations

from typing import Any

from sqlalchemy.engine import Connection

from ..protocol.errors import InvalidRequestError


def check_transaction(connection: Connection) -> None:
    """
    Check that statements of the connection's transaction are committed together.

    Raises:
        InvalidRequestError: the connection has AUTOCOMMIT.
    """
    if _commits_each(connection):
        error = InvalidRequestError(
            "the connection has AUTOCOMMIT: each statement is committed by itself, and no effect with its offset"
        )
        error.hint = (
            'Take an engine, or execution_options, without isolation_level="AUTOCOMMIT", and connect_args without '
            "autocommit."
        )
        raise error


def _commits_each(connection: Connection) -> bool:
    """By the driver: `connect_args` may say so too, of which SQLAlchemy knows nothing."""
    pooled: Any = connection.connection
    if connection.dialect.name == "sqlite":
        # A driver that begins nothing by itself is as it should be where an event of the user's has sent BEGIN.
        driver = pooled.driver_connection
        begins_nothing = driver.isolation_level is None and not driver.in_transaction
        # aiosqlite does not show this attribute, which drivers have since Python 3.12.
        return begins_nothing or getattr(getattr(driver, "_conn", driver), "autocommit", 0) is True
    try:
        return bool(connection.dialect.detect_autocommit_setting(pooled.dbapi_connection))
    except NotImplementedError:  # of SQLAlchemy, for a dialect of another package that cannot tell
        return getattr(pooled.dbapi_connection, "autocommit", False) is True


def begin_before_savepoint(connection: Connection) -> None:
    """
    Begin the transaction that a savepoint is to be in.

    Python's driver of SQLite begins one before the first statement that writes, and a savepoint is none: its end would commit.
    """
    pooled: Any = connection.connection
    if connection.dialect.name == "sqlite" and not pooled.driver_connection.in_transaction:
        connection.exec_driver_sql("BEGIN")
