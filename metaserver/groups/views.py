"""Finds consumer groups that have to be settled, and builds views of groups for operators. SQL,
synchronous.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import GroupList, GroupSummary, GroupView, OwnerView
from ...protocol.errors import GroupUnknownError
from ...protocol.ids import ConsumerGroup, SessionId, check_name
from ...protocol.progress import PendingReset, ResetGroup
from ...protocol.routing import ConsumeStrategy
from ..cluster.losses import read_given_up
from ..cluster.partitions import subject_partitions
from ..cluster.subjects import PLANNED, SERVED, open_subject_row
from ..cluster.unfinished import UNFINISHED
from ..sql.dialect import SqliteMoment, begin_snapshot, now_ms, rows_of, sqlite_moment
from ..sql.duties import duty_left_ms, reset_duty
from ..sql.schema import (
    groups,
    leases,
    live_resets,
    operations,
    removals,
    sessions,
    starts,
    subjects,
)
from .group_rows import read_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class DueWork:
    """The work of a round of the periodic work, read at once; usually there is none."""

    groups: tuple[int, ...]
    """Ids of the groups to settle now."""
    next_expiry_ms: int | None
    """Time, in milliseconds, until the next session may expire."""
    removals: bool = False
    """True if brokers have to drop partitions or to forget groups."""
    operations: bool = False
    """True if an operation may have no driver."""
    quick: bool = False
    """True if groups or their starts have to be sent to brokers, or if a reset waits."""
    creations: bool = False
    """True if the creation of a subject is not finished."""
    versions: tuple[int, ...] = ()
    """Numbers that are the same as in an earlier round only if no version of a group has risen
    since.
    """


_expired = sa.select(sessions.c.group_id).where(
    # Read once: PostgreSQL cannot use the index with a clock that is read for each row, and rounds
    # have to be cheap.
    sessions.c.expires_at <= sa.select(now_ms()).scalar_subquery()
)
_unsettled = (
    sa.select(groups.c.group_id)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(
        sa.or_(sa.not_(groups.c.settled), groups.c.route_version != subjects.c.route_version),
    )
)
_due = sa.union(_expired, _unsettled)
_sessions = sa.select(sa.func.min(sessions.c.expires_at) - now_ms()).scalar_subquery()
_to_drive = sa.select(operations.c.operation_id).where(UNFINISHED)
_due_else = sa.select(
    _sessions.label("next_ms"),
    sa.exists(sa.select(removals.c.partition_id)).label("removals"),
    sa.exists(_to_drive.where(operations.c.driven_until <= now_ms())).label("operations"),
    sa.exists(_to_drive).label("driven"),
    sa.or_(
        sa.exists(sa.select(groups.c.group_id).where(sa.not_(groups.c.told)).correlate(None)),
        sa.exists(sa.select(starts.c.group_id)),
        sa.exists(sa.select(live_resets.c.group_id).where(live_resets.c.answer.is_(None))),
    ).label("quick"),
    sa.exists(PLANNED).label("creations"),
    sa.or_(sa.exists(_expired.correlate(None)), sa.exists(_unsettled.correlate(None))).label("due"),
    sa.func.count(groups.c.group_id).label("known"),
    sa.func.coalesce(sa.func.max(groups.c.group_id), 0).label("newest"),
    sa.func.coalesce(sa.func.sum(groups.c.version), 0).label("versions"),
)


_NOTHING_DUE = "keylane.nothing_due"
"""Key in a connection's `info`: the moment at which it saw nothing to do, and the result."""


def due_work(connection: Connection) -> DueWork:
    """
    Return the work that is due.

    Groups are due if they have an expired session, an unsettled change, or a route that is newer
    than when they were last settled. SQLite reports whether anything was written since a round with
    nothing to do; if not, only a session may have expired.
    """
    moment = sqlite_moment(connection)
    before: tuple[SqliteMoment, DueWork] | None = connection.info.get(_NOTHING_DUE)
    if moment is not None and before is not None and moment.commits == before[0].commits:
        left = _left_after(before[1], moment.now_ms - before[0].now_ms)
        if left is not None:
            return left
    due, lasting = _read_due(connection)
    if moment is not None and lasting:
        connection.info[_NOTHING_DUE] = moment, due
    else:
        connection.info.pop(_NOTHING_DUE, None)
    return due


def _left_after(before: DueWork, elapsed_ms: int) -> DueWork | None:
    """Return what is due if only time has passed since there was nothing to do; None: not known."""
    if before.next_expiry_ms is None:
        return before
    left_ms = before.next_expiry_ms - elapsed_ms
    return replace(before, next_expiry_ms=left_ms) if left_ms > 0 and elapsed_ms >= 0 else None


def _read_due(connection: Connection) -> tuple[DueWork, bool]:
    """Return the due work, and whether it is nothing until a session expires or something is
    written.
    """
    row = connection.execute(_due_else).one()
    groups_due = connection.execute(_due).scalars().all() if row.due else ()
    something = row.due or row.removals or row.driven or row.quick or row.creations
    due = DueWork(
        groups=tuple(groups_due),
        next_expiry_ms=row.next_ms,
        removals=bool(row.removals),
        operations=bool(row.operations),
        quick=bool(row.quick),
        creations=bool(row.creations),
        versions=(row.known, row.newest, int(row.versions)),
    )
    return due, not something


OWNERS = (
    sa.select(sessions.c.client)
    .join(leases, leases.c.session == sessions.c.session)
    .where(leases.c.group_id == sa.bindparam("of_group"))
    .distinct()
    .order_by(sessions.c.client)
)
"""Names of the consumers that hold a partition of a group."""
_group_versions = sa.select(groups.c.group_id, groups.c.version).where(
    groups.c.group_id.in_(sa.bindparam("ids"))
)


def group_versions(connection: Connection, ids: Collection[int]) -> dict[int, int]:
    """Return group id → its present version."""
    return {row.group_id: row.version for row in rows_of(connection, _group_versions, ids)}


_grants_versions = sa.select(sessions.c.session, sessions.c.grants_version).where(
    sessions.c.group_id.in_(sa.bindparam("ids"))
)


def grants_versions(connection: Connection, ids: Collection[int]) -> dict[SessionId, int]:
    """Return session → version of its grants, for every session of these groups."""
    rows = rows_of(connection, _grants_versions, ids)
    return {SessionId(row.session): row.grants_version for row in rows}


def list_groups(connection: Connection, subject: str) -> GroupList:
    """Return the consumer groups of a subject, ordered by name. Raises SubjectUnknownError."""
    row = open_subject_row(connection, subject)
    alive = (
        sa.select(sa.func.count())
        .where(sessions.c.group_id == groups.c.group_id, sessions.c.expires_at > now_ms())
        .scalar_subquery()
        .label("sessions")
    )
    rows = connection.execute(
        sa.select(groups.c.name, groups.c.strategy, alive)
        .where(groups.c.subject_id == row.subject_id, sa.not_(groups.c.deleting))
        .order_by(groups.c.name)
    )
    summaries = [
        GroupSummary(group=row.name, strategy=ConsumeStrategy(row.strategy), sessions=row.sessions)
        for row in rows
    ]
    return GroupList(groups=[summary.group for summary in summaries], summaries=summaries)


def read_group(connection: Connection, subject: str, group: ConsumerGroup) -> GroupView:
    """
    Return a group with the owner of each of its partitions.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError
    """
    begin_snapshot(connection)
    row = open_subject_row(connection, subject)
    group_id, strategy = find_group(connection, row.subject_id, subject, group)
    left = (sessions.c.expires_at - now_ms()).label("left_ms")
    alive = sa.and_(sessions.c.group_id == group_id, sessions.c.expires_at > now_ms())
    live = {
        session.session: session
        for session in connection.execute(
            sa.select(sessions.c.session, sessions.c.client, left).where(alive)
        )
    }
    rows = connection.execute(sa.select(leases).where(leases.c.group_id == group_id))
    held = {lease.partition_id: lease for lease in rows}
    owners = []
    for partition in subject_partitions(connection, row.subject_id, SERVED):
        lease = held.get(partition.partition_id)
        session = None if lease is None else live.get(lease.session)
        owners.append(
            OwnerView(
                partition=partition,
                token=0 if lease is None else lease.token,
                session=None if session is None else session.session,
                client=None if session is None else session.client,
                expires_in_ms=None if session is None else max(0, session.left_ms),
            )
        )
    return GroupView(
        subject=subject,
        group=group,
        sessions=len(live),
        owners=tuple(owners),
        strategy=strategy,
        settings=read_stored(connection, group_id, subject=subject, group=group),
        reset=_pending_reset(connection, group_id),
        silent_ms=None if live else _silent_ms(connection, group_id),
        revision=_revision(connection, group_id, busy=bool(live)),
        given_up=read_given_up(connection, group_id),
    )


_counted = sa.select(groups.c.version, groups.c.last_token).where(
    groups.c.group_id == sa.bindparam("of_group")
)


def _revision(connection: Connection, group_id: int, *, busy: bool) -> str:
    """Return the revision of an idle group; while the group has consumers or is being reset, a
    revision that never equals one of an idle group.
    """
    row = connection.execute(_counted, {"of_group": group_id}).one()
    busy = busy or duty_left_ms(connection, reset_duty(group_id)) > 0
    return revision_of(group_id, row.version, row.last_token) + ("+" if busy else "")


def revision_of(group_id: int, version: int, last_token: int) -> str:
    """Return the revision of a group without live consumers whose cursors are not being set."""
    return f"{group_id}.{version}.{last_token}"


_silence = sa.select(now_ms() - groups.c.idle_since).where(
    groups.c.group_id == sa.bindparam("of_group")
)


def _silent_ms(connection: Connection, group_id: int) -> int | None:
    silent_ms: int | None = connection.execute(_silence, {"of_group": group_id}).scalar_one()
    return None if silent_ms is None else max(0, silent_ms)


_reset = sa.select(live_resets.c.ask, live_resets.c.begun).where(
    live_resets.c.group_id == sa.bindparam("of_group"), live_resets.c.answer.is_(None)
)


def _pending_reset(connection: Connection, group_id: int) -> PendingReset | None:
    row = connection.execute(_reset, {"of_group": group_id}).one_or_none()
    if row is None:
        return None
    ask = msgspec.json.decode(row.ask, type=ResetGroup)
    owners = connection.execute(OWNERS, {"of_group": group_id}).scalars()
    return PendingReset(to=ask.to, begun=row.begun, waits_for=tuple(owners))


def find_group(
    connection: Connection, subject_id: int, subject: str, group: str
) -> tuple[int, ConsumeStrategy]:
    """
    Return the id and the strategy of a group.

    Raises:
        InvalidRequestError, GroupUnknownError
    """
    check_name("consumer group", group)
    named = sa.and_(
        groups.c.subject_id == subject_id, groups.c.name == group, sa.not_(groups.c.deleting)
    )
    chosen = sa.select(groups.c.group_id, groups.c.strategy).where(named)
    row = connection.execute(chosen).one_or_none()
    if row is None:
        raise GroupUnknownError(subject=subject, group=group)
    return row.group_id, ConsumeStrategy(row.strategy)
