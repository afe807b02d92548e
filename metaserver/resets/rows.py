"""Stores the rows of a reset: its partitions, their new tokens, and which of them are drained
afterwards. Runs SQL synchronously.

Invariants
    A group with a live session is not reset, and no session begins during a reset. Live resets are
    an exception: they begin once no session holds a lease, and no session is granted one while they
    are pending.
    A reset sets the cursors on all partitions that the group could read when it began, except
    abandoned ones on silent brokers. The reply lists these; they can be reset by id once their
    broker is back.
    Rows of drained partitions are deleted before any cursor is set back, and are inserted again
    after a cursor has been set to the end. Rows for the start of a new group are deleted too,
    because brokers refuse the token of that cursor once they have seen the token of the reset.
    The cursor on an empty partition is always at its end, but the partition counts as drained only
    if its parents do. Otherwise its children would be read too early.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa
from msgspec.structs import replace
from sqlalchemy.engine import Connection

from ...protocol.errors import (
    BusyError,
    ConflictError,
    NotFoundError,
    PartitionUnknownError,
    Reason,
)
from ...protocol.ids import FencingToken, PartitionId, check_name
from ...protocol.progress import ResetGroup
from ...protocol.reading.bounds import nearest_ancestors
from ...protocol.routing import ConsumeStrategy, Partition, PartitionState
from ...protocol.text import counted
from ..cluster.announcements import mark_unsettled
from ..cluster.partitions import IS_VISIBLE_PARENT, subject_parents, subject_partitions
from ..cluster.subjects import SERVED, open_subject_row
from ..groups.leases import drained_after_parents, raise_token_floor
from ..groups.parked_ancestors import read_finished_partitions
from ..groups.sessions import end_expired_sessions
from ..groups.views import find_group
from ..sql.dialect import insert_new, insert_or_replace
from ..sql.duties import duty_left_ms, rebuilt_duty, release_duty, reset_duty, take_duty
from ..sql.schema import (
    drained,
    groups,
    leases,
    live_resets,
    partition_parents,
    partitions,
    sessions,
    starts,
)
from .cursors import check_request


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetScope:
    """The group and the partitions that a reset affects."""

    group_id: int
    subject_id: int
    static: bool
    strategy: ConsumeStrategy
    request: ResetGroup
    partitions: tuple[Partition, ...]
    left_out: tuple[Partition, ...] = ()
    """Abandoned partitions on silent brokers."""
    others: tuple[Partition, ...] = ()
    """The subject's other partitions, if the reset affects only some of them."""
    lineage: Mapping[PartitionId, tuple[PartitionId, ...]] = field(default_factory=dict)
    """Maps each partition id to its parents, including partitions whose data is gone. It is empty
    if the reset affects all partitions.
    """

    def kept_children(self, partition: Partition) -> tuple[tuple[int, int], ...]:
        """
        Return the ranges of the nearest descendants of a partition that the reset does not change.

        They may have adopted its parked messages through partitions that are reset too, or whose
        data is gone.
        """
        other_partitions = {each.partition_id: each for each in self.others}
        ranges: list[tuple[int, int]] = []
        passed_ids = {partition.partition_id}
        for child, parents in sorted(self.lineage.items()):
            if passed_ids.isdisjoint(parents):
                continue
            if child in other_partitions:
                ranges.append(
                    (other_partitions[child].range_start, other_partitions[child].range_end)
                )
            else:
                passed_ids.add(child)
        return tuple(ranges)

    def kept_parents(self, partition: Partition) -> tuple[int, ...]:
        """Return the ids of those ancestors of a partition that the reset does not change."""
        other_ids = {each.partition_id for each in self.others}
        ancestors: set[PartitionId] = set()
        pending_ids = [partition.partition_id]
        while pending_ids:
            parents = set(self.lineage.get(pending_ids.pop(), ())) - ancestors
            ancestors |= parents
            pending_ids += parents
        direct_parents = set(self.lineage.get(partition.partition_id, ())).difference(self.ids)
        return tuple(sorted(int(each) for each in ancestors & other_ids | direct_parents))

    @property
    def ids(self) -> list[int]:
        """The ids of the partitions to reset, sorted."""
        return sorted(int(partition.partition_id) for partition in self.partitions)


def read_reset_scope(
    connection: Connection, subject: str, group: str, request: ResetGroup, *, begun: bool = False
) -> ResetScope:
    """
    Return the partitions that a request selects.

    Args:
        begun: True if some cursors may already have been set, in which case partitions may have
            expired since then.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError, NotFoundError,
        PartitionUnknownError, ConflictError
    """
    row = open_subject_row(connection, subject)
    check_name("consumer group", group)
    if request.queue is not None and not row.static:
        raise ConflictError(Reason.SUBJECT_NOT_STATIC, subject=subject)
    check_request(request, static=row.static)
    group_id, strategy = find_group(connection, row.subject_id, subject, group)
    selected_partitions, skipped_partitions = settable_partitions(
        connection, row.subject_id, queue=request.queue, partition_id=request.partition_id
    )
    if not selected_partitions and not begun and request.queue is not None:
        raise NotFoundError(Reason.QUEUE_UNKNOWN, subject=subject, queue=request.queue)
    if not selected_partitions and not begun and request.partition_id is not None:
        raise PartitionUnknownError(
            f"{subject!r} has no partition {request.partition_id} with data",
            partition_id=request.partition_id,
        )
    other_partitions: tuple[Partition, ...] = ()
    lineage: dict[PartitionId, tuple[PartitionId, ...]] = {}
    if request.queue is not None or request.partition_id is not None:
        ids = {each.partition_id for each in selected_partitions}
        served_partitions = subject_partitions(connection, row.subject_id, SERVED)
        other_partitions = tuple(each for each in served_partitions if each.partition_id not in ids)
        lineage = subject_parents(connection, row.subject_id)
    return ResetScope(
        group_id=group_id,
        strategy=strategy,
        subject_id=row.subject_id,
        static=row.static,
        request=request,
        partitions=selected_partitions,
        left_out=skipped_partitions,
        others=other_partitions,
        lineage=lineage,
    )


_abandoned_query = sa.select(partitions.c.partition_id).where(
    partitions.c.subject_id == sa.bindparam("of_subject"),
    partitions.c.abandoned,
    partitions.c.end_offset.is_(None),
)


def settable_partitions(
    connection: Connection,
    subject_id: int,
    *,
    queue: int | None = None,
    partition_id: int | None = None,
) -> tuple[tuple[Partition, ...], tuple[Partition, ...]]:
    """
    Return the selected partitions, all by default, and those that are left out.

    Parents whose data is gone are replaced by the nearest ancestors with data, whose cursors are
    relevant instead.
    """
    abandoned_ids = set(connection.execute(_abandoned_query, {"of_subject": subject_id}).scalars())
    selected_partitions: list[Partition] = []
    skipped_partitions: list[Partition] = []
    served_partitions = subject_partitions(connection, subject_id, SERVED)
    for partition in _with_nearest_ancestors(connection, subject_id, served_partitions):
        this_id = int(partition.partition_id)
        if queue not in {None, partition.queue} or partition_id not in {None, this_id}:
            continue
        is_silent = this_id in abandoned_ids and partition.address is None
        (skipped_partitions if is_silent and partition_id is None else selected_partitions).append(
            partition
        )
    return tuple(selected_partitions), tuple(skipped_partitions)


def _with_nearest_ancestors(
    connection: Connection, subject_id: int, served_partitions: Sequence[Partition]
) -> list[Partition]:
    """Return the partitions with their parents replaced by the nearest ancestors that have data."""
    ids = {partition.partition_id for partition in served_partitions}
    if all(ids.issuperset(partition.parents) for partition in served_partitions):
        return list(served_partitions)
    nearest_by_id = nearest_ancestors(subject_parents(connection, subject_id), ids)
    return [
        replace(each, parents=tuple(sorted(nearest_by_id.get(each.partition_id, ()))))
        for each in served_partitions
    ]


def begin_reset(
    connection: Connection,
    scope: ResetScope,
    *,
    holder: str,
    lease_ms: int,
    fence: int = 0,
    reset_id: int = 0,
) -> dict[int, int] | None:
    """
    Prevent sessions from joining for `lease_ms`, and give each partition a token higher than all
    granted ones.

    Args:
        fence: highest token that the brokers have seen; it exceeds those in the database if the
            database was restored from a copy.
        reset_id: id of the live reset; 0 if this is not a live reset.

    Returns:
        A dict that maps each partition id to its token; None if the scope has changed, so that the
        caller must plan again.

    Raises:
        BusyError: the group has live sessions or, for a live reset, a session that holds a lease;
            another reset is running or pending; or the database has just been rebuilt.
    """
    group_id, ids = scope.group_id, scope.ids
    this_group = sa.and_(groups.c.group_id == group_id, sa.not_(groups.c.deleting))
    query = sa.select(groups.c.last_token, groups.c.strategy).where(this_group)
    row = connection.execute(query.with_for_update()).one_or_none()
    if row is None:
        return None
    stored_token, strategy = row
    end_expired_sessions(connection, group_id)
    _check_reset_allowed(connection, group_id, reset_id)
    selected_partitions, _ = settable_partitions(
        connection,
        scope.subject_id,
        queue=scope.request.queue,
        partition_id=scope.request.partition_id,
    )
    if {partition.partition_id for partition in selected_partitions} != set(
        ids
    ) or strategy != scope.strategy:
        return None
    if not take_duty(connection, reset_duty(group_id), holder=holder, lease_ms=lease_ms):
        raise BusyError(Reason.GROUP_BUSY, "another reset of this consumer group is running")
    last_token = raise_token_floor(FencingToken(stored_token), fence)
    tokens = {partition_id: last_token + number for number, partition_id in enumerate(ids, 1)}
    lease_columns = {"group_id": group_id, "session": None, "wanted": None, "withdrawn": False}
    rows = [
        {"partition_id": partition_id, "token": token, **lease_columns}
        for partition_id, token in tokens.items()
    ]
    insert_or_replace(connection, leases, rows)
    for table in (drained, starts):
        is_reset = sa.and_(table.c.group_id == group_id, table.c.partition_id.in_(ids))
        connection.execute(sa.delete(table).where(is_reset))
    # The group may have to be announced to the brokers of partitions that are no longer drained.
    values = {"last_token": last_token + len(tokens), "told": False}
    connection.execute(sa.update(groups).where(this_group).values(values))
    mark_unsettled(connection, group_id)
    this_reset = sa.update(live_resets).where(live_resets.c.reset_id == reset_id)
    connection.execute(this_reset.values(begun=True))
    return tokens


_pending_query = sa.select(live_resets.c.reset_id).where(
    live_resets.c.group_id == sa.bindparam("of_group"), live_resets.c.answer.is_(None)
)
_live_count_query = sa.select(sa.func.count()).where(
    sessions.c.group_id == sa.bindparam("of_group")
)
_held_count_query = sa.select(sa.func.count()).where(
    leases.c.group_id == sa.bindparam("of_group"), leases.c.session.is_not(None)
)


def _check_reset_allowed(connection: Connection, group_id: int, reset_id: int) -> None:
    """Check that a reset is not prevented by a session, by another reset, or by a recent rebuild of
    the database. Raises BusyError.
    """
    remaining_ms = duty_left_ms(connection, rebuilt_duty(group_id))
    if remaining_ms:
        raise BusyError(
            Reason.GROUP_BUSY,
            "the database was rebuilt, and earlier consumers may still be at work",
            left_ms=remaining_ms,
        )
    parameters = {"of_group": group_id}
    pending_id = connection.execute(_pending_query, parameters).scalar_one_or_none() or 0
    if pending_id != reset_id:
        raise BusyError(
            Reason.GROUP_BUSY,
            "another reset of this consumer group is pending, or this one is done",
        )
    if reset_id:
        held_count = connection.execute(_held_count_query, parameters).scalar_one()
        if held_count:
            raise BusyError(
                Reason.GROUP_BUSY,
                f"{counted(held_count, 'partition')} of the group are not handed over",
            )
        return
    live_count = connection.execute(_live_count_query, parameters).scalar_one()
    if live_count:
        raise BusyError(
            Reason.GROUP_BUSY,
            f"the consumer group has {counted(live_count, 'live consumer')}: stop them, or "
            "reset the group anyway with live=True (--live), while no other reset runs",
            sessions=live_count,
        )


def end_reset(
    connection: Connection,
    group_id: int,
    tokens: Mapping[int, int],
    cursors: Mapping[int, int],
    *,
    holder: str,
    recorded_answer: tuple[int, str] = (0, ""),
    parked_ids: Collection[int] = (),
) -> None:
    """
    Allow sessions to join again and store which partitions are drained.

    Args:
        tokens: the result of `begin_reset`.
        cursors: maps each partition id to the cursor that its broker has set; empty if the reset is
            unfinished.
        recorded_answer: id of the finished live reset (or 0), and its answer as JSON.
        parked_ids: ids of the partitions that, according to their brokers, leave parked messages to
            their children.
    """
    this_group = groups.c.group_id == group_id
    connection.execute(sa.select(groups.c.group_id).where(this_group).with_for_update()).one()
    had_duty = release_duty(connection, reset_duty(group_id), holder=holder)
    sealed_rows = connection.execute(
        sa.select(partitions.c.partition_id, partitions.c.end_offset, leases.c.token)
        .join(leases, leases.c.partition_id == partitions.c.partition_id)
        .where(
            leases.c.group_id == group_id,
            leases.c.partition_id.in_(cursors),
            partitions.c.state == PartitionState.SEALED,
        )
    )
    at_end_ids = [
        row.partition_id
        for row in sealed_rows
        # A newer token means that a session has been granted the partition since. It reads the same
        # cursor from the broker, and will report the partition as drained.
        if (had_duty or row.token == tokens[row.partition_id])
        and cursors[row.partition_id] == row.end_offset
    ]
    record_drained(connection, group_id, at_end_ids, parked_ids)
    reset_id, answer = recorded_answer
    this_reset = sa.update(live_resets).where(live_resets.c.reset_id == reset_id)
    connection.execute(this_reset.values(answer=answer))
    mark_unsettled(connection, group_id)


def record_drained(
    connection: Connection,
    group_id: int,
    at_end_ids: Sequence[int],
    parked_ids: Collection[int] = (),
) -> None:
    """
    Record that a locked group has drained these partitions, except for those with undrained
    parents.

    Partitions that adopt parked messages of ancestors are left out, because they first need an
    owner.

    Args:
        at_end_ids: ids of the sealed partitions whose end the group has reached.
        parked_ids: ids of those that leave parked messages to their children.
    """
    candidates = _filter_drained_after_parents(connection, group_id, at_end_ids)
    drained_rows = [
        {"group_id": group_id, "partition_id": partition_id, "parked": partition_id in parked_ids}
        for partition_id in read_finished_partitions(connection, group_id, candidates, parked_ids)
    ]
    insert_new(connection, drained, drained_rows)


_undrained_parents_query = (
    sa.select(partition_parents, partitions.c.lost)
    .join(partitions, partitions.c.partition_id == partition_parents.c.parent_id)
    .outerjoin(
        drained,
        sa.and_(
            drained.c.group_id == sa.bindparam("of_group"),
            drained.c.partition_id == partition_parents.c.parent_id,
        ),
    )
    .where(
        partition_parents.c.partition_id.in_(sa.bindparam("ids")),
        sa.or_(partitions.c.state != PartitionState.EXPIRED, partitions.c.lost),
        IS_VISIBLE_PARENT,
        drained.c.partition_id.is_(None),
    )
)
"""The parents that block these partitions for a group. In place of a lost parent, the parent's own
parents block.
"""


def _filter_drained_after_parents(
    connection: Connection, group_id: int, at_end_ids: Sequence[int]
) -> list[int]:
    """Return only those partitions whose parents the group has drained as well."""
    undrained_parents: dict[int, set[int]] = {}
    lost_ids: set[int] = set()
    pending_ids = set(at_end_ids)
    while pending_ids:
        parameters = {"of_group": group_id, "ids": sorted(pending_ids)}
        rows = connection.execute(_undrained_parents_query, parameters).all()
        for row in rows:
            undrained_parents.setdefault(row.partition_id, set()).add(row.parent_id)
        pending_ids = {row.parent_id for row in rows if row.lost} - lost_ids
        lost_ids |= pending_ids
    drained_ids = drained_after_parents({*at_end_ids, *lost_ids}, undrained_parents)
    return [partition_id for partition_id in sorted(drained_ids) if partition_id not in lost_ids]
