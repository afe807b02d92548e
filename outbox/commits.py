"""Detects the commits of the user's transactions, after which their rows can be sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

from sqlalchemy import event
from sqlalchemy.engine import Connection, Transaction
from sqlalchemy.orm import Session, SessionTransaction

POLL_S = 0.001
"""Interval in seconds at which a commit is polled for, because SQLAlchemy has an event before the
commit of a connection and none after it.
"""


class CommitWatch:
    """
    Calls `wake` in `loop` after each commit of a session or connection that was given to `note`,
    never after a rollback.

    The session or connection may be used in any thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._noted: WeakKeyDictionary[Session | Connection, bool] = WeakKeyDictionary()
        """Sessions and connections that were noted; True while their transaction has added rows."""

    def note(self, target: Session | Connection) -> None:
        """Note that `target` has added a row in its present transaction."""
        known = target in self._noted
        self._noted[target] = True
        if known:
            return
        if isinstance(target, Session):
            event.listen(target, "after_commit", self._committed)
            event.listen(target, "after_soft_rollback", self._session_rolled_back)
        else:
            event.listen(target, "commit", self._committing)
            event.listen(target, "rollback", self._rolled_back)

    def _committed(self, session: Session) -> None:
        if not session.in_nested_transaction() and self._noted.get(session):
            self._noted[session] = False
            self._call(self._wake)

    def _session_rolled_back(self, session: Session, ended: SessionTransaction) -> None:
        if not ended.nested:  # rows that were added before a savepoint stay
            self._noted[session] = False

    def _rolled_back(self, connection: Connection) -> None:
        self._noted[connection] = False

    def _committing(self, connection: Connection) -> None:
        transaction = connection.get_transaction()
        if transaction is not None and self._noted.get(connection):
            self._noted[connection] = False
            self._call(lambda: self._wake_after(transaction))

    def _wake_after(self, transaction: Transaction) -> None:
        if transaction.is_active:
            self._loop.call_later(POLL_S, self._wake_after, transaction)
        else:
            self._wake()

    def _call(self, work: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)
