"""Statements for operators: count the rows of an outbox, and redrive or delete unsent rows.
I/O: SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import starmap

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.text import LISTED_MAX
from .lease import advance_token
from .tables import FAILED, HALTED, REFUSED, WAITING, OutboxTables, database_ms

RECORDED = 1
"""Stands for every batch id when rows are counted by state."""
COUNTED_MAX = 10_000
"""The number of rows up to which gauges count exactly."""
SETTLED = (FAILED, REFUSED)
"""The states of rows that are sent again only after a redrive."""
UNSENT = (WAITING, HALTED)
"""The states of rows that were never sent."""
_STATE_NAMES = {FAILED: "failed", REFUSED: "refused", WAITING: "waiting", HALTED: "halted"}


class OutboxGauges(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of unsent rows; cheap enough to read every few seconds."""

    rows: int
    """The number of rows; above 10,000 an upper bound, estimated from the ids, which also count
    rows that were sent or rolled back.
    """
    counted: bool
    """True if `rows` is exact."""
    failed: int
    """Rows that may or may not be stored, because no broker can tell; counted up to 10,000."""
    refused: int = 0
    """Rows over their subject's size limit; counted up to 10,000."""
    oldest_age_ms: int
    """The age of the row with the lowest id, in milliseconds; 0 if there is none."""


class SubjectRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one subject."""

    subject: str
    waiting: int = 0
    recorded: int = 0
    """Rows in recorded batches, which are being sent."""
    failed: int = 0
    """Rows that may or may not be stored, because no broker can tell."""
    halted: int = 0
    """Rows that are waiting because an older row of their key has failed."""
    refused: int = 0
    """Rows over their subject's size limit, which are sent only after a redrive."""
    oldest_age_ms: int = 0


class FailedRow(msgspec.Struct, frozen=True):
    """A row that may or may not be stored, because no broker can tell."""

    id: int
    subject: str
    key: bytes
    failure: str


class RefusedRow(msgspec.Struct, frozen=True):
    """A row that was not sent because it exceeds its subject's size limit."""

    id: int
    subject: str
    key: bytes
    refusal: str


class RowChange(msgspec.Struct, frozen=True, kw_only=True):
    """The number of rows, by state, that a call has redriven or deleted, or would have in a dry
    run.
    """

    failed: int = 0
    refused: int = 0
    waiting: int = 0
    halted: int = 0

    @property
    def rows(self) -> int:
        """The number of all changed rows."""
        return self.failed + self.refused + self.waiting + self.halted


class OutboxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an outbox, read from its tables."""

    subjects: tuple[SubjectRows, ...]
    failed_rows: tuple[FailedRow, ...]
    """The first failed rows."""
    refused_rows: tuple[RefusedRow, ...]
    """The first refused rows."""
    owner: str
    """The sending process; empty while there is nothing to send."""
    lease_left_ms: int
    """Milliseconds until the lease expires; 0 if it is free or has expired."""
    token: int

    @property
    def rows(self) -> int:
        """The number of all rows."""
        return sum(
            each.waiting + each.recorded + each.failed + each.halted + each.refused
            for each in self.subjects
        )

    @property
    def failed(self) -> int:
        """The number of rows that may or may not be stored, because no broker can tell."""
        return sum(each.failed for each in self.subjects)

    @property
    def refused(self) -> int:
        """The number of rows over their subject's size limit."""
        return sum(each.refused for each in self.subjects)

    @property
    def oldest_age_ms(self) -> int:
        """The age of the oldest row, in milliseconds; 0 if there is none."""
        return max((each.oldest_age_ms for each in self.subjects), default=0)


def read_gauges(connection: Connection, tables: OutboxTables, *, now_ns: int) -> OutboxGauges:
    """
    Read the gauges. This reads at most a few thousand index entries, no matter how many rows exist.

    Args:
        now_ns: the current time, in nanoseconds since 1970.

    Raises:
        SchemaError: the tables are missing or have another version.
    """
    tables.check(connection)
    rows = tables.rows.c
    oldest = connection.execute(
        sa.select(rows.id, rows.added_at_ns).order_by(rows.id).limit(1)
    ).first()
    if oldest is None:
        return OutboxGauges(rows=0, counted=True, failed=0, oldest_age_ms=0)
    count = _count_rows(connection, sa.select(rows.id).order_by(rows.id).limit(COUNTED_MAX + 1))
    is_exact = count <= COUNTED_MAX
    if not is_exact:
        # Some of the counted rows may have been sent since the previous statement.
        newest_id = connection.execute(sa.select(sa.func.max(rows.id))).scalar() or 0
        count = max(count, newest_id - oldest.id + 1)
    failed, refused = (
        sa.select(rows.id).where(rows.batch_id == state).limit(COUNTED_MAX)
        for state in (FAILED, REFUSED)
    )
    return OutboxGauges(
        rows=count,
        counted=is_exact,
        failed=_count_rows(connection, failed),
        refused=_count_rows(connection, refused),
        oldest_age_ms=max(0, now_ns - oldest.added_at_ns) // 1_000_000,
    )


def _count_rows(connection: Connection, query: sa.Select[tuple[int]]) -> int:
    row_count: int = connection.execute(
        sa.select(sa.func.count()).select_from(query.subquery())
    ).scalar_one()
    return row_count


def read_status(
    connection: Connection, tables: OutboxTables, *, now_ns: int, subject: str | None = None
) -> OutboxStatus:
    """
    Count the rows of all subjects, or of a single one.

    Args:
        now_ns: the current time, in nanoseconds since 1970.
        subject: restricts the count to this subject.

    Raises:
        SchemaError: the tables are missing or have another version.
    """
    tables.check(connection)
    rows = tables.rows.c
    state = sa.case((rows.batch_id > WAITING, RECORDED), else_=rows.batch_id)
    counts = connection.execute(
        sa.select(rows.subject, state, sa.func.count(), sa.func.min(rows.added_at_ns))
        .where(_subject_condition(tables, subject))
        .group_by(rows.subject, state)
    ).all()
    lease = tables.lease.c
    owner, until_ms, now_ms, token = connection.execute(
        sa.select(lease.owner, lease.until_ms, database_ms(), lease.token)
    ).one()
    return OutboxStatus(
        subjects=tuple(
            _build_subject_rows(name, [row[1:] for row in counts if row[0] == name], now_ns)
            for name in sorted({row[0] for row in counts})
        ),
        failed_rows=tuple(starmap(FailedRow, _read_first(connection, tables, FAILED, subject))),
        refused_rows=tuple(starmap(RefusedRow, _read_first(connection, tables, REFUSED, subject))),
        owner=owner if until_ms else "",
        lease_left_ms=max(0, until_ms - now_ms),
        token=token,
    )


def _read_first(
    connection: Connection, tables: OutboxTables, state: int, subject: str | None
) -> list[tuple[int, str, bytes, str]]:
    """Return the id, subject, key and reason of each of the first rows in a state."""
    rows = tables.rows.c
    selected = connection.execute(
        sa.select(rows.id, rows.subject, rows.order_key, rows.failure)
        .where(rows.batch_id == state, _subject_condition(tables, subject))
        .order_by(rows.id)
        .limit(LISTED_MAX)
    )
    return [(row_id, name, bytes(key), reason or "") for row_id, name, key, reason in selected]


def _build_subject_rows(
    subject: str, counts: list[tuple[int, int, int]], now_ns: int
) -> SubjectRows:
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


def change_rows(
    connection: Connection,
    tables: OutboxTables,
    change: Callable[[Connection, OutboxTables, str | None, int], int],
    states: Collection[int],
    *,
    subject: str | None = None,
    dry_run: bool = False,
) -> RowChange:
    """
    Change the rows in the given states, and requeue rows that were halted behind a failed one.

    Args:
        change: `requeue_rows` or `delete_rows`.
        states: SETTLED or UNSENT.
        subject: restricts the call to rows of this subject.
        dry_run: only count the rows, without changing them.

    Returns:
        The number of rows in each of `states`.

    Raises:
        As `read_status`.
    """
    tables.check(connection)
    if dry_run:
        return _count_by_state(connection, tables, states, subject)
    advance_token(connection, tables, deletes=change is delete_rows)
    counts = {_STATE_NAMES[state]: change(connection, tables, subject, state) for state in states}
    if FAILED in states:
        requeue_rows(connection, tables, subject, HALTED)
    return RowChange(**counts)


def _count_by_state(
    connection: Connection, tables: OutboxTables, states: Collection[int], subject: str | None
) -> RowChange:
    state = tables.rows.c.batch_id
    counts = connection.execute(
        sa.select(state, sa.func.count())
        .where(state.in_(states), _subject_condition(tables, subject))
        .group_by(state)
    )
    return RowChange(**{_STATE_NAMES[each]: count for each, count in counts})


def delete_rows(
    connection: Connection, tables: OutboxTables, subject: str | None, state: int
) -> int:
    """Delete the rows in a state, and return how many there were."""
    condition = tables.rows.c.batch_id == state
    return connection.execute(
        sa.delete(tables.rows).where(condition, _subject_condition(tables, subject))
    ).rowcount


def requeue_rows(
    connection: Connection, tables: OutboxTables, subject: str | None, state: int
) -> int:
    """Let the rows in a state wait to be sent, and return how many there were."""
    return connection.execute(
        sa.update(tables.rows)
        .where(tables.rows.c.batch_id == state, _subject_condition(tables, subject))
        .values(batch_id=WAITING, failure=None)
    ).rowcount


def _subject_condition(tables: OutboxTables, subject: str | None) -> sa.ColumnElement[bool]:
    return sa.true() if subject is None else tables.rows.c.subject == subject
