"""The partitions and groups that brokers still have to delete, and the end of deletions. SQL,
synchronous.

    marked `deleting`, a row of `removals` for each partition
      ─▶ its broker has done it: the row is deleted
      ─▶ no row is left: all rows are deleted, a row of `deletions` stays

A row of `removals` with group 0 means that the broker has to drop the partition; with any other
group, that it has to forget the group.

Invariants
    The rows of a subject or a group are deleted only when no row of `removals` is left: until then
    its name is taken.
    Every function may be repeated, also by several metaservers at once; a repeat changes nothing.
    A transaction that deletes rows of `removals` holds the lock of their subject, so that the last
    one sees that none is left.
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

WHOLE = 0
"""Group id of a removal or a deletion that concerns the whole partition or subject."""
GROUPS_AT_ONCE = 100
"""Most groups whose rows a statement deletes, because each may have thousands."""
Removal = tuple[int, int]
"""Partition id and group id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRemoval:
    """A partition that its broker has to drop, or on which the broker has to forget a group."""

    partition_id: int
    group_id: int
    token: int
    subject_id: int
    subject: str
    group: str
    last_id: int
    """Highest partition id that the subject has had, or, for a replaced subject, that is dropped.
    """
    broker_group: str
    address: str | None
    """host:port of the broker; None: it is silent."""
    state: PartitionState

    @property
    def key(self) -> Removal:
        """Partition id and group id."""
        return self.partition_id, self.group_id

    @property
    def obsolete(self) -> bool:
        """True if no broker need be asked, because the partition has no messages left for the
        group.
        """
        return self.group_id != WHOLE and self.state is PartitionState.EXPIRED


def plan_removals(
    connection: Connection, chosen: sa.ColumnElement[bool], *, group_id: int = WHOLE, token: int = 0
) -> None:
    """Journal the removals for the brokers of the chosen partitions."""
    ids = connection.execute(sa.select(partitions.c.partition_id).where(chosen)).scalars()
    row = {"group_id": group_id, "token": token}
    insert_new(connection, removals, [{"partition_id": each, **row} for each in sorted(ids)])


_of_all = partitions.alias("of_all")
_to_drop = removals.alias("to_drop")
_last_id = (
    sa.select(sa.func.max(_of_all.c.partition_id))
    .where(
        _of_all.c.subject_id == subjects.c.subject_id,
        # A replaced subject continues in partitions with higher ids.
        sa.or_(
            subjects.c.deleting,
            sa.exists().where(
                _to_drop.c.partition_id == _of_all.c.partition_id, _to_drop.c.group_id == WHOLE
            ),
        ),
    )
    .correlate(subjects)
    .scalar_subquery()
)
_pending = (
    sa.select(
        removals,
        partitions.c.subject_id,
        partitions.c.broker_group,
        partitions.c.state,
        subjects.c.name.label("subject"),
        groups.c.name.label("group_name"),
        _last_id.label("last_id"),
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
    """Return the removals after `after`, by partition, including those of silent brokers."""
    behind = sa.tuple_(removals.c.partition_id, removals.c.group_id) > sa.tuple_(*after)
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
        for row in connection.execute(_pending.where(behind).limit(limit))
    ]


def note_removed(connection: Connection, done: Mapping[Removal, int]) -> list[str]:
    """
    Store what brokers have done, and end the deletions that are complete.

    Args:
        done: (partition id, group id) → highest token of the group that the broker refuses now.

    Returns:
        The names of the subjects that are deleted now.
    """
    _lock_subjects(connection, partitions.c.partition_id.in_({key[0] for key in done}))
    for (partition_id, group_id), token in sorted(done.items()):
        here = sa.and_(removals.c.partition_id == partition_id, removals.c.group_id == group_id)
        gone = connection.execute(sa.delete(removals).where(here)).rowcount
        if gone and token:
            of = sa.select(partitions.c.subject_id).where(partitions.c.partition_id == partition_id)
            lower = sa.and_(
                subjects.c.subject_id == of.scalar_subquery(), subjects.c.tokens_above < token
            )
            connection.execute(sa.update(subjects).where(lower).values(tokens_above=token))
    return end_deletions(connection)


def give_up_removals(connection: Connection, broker_group: str) -> None:
    """Cancel the removals of a broker group whose loss is accepted, because its data folder is
    refused from now on.
    """
    _lock_subjects(
        connection,
        partitions.c.broker_group == broker_group,
        partitions.c.partition_id.in_(sa.select(removals.c.partition_id)),
    )
    there = sa.select(partitions.c.partition_id).where(partitions.c.broker_group == broker_group)
    here = removals.c.partition_id.in_(there)
    ids = connection.execute(sa.select(removals.c.partition_id).where(here)).scalars().all()
    refuse_folders(connection, ids)
    connection.execute(sa.delete(removals).where(here))
    end_deletions(connection)


def _lock_subjects(connection: Connection, *of_partitions: sa.ColumnElement[bool]) -> None:
    """Lock the subjects of these partitions, so that of two transactions that store removals the
    later one sees what the first has stored.
    """
    ids = sa.select(partitions.c.subject_id).where(*of_partitions)
    here = sa.select(subjects.c.subject_id).where(subjects.c.subject_id.in_(ids))
    connection.execute(here.order_by(subjects.c.name).with_for_update()).all()


_left = sa.exists().where(removals.c.group_id == groups.c.group_id)
_ended_groups = (
    sa.select(groups.c.group_id, groups.c.subject_id, subjects.c.name)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(groups.c.deleting, sa.not_(subjects.c.deleting), sa.not_(_left))
    .order_by(groups.c.group_id)
)
_of_subject = (
    sa.select(sa.literal(1))
    .select_from(removals.join(partitions))
    .where(partitions.c.subject_id == subjects.c.subject_id)
    .correlate(subjects)
)
_ended_subjects = (
    sa.select(subjects.c.subject_id, subjects.c.name)
    .where(subjects.c.deleting, sa.not_(sa.exists(_of_subject)))
    .order_by(subjects.c.name)
    .with_for_update()
)


def end_deletions(connection: Connection) -> list[str]:
    """Delete the rows of groups and subjects of which brokers have nothing left; returns the names
    of the subjects.
    """
    for row in connection.execute(_ended_groups).all():
        _delete_group_rows(connection, [row.group_id])
        tombstone = {"subject_id": row.subject_id, "group_id": row.group_id, "subject": row.name}
        insert_new(connection, deletions, tombstone)
    gone = connection.execute(_ended_subjects).all()
    for subject in gone:
        _delete_subject_rows(connection, subject.subject_id, subject.name)
    if gone and not connection.execute(sa.select(sa.exists(sa.select(subjects)))).scalar_one():
        # The brokers' last reports still count the dropped partitions: the database would seem
        # lost.
        connection.execute(sa.update(brokers).values(hosted=0))
    return [subject.name for subject in gone]


def _delete_group_rows(connection: Connection, ids: Sequence[int]) -> None:
    """Delete the rows of groups in portions: a group has rows for each of its partitions, and a
    statement on PostgreSQL has 10 s, and 32,767 parameters.
    """
    for first in range(0, len(ids), GROUPS_AT_ONCE):
        portion = ids[first : first + GROUPS_AT_ONCE]
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
            connection.execute(sa.delete(table).where(table.c.group_id.in_(portion)))


def _delete_subject_rows(connection: Connection, subject_id: int, name: str) -> None:
    of_groups = sa.select(groups.c.group_id).where(groups.c.subject_id == subject_id)
    ids = list(connection.execute(of_groups).scalars())
    _delete_group_rows(connection, ids)
    of_operations = sa.select(operations.c.operation_id).where(
        operations.c.subject_id == subject_id
    )
    mine = sa.select(partitions.c.partition_id).where(partitions.c.subject_id == subject_id)
    connection.execute(sa.delete(steps).where(steps.c.operation_id.in_(of_operations)))
    connection.execute(sa.delete(operations).where(operations.c.subject_id == subject_id))
    for table in (partition_parents, heard):
        connection.execute(sa.delete(table).where(table.c.partition_id.in_(mine)))
    # The rows of hidden subjects that were to be published in this one.
    connection.execute(sa.delete(partition_parents).where(partition_parents.c.parent_id.in_(mine)))
    for table in (partitions, subjects):
        connection.execute(sa.delete(table).where(table.c.subject_id == subject_id))
    rows = [
        {"subject_id": subject_id, "group_id": group_id, "subject": name}
        for group_id in (WHOLE, *ids)
    ]
    insert_new(connection, deletions, rows)


def was_deleted(
    connection: Connection, subject: str, *, subject_id: int = 0, group_id: int = WHOLE
) -> bool:
    """Return whether the subject with this name and id was deleted, or, with `group_id`, whether
    this group of it was.
    """
    named = sa.and_(deletions.c.subject == subject, deletions.c.group_id == group_id)
    if group_id == WHOLE:
        named = sa.and_(named, deletions.c.subject_id == subject_id)
    return connection.execute(sa.select(sa.exists().where(named))).scalar_one()


def subject_of_deleted_group(connection: Connection, subject: str, group_id: int) -> int | None:
    """Return the id of the subject of this name whose group with this id was deleted, or None."""
    named = sa.and_(deletions.c.subject == subject, deletions.c.group_id == group_id)
    return connection.execute(sa.select(deletions.c.subject_id).where(named)).scalar_one_or_none()


def name_was_deleted(connection: Connection, subject: str) -> bool:
    """Return whether a subject of this name was deleted."""
    return connection.execute(sa.select(sa.exists().where(_deleted(subject)))).scalar_one()


def is_ageing(connection: Connection, subject: str) -> bool:
    """Return whether the deletion of a subject of this name will be forgotten after a time; see
    `retention/history.py`.
    """
    named = sa.and_(_deleted(subject), deletions.c.ended_at.is_not(None))
    return connection.execute(sa.select(sa.exists().where(named))).scalar_one()


def remember_longer(connection: Connection, subject: str) -> None:
    """Start the time again after which deletions of this name are forgotten, because a program
    still asks for it.
    """
    connection.execute(sa.update(deletions).where(_deleted(subject)).values(ended_at=None))


def _deleted(subject: str) -> sa.ColumnElement[bool]:
    return sa.and_(deletions.c.subject == subject, deletions.c.group_id == WHOLE)


def removals_left(connection: Connection, subject_id: int, group_id: int = WHOLE) -> int:
    """Count the partitions that brokers still have to drop, or on which they have to forget the
    group.
    """
    count = (
        sa.select(sa.func.count())
        .select_from(removals.join(partitions))
        .where(partitions.c.subject_id == subject_id, removals.c.group_id == group_id)
    )
    return connection.execute(count).scalar_one()


def being_deleted(connection: Connection, subject_id: int, name: str) -> SubjectDeletedError:
    """Make the error for calls that concern a subject that is being deleted."""
    return SubjectDeletedError(
        f"subject {name!r} is being deleted; its name is free when every broker has "
        f"dropped its partitions",
        subject=name,
        left=removals_left(connection, subject_id),
    )
