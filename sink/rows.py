"""Statements on the rows of one partition, which are read when a handler's block begins, and are
locked and written when it ends. I/O: SQL.

    read_state   one SELECT without a lock: the token, and which messages are done
    record       lock the fence ─▶ check that its token is not above ours ─▶ insert our offsets

The lock on the fence is shared while its token is ours, so lanes of one owner do not wait for each
other. An owner that raises the token locks the fence exclusively, once. The lock is taken at the
end of the block, so an owner that is suspended during its handler holds no lock.

Invariants
    A transaction that recorded under a token cannot commit after another has raised the fence above
    that token, because both hold the lock until they commit. After raising a fence, an owner checks
    again which offsets are done before it records any. An offset is in at most one row of
    `done_ranges`. Only offsets below the cursor are merged; they are redelivered only after a
    reset. A concurrent block for the same message that began before the merge is refused: after its
    INSERT, it checks for other rows that contain one of its offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from ..protocol.errors import (
    EffectDoneError,
    InvalidRequestError,
    LeaseLostError,
    Reason,
    SchemaError,
)
from ..protocol.offsets import Range
from .done_ranges import offsets_outside, plan_merges, ranges_of
from .tables import SinkTables

MERGE_ROWS_MAX = 2_000
"""The maximum number of rows that one merge reads."""
FIRST_MERGE_ROWS = 4_000
"""
The first merge of an owner starts this many rows below the cursor.

If it started at the lowest row, an owner that is soon replaced would never reach its own rows:
messages that were not fenced leave gaps, and over the years these leave many rows that cannot be
merged.
"""
_MYSQL = ("mysql", "mariadb")
DIALECTS = ("sqlite", "postgresql", *_MYSQL)


class Source(NamedTuple):
    """The partition that messages come from, and the token under which they were delivered."""

    subject: str
    group: str
    partition_id: int
    token: int
    leased_id: int
    """The partition whose lease has the token; for parked messages of an ancestor, this is a child
    partition.
    """
    cluster_id: str
    """The identity of the cluster, to which the partitions, offsets and tokens belong."""

    @property
    def uses_child_lease(self) -> bool:
        """True if the token belongs to a child partition, whose fence it is compared with."""
        return self.leased_id != self.partition_id

    def check_cluster(self, cluster_id: str, table: str) -> None:
        """
        Check that a fence of the group belongs to the cluster of the messages.

        Raises:
            SchemaError: partition ids, offsets and tokens of this cluster say nothing about those
                in the table.
        """
        if cluster_id != self.cluster_id:
            raise SchemaError(
                Reason.SINK_OTHER_CLUSTER,
                f"table {table} has effects of group {self.group!r} of {self.subject!r} from "
                f"another cluster ({cluster_id[:8]}…, this is {self.cluster_id[:8]}…)",
                table=table,
            )

    def fenced_error(self, current_token: int, offset: int) -> LeaseLostError:
        """Return the error for a message whose owner has been replaced."""
        return LeaseLostError(
            Reason.EFFECT_FENCED,
            f"message {offset} of partition {self.partition_id} was delivered under token "
            f"{self.token}; "
            f"an owner with token {current_token} has committed effects",
            partition_id=self.partition_id,
            offset=offset,
            token=self.token,
            current_token=current_token,
        )


class SourceState(NamedTuple):
    """The state of a source in the database, for some of its messages."""

    token: int
    """The highest token with committed effects; 0 if there is none."""
    pending: list[int]
    """The offsets whose effects are not done."""


class EffectRows:
    """Executes statements on the rows of one source, on the user's connection."""

    def __init__(self, connection: Connection, tables: SinkTables, source: Source) -> None:
        """
        Prepare statements for the dialect of the connection's database.

        Raises:
            InvalidRequestError: the database is not supported.
        """
        self._dialect = connection.dialect.name
        if self._dialect not in DIALECTS:
            raise InvalidRequestError(
                f"fenced effects need a database of {', '.join(DIALECTS)}, not {self._dialect}"
            )
        self._connection = connection
        self._tables = tables
        self._source = source
        fences = tables.fences
        self._fence_condition = sa.and_(
            fences.c.subject == source.subject,
            fences.c.consumer_group == source.group,
            fences.c.partition_id == source.partition_id,
        )

    def read_state(self, offsets: Sequence[int]) -> SourceState:
        """
        Return the fence's token, and which of the sorted `offsets` are not done yet.

        Raises:
            LeaseLostError: a newer owner has committed effects.
            SchemaError: the tables are missing, or have effects of another cluster.
        """
        fences, done_ranges = self._tables.fences, self._tables.done_ranges
        near_rows = sa.and_(
            done_ranges.c.fence_id == fences.c.id, self._nearby_rows_condition(fences.c.id, offsets)
        )
        query = (
            sa.select(
                fences.c.cluster_id,
                fences.c.token,
                done_ranges.c.first_offset,
                done_ranges.c.next_offset,
            )
            .select_from(fences.outerjoin(done_ranges, near_rows))
            .where(self._fence_condition)
            .order_by(done_ranges.c.first_offset)
        )
        try:
            selected_rows = self._connection.execute(query).all()
        except SQLAlchemyError as error:
            raise self._tables.missing_error(error) or error from error
        if not selected_rows:
            self._check_group()
            return SourceState(0, list(offsets))
        cluster_id, token, *_ = selected_rows[0]
        self._source.check_cluster(cluster_id, fences.name)
        if token > self._source.token and not self._source.uses_child_lease:
            raise self._source.fenced_error(token, offsets[0])
        ranges = [(first, end) for _, _, first, end in selected_rows if first is not None]
        # several children may have owners
        known_token = 0 if self._source.uses_child_lease else token
        return SourceState(known_token, offsets_outside(ranges, offsets))

    def _check_group(self) -> None:
        """Check the cluster of the group's other fences. Raises SchemaError."""
        fences, source = self._tables.fences, self._source
        query = (
            sa.select(fences.c.cluster_id)
            .where(
                fences.c.subject == source.subject,
                fences.c.consumer_group == source.group,
                fences.c.cluster_id != source.cluster_id,
            )
            .limit(1)
        )
        other_id = self._connection.execute(query).scalar()
        if other_id is not None:
            source.check_cluster(other_id, fences.name)

    def record(self, state: SourceState) -> int:
        """
        Record the effects of the pending messages in `state` as done, and return the fence's id.

        Raises:
            LeaseLostError, EffectDoneError, SchemaError: this transaction must not commit.
        """
        offsets, token = state.pending, self._source.token
        if self._source.uses_child_lease:
            child_source = self._source._replace(partition_id=self._source.leased_id)
            EffectRows(self._connection, self._tables, child_source).raise_fence(0, offsets[0])
            fence_id, _ = self._lock_fence(shared=False)
        else:
            fence_id = self.raise_fence(state.token, offsets[0])
        if state.token != token:
            self._check_not_done(fence_id, offsets)
        rows = [
            {"fence_id": fence_id, "first_offset": first, "next_offset": end}
            for first, end in ranges_of(offsets)
        ]
        try:
            self._connection.execute(sa.insert(self._tables.done_ranges), rows)
        except IntegrityError as error:
            raise self._already_done_error(offsets[0]) from error
        return fence_id

    def check_not_merged(self, fence_id: int, state: SourceState) -> None:
        """
        Check that since `read_state`, no concurrent block has recorded the same message and had it
        merged.

        A merged row no longer begins at the message's offset, so the INSERT does not conflict with
        it. This cannot happen to an owner that did its check under the lock in `record`.

        Raises:
            EffectDoneError: this transaction must not commit.
        """
        if state.token != self._source.token:
            return
        offsets = state.pending
        latest_end = 0
        for first, end in self._locked_ranges(fence_id, offsets[0] - 1, offsets[-1]):
            if first < latest_end:
                raise self._already_done_error(first)
            latest_end = end

    def raise_fence(self, known_token: int, offset: int) -> int:
        """
        Lock the fence until the transaction ends, raise it to our token, and return its id.

        Raises:
            LeaseLostError: the fence is above our token.
            SchemaError: the fence belongs to another cluster.
        """
        token = self._source.token
        fence_id, current_token = self._lock_fence(shared=known_token == token)
        if current_token > token:
            raise self._source.fenced_error(current_token, offset)
        if current_token < token:
            fences = self._tables.fences
            update = sa.update(fences).where(fences.c.id == fence_id).values(token=token)
            self._connection.execute(update)
        return fence_id

    def merge(self, fence_id: int, start_offset: int | None, cursor: int) -> int:
        """
        Merge the rows of offsets below `cursor`, and return the offset at which the next merge
        starts.

        Rows that another transaction is merging are skipped.

        Args:
            start_offset: the offset at which the merge starts; None for the first merge of an
                owner.
        """
        done_ranges = self._tables.done_ranges
        if start_offset is None:
            start_offset = self._first_merge_offset(fence_id, cursor)
        query = (
            sa.select(done_ranges.c.first_offset, done_ranges.c.next_offset)
            .where(
                done_ranges.c.fence_id == fence_id,
                done_ranges.c.first_offset >= start_offset,
                done_ranges.c.first_offset < cursor,
                done_ranges.c.next_offset <= cursor,
            )
            .order_by(done_ranges.c.first_offset)
            .limit(MERGE_ROWS_MAX)
            .with_for_update(skip_locked=True)
        )
        ranges: list[Range] = [(first, end) for first, end in self._connection.execute(query)]
        merges = plan_merges(ranges)
        if merges:
            of_fence = done_ranges.c.fence_id == fence_id
            first: Any = sa.bindparam("first")
            end: Any = sa.bindparam("end")
            parameters = [
                {"first": merge.first_offset, "end": merge.next_offset} for merge in merges
            ]
            rows_after = sa.and_(
                of_fence, done_ranges.c.first_offset > first, done_ranges.c.first_offset < end
            )
            self._connection.execute(sa.delete(done_ranges).where(rows_after), parameters)
            self._connection.execute(
                sa.update(done_ranges)
                .where(of_fence, done_ranges.c.first_offset == first)
                .values(next_offset=end),
                parameters,
            )
        if not ranges:
            return start_offset
        last_merged_offset = (
            merges[-1].first_offset
            if merges and merges[-1].next_offset == ranges[-1][1]
            else ranges[-1][0]
        )
        return max(start_offset, last_merged_offset)

    def _first_merge_offset(self, fence_id: int, cursor: int) -> int:
        """Return the offset at which an owner's first merge starts: FIRST_MERGE_ROWS rows below the
        cursor, or at the lowest row.
        """
        done_ranges = self._tables.done_ranges
        query = (
            sa.select(done_ranges.c.first_offset)
            .where(done_ranges.c.fence_id == fence_id, done_ranges.c.first_offset < cursor)
            .order_by(done_ranges.c.first_offset.desc())
            .limit(1)
            .offset(FIRST_MERGE_ROWS)
        )
        offset: int | None = self._connection.execute(query).scalar()
        return offset or 0

    # ── statements ────────────────────────────────────────────────────────────────────────────────
    def _nearby_rows_condition(self, fence_id: Any, offsets: Sequence[int]) -> Any:
        """Return the SQL condition for rows that may contain one of `offsets`: those that begin
        among them, and the last row before that.
        """
        done_ranges = self._tables.done_ranges
        earlier = done_ranges.alias("earlier")
        low, high = offsets[0], offsets[-1]
        nearest = (
            sa.select(sa.func.max(earlier.c.first_offset))
            .where(earlier.c.fence_id == fence_id, earlier.c.first_offset <= low)
            .scalar_subquery()
        )
        return sa.and_(
            done_ranges.c.first_offset >= sa.func.coalesce(nearest, low),
            done_ranges.c.first_offset <= high,
        )

    def _lock_fence(self, *, shared: bool) -> tuple[int, int]:
        """Create the fence if it is missing, lock it until the transaction ends, and return its id
        and token. Raises SchemaError if it belongs to another cluster.
        """
        fences = self._tables.fences
        if self._dialect == "sqlite":  # only a write locks the database
            self._connection.execute(
                sa.update(fences).where(self._fence_condition).values(token=fences.c.token)
            )
        query = (
            sa.select(fences.c.id, fences.c.token, fences.c.cluster_id)
            .where(self._fence_condition)
            .with_for_update(read=shared)
        )
        row = self._connection.execute(query).first()
        if row is None:
            self._connection.execute(self._insert_fence())
            row = self._connection.execute(query).one()
        self._source.check_cluster(row[2], fences.name)
        return row[0], row[1]

    def _insert_fence(self) -> Any:
        """Return an INSERT statement that does nothing if the row exists."""
        fences, source = self._tables.fences, self._source
        values = {
            "subject": source.subject,
            "consumer_group": source.group,
            "partition_id": source.partition_id,
            "token": 0,
            "cluster_id": source.cluster_id,
        }
        if self._dialect == "postgresql":
            return postgresql.insert(fences).values(values).on_conflict_do_nothing()
        if self._dialect == "sqlite":
            return sqlite.insert(fences).values(values).on_conflict_do_nothing()
        return sa.insert(fences).prefix_with("IGNORE").values(values)

    def _check_not_done(self, fence_id: int, offsets: Sequence[int]) -> None:
        """
        Check under the lock that no earlier owner has completed any of `offsets` since
        `read_state`.

        The rows are locked, because with an older snapshot only a locking read sees the latest
        commits, or fails.

        Raises:
            EffectDoneError: the effect of a message is done.
        """
        pending = set(
            offsets_outside(self._locked_ranges(fence_id, offsets[0], offsets[-1]), offsets)
        )
        for offset in offsets:
            if offset not in pending:
                raise self._already_done_error(offset)

    def _locked_ranges(self, fence_id: int, low: int, high: int) -> list[Range]:
        """Take shared locks on the rows that begin in `(low, high]` and on the last row before
        those, and return their ranges.
        """
        done_ranges = self._tables.done_ranges
        rows = (
            sa.select(done_ranges.c.first_offset, done_ranges.c.next_offset)
            .where(done_ranges.c.fence_id == fence_id)
            .with_for_update(read=True)
        )
        # No subquery, because MariaDB would read it in the old snapshot.
        nearest = rows.where(done_ranges.c.first_offset <= low).order_by(
            done_ranges.c.first_offset.desc()
        )
        rows_after = rows.where(
            done_ranges.c.first_offset > low, done_ranges.c.first_offset <= high
        )
        return [
            (first, end)
            for query in (nearest.limit(1), rows_after.order_by(done_ranges.c.first_offset))
            for first, end in self._connection.execute(query)
        ]

    def _already_done_error(self, offset: int) -> EffectDoneError:
        return EffectDoneError(partition_id=self._source.partition_id, offset=offset)
