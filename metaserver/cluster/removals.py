"""Keeps a journal of what brokers must still delete, and completes deletions of subjects and
groups. Runs SQL synchronously.

    marked `deleting`, with a row of `removals` for each partition
      ─▶ a broker has done its part: the row is deleted
      ─▶ no rows remain: the rows of the subject or group are deleted, a row of `deletions` is kept

A row of `removals` with group 0 means that the broker must drop the partition; with any other
group, that it must forget the group.

Invariants
    The rows of a subject or group are deleted only when it has no more rows in `removals`; until
    then its name is taken.
    Every function is idempotent, even if several metaservers call it concurrently.
    A transaction that deletes rows of `removals` locks their subject, so the last one sees that
    none remain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import SubjectDeletedError
from ...protocol.routing import PartitionState
from ..sql.dialect import insert_new, now_ms
from ..sql.schema import (
    brokers,
    deletions,
    drained,
    given_up,
    groups,
    heard,
    leases,
    live_resets,
    operations,
    partition_parents,
    partitions,
    removals,
    sessions,
    starts,
    steps,
    subjects,
    suspended_clients,
)
from .losses import refuse_folders

WHOLE_PARTITION = 0
"""The group id used for the removal of a whole partition or the deletion of a whole subject."""
GROUPS_PER_DELETE = 100
"""Maximum number of groups whose rows are deleted by one statement; each group may have thousands
of rows.
"""
Removal = tuple[int, int]
"""The partition id and the group id of a removal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRemoval:
    """A partition that its broker must drop, or for which its broker must forget a group."""

    partition_id: int
    group_id: int
    token: int
    subject_id: int
    subject: str
    group: str
    last_id: int
    """The highest partition id to drop: the subject's highest one or, if its messages were
    replaced, the highest one among the dropped partitions.
    """
    broker_group: str
    address: str | None
    """The `host:port` of the broker; None if it is silent."""
    state: PartitionState

    @property
    def key(self) -> Removal:
        """The partition id and the group id."""
        return self.partition_id, self.group_id

    @property
    def is_obsolete(self) -> bool:
        """True if the broker need not be asked, because the partition has no messages left."""
        return self.group_id != WHOLE_PARTITION and self.state is PartitionState.EXPIRED


def plan_removals(
    connection: Connection,
    condition: sa.ColumnElement[bool],
    *,
    group_id: int = WHOLE_PARTITION,
    token: int = 0,
) -> None:
    """Journal a removal for each partition that matches a condition."""
    ids = connection.execute(sa.select(partitions.c.partition_id).where(condition)).scalars()
    row = {"group_id": group_id, "token": token}
    insert_new(
        connection,
        removals,
        [{"partition_id": partition_id, **row} for partition_id in sorted(ids)],
    )


_all_partitions = partitions.alias("of_all")
_drops = removals.alias("to_drop")
_last_id_query = (
    sa.select(sa.func.max(_all_partitions.c.partition_id))
    .where(
        _all_partitions.c.subject_id == subjects.c.subject_id,
        # A subject whose messages were replaced continues in partitions with higher ids.
        sa.or_(
            subjects.c.deleting,
            sa.exists().where(
                _drops.c.partition_id == _all_partitions.c.partition_id,
                _drops.c.group_id == WHOLE_PARTITION,
            ),
        ),
    )
    .correlate(subjects)
    .scalar_subquery()
)
_pending_query = (
    sa.select(
        removals,
        partitions.c.subject_id,
        partitions.c.broker_group,
        partitions.c.state,
        subjects.c.name.label("subject"),
        groups.c.name.label("group_name"),
        _last_id_query.label("last_id"),
        sa.case((brokers.c.expires_at > now_ms(), brokers.c.address)).label("address"),
    )
    .join(partitions, partitions.c.partition_id == removals.c.partition_id)
    .join(subjects, subjects.c.subject_id == partitions.c.subject_id)
    .join(brokers, brokers.c.broker_group == partitions.c.broker_group)
    .outerjoin(groups, groups.c.group_id == removals.c.group_id)
    .order_by(removals.c.partition_id, removals.c.group_id)
)


def pending_removals(
    connection: Connection, *, limit: int, after: Removal = (0, 0)
) -> list[PendingRemoval]:
    """Return the removals after `after`, in order, including those of silent brokers."""
    after_key = sa.tuple_(removals.c.partition_id, removals.c.group_id) > sa.tuple_(*after)
    return [
        PendingRemoval(
            partition_id=row.partition_id,
            group_id=row.group_id,
            token=row.token,
            subject_id=row.subject_id,
            subject=row.subject,
            group=row.group_name or "",
            last_id=row.last_id,
            broker_group=row.broker_group,
            address=row.address,
            state=PartitionState(row.state),
        )
        for row in connection.execute(_pending_query.where(after_key).limit(limit))
    ]


def complete_removals(connection: Connection, tokens: Mapping[Removal, int]) -> list[str]:
    """
    Record which removals brokers have carried out, and finish the deletions that are now complete.

    Args:
        tokens: maps each (partition id, group id) to the highest token of the group that the broker
            now refuses.

    Returns:
        The names of the subjects whose deletion is finished.
    """
    _lock_subjects(connection, partitions.c.partition_id.in_({key[0] for key in tokens}))
    for (partition_id, group_id), token in sorted(tokens.items()):
        is_removal = sa.and_(
            removals.c.partition_id == partition_id, removals.c.group_id == group_id
        )
        deleted_count = connection.execute(sa.delete(removals).where(is_removal)).rowcount
        if deleted_count and token:
            subject_id = sa.select(partitions.c.subject_id).where(
                partitions.c.partition_id == partition_id
            )
            has_lower_token = sa.and_(
                subjects.c.subject_id == subject_id.scalar_subquery(),
                subjects.c.tokens_above < token,
            )
            connection.execute(
                sa.update(subjects).where(has_lower_token).values(tokens_above=token)
            )
    return finish_deletions(connection)


def cancel_removals(connection: Connection, broker_group: str) -> None:
    """Cancel the removals of a broker group whose loss was accepted and refuse its data folder."""
    _lock_subjects(
        connection,
        partitions.c.broker_group == broker_group,
        partitions.c.partition_id.in_(sa.select(removals.c.partition_id)),
    )
    hosted_query = sa.select(partitions.c.partition_id).where(
        partitions.c.broker_group == broker_group
    )
    is_hosted = removals.c.partition_id.in_(hosted_query)
    ids = connection.execute(sa.select(removals.c.partition_id).where(is_hosted)).scalars().all()
    refuse_folders(connection, ids)
    connection.execute(sa.delete(removals).where(is_hosted))
    finish_deletions(connection)


def _lock_subjects(connection: Connection, *of_partitions: sa.ColumnElement[bool]) -> None:
    """Lock the subjects of these partitions, so that the last of several transactions that delete
    rows of `removals` sees that none remain.
    """
    ids = sa.select(partitions.c.subject_id).where(*of_partitions)
    query = sa.select(subjects.c.subject_id).where(subjects.c.subject_id.in_(ids))
    connection.execute(query.order_by(subjects.c.name).with_for_update()).all()


_has_removals = sa.exists().where(removals.c.group_id == groups.c.group_id)
_finished_groups_query = (
    sa.select(groups.c.group_id, groups.c.subject_id, subjects.c.name)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(groups.c.deleting, sa.not_(subjects.c.deleting), sa.not_(_has_removals))
    .order_by(groups.c.group_id)
)
_subject_removals = (
    sa.select(sa.literal(1))
    .select_from(removals.join(partitions))
    .where(partitions.c.subject_id == subjects.c.subject_id)
    .correlate(subjects)
)
_finished_subjects_query = (
    sa.select(subjects.c.subject_id, subjects.c.name)
    .where(subjects.c.deleting, sa.not_(sa.exists(_subject_removals)))
    .order_by(subjects.c.name)
    .with_for_update()
)


def finish_deletions(connection: Connection) -> list[str]:
    """Delete the rows of deleted groups and subjects that have no removals left. Return the names
    of those subjects.
    """
    for row in connection.execute(_finished_groups_query).all():
        _delete_group_rows(connection, [row.group_id])
        tombstone = {"subject_id": row.subject_id, "group_id": row.group_id, "subject": row.name}
        insert_new(connection, deletions, tombstone)
    finished_subjects = connection.execute(_finished_subjects_query).all()
    for subject in finished_subjects:
        _delete_subject_rows(connection, subject.subject_id, subject.name)
    if (
        finished_subjects
        and not connection.execute(sa.select(sa.exists(sa.select(subjects)))).scalar_one()
    ):
        # The last reports of the brokers still include the dropped partitions, which would make the
        # empty database look lost.
        connection.execute(sa.update(brokers).values(hosted=0))
    return [subject.name for subject in finished_subjects]


def _delete_group_rows(connection: Connection, ids: Sequence[int]) -> None:
    """Delete the rows of groups in chunks. A group has rows for each of its partitions, and a
    PostgreSQL statement is limited to 10 s and 32,767 parameters.
    """
    for start in range(0, len(ids), GROUPS_PER_DELETE):
        chunk = ids[start : start + GROUPS_PER_DELETE]
        for table in (
            live_resets,
            sessions,
            leases,
            starts,
            suspended_clients,
            drained,
            given_up,
            heard,
            groups,
        ):
            connection.execute(sa.delete(table).where(table.c.group_id.in_(chunk)))


def _delete_subject_rows(connection: Connection, subject_id: int, name: str) -> None:
    """Delete all rows of a subject and record its deletion and those of its groups."""
    group_ids = sa.select(groups.c.group_id).where(groups.c.subject_id == subject_id)
    ids = list(connection.execute(group_ids).scalars())
    _delete_group_rows(connection, ids)
    operation_ids = sa.select(operations.c.operation_id).where(
        operations.c.subject_id == subject_id
    )
    partition_ids = sa.select(partitions.c.partition_id).where(
        partitions.c.subject_id == subject_id
    )
    connection.execute(sa.delete(steps).where(steps.c.operation_id.in_(operation_ids)))
    connection.execute(sa.delete(operations).where(operations.c.subject_id == subject_id))
    for table in (partition_parents, heard):
        connection.execute(sa.delete(table).where(table.c.partition_id.in_(partition_ids)))
    # Delete the rows of hidden subjects that were meant to be published in this one.
    connection.execute(
        sa.delete(partition_parents).where(partition_parents.c.parent_id.in_(partition_ids))
    )
    for table in (partitions, subjects):
        connection.execute(sa.delete(table).where(table.c.subject_id == subject_id))
    rows = [
        {"subject_id": subject_id, "group_id": group_id, "subject": name}
        for group_id in (WHOLE_PARTITION, *ids)
    ]
    insert_new(connection, deletions, rows)


def was_deleted(
    connection: Connection, subject: str, *, subject_id: int = 0, group_id: int = WHOLE_PARTITION
) -> bool:
    """Return True if the subject with this name and id was deleted, or its group if `group_id` is
    given.
    """
    is_deletion = sa.and_(deletions.c.subject == subject, deletions.c.group_id == group_id)
    if group_id == WHOLE_PARTITION:
        is_deletion = sa.and_(is_deletion, deletions.c.subject_id == subject_id)
    return connection.execute(sa.select(sa.exists().where(is_deletion))).scalar_one()


def subject_of_deleted_group(connection: Connection, subject: str, group_id: int) -> int | None:
    """Return the id of the subject with this name to which the deleted group belonged, or None."""
    condition = sa.and_(deletions.c.subject == subject, deletions.c.group_id == group_id)
    return connection.execute(
        sa.select(deletions.c.subject_id).where(condition)
    ).scalar_one_or_none()


def name_was_deleted(connection: Connection, subject: str) -> bool:
    """Return True if a subject with this name was ever deleted."""
    return connection.execute(sa.select(sa.exists().where(_is_deletion_of(subject)))).scalar_one()


def deletion_expires(connection: Connection, subject: str) -> bool:
    """Return True if the record of a deletion with this name will expire; see
    `retention/history.py`.
    """
    condition = sa.and_(_is_deletion_of(subject), deletions.c.ended_at.is_not(None))
    return connection.execute(sa.select(sa.exists().where(condition))).scalar_one()


def extend_deletion_record(connection: Connection, subject: str) -> None:
    """Restart the time after which records of deletions with this name expire, because a program is
    still using the name.
    """
    connection.execute(sa.update(deletions).where(_is_deletion_of(subject)).values(ended_at=None))


def _is_deletion_of(subject: str) -> sa.ColumnElement[bool]:
    return sa.and_(deletions.c.subject == subject, deletions.c.group_id == WHOLE_PARTITION)


def count_removals(connection: Connection, subject_id: int, group_id: int = WHOLE_PARTITION) -> int:
    """Return the number of partitions that brokers must still drop, or for which they must still
    forget the group.
    """
    count = (
        sa.select(sa.func.count())
        .select_from(removals.join(partitions))
        .where(partitions.c.subject_id == subject_id, removals.c.group_id == group_id)
    )
    return connection.execute(count).scalar_one()


def being_deleted_error(connection: Connection, subject_id: int, name: str) -> SubjectDeletedError:
    """Build the error for calls about a subject that is being deleted."""
    return SubjectDeletedError(
        f"subject {name!r} is being deleted; its name is free once every broker has dropped its "
        f"partitions",
        subject=name,
        left=count_removals(connection, subject_id),
    )
