"""Reads and writes the rows of messages and of batches. I/O: SQL.

All functions but `insert_of` and `any_unsettled` must be called in a transaction that has checked
the token of the lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.limits import LOGICAL_PARTITIONS
from .assignment import SubjectKey, SubjectRange
from .batches import OutboxBatch, OutboxRow, SendSession
from .lease import TokenPassedError
from .tables import FAILED, HALTED, REFUSED, WAITING, OutboxTables

FAILURE_CHARS_MAX = 500
IDS_AT_ONCE = 5_000
"""Number of ids in one statement, each a parameter; SQLite takes 32,766."""
SUBJECTS_MAX = 10_000
"""Number of subjects in one statement, each a parameter; SQLite and PostgreSQL take some 32,000."""
RANGES_MAX = 5_000
"""Number of ranges in one statement, each 50 to 70 bytes of text; SQLite takes a million bytes."""


def insert_of(tables: OutboxTables) -> sa.Insert:
    """Return the statement that adds a row."""
    return sa.insert(tables.rows)


def any_unsettled(connection: Connection, tables: OutboxTables) -> bool:
    """Return True if a row waits or is recorded."""
    return _any(connection, tables, tables.rows.c.batch_id >= WAITING)


def any_waiting(connection: Connection, tables: OutboxTables) -> bool:
    """Return True if a row waits."""
    return _any(connection, tables, tables.rows.c.batch_id == WAITING)


def _any(connection: Connection, tables: OutboxTables, wanted: sa.ColumnElement[bool]) -> bool:
    return (
        connection.execute(sa.select(tables.rows.c.id).where(wanted).limit(1)).first() is not None
    )


def failed_keys(connection: Connection, tables: OutboxTables) -> set[SubjectKey]:
    """Return the keys that have a failed row."""
    rows = tables.rows.c
    keys = connection.execute(
        sa.select(rows.subject, rows.order_key).where(rows.batch_id == FAILED).distinct()
    )
    return {(subject, bytes(key)) for subject, key in keys if key}


def waiting(
    connection: Connection,
    tables: OutboxTables,
    closed: Sequence[SubjectRange],
    *,
    rows_max: int,
    bytes_max: int,
) -> tuple[list[OutboxRow], bool]:
    """
    Return waiting rows in the order of their ids, and whether there are more.

    Each call begins at the lowest id, so that a row with a low id that was committed late is found
    before newer rows.

    Args:
        closed: ranges whose rows are skipped; the ranges of one subject follow each other. If
            there are more than a statement has room for, the result has rows of some of these
            ranges too, and rows of open ranges after them.
        bytes_max: limit for keys, values and properties together; the first row is read in any
            case.
    """
    skipped = ClosedRows(closed)
    rows = tables.rows.c
    wanted = sa.and_(rows.batch_id == WAITING, skipped.condition(tables))
    if not skipped.all_skipped:
        # Each page sees the rows that were committed before it was read. A row above the highest
        # id of now may be newer than a row of an earlier page that was committed in the meantime.
        newest = sa.select(sa.func.max(rows.id)).where(rows.batch_id == WAITING)
        wanted = sa.and_(wanted, rows.id <= (connection.execute(newest).scalar() or 0))
    after = 0
    while True:
        some = sa.and_(wanted, rows.id > after)
        page, more = _first_rows(
            connection, tables, some, rows_max, bytes_max, options=skipped.execution_options
        )
        if skipped.all_skipped or not more or skipped.has_open(page):
            return page, more
        after = page[-1].id


def _first_rows(
    connection: Connection,
    tables: OutboxTables,
    wanted: sa.ColumnElement[bool],
    rows_max: int,
    bytes_max: int,
    *,
    options: dict[str, Any],
) -> tuple[list[OutboxRow], bool]:
    """Return the first rows by their ids, and whether there are more."""
    rows = tables.rows.c
    size = sa.func.length(rows.order_key) + sa.func.length(rows.value)
    first = (
        sa.select(rows.id, (size + sa.func.length(rows.properties)).label("size"))
        .where(wanted)
        .order_by(rows.id)
        .limit(rows_max)
    )
    part = first.subquery()
    last_id, count, total = connection.execute(
        sa.select(sa.func.max(part.c.id), sa.func.count(), sa.func.sum(part.c.size)),
        execution_options=options,
    ).one()
    if not count:
        return [], False
    more = count == rows_max or total > bytes_max
    if total > bytes_max:
        sizes = connection.execute(first, execution_options=options).all()
        totals = accumulate(row.size for row in sizes)
        last_id = sizes[max(1, sum(1 for total in totals if total <= bytes_max)) - 1].id
    wanted = sa.and_(wanted, rows.id <= last_id)
    return _read(connection, tables, wanted, options), more


class ClosedRows:
    """
    Ranges whose rows wait: a statement skips them, as far as it has room for them.

    Subjects whose rows all wait are in one list, which a database looks up once a row. Subjects of
    which only some partitions wait are the cases of one CASE: a chain of ANDs would be as deep as
    it is long, and SQLite refuses expressions that are deeper than 1,000.
    """

    def __init__(self, closed: Iterable[SubjectRange]) -> None:
        self._whole: list[str] = []
        """Subjects that the statement skips."""
        self._parts: dict[str, list[SubjectRange]] = {}
        """Ranges that the statement skips."""
        self._left: dict[str, list[SubjectRange]] = {}
        """Ranges that the statement has no room for, and does not skip."""
        ranges_left = RANGES_MAX
        for subject, group in groupby(closed, key=lambda each: each.subject):
            ranges = list(group)
            if len(self._whole) + len(self._parts) >= SUBJECTS_MAX:
                self._left[subject] = ranges
            elif _is_whole(ranges):
                self._whole.append(subject)
            elif len(ranges) <= ranges_left:
                self._parts[subject] = ranges
                ranges_left -= len(ranges)
            else:
                self._left[subject] = ranges

    @property
    def execution_options(self) -> dict[str, Any]:
        """The options for a statement with `condition`: the ranges are in its text, so the
        statement differs each time and must not fill a cache.
        """
        return {"compiled_cache": None} if self._parts else {}

    @property
    def all_skipped(self) -> bool:
        """True if a statement with `condition` selects no row of a closed range."""
        return not self._left

    def condition(self, tables: OutboxTables) -> sa.ColumnElement[bool]:
        """Return the condition of the rows that have to be read."""
        rows = tables.rows.c
        conditions: list[sa.ColumnElement[bool]] = []
        if self._whole:
            conditions.append(rows.subject.not_in(self._whole))
        if self._parts:
            cases = {
                subject: sa.case((_in_any(ranges), 0), else_=1)
                for subject, ranges in self._parts.items()
            }
            conditions.append(sa.case(cases, value=rows.subject, else_=1) == 1)
        return sa.and_(sa.true(), *conditions)

    def has_open(self, selected: Iterable[OutboxRow]) -> bool:
        """Return True if one of the selected rows is in no closed range."""
        return any(
            not any(
                each.start <= row.logical < each.end for each in self._left.get(row.subject, ())
            )
            for row in selected
        )


def _is_whole(ranges: Sequence[SubjectRange]) -> bool:
    return ranges[0].start == 0 and ranges[0].end == LOGICAL_PARTITIONS


def _in_any(ranges: Iterable[SubjectRange]) -> sa.ColumnElement[bool]:
    """Return the condition that a logical partition is in these ranges; it is text, because
    hundreds of parameters cost more than the query itself.
    """
    text = " OR ".join(f"logical BETWEEN {each.start:d} AND {each.end - 1:d}" for each in ranges)
    return sa.literal_column(f"({text})", sa.Boolean)


def _read(
    connection: Connection,
    tables: OutboxTables,
    wanted: sa.ColumnElement[bool],
    options: dict[str, Any] | None = None,
) -> list[OutboxRow]:
    rows = tables.rows.c
    selected = connection.execute(
        sa.select(
            rows.id,
            rows.subject,
            rows.logical,
            rows.order_key,
            rows.value,
            rows.properties,
            rows.added_at_ns,
        )
        .where(wanted)
        .order_by(rows.id),
        execution_options=options,
    )
    return [OutboxRow(*row) for row in selected]


def recorded(connection: Connection, tables: OutboxTables) -> list[OutboxBatch]:
    """Return all recorded batches with their rows, in the order in which each partition gets
    them.
    """
    table = tables.batches
    batches = connection.execute(
        sa.select(table).order_by(table.c.partition_id, table.c.sequence)
    ).all()
    if not batches:
        return []
    rows = {
        batch.id: _read(connection, tables, tables.rows.c.batch_id == batch.id) for batch in batches
    }
    return [
        OutboxBatch(
            batch.subject,
            batch.partition_id,
            SendSession(batch.producer_id, batch.epoch),
            batch.sequence,
            rows[batch.id],
            doubtful=True,
        )
        for batch in batches
        if rows[batch.id]
    ]


def record(connection: Connection, tables: OutboxTables, batches: Sequence[OutboxBatch]) -> None:
    """
    Write down which rows are in which batch, before any of them is sent.

    Raises:
        TokenPassedError: a row has vanished; another program removed it.
    """
    if not batches:
        return
    connection.execute(
        sa.insert(tables.batches),
        [
            {
                "id": batch.id,
                "subject": batch.subject,
                "partition_id": batch.partition_id,
                "producer_id": batch.session.producer_id,
                "epoch": batch.session.epoch,
                "sequence": batch.sequence,
            }
            for batch in batches
        ],
    )
    for batch in batches:
        ids = [row.id for row in batch.rows]
        if _set_batch(connection, tables, ids, batch.id) != len(ids):
            raise TokenPassedError


def halt(connection: Connection, tables: OutboxTables, ids: Sequence[int]) -> None:
    """Keep rows from being read until the failed rows of their keys are redriven or purged."""
    _set_batch(connection, tables, ids, HALTED)


def refuse(connection: Connection, tables: OutboxTables, refused: Mapping[int, str]) -> None:
    """Keep rows from being sent; newer rows of their keys are sent."""
    rows = tables.rows
    for row_id, why in refused.items():
        connection.execute(
            sa.update(rows)
            .where(rows.c.id == row_id)
            .values(batch_id=REFUSED, failure=why[:FAILURE_CHARS_MAX])
        )


def _set_batch(
    connection: Connection, tables: OutboxTables, ids: Sequence[int], batch_id: int
) -> int:
    rows = tables.rows.c
    changed = 0
    for first in range(0, len(ids), IDS_AT_ONCE):
        some = ids[first : first + IDS_AT_ONCE]
        changed += connection.execute(
            sa.update(tables.rows).where(rows.id.in_(some)).values(batch_id=batch_id)
        ).rowcount
    return changed


def remove(connection: Connection, tables: OutboxTables, batches: Iterable[OutboxBatch]) -> None:
    """Delete batches that are stored, and their rows."""
    for batch in batches:
        connection.execute(sa.delete(tables.rows).where(tables.rows.c.batch_id == batch.id))
        _forget(connection, tables, batch)


def unassign(connection: Connection, tables: OutboxTables, batches: Iterable[OutboxBatch]) -> None:
    """Let the rows of batches wait again."""
    for batch in batches:
        _leave(connection, tables, batch, {"batch_id": WAITING})


def fail(connection: Connection, tables: OutboxTables, failures: Mapping[OutboxBatch, str]) -> None:
    """Mark the rows of batches as failed; their keys send nothing more until `redrive` or
    `purge`.
    """
    for batch, why in failures.items():
        _leave(connection, tables, batch, {"batch_id": FAILED, "failure": why[:FAILURE_CHARS_MAX]})


def _leave(
    connection: Connection, tables: OutboxTables, batch: OutboxBatch, values: dict[str, Any]
) -> None:
    rows = tables.rows
    connection.execute(sa.update(rows).where(rows.c.batch_id == batch.id).values(values))
    _forget(connection, tables, batch)


def _forget(connection: Connection, tables: OutboxTables, batch: OutboxBatch) -> None:
    connection.execute(sa.delete(tables.batches).where(tables.batches.c.id == batch.id))
