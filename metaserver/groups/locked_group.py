"""Reads and stores the sessions and leases of one locked consumer group. Runs SQL synchronously."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import GroupUnknownError
from ...protocol.ids import MAX_I64, FencingToken, PartitionId, SessionId
from ...protocol.routing import ConsumeStrategy
from ..cluster.partitions import build_previous
from ..sql.dialect import insert_or_replace, now_ms, split_ids
from ..sql.schema import groups, leases, sessions
from .group_rows import client_is_suspended
from .leases import PartitionLease
from .sessions import end_expired_sessions, select_locked_in_order


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedGroup:
    """A group that is locked until the transaction ends."""

    group_id: int
    name: str
    subject_id: int
    last_token: FencingToken
    version: int
    settled: bool
    route_version: int
    """The route version with which the group was last settled."""
    shared: bool


# Reads only the group's row. After waiting for a lock, a statement sees the current version of the
# locked row, but sees all other rows as they were when it started. Later statements see everything
# that the previous transaction stored.
_lock_group_query = (
    sa.select(groups).where(groups.c.group_id == sa.bindparam("of_group")).with_for_update()
)


def lock_group(connection: Connection, group_id: int) -> LockedGroup:
    """
    Lock a group until the transaction ends and return its row.

    Raises:
        GroupUnknownError: the group was deleted.
    """
    row = connection.execute(_lock_group_query, {"of_group": group_id}).one_or_none()
    if row is None:
        raise GroupUnknownError(f"consumer group {group_id} was deleted")
    return LockedGroup(
        group_id=row.group_id,
        name=row.name,
        subject_id=row.subject_id,
        last_token=FencingToken(row.last_token),
        version=row.version,
        settled=row.settled,
        route_version=row.route_version,
        shared=row.strategy == ConsumeStrategy.SHARED,
    )


_update_group = sa.update(groups).where(groups.c.group_id == sa.bindparam("of_group"))


def set_group(connection: Connection, group_id: int, **columns: int | bool) -> None:
    """Update columns of the group's row."""
    connection.execute(_update_group, {"of_group": group_id, **columns})


_members_query = (
    sa.select(
        sessions.c.session,
        sa.or_(sessions.c.suspended, groups.c.suspended, client_is_suspended).label("suspended"),
        (sessions.c.expires_at <= now_ms()).label("expired"),
    )
    .join(groups, groups.c.group_id == sessions.c.group_id)
    .where(sessions.c.group_id == sa.bindparam("of_group"))
    .order_by(sessions.c.joined)
)


def read_members(connection: Connection, group_id: int) -> dict[SessionId, bool]:
    """Return a dict that maps each session of the group, in the order of joining, to whether it is
    suspended by itself or by an operator.
    """
    rows = connection.execute(_members_query, {"of_group": group_id})
    return {SessionId(row.session): row.suspended for row in rows}


_expired_leases_query = (
    sa.select(sa.func.count())
    .select_from(leases.join(sessions, leases.c.session == sessions.c.session))
    .where(sessions.c.group_id == sa.bindparam("of_group"), sessions.c.expires_at <= now_ms())
)


def end_expired_members(
    connection: Connection, group_id: int
) -> tuple[dict[SessionId, bool], list[SessionId], int]:
    """End the group's expired sessions. Return the live ones in the form of `read_members`, those
    that were ended, and how many leases these had.
    """
    rows = connection.execute(_members_query, {"of_group": group_id}).all()
    members = {SessionId(row.session): row.suspended for row in rows}
    if not any(row.expired for row in rows):
        return members, [], 0
    lost_leases = connection.execute(_expired_leases_query, {"of_group": group_id}).scalar_one()
    ended_sessions = end_expired_sessions(connection, group_id)
    for session in ended_sessions:
        members.pop(session, None)
    return members, ended_sessions, lost_leases


_holders_query = (
    sa.select(
        sessions.c.session,
        sessions.c.client,
        sa.or_(sessions.c.suspended, groups.c.suspended, client_is_suspended).label("suspended"),
    )
    .join(groups, groups.c.group_id == sessions.c.group_id)
    .where(sessions.c.session.in_(sa.bindparam("ids")))
)


def read_holders(connection: Connection, ids: Collection[str]) -> dict[SessionId, tuple[str, bool]]:
    """Return a dict that maps each session to its client, and to whether it is suspended by itself
    or by an operator.
    """
    rows = connection.execute(_holders_query, {"ids": list(ids)})
    return {SessionId(row.session): (row.client, row.suspended) for row in rows}


_lock_sessions = select_locked_in_order(sessions.c.session.in_(sa.bindparam("ids")))
_group_is_suspended = (
    sa.select(sa.literal(1))
    .where(groups.c.group_id == sessions.c.group_id, groups.c.suspended)
    .correlate(sessions)
    .exists()
)
_lock_active = select_locked_in_order(
    sessions.c.session.in_(sa.bindparam("ids")),
    sa.not_(sa.or_(sessions.c.suspended, _group_is_suspended, client_is_suspended)),
)


def lock_active_sessions(connection: Connection, ids: Collection[SessionId]) -> set[SessionId]:
    """Lock and return those sessions that exist and have not been suspended by themselves or by an
    operator.
    """
    rows = connection.execute(_lock_active, {"ids": list(ids)}).scalars()
    return {SessionId(session) for session in rows}


_sessions_to_update = _lock_sessions.cte("sessions_to_update")
_update_versions = (
    sa.update(sessions)
    .where(sessions.c.session.in_(sa.select(_sessions_to_update.c.session)))
    .values(grants_version=sa.bindparam("to_version"))
)


def raise_versions(connection: Connection, changed: Collection[SessionId], version: int) -> None:
    """Store a new version of the grants of these sessions."""
    if changed:
        connection.execute(_update_versions, {"ids": list(changed), "to_version": version})


_sessions_of_groups = select_locked_in_order(sessions.c.group_id.in_(sa.bindparam("ids"))).cte(
    "sessions_of_groups"
)
_lock_all_sessions = select_locked_in_order()
"""Locks all sessions; used if there are more groups than fit into one statement."""
_group_version = sa.select(groups.c.version).where(groups.c.group_id == sessions.c.group_id)
_update_group_versions = (
    sa.update(sessions)
    .where(sessions.c.session.in_(sa.select(_sessions_of_groups.c.session)))
    .values(grants_version=_group_version.scalar_subquery())
)


def raise_group_versions(connection: Connection, group_ids: Collection[int]) -> None:
    """
    Set the grants version of every session in these groups to the version of its group.

    All sessions are locked before the first one is changed, because locking them group by group
    would not follow the order in which heartbeats lock them.
    """
    chunks = list(split_ids(group_ids))
    if len(chunks) > 1:
        connection.execute(_lock_all_sessions)
    for chunk in chunks:
        connection.execute(_update_group_versions, {"ids": chunk})


_leases_query = sa.select(leases).where(leases.c.group_id == sa.bindparam("of_group"))
_leases_by_id = _leases_query.where(leases.c.partition_id.in_(sa.bindparam("ids")))


def read_leases(connection: Connection, group_id: int) -> dict[PartitionId, PartitionLease]:
    """Return a dict that maps each partition id to its lease, for all leases of a group."""
    rows = connection.execute(_leases_query, {"of_group": group_id})
    return {row.partition_id: _build_lease(row) for row in rows}


def read_leases_of(
    connection: Connection, group_id: int, ids: Collection[int]
) -> dict[PartitionId, PartitionLease]:
    """Return a dict that maps each partition id to its lease in a group; partitions without a lease
    are omitted.
    """
    parameters = {"of_group": group_id, "ids": valid_ids(ids)}
    return {
        row.partition_id: _build_lease(row) for row in connection.execute(_leases_by_id, parameters)
    }


def valid_ids(ids: Collection[int]) -> list[int]:
    """Return those numbers that are in the range of partition ids; the database would reject the
    others.
    """
    return [partition_id for partition_id in ids if 0 < partition_id <= MAX_I64]


def store_leases(connection: Connection, group_id: int, rows: Collection[PartitionLease]) -> None:
    """Insert or update leases of a group."""
    insert_or_replace(connection, leases, [_lease_row(group_id, lease) for lease in rows])


def _lease_row(group_id: int, lease: PartitionLease) -> dict[str, Any]:
    """Return the column values of a lease. This is ten times as fast as `asdict`, which copies
    every value.
    """
    return {
        "group_id": group_id,
        "partition_id": lease.partition_id,
        "token": lease.token,
        "session": lease.session,
        "wanted": lease.wanted,
        "withdrawn": lease.withdrawn,
        "previous_client": lease.previous.client if lease.previous else None,
        "previous_end": lease.previous.end if lease.previous else None,
    }


def _build_lease(row: sa.Row[Any]) -> PartitionLease:
    return PartitionLease(
        partition_id=row.partition_id,
        token=row.token,
        session=row.session,
        wanted=row.wanted,
        withdrawn=row.withdrawn,
        previous=build_previous(row),
    )
