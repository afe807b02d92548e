"""Reads and stores the rows of one locked consumer group: its sessions and leases. SQL,
synchronous.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import GroupUnknownError
from ...protocol.ids import MAX_I64, FencingToken, PartitionId, SessionId
from ...protocol.routing import ConsumeStrategy
from ..sql.dialect import insert_or_replace, now_ms, portions
from ..sql.schema import groups, leases, sessions
from .group_rows import client_is_suspended
from .leases import PartitionLease
from .sessions import lock_in_order, sweep_sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedGroup:
    """A group, locked until the transaction ends."""

    group_id: int
    subject_id: int
    last_token: FencingToken
    version: int
    settled: bool
    route_version: int
    """Route version with which the group was settled."""
    shared: bool


# It reads the group's row alone: a statement that has waited for a lock sees the locked row as it
# is now, but all others as they were when it began. A later statement reads what the previous
# transaction has stored elsewhere.
_locked_group = (
    sa.select(groups).where(groups.c.group_id == sa.bindparam("of_group")).with_for_update()
)


def lock_group(connection: Connection, group_id: int) -> LockedGroup:
    """
    Lock a group, and read it; others that lock it wait until this transaction ends.

    Raises:
        GroupUnknownError: it was deleted.
    """
    row = connection.execute(_locked_group, {"of_group": group_id}).one_or_none()
    if row is None:
        raise GroupUnknownError(f"consumer group {group_id} was deleted")
    return LockedGroup(
        group_id=row.group_id,
        subject_id=row.subject_id,
        last_token=FencingToken(row.last_token),
        version=row.version,
        settled=row.settled,
        route_version=row.route_version,
        shared=row.strategy == ConsumeStrategy.SHARED,
    )


_set_group = sa.update(groups).where(groups.c.group_id == sa.bindparam("of_group"))


def set_group(connection: Connection, group_id: int, **columns: int | bool) -> None:
    """Update columns of the group's row."""
    connection.execute(_set_group, {"of_group": group_id, **columns})


_members = (
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
    """Return session → whether it is suspended, by itself or an operator, for the sessions of a
    group in the order of joining.
    """
    rows = connection.execute(_members, {"of_group": group_id})
    return {SessionId(row.session): row.suspended for row in rows}


def sweep_members(
    connection: Connection, group_id: int
) -> tuple[dict[SessionId, bool], list[SessionId]]:
    """End the expired sessions of a group; returns the others as `read_members` does, and the ended
    ones.
    """
    rows = connection.execute(_members, {"of_group": group_id}).all()
    members = {SessionId(row.session): row.suspended for row in rows}
    ended = sweep_sessions(connection, group_id) if any(row.expired for row in rows) else []
    for session in ended:
        members.pop(session, None)
    return members, ended


_sessions_locked = lock_in_order(sessions.c.session.in_(sa.bindparam("ids")))
_group_is_suspended = (
    sa.select(sa.literal(1))
    .where(groups.c.group_id == sessions.c.group_id, groups.c.suspended)
    .correlate(sessions)
    .exists()
)
_able_locked = lock_in_order(
    sessions.c.session.in_(sa.bindparam("ids")),
    sa.not_(sa.or_(sessions.c.suspended, _group_is_suspended, client_is_suspended)),
)


def lock_able_sessions(connection: Connection, ids: Collection[SessionId]) -> set[SessionId]:
    """Lock those sessions that exist and are not suspended by themselves or an operator, and return
    them.
    """
    rows = connection.execute(_able_locked, {"ids": list(ids)}).scalars()
    return {SessionId(session) for session in rows}


_changed = _sessions_locked.cte("changed")
_set_versions = (
    sa.update(sessions)
    .where(sessions.c.session.in_(sa.select(_changed.c.session)))
    .values(grants_version=sa.bindparam("to_version"))
)


def raise_versions(connection: Connection, changed: Collection[SessionId], version: int) -> None:
    """Store that the grants of these sessions have changed, under this version."""
    if changed:
        connection.execute(_set_versions, {"ids": list(changed), "to_version": version})


_of_groups = lock_in_order(sessions.c.group_id.in_(sa.bindparam("ids"))).cte("of_groups")
_every_session = lock_in_order()
"""Locks every session; used if there are more groups than a statement can name."""
_version = sa.select(groups.c.version).where(groups.c.group_id == sessions.c.group_id)
_set_group_versions = (
    sa.update(sessions)
    .where(sessions.c.session.in_(sa.select(_of_groups.c.session)))
    .values(grants_version=_version.scalar_subquery())
)


def raise_group_versions(connection: Connection, group_ids: Collection[int]) -> None:
    """Store that the grants of every session of these groups have changed, each under its group's
    version.

    All sessions are locked before the first is changed, because group by group they would be locked
    in another order than heartbeats use.
    """
    parts = list(portions(group_ids))
    if len(parts) > 1:
        connection.execute(_every_session)
    for some in parts:
        connection.execute(_set_group_versions, {"ids": some})


_leases = sa.select(leases).where(leases.c.group_id == sa.bindparam("of_group"))
_some_leases = _leases.where(leases.c.partition_id.in_(sa.bindparam("ids")))


def read_leases(connection: Connection, group_id: int) -> dict[PartitionId, PartitionLease]:
    """Return all leases of a group by partition id."""
    rows = connection.execute(_leases, {"of_group": group_id})
    return {row.partition_id: _lease(row) for row in rows}


def read_leases_of(
    connection: Connection, group_id: int, ids: Collection[int]
) -> dict[PartitionId, PartitionLease]:
    """Return partition id → lease of a group; partitions without a lease are left out."""
    which = {"of_group": group_id, "ids": valid_ids(ids)}
    return {row.partition_id: _lease(row) for row in connection.execute(_some_leases, which)}


def valid_ids(ids: Collection[int]) -> list[int]:
    """Return the numbers that can be partition ids; a database refuses the others."""
    return [number for number in ids if 0 < number <= MAX_I64]


def store_leases(connection: Connection, group_id: int, rows: Collection[PartitionLease]) -> None:
    """Insert or update leases of a group."""
    insert_or_replace(connection, leases, [_lease_row(group_id, lease) for lease in rows])


def _lease_row(group_id: int, lease: PartitionLease) -> dict[str, Any]:
    """Return the columns of a lease; `asdict` copies each value, and takes ten times as long."""
    return {
        "group_id": group_id,
        "partition_id": lease.partition_id,
        "token": lease.token,
        "session": lease.session,
        "wanted": lease.wanted,
        "withdrawn": lease.withdrawn,
    }


def _lease(row: sa.Row[Any]) -> PartitionLease:
    return PartitionLease(
        partition_id=row.partition_id,
        token=row.token,
        session=row.session,
        wanted=row.wanted,
        withdrawn=row.withdrawn,
    )
