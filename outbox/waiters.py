"""Lets callers wait until their rows are sent, by this process or another one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.errors import (
    ClosedError,
    DeliveryError,
    Fate,
    KeylaneError,
    MessageTooLargeError,
    Reason,
)
from .database import Transactions
from .lease import deletions
from .round import SettledBatches
from .tables import FAILED, REFUSED, OutboxTables

GONE = -100


class RowWaiters:
    """
    The rows that `Outbox.send` waits for.

    Another process may send a row, so each caller also reads the table every `look_ms`.
    """

    def __init__(self, database: Transactions, tables: OutboxTables, *, look_ms: int) -> None:
        self._database = database
        self._tables = tables
        self._look_ms = look_ms
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def wait(self, row_id: int, token: int) -> None:
        """
        Wait until the row is sent.

        Args:
            token: the token of the lease when the row was added.

        Raises:
            DeliveryError: also if the row vanished while an operator deleted rows.
            MessageTooLargeError, ClosedError, StorageError
        """
        future = self._waiting[row_id] = asyncio.get_running_loop().create_future()
        try:
            while not future.done():
                await asyncio.wait([future], timeout=self._look_ms / 1000)
                if not future.done():
                    state, failure, now = await self._database.run(_outcome, self._tables, row_id)
                    if state == GONE and deletions(now) != deletions(token):
                        failure = "an operator has deleted rows, and this may be one of them"
                    token = now
                    if state == REFUSED:
                        self._refuse(row_id, failure)
                    elif state in {GONE, FAILED}:
                        self._finish(row_id, failure)
            future.result()
        finally:
            del self._waiting[row_id]

    def settle(self, settled: SettledBatches, refused: Mapping[int, str]) -> None:
        """Wake the callers whose rows this process has sent, marked as failed, or refused."""
        if not self._waiting:
            return
        for row_id, why in refused.items():
            self._refuse(row_id, why)
        for batch in settled.stored:
            for row in batch.rows:
                self._finish(row.id, "")
        for batch, why in settled.failed.items():
            for row in batch.rows:
                self._finish(row.id, why)

    def close(self) -> None:
        """End all waits because the outbox is closed."""
        text = "the outbox was closed; the message is in its table, and will be sent later"
        self.end(ClosedError(text).copy(Fate.UNKNOWN))

    def end(self, error: KeylaneError) -> None:
        """End all waits with copies of `error`."""
        for future in self._waiting.values():
            _end(future, error.copy(error.fate))

    def _refuse(self, row_id: int, why: str) -> None:
        future = self._waiting.get(row_id)
        if future is not None:
            _end(future, MessageTooLargeError(f"row {row_id}: {why}"))

    def _finish(self, row_id: int, failure: str) -> None:
        """The row is sent (""), or failed (the reason)."""
        future = self._waiting.get(row_id)
        if future is None:
            return
        error = (
            DeliveryError(Reason.OUTBOX_ROW, f"row {row_id}: {failure}", row_id=row_id)
            if failure
            else None
        )
        _end(future, error)


def _end(future: asyncio.Future[None], error: KeylaneError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _outcome(connection: Connection, tables: OutboxTables, row_id: int) -> tuple[int, str, int]:
    """
    Return the `batch_id` of a row, or GONE; the reason of a failure or refusal; and the lease's
    token.

    One statement reads all, so that the token belongs to the state of the row.
    """
    rows, lease = tables.rows, tables.lease
    ask = sa.select(rows.c.batch_id, rows.c.failure, lease.c.token).select_from(
        lease.outerjoin(rows, rows.c.id == row_id)
    )
    state, failure, token = connection.execute(ask).one()
    return (GONE if state is None else state, failure or "", token)
