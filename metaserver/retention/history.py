"""Removes the cluster's history after `history_retention_ms`: the rows of deletions, publications
and finished operations.

Invariants
    The age of a row is counted from the check that first finds it. It is the sum of the times
    between checks by a single metaserver, so it does not grow while no metaserver is running, nor
    when a clock jumps.
    Rows of unfinished work are kept. A deletion is finished when every broker has either done its
    part or been accepted as lost.
    A canceled operation is kept as long as its subject, because its steps show which partitions
    were never opened.
    A publication is kept while its operation is unfinished or canceled, so that a repeated call
    gets the outcome.
    A row whose age restarts after it was selected is not removed.
    A subject's operations are kept while a hidden subject exists for it, because the publication
    needs those of its cut.

deleted, published, done ─▶ found by a check ─▶ old enough: removed, a batch in each transaction
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.operations import OperationState
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..sql.dialect import insert_or_replace
from ..sql.duties import take_duty
from ..sql.schema import deletions, facts, operations, publications, steps, subjects

ROWS_AT_ONCE = 5_000
"""Maximum number of rows of each table that one transaction changes: statements on PostgreSQL time
out after 10 s, and other writers wait.
"""
AGE = "age of the history"
"""Name of the fact that stores the age of the history, in milliseconds."""

_age = sa.select(facts.c.value).where(facts.c.name == AGE)
_hidden = subjects.alias("hidden")
_needed_by_hidden = (
    sa.exists()
    .where(
        _hidden.c.hidden_for == subjects.c.name, subjects.c.subject_id == operations.c.subject_id
    )
    .correlate(operations)
)
_published = sa.not_(
    sa.exists()
    .where(
        operations.c.operation_id == publications.c.operation_id,
        operations.c.state != OperationState.DONE,
    )
    .correlate(publications)
)
_FINISHED: tuple[tuple[sa.Table, sa.ColumnElement[bool]], ...] = (
    (deletions, sa.true()),
    (publications, _published),
    (operations, operations.c.state == OperationState.DONE),
)
"""Each table, with the condition for the rows of finished work."""


def count_age(connection: Connection, elapsed_ms: int) -> int:
    """Add the time since the last check to the age of the history and return the age in
    milliseconds.
    """
    age_ms = int(connection.execute(_age).scalar_one_or_none() or 0) + elapsed_ms
    insert_or_replace(connection, facts, {"name": AGE, "value": str(age_ms)})
    return age_ms


def start_row_ages(connection: Connection, age_ms: int) -> bool:
    """Start the ages of a batch of finished rows. Return True if more remain."""
    has_more = False
    for table, is_finished in _FINISHED:
        batch = _select_batch(table, sa.and_(table.c.ended_at.is_(None), is_finished))
        start_ages = sa.update(table).where(_key_columns(table).in_(batch)).values(ended_at=age_ms)
        has_more |= connection.execute(start_ages).rowcount == ROWS_AT_ONCE
    return has_more


def remove_old_rows(connection: Connection, before_ms: int) -> bool:
    """Remove a batch of rows that were found before the history had the age `before_ms`. Return
    True if more remain.
    """
    has_more = False
    for table, is_finished in _FINISHED:
        is_old = sa.and_(table.c.ended_at < before_ms, is_finished)
        if table is operations:
            is_old = sa.and_(is_old, sa.not_(_needed_by_hidden))
        keys = [tuple(row) for row in connection.execute(_select_batch(table, is_old))]
        if not keys:
            continue
        if table is operations:
            operation_ids = [operation_id for (operation_id,) in keys]
            connection.execute(sa.delete(steps).where(steps.c.operation_id.in_(operation_ids)))
        columns = table.primary_key.columns
        has_key = (column == sa.bindparam(f"of_{column.name}") for column in columns)
        is_still_old = sa.and_(table.c.ended_at < before_ms, *has_key)
        values = [
            {f"of_{column.name}": part for column, part in zip(columns, key, strict=True)}
            for key in keys
        ]
        connection.execute(sa.delete(table).where(is_still_old), values)
        has_more |= len(keys) == ROWS_AT_ONCE
    return has_more


def _key_columns(table: sa.Table) -> sa.ColumnElement[Any]:
    columns = list(table.primary_key.columns)
    return columns[0] if len(columns) == 1 else sa.tuple_(*columns)


def _select_batch(table: sa.Table, condition: sa.ColumnElement[bool]) -> sa.Select[tuple[Any, ...]]:
    return sa.select(*table.primary_key.columns).where(condition).limit(ROWS_AT_ONCE)


DUTY = "history"
CHECK_INTERVAL_MS = 600_000


def _loop_ms() -> int:
    """Return the event loop's time in milliseconds; unlike a wall clock, it cannot be set."""
    return int(asyncio.get_running_loop().time() * 1000)


class HistoryExpirer:
    """
    Removes rows of the history that are older than `history_retention_ms`.

    Args:
        holder: this metaserver's unique id.
        now_ms: returns a monotonic time in milliseconds.
    """

    def __init__(
        self,
        database: Database,
        settings: MetaserverSettings,
        *,
        holder: str,
        now_ms: Callable[[], int] = _loop_ms,
    ) -> None:
        self._database = database
        self._retention_ms = settings.history_retention_ms
        self._interval_ms = min(CHECK_INTERVAL_MS, settings.history_retention_ms // 10)
        self._lease_ms = 2 * (self._interval_ms + settings.expire_ms)
        self._holder = holder
        self._now_ms = now_ms
        self._next_check_at_ms = 0
        self._last_counted_ms: int | None = None
        """Time up to which this metaserver has counted the age; None if another metaserver may have
        counted since then.
        """

    async def run_once(self) -> None:
        """Check the history, unless the next check is not due yet. Raises StorageError."""
        now_ms = self._now_ms()
        if now_ms < self._next_check_at_ms:
            return
        self._next_check_at_ms = now_ms + self._interval_ms
        has_duty = await self._database.write(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        )
        if not has_duty:
            self._last_counted_ms = None
            return
        since_ms = now_ms if self._last_counted_ms is None else self._last_counted_ms
        # After a longer pause, another metaserver may have counted the age and released the duty.
        elapsed_ms = min(now_ms - since_ms, self._lease_ms)
        self._last_counted_ms = None
        age_ms = await self._database.write(count_age, elapsed_ms)
        self._last_counted_ms = now_ms
        while await self._database.write(start_row_ages, age_ms):
            pass
        while await self._database.write(remove_old_rows, age_ms - self._retention_ms):
            pass
