"""Callers that wait until their rows are sent, by this process or another one."""

from __future__ import annotations

import asyncio

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.errors import OutboxRowFailedError
from .database import Transactions
from .round import Settled
from .tables import FAILED, OutboxTables


class RowWaiters:
    """The rows that `Outbox.send` waits for."""

    def __init__(self, tables: OutboxTables) -> None:
        self._tables = tables
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def wait(self, row_id: int) -> None:
        """Wait until the row is sent.  Raises OutboxRowFailedError."""
        future = self._waiting.setdefault(row_id, asyncio.get_running_loop().create_future())
        try:
            await asyncio.shield(future)
        finally:
            self._waiting.pop(row_id, None)

    def settle(self, settled: Settled) -> None:
        """Tell the callers whose rows this process has sent, or marked as failed."""
        if not self._waiting:
            return
        for batch in settled.stored:
            for row in batch.rows:
                self._tell(row.id, None)
        for batch, why in settled.failed.items():
            for row in batch.rows:
                self._tell(row.id, why)

    async def look(self, database: Transactions) -> None:
        """Tell the callers whose rows another process has sent, or marked as failed."""
        waiting = list(self._waiting)
        if not waiting:
            return
        left = await database.run(_rows_left, self._tables, waiting)
        for row_id in waiting:
            if row_id not in left:
                self._tell(row_id, None)
            elif left[row_id] is not None:
                self._tell(row_id, left[row_id])

    def _tell(self, row_id: int, why: str | None) -> None:
        future = self._waiting.get(row_id)
        if future is None or future.done():
            return
        if why is None:
            future.set_result(None)
        else:
            future.set_exception(OutboxRowFailedError(f"row {row_id}: {why}", row_id=row_id))


def _rows_left(
    connection: Connection, tables: OutboxTables, ids: list[int]
) -> dict[int, str | None]:
    """The rows of `ids` that are in the table, and why a failed one failed."""
    rows = tables.rows.c
    found = connection.execute(
        sa.select(rows.id, rows.batch_id, rows.failure).where(rows.id.in_(ids))
    )
    return {row.id: (row.failure or "") if row.batch_id == FAILED else None for row in found}
