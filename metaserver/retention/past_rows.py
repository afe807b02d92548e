"""Rows of the history, with their ages: deletions, publications and done operations. SQL,
synchronous.

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
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.operations import OperationState
from ..sql.dialect import insert_or_replace
from ..sql.past import deletions, publications
from ..sql.schema import facts, operations, steps, subjects

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
