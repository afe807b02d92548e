"""Detects commits of the user's transactions, after which the rows they added can be sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

from sqlalchemy import event
from sqlalchemy.engine import Connection, Transaction
from sqlalchemy.orm import Session, SessionTransaction

POLL_S = 0.001
"""The interval, in seconds, at which a connection is polled for a commit: SQLAlchemy fires an event
before such a commit, but none after it.
"""


class CommitWatch:
    """
    Calls `wake` in `loop` after each commit, but not rollback, of a session or connection passed to
    `watch`.

    The session or connection may be used in any thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._has_rows: WeakKeyDictionary[Session | Connection, bool] = WeakKeyDictionary()
        """The watched sessions and connections; the value is True while the current transaction has
        added rows.
        """

    def watch(self, target: Session | Connection) -> None:
        """Watch `target`, which has added a row in its current transaction."""
        is_watched = target in self._has_rows
        self._has_rows[target] = True
        if is_watched:
            return
        if isinstance(target, Session):
            event.listen(target, "after_commit", self._after_commit)
            event.listen(target, "after_soft_rollback", self._on_session_rollback)
        else:
            event.listen(target, "commit", self._before_commit)
            event.listen(target, "rollback", self._on_rollback)

    def _after_commit(self, session: Session) -> None:
        if not session.in_nested_transaction() and self._has_rows.get(session):
            self._has_rows[session] = False
            self._call_soon(self._wake)

    def _on_session_rollback(self, session: Session, transaction: SessionTransaction) -> None:
        if not transaction.nested:  # a savepoint's rollback keeps earlier rows
            self._has_rows[session] = False

    def _on_rollback(self, connection: Connection) -> None:
        self._has_rows[connection] = False

    def _before_commit(self, connection: Connection) -> None:
        transaction = connection.get_transaction()
        if transaction is not None and self._has_rows.get(connection):
            self._has_rows[connection] = False
            self._call_soon(lambda: self._wake_when_ended(transaction))

    def _wake_when_ended(self, transaction: Transaction) -> None:
        if transaction.is_active:
            self._loop.call_later(POLL_S, self._wake_when_ended, transaction)
        else:
            self._wake()

    def _call_soon(self, work: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)
