"""Whether what a transaction of the user writes is committed with it, or each statement by
itself.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Connection, RootTransaction

from ..protocol.errors import InvalidRequestError

_held: WeakSet[RootTransaction] = WeakSet()
"""Transactions whose first savepoint stays to their end."""


def check_transaction(connection: Connection) -> None:
    """
    Check that the statements of the connection's transaction are committed together, also behind a
    savepoint.

    Raises:
        InvalidRequestError: the connection has AUTOCOMMIT.
    """
    if _commits_each(connection):
        error = InvalidRequestError(
            "the connection has AUTOCOMMIT: each statement is committed by itself, and no rollback "
            "takes it back"
        )
        error.hint = (
            'Take an engine, or execution_options, without isolation_level="AUTOCOMMIT", and '
            "connect_args without "
            "autocommit."
        )
        raise error
    if connection.dialect.name == "sqlite":
        # SQLAlchemy keeps a function once for each connection.
        event.listen(connection, "release_savepoint", _hold_first_savepoint)


def _commits_each(connection: Connection) -> bool:
    """By the driver: `connect_args` may say so too, of which SQLAlchemy knows nothing."""
    pooled: Any = connection.connection
    if connection.dialect.name == "sqlite":
        # A driver that begins nothing by itself is as it should be where an event of the user's has
        # sent BEGIN.
        driver = pooled.driver_connection
        begins_nothing = driver.isolation_level is None and not driver.in_transaction
        # aiosqlite does not show this attribute, which drivers have since Python 3.12.
        return begins_nothing or getattr(getattr(driver, "_conn", driver), "autocommit", 0) is True
    try:
        return bool(connection.dialect.detect_autocommit_setting(pooled.dbapi_connection))
    except NotImplementedError:  # of SQLAlchemy, for a dialect of another package that cannot tell
        return getattr(pooled.dbapi_connection, "autocommit", False) is True


def _hold_first_savepoint(connection: Connection, name: str, _context: object) -> None:
    """
    Keep the transaction's first savepoint from being released.

    Python's driver of SQLite begins a transaction before the first statement that writes.  A
    savepoint is none, so one that comes first is the transaction itself, and its release is a
    commit.  SQLite releases the latest savepoint of a name: a second one is released in the place
    of the first, which stays until the transaction ends.
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
