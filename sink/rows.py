"""The rows of one partition: read when a handler's block begins, locked and written when it ends.
I/O: SQL.

    look      one SELECT without a lock: the token, and which messages are done
    record    lock the fence ─▶ check that its token is not above ours ─▶ insert our offsets

The fence is locked shared while its token is ours, so that lanes of one owner do not wait for each
other. An owner that raises it locks it exclusively, once for each token. It is locked at the end
of the block, so that an owner that is suspended in the middle of a handler holds no lock of ours.

Invariants
    A transaction that recorded under a token never commits after another has raised the fence above
    that token: each holds the lock until its commit.
    After raising a fence, an owner checks again which offsets earlier owners have done, before it
    records anything.
    An offset is in at most one row of `done`.
    Only offsets below the cursor are merged; they are delivered again only after a reset. A block
    of another try of the message that began before the merge is refused: after its INSERT it looks
    for other rows that contain one of its offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from ..protocol.errors import EffectDoneError, InvalidRequestError, LeaseLostError, Reason
from ..protocol.offsets import Range
from .done_ranges import not_in, plan_merges, ranges_of
from .tables import SinkTables

MERGE_ROWS_MAX = 2_000
"""Number of rows that one merge reads at most."""
MERGE_BACK_ROWS = 4_000
"""
Number of rows below the cursor at which the first merge of an owner begins. If it began at the
lowest row, an owner that is soon replaced would never reach its own rows, because messages that
were not fenced leave gaps, and so unmerged rows, for years.
"""
_MYSQL = ("mysql", "mariadb")
DIALECTS = ("sqlite", "postgresql", *_MYSQL)


class Source(NamedTuple):
    """The partition that messages are from, and the token under which they were delivered."""

    subject: str
    group: str
    partition_id: int
    token: int
    leased_id: int
    """The partition whose lease has the token: a child partition, for parked messages of an
    ancestor.
    """

    @property
    def borrowed(self) -> bool:
        """True if the token is that of another partition, with whose fence it is compared."""
        return self.leased_id != self.partition_id

    def fenced(self, current_token: int, offset: int) -> LeaseLostError:
        """Return the error of a message whose owner was replaced by another."""
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


class Look(NamedTuple):
    """The state of some messages of a source in the database."""

    token: int
    """The highest token that has committed effects; 0 if none has."""
    left: list[int]
    """Offsets whose effects are not done."""


class Rows:
    """Statements on the rows of one source, executed on a connection of the user."""

    def __init__(self, connection: Connection, tables: SinkTables, source: Source) -> None:
        """Raise InvalidRequestError if the database is of an unsupported kind."""
        self._dialect = connection.dialect.name
        if self._dialect not in DIALECTS:
            raise InvalidRequestError(
                f"fenced effects need a database of {', '.join(DIALECTS)}, not {self._dialect}"
            )
        self._connection = connection
        self._tables = tables
        self._source = source
        fences = tables.fences
        self._here = sa.and_(
            fences.c.subject == source.subject,
            fences.c.consumer_group == source.group,
            fences.c.partition_id == source.partition_id,
        )

    def look(self, offsets: Sequence[int]) -> Look:
        """
        Return the fence's token, and which of the sorted `offsets` are not done.

        Raises:
            LeaseLostError: a newer owner has committed effects.
            SchemaError
        """
        fences, done = self._tables.fences, self._tables.done
        near = sa.and_(done.c.fence_id == fences.c.id, self._around(fences.c.id, offsets))
        ask = (
            sa.select(fences.c.token, done.c.first_offset, done.c.next_offset)
            .select_from(fences.outerjoin(done, near))
            .where(self._here)
            .order_by(done.c.first_offset)
        )
        try:
            found_rows = self._connection.execute(ask).all()
        except SQLAlchemyError as error:
            raise self._tables.missing_error(error) or error from error
        if not found_rows:
            return Look(0, list(offsets))
        token = found_rows[0][0]
        if token > self._source.token and not self._source.borrowed:
            raise self._source.fenced(token, offsets[0])
        ranges = [(first, end) for _, first, end in found_rows if first is not None]
        known = 0 if self._source.borrowed else token  # owners of several children may be at work
        return Look(known, not_in(ranges, offsets))

    def record(self, look: Look) -> int:
        """
        Record that the effects of the messages that `look` has left are done; return the id of the
        fence.

        Raises:
            LeaseLostError, EffectDoneError: this transaction must not commit.
        """
        offsets, token = look.left, self._source.token
        if self._source.borrowed:
            own = self._source._replace(partition_id=self._source.leased_id)
            Rows(self._connection, self._tables, own).raise_fence(0, offsets[0])
            fence_id, _ = self._locked(shared=False)
        else:
            fence_id = self.raise_fence(look.token, offsets[0])
        if look.token != token:
            self._check_not_done(fence_id, offsets)
        rows = [
            {"fence_id": fence_id, "first_offset": first, "next_offset": end}
            for first, end in ranges_of(offsets)
        ]
        try:
            self._connection.execute(sa.insert(self._tables.done), rows)
        except IntegrityError as error:
            raise self._done(offsets[0]) from error
        return fence_id

    def check_not_merged(self, fence_id: int, look: Look) -> None:
        """
        Check that no other try of a recorded message was merged with its neighbours since `look`.

        A merged row no longer begins at the message's offset, so the INSERT does not conflict with
        it. An owner that has checked under the lock (`record`) cannot have such a concurrent try.

        Raises:
            EffectDoneError: this transaction must not commit.
        """
        if look.token != self._source.token:
            return
        offsets = look.left
        latest = 0
        for first, end in self._locked_ranges(fence_id, offsets[0] - 1, offsets[-1]):
            if first < latest:
                raise self._done(first)
            latest = end

    def raise_fence(self, known_token: int, offset: int) -> int:
        """
        Lock the fence until the end of the transaction, and raise it to our token; return its id.

        Raises:
            LeaseLostError: the fence is above our token.
        """
        token = self._source.token
        fence_id, current = self._locked(shared=known_token == token)
        if current > token:
            raise self._source.fenced(current, offset)
        if current < token:
            fences = self._tables.fences
            raised = sa.update(fences).where(fences.c.id == fence_id).values(token=token)
            self._connection.execute(raised)
        return fence_id

    def merge(self, fence_id: int, mark: int | None, cursor: int) -> int:
        """
        Merge rows of offsets in `[mark, cursor)`; return the mark of the next merge.

        Rows that another transaction is merging are skipped.

        Args:
            mark: where the merge begins; None in the first merge of an owner.
        """
        done = self._tables.done
        if mark is None:
            mark = self._first_mark(fence_id, cursor)
        ask = (
            sa.select(done.c.first_offset, done.c.next_offset)
            .where(
                done.c.fence_id == fence_id,
                done.c.first_offset >= mark,
                done.c.first_offset < cursor,
                done.c.next_offset <= cursor,
            )
            .order_by(done.c.first_offset)
            .limit(MERGE_ROWS_MAX)
            .with_for_update(skip_locked=True)
        )
        ranges: list[Range] = [(first, end) for first, end in self._connection.execute(ask)]
        merges = plan_merges(ranges)
        if merges:
            here = done.c.fence_id == fence_id
            first: Any = sa.bindparam("first")
            end: Any = sa.bindparam("end")
            edges = [{"first": merge.first_offset, "end": merge.next_offset} for merge in merges]
            behind = sa.and_(here, done.c.first_offset > first, done.c.first_offset < end)
            self._connection.execute(sa.delete(done).where(behind), edges)
            self._connection.execute(
                sa.update(done).where(here, done.c.first_offset == first).values(next_offset=end),
                edges,
            )
        if not ranges:
            return mark
        last_of_run = (
            merges[-1].first_offset
            if merges and merges[-1].next_offset == ranges[-1][1]
            else ranges[-1][0]
        )
        return max(mark, last_of_run)

    def _first_mark(self, fence_id: int, cursor: int) -> int:
        """Return where the first merge of an owner begins: MERGE_BACK_ROWS below the cursor, or at
        the lowest row.
        """
        done = self._tables.done
        back = (
            sa.select(done.c.first_offset)
            .where(done.c.fence_id == fence_id, done.c.first_offset < cursor)
            .order_by(done.c.first_offset.desc())
            .limit(1)
            .offset(MERGE_BACK_ROWS)
        )
        mark: int | None = self._connection.execute(back).scalar()
        return mark or 0

    # ── statements ────────────────────────────────────────────────────────────────────────────────
    def _around(self, fence_id: Any, offsets: Sequence[int]) -> Any:
        """Return the condition of rows that may contain one of `offsets`: they begin among the
        offsets, or are the last before them.
        """
        done = self._tables.done
        before = done.alias("before")
        low, high = offsets[0], offsets[-1]
        nearest = (
            sa.select(sa.func.max(before.c.first_offset))
            .where(before.c.fence_id == fence_id, before.c.first_offset <= low)
            .scalar_subquery()
        )
        return sa.and_(
            done.c.first_offset >= sa.func.coalesce(nearest, low), done.c.first_offset <= high
        )

    def _locked(self, *, shared: bool) -> tuple[int, int]:
        """Create the fence if it is missing, lock it until the end of the transaction, and return
        its id and token.
        """
        fences = self._tables.fences
        if (
            self._dialect == "sqlite"
        ):  # a write locks the database; a SELECT may not even begin a transaction
            self._connection.execute(
                sa.update(fences).where(self._here).values(token=fences.c.token)
            )
        ask = sa.select(fences.c.id, fences.c.token).where(self._here).with_for_update(read=shared)
        row = self._connection.execute(ask).first()
        if row is None:
            self._connection.execute(self._insert_fence())
            row = self._connection.execute(ask).one()
        return row[0], row[1]

    def _insert_fence(self) -> Any:
        """Return an INSERT that does nothing if another lane has just inserted the row."""
        fences, source = self._tables.fences, self._source
        values = {
            "subject": source.subject,
            "consumer_group": source.group,
            "partition_id": source.partition_id,
            "token": 0,
        }
        if self._dialect == "postgresql":
            return postgresql.insert(fences).values(values).on_conflict_do_nothing()
        if self._dialect == "sqlite":
            return sqlite.insert(fences).values(values).on_conflict_do_nothing()
        return sa.insert(fences).prefix_with("IGNORE").values(values)

    def _check_not_done(self, fence_id: int, offsets: Sequence[int]) -> None:
        """
        Check `offsets` again under the lock: an earlier owner may have done one of them since
        `look`.

        The rows are locked, because in a transaction with an older snapshot only a locking read
        sees the newest commits, or fails.

        Raises:
            EffectDoneError
        """
        left = set(not_in(self._locked_ranges(fence_id, offsets[0], offsets[-1]), offsets))
        for offset in offsets:
            if offset not in left:
                raise self._done(offset)

    def _locked_ranges(self, fence_id: int, low: int, high: int) -> list[Range]:
        """Lock the rows that begin in `(low, high]` and the last row before them shared, and return
        their ranges.
        """
        done = self._tables.done
        rows = (
            sa.select(done.c.first_offset, done.c.next_offset)
            .where(done.c.fence_id == fence_id)
            .with_for_update(read=True)
        )
        # Without a subquery: MariaDB would read it in the old snapshot.
        nearest = rows.where(done.c.first_offset <= low).order_by(done.c.first_offset.desc())
        behind = rows.where(done.c.first_offset > low, done.c.first_offset <= high)
        return [
            (first, end)
            for ask in (nearest.limit(1), behind.order_by(done.c.first_offset))
            for first, end in self._connection.execute(ask)
        ]

    def _done(self, offset: int) -> EffectDoneError:
        return EffectDoneError(partition_id=self._source.partition_id, offset=offset)
