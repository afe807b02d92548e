"""Refuses connections with AUTOCOMMIT, where each statement is committed by itself and not with
the user's transaction.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Connection, RootTransaction

from ..protocol.errors import InvalidRequestError

_held: WeakSet[RootTransaction] = WeakSet()
"""Transactions whose first savepoint is kept until they end."""


def check_transaction(connection: Connection) -> None:
    """
    Check that the statements of the connection's transaction are committed together, also after a
    savepoint was released.

    Raises:
        InvalidRequestError: the connection has AUTOCOMMIT.
    """
    if _commits_each(connection):
        error = InvalidRequestError(
            "the connection has AUTOCOMMIT: each statement is committed by itself, and a rollback "
            "undoes none"
        )
        error.hint = (
            'Remove isolation_level="AUTOCOMMIT" from the engine and its execution_options, and '
            "autocommit from connect_args."
        )
        raise error
    if connection.dialect.name == "sqlite":
        # SQLAlchemy registers a function only once for each connection.
        event.listen(connection, "release_savepoint", _hold_first_savepoint)


def _commits_each(connection: Connection) -> bool:
    """Ask the driver: AUTOCOMMIT may be set in `connect_args`, which SQLAlchemy does not
    interpret.
    """
    pooled: Any = connection.connection
    if connection.dialect.name == "sqlite":
        # A driver that begins no transactions by itself is fine if an event handler of the user
        # has sent BEGIN.
        driver = pooled.driver_connection
        begins_nothing = driver.isolation_level is None and not driver.in_transaction
        # Drivers have this attribute since Python 3.12; aiosqlite hides it.
        return begins_nothing or getattr(getattr(driver, "_conn", driver), "autocommit", 0) is True
    try:
        return bool(connection.dialect.detect_autocommit_setting(pooled.dbapi_connection))
    except NotImplementedError:  # a dialect of another package that cannot detect it
        return getattr(pooled.dbapi_connection, "autocommit", False) is True


def _hold_first_savepoint(connection: Connection, name: str, _context: object) -> None:
    """
    Keep the transaction's first savepoint from being released.

    Python's driver of SQLite begins a transaction before the first statement that writes, and
    SAVEPOINT does not count as one. A savepoint that comes first is therefore the transaction
    itself, and its release is a commit. SQLite releases the latest savepoint of a name: a second
    savepoint of the same name is released in place of the first, which stays until the
    transaction ends.
    """
    root = connection.get_transaction()
    first = connection.get_nested_transaction()
    if root is None or first is None or root in _held:
        return
    while first._previous_nested is not None:
        first = first._previous_nested
    if first._savepoint == name:
        connection.dialect.do_savepoint(connection, name)
        _held.add(root)
