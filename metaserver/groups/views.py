"""Finds work for the periodic tasks and builds views of groups for operators. Runs SQL
synchronously.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import (
    EndedMember,
    GroupList,
    GroupMember,
    GroupSummary,
    GroupView,
    OwnerView,
)
from ...protocol.errors import GroupUnknownError
from ...protocol.ids import SessionId, check_name
from ...protocol.progress import PendingReset, ResetGroup
from ...protocol.routing import ConsumeStrategy
from ..cluster.losses import read_given_up
from ..cluster.partitions import read_ages_ms, subject_partitions
from ..cluster.subjects import PLANNED, SERVED, open_subject_row
from ..cluster.unfinished import UNFINISHED
from ..sql.dialect import (
    SqliteVersion,
    begin_snapshot,
    calendar_ms,
    now_ms,
    read_in_chunks,
    read_sqlite_version,
)
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
from .group_rows import client_is_suspended, read_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class DueWork:
    """The work that is due in one round of the periodic tasks; usually there is none."""

    groups: tuple[int, ...]
    """Ids of the groups to settle now."""
    next_expiry_ms: int | None
    """Milliseconds until the next session may expire; None if there are no sessions."""
    removals: bool = False
    """True if brokers must drop partitions or forget groups."""
    operations: bool = False
    """True if an operation may have no driver."""
    quick: bool = False
    """True if groups or start offsets must be sent to brokers, or if a reset is pending."""
    creations: bool = False
    """True if the creation of a subject is unfinished."""
    versions: tuple[int, ...] = ()
    """A fingerprint of all group versions. It equals an earlier one only if no group has changed in
    between.
    """


_expired_query = sa.select(sessions.c.group_id).where(
    # A subquery reads the clock only once. PostgreSQL could not use the index if the clock were
    # read for each row, and this query runs in every round.
    sessions.c.expires_at <= sa.select(now_ms()).scalar_subquery()
)
_unsettled_query = (
    sa.select(groups.c.group_id)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(
        sa.or_(sa.not_(groups.c.settled), groups.c.route_version != subjects.c.route_version),
    )
)
_due_groups_query = sa.union(_expired_query, _unsettled_query)
_next_expiry_ms = sa.select(sa.func.min(sessions.c.expires_at) - now_ms()).scalar_subquery()
_unfinished_operations = sa.select(operations.c.operation_id).where(UNFINISHED)
_other_work_query = sa.select(
    _next_expiry_ms.label("next_ms"),
    sa.exists(sa.select(removals.c.partition_id)).label("removals"),
    sa.exists(_unfinished_operations.where(operations.c.driven_until <= now_ms())).label(
        "operations"
    ),
    sa.exists(_unfinished_operations).label("operations_unfinished"),
    sa.or_(
        sa.exists(sa.select(groups.c.group_id).where(sa.not_(groups.c.told)).correlate(None)),
        sa.exists(sa.select(starts.c.group_id)),
        sa.exists(sa.select(live_resets.c.group_id).where(live_resets.c.answer.is_(None))),
    ).label("quick"),
    sa.exists(PLANNED).label("creations"),
    sa.or_(
        sa.exists(_expired_query.correlate(None)), sa.exists(_unsettled_query.correlate(None))
    ).label("due"),
    sa.func.count(groups.c.group_id).label("group_count"),
    sa.func.coalesce(sa.func.max(groups.c.group_id), 0).label("newest_group"),
    sa.func.coalesce(sa.func.sum(groups.c.version), 0).label("versions"),
)


_CACHED_WORK = "keylane.nothing_due"
"""Key in a connection's `info` that stores when it last found nothing to do, and the result at that
time.
"""


def read_due_work(connection: Connection) -> DueWork:
    """
    Return the work that is due.

    Groups are due if they have an expired session, an unsettled change, or a newer route than when
    they were last settled. With SQLite, a result without any work is cached until something is
    written, because until then only the expiry of a session can create new work.
    """
    db_version = read_sqlite_version(connection)
    cached_entry: tuple[SqliteVersion, DueWork] | None = connection.info.get(_CACHED_WORK)
    if (
        db_version is not None
        and cached_entry is not None
        and db_version.commits == cached_entry[0].commits
    ):
        cached_work = _advance_cached_work(
            cached_entry[1], db_version.now_ms - cached_entry[0].now_ms
        )
        if cached_work is not None:
            return cached_work
    work, cacheable = _query_due_work(connection)
    if db_version is not None and cacheable:
        connection.info[_CACHED_WORK] = db_version, work
    else:
        connection.info.pop(_CACHED_WORK, None)
    return work


def _advance_cached_work(cached: DueWork, elapsed_ms: int) -> DueWork | None:
    """Return the cached result, valid for `elapsed_ms` without a write; None if a session may have
    expired since.
    """
    if cached.next_expiry_ms is None:
        return cached
    remaining_ms = cached.next_expiry_ms - elapsed_ms
    return (
        replace(cached, next_expiry_ms=remaining_ms)
        if remaining_ms > 0 and elapsed_ms >= 0
        else None
    )


def _query_due_work(connection: Connection) -> tuple[DueWork, bool]:
    """Return the due work, and whether the result can be cached because there is no work, due or in
    progress.
    """
    row = connection.execute(_other_work_query).one()
    groups_due = connection.execute(_due_groups_query).scalars().all() if row.due else ()
    has_work = row.due or row.removals or row.operations_unfinished or row.quick or row.creations
    work = DueWork(
        groups=tuple(groups_due),
        next_expiry_ms=row.next_ms,
        removals=bool(row.removals),
        operations=bool(row.operations),
        quick=bool(row.quick),
        creations=bool(row.creations),
        versions=(row.group_count, row.newest_group, int(row.versions)),
    )
    return work, not has_work


OWNERS = (
    sa.select(sessions.c.client)
    .join(leases, leases.c.session == sessions.c.session)
    .where(leases.c.group_id == sa.bindparam("of_group"))
    .distinct()
    .order_by(sessions.c.client)
)
"""Names of the consumers that hold a partition in a group."""
_group_versions_query = sa.select(groups.c.group_id, groups.c.version).where(
    groups.c.group_id.in_(sa.bindparam("ids"))
)


def group_versions(connection: Connection, ids: Collection[int]) -> dict[int, int]:
    """Return a dict that maps each group id to its current version."""
    return {
        row.group_id: row.version for row in read_in_chunks(connection, _group_versions_query, ids)
    }


_grants_versions_query = sa.select(sessions.c.session, sessions.c.grants_version).where(
    sessions.c.group_id.in_(sa.bindparam("ids"))
)


def grants_versions(connection: Connection, ids: Collection[int]) -> dict[SessionId, int]:
    """Return a dict that maps each session in these groups to its grants version."""
    rows = read_in_chunks(connection, _grants_versions_query, ids)
    return {SessionId(row.session): row.grants_version for row in rows}


def list_groups(connection: Connection, subject: str) -> GroupList:
    """Return the consumer groups of a subject, ordered by name. Raises SubjectUnknownError."""
    row = open_subject_row(connection, subject)
    session_count = (
        sa.select(sa.func.count())
        .where(sessions.c.group_id == groups.c.group_id, sessions.c.expires_at > now_ms())
        .scalar_subquery()
        .label("sessions")
    )
    rows = connection.execute(
        sa.select(groups.c.name, groups.c.strategy, session_count)
        .where(groups.c.subject_id == row.subject_id, sa.not_(groups.c.deleting))
        .order_by(groups.c.name)
    )
    summaries = [
        GroupSummary(group=row.name, strategy=ConsumeStrategy(row.strategy), sessions=row.sessions)
        for row in rows
    ]
    return GroupList(groups=[summary.group for summary in summaries], summaries=summaries)


def read_group(connection: Connection, subject: str, group: str) -> GroupView:
    """
    Return a group with the owner of each partition.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError
    """
    begin_snapshot(connection)
    row = open_subject_row(connection, subject)
    group_id, strategy = find_group(connection, row.subject_id, subject, group)
    live_sessions = {
        session.session: session
        for session in connection.execute(_live_query, {"of_group": group_id})
    }
    rows = connection.execute(sa.select(leases).where(leases.c.group_id == group_id))
    leases_by_id = {lease.partition_id: lease for lease in rows}
    owned = Counter(lease.session for lease in leases_by_id.values())
    ages_ms = read_ages_ms(connection, row.subject_id)
    owners = []
    for partition in subject_partitions(connection, row.subject_id, SERVED):
        lease = leases_by_id.get(partition.partition_id)
        session = None if lease is None else live_sessions.get(lease.session)
        heir = None
        if lease is not None and session is not None and lease.withdrawn:
            heir = live_sessions.get(lease.wanted)
        owners.append(
            OwnerView(
                partition=partition,
                token=0 if lease is None else lease.token,
                session=None if session is None else session.session,
                client=None if session is None else session.client,
                expires_in_ms=None if session is None else max(0, session.left_ms),
                hands_over_to=None if heir is None else heir.client,
                age_ms=ages_ms.get(partition.partition_id),
                previous_client=None if lease is None else lease.previous_client,
            )
        )
    return GroupView(
        subject=subject,
        group=group,
        sessions=len(live_sessions),
        owners=tuple(owners),
        strategy=strategy,
        settings=read_stored(connection, group_id, subject=subject, group=group),
        reset=_read_pending_reset(connection, group_id),
        silent_ms=None if live_sessions else _read_silent_ms(connection, group_id),
        revision=_read_revision(connection, group_id, busy=bool(live_sessions)),
        given_up=read_given_up(connection, group_id),
        members=tuple(
            GroupMember(
                client=session.client,
                partitions=owned[session.session],
                heard_ms=max(0, session.ttl_ms - session.left_ms),
                expires_in_ms=max(0, session.left_ms),
                suspended=session.suspended,
                filter=session.filter,
                unreached=tuple(session.unreached.split()),
                session=session.session,
                unreached_ms=tuple(
                    max(0, session.calendar_ms - int(since))
                    for since in session.unreached_since.split()
                ),
            )
            for session in live_sessions.values()
        ),
        ended=_read_ended(connection, group_id),
    )


_live_query = (
    sa.select(
        sessions.c.session,
        sessions.c.client,
        sessions.c.ttl_ms,
        sessions.c.filter,
        sessions.c.unreached,
        sessions.c.unreached_since,
        calendar_ms().label("calendar_ms"),
        (sessions.c.expires_at - now_ms()).label("left_ms"),
        sa.or_(sessions.c.suspended, groups.c.suspended, client_is_suspended).label("suspended"),
    )
    .join(groups, groups.c.group_id == sessions.c.group_id)
    .where(sessions.c.group_id == sa.bindparam("of_group"), sessions.c.expires_at > now_ms())
    .order_by(sessions.c.joined)
)
_ended_query = sa.select(
    groups.c.ended_client,
    groups.c.ended_left,
    (now_ms() - groups.c.ended_at).label("ended_ms"),
    (now_ms() - groups.c.ended_heard_at).label("heard_ms"),
).where(groups.c.group_id == sa.bindparam("of_group"), groups.c.ended_client.is_not(None))


def _read_ended(connection: Connection, group_id: int) -> EndedMember | None:
    row = connection.execute(_ended_query, {"of_group": group_id}).one_or_none()
    if row is None:
        return None
    return EndedMember(
        client=row.ended_client,
        left=bool(row.ended_left),
        ended_ms=None if row.ended_ms is None else max(0, row.ended_ms),
        heard_ms=None if row.heard_ms is None else max(0, row.heard_ms),
    )


_revision_query = sa.select(groups.c.version, groups.c.last_token).where(
    groups.c.group_id == sa.bindparam("of_group")
)


def _read_revision(connection: Connection, group_id: int, *, busy: bool) -> str:
    """Return the group's revision. While the group has consumers or is being reset, it never equals
    the revision of an idle group.
    """
    row = connection.execute(_revision_query, {"of_group": group_id}).one()
    busy = busy or duty_left_ms(connection, reset_duty(group_id)) > 0
    return build_revision(group_id, row.version, row.last_token) + ("+" if busy else "")


def build_revision(group_id: int, version: int, last_token: int) -> str:
    """Return the revision of an idle group, that is, one without live consumers or a reset."""
    return f"{group_id}.{version}.{last_token}"


_silent_ms_query = sa.select(now_ms() - groups.c.idle_since).where(
    groups.c.group_id == sa.bindparam("of_group")
)


def _read_silent_ms(connection: Connection, group_id: int) -> int | None:
    silent_ms: int | None = connection.execute(
        _silent_ms_query, {"of_group": group_id}
    ).scalar_one()
    return None if silent_ms is None else max(0, silent_ms)


_reset_query = sa.select(
    live_resets.c.ask,
    live_resets.c.begun,
    (calendar_ms() - live_resets.c.asked_at).label("asked_ms"),
).where(live_resets.c.group_id == sa.bindparam("of_group"), live_resets.c.answer.is_(None))


def _read_pending_reset(connection: Connection, group_id: int) -> PendingReset | None:
    row = connection.execute(_reset_query, {"of_group": group_id}).one_or_none()
    if row is None:
        return None
    request = msgspec.json.decode(row.ask, type=ResetGroup)
    owners = connection.execute(OWNERS, {"of_group": group_id}).scalars()
    return PendingReset(
        to=request.to,
        begun=row.begun,
        waits_for=tuple(owners),
        asked_ms=None if row.asked_ms is None else max(0, row.asked_ms),
    )


def find_open_group(
    connection: Connection, subject: str, group: str
) -> tuple[int, ConsumeStrategy]:
    """
    Return the id and the strategy of a group of an open subject.

    Raises:
        InvalidRequestError, GroupUnknownError
        Any error of `open_subject_row`.
    """
    return find_group(connection, open_subject_row(connection, subject).subject_id, subject, group)


def find_group(
    connection: Connection, subject_id: int, subject: str, group: str
) -> tuple[int, ConsumeStrategy]:
    """
    Return the id and the strategy of a group.

    Raises:
        InvalidRequestError, GroupUnknownError
    """
    check_name("consumer group", group)
    is_this_group = sa.and_(
        groups.c.subject_id == subject_id, groups.c.name == group, sa.not_(groups.c.deleting)
    )
    query = sa.select(groups.c.group_id, groups.c.strategy).where(is_this_group)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise GroupUnknownError(subject=subject, group=group)
    return row.group_id, ConsumeStrategy(row.strategy)
