"""Reads and writes the rows of messages and batches. I/O: SQL.

All functions except `insert_statement` and `has_unsettled_rows` must be called in a transaction
that has checked the token of the lease.
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
from .lease import TokenChangedError
from .tables import FAILED, HALTED, REFUSED, WAITING, OutboxTables

FAILURE_CHARS_MAX = 500
IDS_AT_ONCE = 5_000
"""The maximum number of ids in a statement. Each id is a parameter, and SQLite allows 32,766."""
SUBJECTS_MAX = 10_000
"""The maximum number of subjects in a statement. Each subject is a parameter, and SQLite and
PostgreSQL allow about 32,000.
"""
RANGES_MAX = 5_000
"""The maximum number of ranges in a statement. Each range takes 50 to 70 bytes of text, and SQLite
allows a million bytes.
"""


def insert_statement(tables: OutboxTables) -> sa.Insert:
    """Return the statement that adds a row."""
    return sa.insert(tables.rows)


def has_unsettled_rows(connection: Connection, tables: OutboxTables) -> bool:
    """Return True if a row is waiting or recorded."""
    return _exists(connection, tables, tables.rows.c.batch_id >= WAITING)


def has_waiting_rows(connection: Connection, tables: OutboxTables) -> bool:
    """Return True if a row is waiting."""
    return _exists(connection, tables, tables.rows.c.batch_id == WAITING)


def _exists(
    connection: Connection, tables: OutboxTables, condition: sa.ColumnElement[bool]
) -> bool:
    return (
        connection.execute(sa.select(tables.rows.c.id).where(condition).limit(1)).first()
        is not None
    )


def read_failed_keys(connection: Connection, tables: OutboxTables) -> set[SubjectKey]:
    """Return the keys that have a failed row."""
    rows = tables.rows.c
    keys = connection.execute(
        sa.select(rows.subject, rows.order_key).where(rows.batch_id == FAILED).distinct()
    )
    return {(subject, bytes(key)) for subject, key in keys if key}


def read_waiting(
    connection: Connection,
    tables: OutboxTables,
    closed_ranges: Sequence[SubjectRange],
    *,
    rows_max: int,
    bytes_max: int,
) -> tuple[list[OutboxRow], bool]:
    """
    Return waiting rows in the order of their ids, and whether there are more.

    Each call starts at the lowest id, so that rows with low ids that were committed late are found
    before newer rows.

    Args:
        closed_ranges: ranges whose rows are skipped, grouped by subject. If a statement cannot hold
            them all, the result includes rows of some of these ranges.
        bytes_max: the limit for keys, values and properties in total, in bytes; the first row is
            always read.
    """
    skipped = SkippedRanges(closed_ranges)
    rows = tables.rows.c
    condition = sa.and_(rows.batch_id == WAITING, skipped.condition(tables))
    if not skipped.all_skipped:
        # Each page sees the commits up to its own read. A row above the current highest id may be
        # newer than a row that was committed since then, with an id in an earlier page.
        newest = sa.select(sa.func.max(rows.id)).where(rows.batch_id == WAITING)
        condition = sa.and_(condition, rows.id <= (connection.execute(newest).scalar() or 0))
    after_id = 0
    while True:
        page_condition = sa.and_(condition, rows.id > after_id)
        page, more = _read_page(
            connection,
            tables,
            page_condition,
            rows_max,
            bytes_max,
            options=skipped.execution_options,
        )
        if skipped.all_skipped or not more or skipped.has_open(page):
            return page, more
        after_id = page[-1].id


def _read_page(
    connection: Connection,
    tables: OutboxTables,
    condition: sa.ColumnElement[bool],
    rows_max: int,
    bytes_max: int,
    *,
    options: dict[str, Any],
) -> tuple[list[OutboxRow], bool]:
    """Return the rows with the lowest ids, and whether there are more."""
    rows = tables.rows.c
    size = sa.func.length(rows.order_key) + sa.func.length(rows.value)
    sizes_query = (
        sa.select(rows.id, (size + sa.func.length(rows.properties)).label("size"))
        .where(condition)
        .order_by(rows.id)
        .limit(rows_max)
    )
    page = sizes_query.subquery()
    last_id, count, total = connection.execute(
        sa.select(sa.func.max(page.c.id), sa.func.count(), sa.func.sum(page.c.size)),
        execution_options=options,
    ).one()
    if not count:
        return [], False
    more = count == rows_max or total > bytes_max
    if total > bytes_max:
        sizes = connection.execute(sizes_query, execution_options=options).all()
        totals = accumulate(row.size for row in sizes)
        last_id = sizes[max(1, sum(1 for total in totals if total <= bytes_max)) - 1].id
    condition = sa.and_(condition, rows.id <= last_id)
    return _read_rows(connection, tables, condition, options), more


class SkippedRanges:
    """
    Ranges of waiting rows, of which a statement skips as many as it can hold.

    Subjects whose rows are all waiting are in one list, which the database searches once for each
    row. Other subjects are branches of a CASE expression, because a chain of ANDs would be too
    deep: SQLite refuses expressions deeper than 1,000.
    """

    def __init__(self, closed_ranges: Iterable[SubjectRange]) -> None:
        self._skipped_subjects: list[str] = []
        """Subjects that the statement skips."""
        self._skipped_ranges: dict[str, list[SubjectRange]] = {}
        """Ranges that the statement skips."""
        self._unskipped: dict[str, list[SubjectRange]] = {}
        """Ranges that the statement does not skip, because it cannot hold more."""
        ranges_remaining = RANGES_MAX
        for subject, group in groupby(closed_ranges, key=lambda each: each.subject):
            ranges = list(group)
            if len(self._skipped_subjects) + len(self._skipped_ranges) >= SUBJECTS_MAX:
                self._unskipped[subject] = ranges
            elif _is_whole(ranges):
                self._skipped_subjects.append(subject)
            elif len(ranges) <= ranges_remaining:
                self._skipped_ranges[subject] = ranges
                ranges_remaining -= len(ranges)
            else:
                self._unskipped[subject] = ranges

    @property
    def execution_options(self) -> dict[str, Any]:
        """The options for a statement with `condition`. The statement is not cached if its text
        contains ranges, because these differ each time.
        """
        return {"compiled_cache": None} if self._skipped_ranges else {}

    @property
    def all_skipped(self) -> bool:
        """True if a statement with `condition` selects no rows of closed ranges."""
        return not self._unskipped

    def condition(self, tables: OutboxTables) -> sa.ColumnElement[bool]:
        """Return the SQL condition that selects the rows to read."""
        rows = tables.rows.c
        conditions: list[sa.ColumnElement[bool]] = []
        if self._skipped_subjects:
            conditions.append(rows.subject.not_in(self._skipped_subjects))
        if self._skipped_ranges:
            cases = {
                subject: sa.case((_in_any(ranges), 0), else_=1)
                for subject, ranges in self._skipped_ranges.items()
            }
            conditions.append(sa.case(cases, value=rows.subject, else_=1) == 1)
        return sa.and_(sa.true(), *conditions)

    def has_open(self, rows: Iterable[OutboxRow]) -> bool:
        """Return True if any of the rows is outside all closed ranges."""
        return any(
            not any(
                each.start <= row.logical < each.end
                for each in self._unskipped.get(row.subject, ())
            )
            for row in rows
        )


def _is_whole(ranges: Sequence[SubjectRange]) -> bool:
    return ranges[0].start == 0 and ranges[0].end == LOGICAL_PARTITIONS


def _in_any(ranges: Iterable[SubjectRange]) -> sa.ColumnElement[bool]:
    """Return the SQL condition that selects rows in these ranges. It is literal text, because
    hundreds of parameters would cost more than the query.
    """
    text = " OR ".join(f"logical BETWEEN {each.start:d} AND {each.end - 1:d}" for each in ranges)
    return sa.literal_column(f"({text})", sa.Boolean)


def _read_rows(
    connection: Connection,
    tables: OutboxTables,
    condition: sa.ColumnElement[bool],
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
        .where(condition)
        .order_by(rows.id),
        execution_options=options,
    )
    return [OutboxRow(*row) for row in selected]


def read_recorded(connection: Connection, tables: OutboxTables) -> list[OutboxBatch]:
    """Return all recorded batches with their rows, in sending order for each partition."""
    table = tables.batches
    batches = connection.execute(
        sa.select(table).order_by(table.c.partition_id, table.c.sequence)
    ).all()
    if not batches:
        return []
    rows = {
        batch.id: _read_rows(connection, tables, tables.rows.c.batch_id == batch.id)
        for batch in batches
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


def record_batches(
    connection: Connection, tables: OutboxTables, batches: Sequence[OutboxBatch]
) -> None:
    """
    Record which rows are in which batch, before any of them is sent.

    Raises:
        TokenChangedError: another program has removed a row.
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
            raise TokenChangedError


def halt_rows(connection: Connection, tables: OutboxTables, ids: Sequence[int]) -> None:
    """Mark rows as halted until the failed rows of their keys are redriven or purged."""
    _set_batch(connection, tables, ids, HALTED)


def refuse_rows(connection: Connection, tables: OutboxTables, reasons: Mapping[int, str]) -> None:
    """Mark rows as refused, with the reasons; newer rows of their keys are sent."""
    rows = tables.rows
    for row_id, reason in reasons.items():
        connection.execute(
            sa.update(rows)
            .where(rows.c.id == row_id)
            .values(batch_id=REFUSED, failure=reason[:FAILURE_CHARS_MAX])
        )


def _set_batch(
    connection: Connection, tables: OutboxTables, ids: Sequence[int], batch_id: int
) -> int:
    rows = tables.rows.c
    changed_count = 0
    for start in range(0, len(ids), IDS_AT_ONCE):
        chunk = ids[start : start + IDS_AT_ONCE]
        changed_count += connection.execute(
            sa.update(tables.rows).where(rows.id.in_(chunk)).values(batch_id=batch_id)
        ).rowcount
    return changed_count


def delete_stored(
    connection: Connection, tables: OutboxTables, batches: Iterable[OutboxBatch]
) -> None:
    """Delete stored batches and their rows."""
    for batch in batches:
        connection.execute(sa.delete(tables.rows).where(tables.rows.c.batch_id == batch.id))
        _delete_batch(connection, tables, batch)


def requeue_batches(
    connection: Connection, tables: OutboxTables, batches: Iterable[OutboxBatch]
) -> None:
    """Delete batches, and let their rows wait again."""
    for batch in batches:
        _update_batch_rows(connection, tables, batch, {"batch_id": WAITING})


def fail_batches(
    connection: Connection, tables: OutboxTables, reasons: Mapping[OutboxBatch, str]
) -> None:
    """Mark the rows of batches as failed; no rows of their keys are sent until they are
    redriven or purged.
    """
    for batch, reason in reasons.items():
        _update_batch_rows(
            connection, tables, batch, {"batch_id": FAILED, "failure": reason[:FAILURE_CHARS_MAX]}
        )


def _update_batch_rows(
    connection: Connection, tables: OutboxTables, batch: OutboxBatch, values: dict[str, Any]
) -> None:
    rows = tables.rows
    connection.execute(sa.update(rows).where(rows.c.batch_id == batch.id).values(values))
    _delete_batch(connection, tables, batch)


def _delete_batch(connection: Connection, tables: OutboxTables, batch: OutboxBatch) -> None:
    connection.execute(sa.delete(tables.batches).where(tables.batches.c.id == batch.id))
