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
    pooled: Any = connection.connection
    if connection.dialect.name == "sqlite":
        # A driver that begins nothing by itself is as it should be where an event of the user's has sent BEGIN.
        driver = pooled.driver_connection
        each_alone = driver.isolation_level is None and not driver.in_transaction
    else:
        named = connection.get_execution_options().get("isolation_level")
        each_alone = str(named or _of_the_engine(connection)).upper() == "AUTOCOMMIT"
    if each_alone or getattr(pooled.dbapi_connection, "autocommit", False) is True:
        error = InvalidRequestError(
            "the connection has AUTOCOMMIT: each statement is committed by itself, and no effect with its offset"
        )
        error.hint = 'Take an engine, or execution_options, without isolation_level="AUTOCOMMIT".'
        raise error


def _of_the_engine(connection: Connection) -> str | None:
    """What `create_engine(isolation_level=…)` was given."""
    dialect: Any = connection.dialect
    level: str | None = getattr(dialect, "_on_connect_isolation_level", None)
    return level


def begin_before_savepoint(connection: Connection) -> None:
    """
    Begin the transaction that a savepoint is to be in.

    Python's driver of SQLite begins one before the first statement that writes, and a savepoint is none: its end would commit.
    """
    pooled: Any = connection.connection
    if connection.dialect.name == "sqlite" and not pooled.driver_connection.in_transaction:
        connection.exec_driver_sql("BEGIN")
