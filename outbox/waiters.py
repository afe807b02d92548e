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
from .lease import deletion_count
from .round import SettledBatches
from .tables import FAILED, REFUSED, OutboxTables

ROW_MISSING = -100


class RowWaiters:
    """
    Tracks the rows that `Outbox.send` calls are waiting for.

    Another process may send a row, so each caller also reads the table every `poll_ms`.
    """

    def __init__(self, database: Transactions, tables: OutboxTables, *, poll_ms: int) -> None:
        self._database = database
        self._tables = tables
        self._poll_ms = poll_ms
        self._futures: dict[int, asyncio.Future[None]] = {}

    async def wait(self, row_id: int, token: int) -> None:
        """
        Wait until the row is sent.

        Args:
            token: the lease's token at the time when the row was added.

        Raises:
            DeliveryError: the row failed, or it is missing after an operator deleted rows.
            MessageTooLargeError: the row was refused.
            ClosedError: the outbox was closed.
            StorageError: the database reported an error.
        """
        future = self._futures[row_id] = asyncio.get_running_loop().create_future()
        try:
            while not future.done():
                await asyncio.wait([future], timeout=self._poll_ms / 1000)
                if not future.done():
                    state, failure, current_token = await self._database.run(
                        _read_outcome, self._tables, row_id
                    )
                    if state == ROW_MISSING and deletion_count(current_token) != deletion_count(
                        token
                    ):
                        failure = "an operator has deleted rows, and this may be one of them"
                    token = current_token
                    if state == REFUSED:
                        self._refuse(row_id, failure)
                    elif state in {ROW_MISSING, FAILED}:
                        self._settle_row(row_id, failure)
            future.result()
        finally:
            del self._futures[row_id]

    def settle(self, settled: SettledBatches, refused: Mapping[int, str]) -> None:
        """Wake callers whose rows this process has sent, failed or refused."""
        if not self._futures:
            return
        for row_id, reason in refused.items():
            self._refuse(row_id, reason)
        for batch in settled.stored:
            for row in batch.rows:
                self._settle_row(row.id, "")
        for batch, reason in settled.failed.items():
            for row in batch.rows:
                self._settle_row(row.id, reason)

    def close(self) -> None:
        """Fail all waits because the outbox is closed."""
        text = "the outbox was closed; the message is in its table, and will be sent later"
        self.fail_all(ClosedError(text).copy(Fate.UNKNOWN))

    def fail_all(self, error: KeylaneError) -> None:
        """Fail all waits with copies of `error`."""
        for future in self._futures.values():
            _complete(future, error.copy(error.fate))

    def _refuse(self, row_id: int, reason: str) -> None:
        future = self._futures.get(row_id)
        if future is not None:
            _complete(future, MessageTooLargeError(f"row {row_id}: {reason}"))

    def _settle_row(self, row_id: int, failure: str) -> None:
        """Wake the caller that waits for a row. The row was sent, or failed for the reason in
        `failure`.
        """
        future = self._futures.get(row_id)
        if future is None:
            return
        error = (
            DeliveryError(Reason.OUTBOX_ROW, f"row {row_id}: {failure}", row_id=row_id)
            if failure
            else None
        )
        _complete(future, error)


def _complete(future: asyncio.Future[None], error: KeylaneError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _read_outcome(
    connection: Connection, tables: OutboxTables, row_id: int
) -> tuple[int, str, int]:
    """
    Return a row's `batch_id` or ROW_MISSING, the reason for its failure or refusal, and the lease's
    token.

    A single statement reads all of them, so that the token and the row are consistent.
    """
    rows, lease = tables.rows, tables.lease
    query = sa.select(rows.c.batch_id, rows.c.failure, lease.c.token).select_from(
        lease.outerjoin(rows, rows.c.id == row_id)
    )
    state, failure, token = connection.execute(query).one()
    return (ROW_MISSING if state is None else state, failure or "", token)
