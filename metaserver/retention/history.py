"""The history of the cluster, and its removal after `history_retention_ms`: deletions, publications
and done operations.

Invariants
    The age of a row starts when a check first finds it. It is counted in the time that passes
    between checks of one metaserver, so that it does not rise while none runs, and no jump of a
    clock makes a row old.
    Rows of unfinished work stay: a deletion is over when every broker has done its part, or its
    loss is accepted.
    A canceled operation stays with its subject, because its steps show which partitions were never
    opened.
    A publication stays while its operation is unfinished, and with a canceled one, so that a repeat
    gets the outcome.
    A row whose age starts again after it was chosen is not removed.
    The operations of a subject stay while a hidden subject is made for it, because the publication
    needs those of its cut.

deleted, published, done ─▶ found by a check ─▶ old enough: removed, a portion in each transaction
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
"""Most rows of each table that one transaction changes: a statement on PostgreSQL has 10 s, and
other writers wait.
"""
AGE = "age of the history"
"""Name of the fact that has the age of the history, in milliseconds."""

_age = sa.select(facts.c.value).where(facts.c.name == AGE)
_hidden = subjects.alias("hidden")
_awaited = (
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
_OVER: tuple[tuple[sa.Table, sa.ColumnElement[bool]], ...] = (
    (deletions, sa.true()),
    (publications, _published),
    (operations, operations.c.state == OperationState.DONE),
)
"""Each table, with the condition for rows that are over."""


def count_age(connection: Connection, elapsed_ms: int) -> int:
    """Add the time since the last check, and return the age of the history in milliseconds."""
    age_ms = int(connection.execute(_age).scalar_one_or_none() or 0) + elapsed_ms
    insert_or_replace(connection, facts, {"name": AGE, "value": str(age_ms)})
    return age_ms


def note_ended(connection: Connection, age_ms: int) -> bool:
    """Start the ages of some rows, and return whether more are left."""
    more = False
    for table, over in _OVER:
        some = _some(table, sa.and_(table.c.ended_at.is_(None), over))
        ended = sa.update(table).where(_key(table).in_(some)).values(ended_at=age_ms)
        more |= connection.execute(ended).rowcount == ROWS_AT_ONCE
    return more


def remove_ended(connection: Connection, before_ms: int) -> bool:
    """Remove some rows that ended before this age, and return whether more are left."""
    more = False
    for table, over in _OVER:
        old = sa.and_(table.c.ended_at < before_ms, over)
        if table is operations:
            old = sa.and_(old, sa.not_(_awaited))
        keys = [tuple(row) for row in connection.execute(_some(table, old))]
        if not keys:
            continue
        if table is operations:
            done = [operation_id for (operation_id,) in keys]
            connection.execute(sa.delete(steps).where(steps.c.operation_id.in_(done)))
        columns = table.primary_key.columns
        these = (column == sa.bindparam(f"of_{column.name}") for column in columns)
        here = sa.and_(table.c.ended_at < before_ms, *these)
        values = [
            {f"of_{column.name}": part for column, part in zip(columns, key, strict=True)}
            for key in keys
        ]
        connection.execute(sa.delete(table).where(here), values)
        more |= len(keys) == ROWS_AT_ONCE
    return more


def _key(table: sa.Table) -> sa.ColumnElement[Any]:
    columns = list(table.primary_key.columns)
    return columns[0] if len(columns) == 1 else sa.tuple_(*columns)


def _some(table: sa.Table, chosen: sa.ColumnElement[bool]) -> sa.Select[tuple[Any, ...]]:
    return sa.select(*table.primary_key.columns).where(chosen).limit(ROWS_AT_ONCE)


DUTY = "history"
LOOK_MS = 600_000


def _loop_ms() -> int:
    """Return the event loop's time in milliseconds, which unlike a calendar cannot be set."""
    return int(asyncio.get_running_loop().time() * 1000)


class PastExpirer:
    """
    Removes rows of the history that are older than `history_retention_ms`.

    Args:
        holder: id of this process, which no other metaserver has.
        now_ms: returns a time that only rises while this process runs.
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
        self._look_ms = min(LOOK_MS, settings.history_retention_ms // 10)
        self._lease_ms = 2 * (self._look_ms + settings.expire_ms)
        self._holder = holder
        self._now_ms = now_ms
        self._next_ms = 0
        self._counted_ms: int | None = None
        """Time up to which this metaserver has counted; None: another one may have counted
        since.
        """

    async def run_once(self) -> None:
        """Check the history, unless that was done a moment ago. Raises StorageError."""
        now_ms = self._now_ms()
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self._look_ms
        mine = await self._database.write(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        )
        if not mine:
            self._counted_ms = None
            return
        since_ms = now_ms if self._counted_ms is None else self._counted_ms
        # After a longer pause another metaserver may have counted, and returned the duty.
        elapsed_ms = min(now_ms - since_ms, self._lease_ms)
        self._counted_ms = None
        age_ms = await self._database.write(count_age, elapsed_ms)
        self._counted_ms = now_ms
        while await self._database.write(note_ended, age_ms):
            pass
        while await self._database.write(remove_ended, age_ms - self._retention_ms):
            pass
