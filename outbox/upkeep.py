"""What operators ask of an outbox's tables: how many rows wait, and what becomes of failed ones.  I/O: SQL."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.text import LISTED_MAX
from .lease import pass_token
from .tables import FAILED, HALTED, REFUSED, WAITING, OutboxTables, database_ms

RECORDED = 1
"""Of rows in any batch, where rows are counted."""
COUNTED_MAX = 10_000
"""Rows that gauges count."""


class OutboxGauges(msgspec.Struct, frozen=True, kw_only=True):
    """How much is not sent, for a program that asks every few seconds."""

    rows: int
    """All rows; above 10,000 at most as many: by their ids, of which rolled back and sent rows have some."""
    counted: bool
    """`rows` is exact."""
    failed: int
    """Rows that no broker can tell of, counted up to 10,000."""
    refused: int = 0
    """Rows over the limit of their subject, counted up to 10,000."""
    oldest_age_ms: int
    """Of the row with the lowest id; 0 if there is none."""


class SubjectRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one subject."""

    subject: str
    waiting: int = 0
    recorded: int = 0
    """In batches that are sent, or will be sent again."""
    failed: int = 0
    """No broker can tell whether they are stored."""
    halted: int = 0
    """Behind a failed row of their key."""
    refused: int = 0
    """Over the limit of their subject: not sent, unless they are redriven."""
    oldest_age_ms: int = 0


class FailedRow(msgspec.Struct, frozen=True):
    """A row that may be stored, and no broker can tell; or one that was refused, and is not."""

    id: int
    subject: str
    key: bytes
    failure: str


class OutboxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the tables say."""

    subjects: tuple[SubjectRows, ...]
    failed_rows: tuple[FailedRow, ...]
    """The first of them."""
    owner: str
    """The process that sends; empty while no process needs to."""
    lease_left_ms: int
    """0 if the lease is free, or its owner is silent."""
    token: int

    @property
    def rows(self) -> int:
        """All rows."""
        return sum(
            each.waiting + each.recorded + each.failed + each.halted + each.refused
            for each in self.subjects
        )

    @property
    def failed(self) -> int:
        """Rows that no broker can tell of."""
        return sum(each.failed for each in self.subjects)

    @property
    def refused(self) -> int:
        """Rows over the limit of their subject."""
        return sum(each.refused for each in self.subjects)

    @property
    def oldest_age_ms(self) -> int:
        """Of the oldest row; 0 if there is none."""
        return max((each.oldest_age_ms for each in self.subjects), default=0)


def read_gauges(connection: Connection, tables: OutboxTables, *, now_ns: int) -> OutboxGauges:
    """
    Look at no more than some thousand entries of an index, however many rows there are.

    Args:
        now_ns: of the calendar, for the age.

    Raises:
        OutboxMissingError, OutboxOlderError, OutboxNewerError
    """
    tables.check(connection)
    rows = tables.rows.c
    oldest = connection.execute(
        sa.select(rows.id, rows.added_at_ns).order_by(rows.id).limit(1)
    ).first()
    if oldest is None:
        return OutboxGauges(rows=0, counted=True, failed=0, oldest_age_ms=0)
    count = _count(connection, sa.select(rows.id).order_by(rows.id).limit(COUNTED_MAX + 1))
    counted = count <= COUNTED_MAX
    if not counted:
        # Rows that were counted may be sent between two statements, all of them too.
        newest_id = connection.execute(sa.select(sa.func.max(rows.id))).scalar() or 0
        count = max(count, newest_id - oldest.id + 1)
    failed, refused = (
        sa.select(rows.id).where(rows.batch_id == state).limit(COUNTED_MAX)
        for state in (FAILED, REFUSED)
    )
    return OutboxGauges(
        rows=count,
        counted=counted,
        failed=_count(connection, failed),
        refused=_count(connection, refused),
        oldest_age_ms=max(0, now_ns - oldest.added_at_ns) // 1_000_000,
    )


def _count(connection: Connection, some: sa.Select[tuple[int]]) -> int:
    counted: int = connection.execute(
        sa.select(sa.func.count()).select_from(some.subquery())
    ).scalar_one()
    return counted


def read_status(
    connection: Connection, tables: OutboxTables, *, now_ns: int, subject: str | None = None
) -> OutboxStatus:
    """
    Count rows.

    Args:
        now_ns: of the calendar, for ages.
        subject: only its rows.

    Raises:
        OutboxMissingError, OutboxOlderError, OutboxNewerError
    """
    tables.check(connection)
    rows = tables.rows.c
    state = sa.case((rows.batch_id > WAITING, RECORDED), else_=rows.batch_id)
    counts = connection.execute(
        sa.select(rows.subject, state, sa.func.count(), sa.func.min(rows.added_at_ns))
        .where(_of(tables, subject))
        .group_by(rows.subject, state)
    ).all()
    failed = connection.execute(
        sa.select(rows.id, rows.subject, rows.order_key, rows.failure)
        .where(rows.batch_id.in_([FAILED, REFUSED]), _of(tables, subject))
        .order_by(rows.id)
        .limit(LISTED_MAX)
    )
    lease = tables.lease.c
    owner, until_ms, now_ms, token = connection.execute(
        sa.select(lease.owner, lease.until_ms, database_ms(), lease.token)
    ).one()
    return OutboxStatus(
        subjects=tuple(
            _subject_rows(name, [row[1:] for row in counts if row[0] == name], now_ns)
            for name in sorted({row[0] for row in counts})
        ),
        failed_rows=tuple(
            FailedRow(row_id, name, bytes(key), why or "") for row_id, name, key, why in failed
        ),
        owner=owner if until_ms else "",
        lease_left_ms=max(0, until_ms - now_ms),
        token=token,
    )


def _subject_rows(subject: str, counts: list[tuple[int, int, int]], now_ns: int) -> SubjectRows:
    by_state = {state: count for state, count, _ in counts}
    oldest_ns = min(added_ns for _, _, added_ns in counts)
    return SubjectRows(
        subject=subject,
        waiting=by_state.get(WAITING, 0),
        recorded=by_state.get(RECORDED, 0),
        failed=by_state.get(FAILED, 0),
        halted=by_state.get(HALTED, 0),
        refused=by_state.get(REFUSED, 0),
        oldest_age_ms=max(0, now_ns - oldest_ns) // 1_000_000,
    )


def redrive(connection: Connection, tables: OutboxTables, *, subject: str | None = None) -> int:
    """
    Send failed rows again, each before newer ones of its key: a row that was stored is then stored twice.

    Refused rows are sent again, too, behind what was sent of their keys meanwhile.

    Returns:
        The number of failed and refused rows.

    Raises:
        As `read_status`.
    """
    tables.check(connection)
    pass_token(connection, tables)
    count = sum(_set_state(connection, tables, state, subject) for state in (FAILED, REFUSED))
    _set_state(connection, tables, HALTED, subject)
    return count


def purge(connection: Connection, tables: OutboxTables, *, subject: str | None = None) -> int:
    """
    Delete failed and refused rows, and let newer rows of the keys of failed ones be sent.

    Returns:
        The number of failed and refused rows.

    Raises:
        As `read_status`.
    """
    tables.check(connection)
    pass_token(connection, tables)
    failed = tables.rows.c.batch_id.in_([FAILED, REFUSED])
    count = connection.execute(sa.delete(tables.rows).where(failed, _of(tables, subject))).rowcount
    _set_state(connection, tables, HALTED, subject)
    return count


def _set_state(
    connection: Connection, tables: OutboxTables, state: int, subject: str | None
) -> int:
    return connection.execute(
        sa.update(tables.rows)
        .where(tables.rows.c.batch_id == state, _of(tables, subject))
        .values(batch_id=WAITING, failure=None)
    ).rowcount


def _of(tables: OutboxTables, subject: str | None) -> sa.ColumnElement[bool]:
    return sa.true() if subject is None else tables.rows.c.subject == subject
