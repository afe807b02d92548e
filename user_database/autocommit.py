"""Rejects connections in AUTOCOMMIT mode, which commit each statement separately instead of the
user's transaction as a whole.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Connection, RootTransaction

from ..protocol.errors import InvalidRequestError

_transactions_with_savepoint: WeakSet[RootTransaction] = WeakSet()
"""Transactions whose first savepoint is kept open until they end."""


def check_transaction(connection: Connection) -> None:
    """
    Check that the connection commits all statements of its transaction together.

    For SQLite, also make sure that releasing a savepoint commits nothing.

    Raises:
        InvalidRequestError: the connection is in AUTOCOMMIT mode.
    """
    if _is_autocommit(connection):
        error = InvalidRequestError(
            "the connection has AUTOCOMMIT: each statement is committed separately, and a rollback "
            "undoes none"
        )
        error.hint = (
            'Remove isolation_level="AUTOCOMMIT" from the engine and its execution_options, and '
            "autocommit from connect_args."
        )
        raise error
    if connection.dialect.name == "sqlite":
        # SQLAlchemy registers a function only once for each connection.
        event.listen(connection, "release_savepoint", _keep_first_savepoint)


def _is_autocommit(connection: Connection) -> bool:
    """Return True if the driver commits each statement. The driver is asked, because
    `connect_args`, which SQLAlchemy does not interpret, may have set AUTOCOMMIT.
    """
    pooled_connection: Any = connection.connection
    if connection.dialect.name == "sqlite":
        # A driver that does not begin transactions itself is fine if an event handler of the user's
        # has sent BEGIN.
        driver_connection = pooled_connection.driver_connection
        has_no_transaction = (
            driver_connection.isolation_level is None and not driver_connection.in_transaction
        )
        # Drivers have this attribute since Python 3.12; aiosqlite hides it.
        return (
            has_no_transaction
            or getattr(getattr(driver_connection, "_conn", driver_connection), "autocommit", 0)
            is True
        )
    try:
        return bool(
            connection.dialect.detect_autocommit_setting(pooled_connection.dbapi_connection)
        )
    except NotImplementedError:  # some third-party dialects cannot detect it
        return getattr(pooled_connection.dbapi_connection, "autocommit", False) is True


def _keep_first_savepoint(connection: Connection, name: str, _context: object) -> None:
    """
    Prevent the transaction's first savepoint from being released.

    Python's SQLite driver begins a transaction before the first statement that writes, and
    SAVEPOINT is not such a statement. If a savepoint comes first, SQLite treats it as the
    transaction, and releasing it commits. SQLite releases the latest savepoint with a given name,
    so this function adds a second savepoint with the same name, which is released instead of the
    first.
    """
    transaction = connection.get_transaction()
    savepoint = connection.get_nested_transaction()
    if transaction is None or savepoint is None or transaction in _transactions_with_savepoint:
        return
    while savepoint._previous_nested is not None:
        savepoint = savepoint._previous_nested
    if savepoint._savepoint == name:
        connection.dialect.do_savepoint(connection, name)
        _transactions_with_savepoint.add(transaction)
