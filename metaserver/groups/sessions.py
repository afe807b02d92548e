"""Begins, renews and ends consumer sessions. Runs SQL synchronously.

Invariants
    A session is live while `expires_at` is later than the database's clock.
    Only live sessions are renewed: an expired one stays dead even before its row is deleted.
    The transaction that begins or ends a session marks its group as unsettled.

The quota of a principal is not exact: two concurrent joins in different groups may both get the
last session that the quota allows, because their transactions do not wait for each other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.access.quota import EVERYBODY
from ...protocol.control import Join, LeaseEnd, Suspend
from ...protocol.errors import (
    BusyError,
    ConflictError,
    FencedError,
    GroupDeletedError,
    GroupUnknownError,
    InvalidRequestError,
    KeylaneError,
    OverloadedError,
    QuotaExceededError,
    Reason,
    SessionUnknownError,
    SubjectDeletedError,
)
from ...protocol.groups import GroupStart
from ...protocol.http.access import PRINCIPAL
from ...protocol.ids import SessionId, check_name
from ...protocol.routing import OrderStrategy
from ..cluster.announcements import Announcement, mark_unsettled, pending_announcements
from ..cluster.removals import count_removals, subject_of_deleted_group, was_deleted
from ..cluster.rows import SubjectRow
from ..cluster.subjects import find_subject, open_subject_row
from ..sql.cluster_facts import read_cluster_id
from ..sql.dialect import now_ms
from ..sql.duties import duty_left_ms, reset_duty
from ..sql.schema import access_quotas, groups, leases, live_resets, sessions, subjects
from .group_rows import (
    EARLIEST,
    MEMBER_COLUMNS,
    MemberSettings,
    build_member_settings,
    build_start,
    insert_group,
)

if TYPE_CHECKING:
    from sqlalchemy.sql.dml import ReturningUpdate


RETRY_AFTER_MS = 5_000

_quotas_query = sa.select(access_quotas.c.name, access_quotas.c.sessions).where(
    access_quotas.c.kind == PRINCIPAL,
    access_quotas.c.name.in_((EVERYBODY, sa.bindparam("of_principal"))),
)
_principal_sessions_query = sa.select(sa.func.count()).where(
    sessions.c.principal == sa.bindparam("of_principal"), sessions.c.expires_at > now_ms()
)


def check_session_quota(connection: Connection, principal: str, *, count: int = 1) -> None:
    """
    Check that a principal may begin `count` more sessions. The principal "" has no limit.

    Raises:
        QuotaExceededError: the principal would exceed its quota, or that of EVERYBODY if it has
            none of its own.
    """
    if not principal:
        return
    parameters = {"of_principal": principal}
    limits = {row.name: row.sessions for row in connection.execute(_quotas_query, parameters)}
    limit = limits.get(principal, limits.get(EVERYBODY, 0))
    if (
        limit
        and connection.execute(_principal_sessions_query, parameters).scalar_one() + count > limit
    ):
        raise QuotaExceededError(
            Reason.SESSION_QUOTA,
            f"{principal!r} already has {limit} consumers, the maximum",
            principal=principal,
            limit=limit,
            retry_after_ms=RETRY_AFTER_MS,
        )


PREDECESSORS_MAX = 16
"""Number of earlier sessions that an instance's session remembers. Calls from even older ones must
have timed out by now.
"""
_SESSION = re.compile(r"[0-9a-f]{16,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A live session."""

    session: SessionId
    group_id: int
    ttl_ms: int
    grants_version: int
    suspended: bool = False
    handing_over: bool = False
    """True if a lease was withdrawn from it and has not been released yet; only set by
    `renew_sessions`.
    """
    new_group: bool = False
    """True if its join created the group; only set by `join_group`."""
    pending_announcements: tuple[Announcement, ...] = ()
    """Partitions of a new group whose brokers do not know the group yet; only set by
    `join_group`.
    """
    start: GroupStart | None = None
    """Where its group starts; only set by `join_group`."""
    replaced_sessions: tuple[SessionId, ...] = ()
    """Sessions of the same instance that this join ended; only set by `join_group`."""
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    """Order strategy of its subject; only set by `join_group`."""
    cluster_id: str = ""
    """The identity of the cluster; only set by `join_group`."""
    unreached: tuple[str, ...] = ()
    """Broker groups to which it cannot connect."""


_session_query = sa.select(
    sessions.c.session,
    sessions.c.group_id,
    sessions.c.ttl_ms,
    sessions.c.grants_version,
    sessions.c.suspended,
    sessions.c.unreached,
)
_named_group = sa.and_(
    groups.c.subject_id == sa.bindparam("of_subject"), groups.c.name == sa.bindparam("of_name")
)
_group_id_query = sa.select(groups.c.group_id).where(_named_group)
_lock_group_query = (
    sa.select(
        groups.c.group_id,
        groups.c.version,
        groups.c.strategy,
        groups.c.start_at,
        groups.c.start_ms,
        sa.or_(groups.c.deleting, subjects.c.deleting).label("deleting"),
    )
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(_named_group)
    .with_for_update(of=groups)
)
_existing_session_query = _session_query.add_columns(
    (sessions.c.expires_at > now_ms()).label("alive")
).where(sessions.c.session == sa.bindparam("of_session"))
_member_count_query = sa.select(sa.func.count()).where(
    sessions.c.group_id == sa.bindparam("of_group")
)
_reset_running_query = sa.select(
    sa.exists().where(
        live_resets.c.group_id == sa.bindparam("of_group"), live_resets.c.answer.is_(None)
    )
)
"""True if a reset with live sessions is running. More sessions may join, but nothing is granted to
them until it is done.
"""
_other_filter_query = (
    sa.select(sessions.c.filter, sessions.c.client)
    .where(
        sessions.c.group_id == sa.bindparam("of_group"),
        sessions.c.expires_at > now_ms(),
        sessions.c.filter != sa.bindparam("of_filter"),
    )
    .limit(1)
)
_insert_session = sa.insert(sessions).values(expires_at=now_ms() + sa.bindparam("for_ms"))


def join_group(
    connection: Connection, request: Join, *, sessions_max: int, principal: str = ""
) -> SessionRow:
    """
    Begin a session, unless it is already live. The first session of a group creates the group.

    Args:
        sessions_max: the maximum number of sessions in a group.
        principal: the principal against whose quota the session counts; "" has no limit.

    Raises:
        SubjectUnknownError
        InvalidRequestError: a name is invalid, or the session belongs to another group.
        ConflictError: the group has another strategy, or a live session with another filter.
        QuotaExceededError: `principal` has the maximum number of sessions.
        OverloadedError: the group has `sessions_max` sessions, or the subject has too many groups.
        BusyError: the group's cursors are being reset.
        SubjectDeletedError, GroupDeletedError: the subject or group is being deleted, or was
            deleted since the client's previous session joined it.
        GroupUnknownError: the group does not exist, and its start is not the earliest message, so
            `starts/` must create it first.
        FencedError: another session has replaced this instance; see `_replace_instance`.
    """
    _check_names(request)
    _check_same_subject(connection, request)
    subject = open_subject_row(connection, request.subject)
    new_group, group = _lock_or_create_group(connection, subject, request)
    group_id, start = group.group_id, build_start(group)
    existing_row = connection.execute(
        _existing_session_query, {"of_session": request.session}
    ).one_or_none()
    if existing_row is not None and existing_row.group_id != group_id:
        raise InvalidRequestError("this session has joined another group", session=request.session)
    if existing_row is not None and existing_row.alive:
        return replace(
            _session_row(existing_row),
            start=start,
            order_strategy=subject.order_strategy,
            cluster_id=read_cluster_id(connection),
        )
    replaced_sessions: tuple[SessionId, ...] = ()
    predecessors = ""
    if not new_group:  # a new group can have neither sessions nor a reset
        _check_not_reset(connection, group_id)
        if existing_row is not None:  # it has expired, but its leases may not be free yet
            end_sessions(connection, [SessionId(request.session)], LeaseEnd.EXPIRED)
        replaced_sessions, predecessors = _replace_instance(connection, group_id, request)
        _check_capacity(connection, group_id, request, sessions_max)
    check_session_quota(connection, principal)
    version = group.version if new_group else group.version + 1
    row = {
        **_join_columns(request),
        "group_id": group_id,
        "joined": version,
        "grants_version": version,
        "predecessors": predecessors,
        "principal": principal,
    }
    connection.execute(_insert_session, row)
    if not new_group:  # a new group is unsettled anyway
        mark_unsettled(connection, group_id)
    return SessionRow(
        session=SessionId(request.session),
        group_id=group_id,
        ttl_ms=request.ttl_ms,
        grants_version=version,
        suspended=request.suspended,
        new_group=new_group,
        pending_announcements=_read_unheard(connection, group_id) if new_group else (),
        start=start,
        replaced_sessions=replaced_sessions,
        order_strategy=subject.order_strategy,
        cluster_id=read_cluster_id(connection),
    )


class PendingJoin(NamedTuple):
    """A join, and the principal against whose quota it counts; "" has no quota."""

    join: Join
    principal: str

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for joins of the same group for which all checks have the same
        result.
        """
        request = self.join
        instance_session = request.session if request.instance else ""
        return (
            request.strategy,
            request.filter,
            request.group_id,
            repr(request.start),
            self.principal,
            instance_session,
        )


def join_batch(
    connection: Connection, joins: Sequence[PendingJoin], *, sessions_max: int
) -> dict[str, SessionRow | KeylaneError]:
    """
    Call `join_group` for several sessions of one group. Return a dict that maps each session to its
    row or its error.

    Consumers that start together often differ only in their session ids. In that case only the
    first one is checked, and the others are inserted with a single statement.
    """
    results: dict[str, SessionRow | KeylaneError] = {}
    by_session = {join.join.session: join for join in joins}
    existing_ids = set(connection.execute(_existing_ids_query, {"ids": list(by_session)}).scalars())
    by_kind: dict[tuple[object, ...], list[PendingJoin]] = {}
    for session, join in by_session.items():
        kind = (*join.kind, session) if session in existing_ids else join.kind
        by_kind.setdefault(kind, []).append(join)
    for identical_joins in by_kind.values():
        for index, join in enumerate(identical_joins):
            row: SessionRow | KeylaneError
            try:
                with connection.begin_nested():
                    row = join_group(
                        connection, join.join, sessions_max=sessions_max, principal=join.principal
                    )
            except KeylaneError as error:
                row = error
            results[join.join.session] = row
            remaining_joins = identical_joins[index + 1 :]
            if isinstance(row, KeylaneError) or not remaining_joins:
                continue
            if _has_capacity(connection, row.group_id, remaining_joins, sessions_max):
                results |= _insert_identical(connection, row, remaining_joins)
                break
    return results


_existing_ids_query = sa.select(sessions.c.session).where(
    sessions.c.session.in_(sa.bindparam("ids"))
)


def _has_capacity(
    connection: Connection, group_id: int, joins: Sequence[PendingJoin], sessions_max: int
) -> bool:
    """Return True if the group and the principal can have all of these sessions in addition to the
    existing ones.
    """
    member_count: int = connection.execute(_member_count_query, {"of_group": group_id}).scalar_one()
    try:
        check_session_quota(connection, joins[0].principal, count=len(joins))
    except QuotaExceededError:
        return False
    return member_count + len(joins) <= sessions_max


def _insert_identical(
    connection: Connection, template: SessionRow, joins: Sequence[PendingJoin]
) -> dict[str, SessionRow | KeylaneError]:
    """Begin sessions whose joins would pass the same checks as that of `template`, which has just
    begun.
    """
    version = template.grants_version
    shared_columns = {
        "group_id": template.group_id,
        "joined": version,
        "grants_version": version,
        "predecessors": "",
    }
    rows = [
        {**_join_columns(join.join), **shared_columns, "principal": join.principal}
        for join in joins
    ]
    connection.execute(_insert_session, rows)
    mark_unsettled(connection, template.group_id)
    return {
        join.join.session: replace(
            template,
            session=SessionId(join.join.session),
            ttl_ms=join.join.ttl_ms,
            suspended=join.join.suspended,
            new_group=False,
            pending_announcements=(),
        )
        for join in joins
    }


def _join_columns(request: Join) -> dict[str, object]:
    """Return those columns of a session's row that come from its join."""
    return {
        "session": request.session,
        "client": request.client,
        "ttl_ms": request.ttl_ms,
        "suspended": request.suspended,
        "instance": request.instance,
        "filter": request.filter,
        "for_ms": request.ttl_ms,
    }


def _check_names(request: Join) -> None:
    """Check the names in a join. Raises InvalidRequestError."""
    check_name("consumer group", request.group)
    if request.instance:
        check_name("instance", request.instance)


def _check_capacity(
    connection: Connection, group_id: int, request: Join, sessions_max: int
) -> None:
    """Check that a session may join the live ones. Raises ConflictError or OverloadedError."""
    _check_filter(connection, group_id, request)
    if connection.execute(_member_count_query, {"of_group": group_id}).scalar_one() >= sessions_max:
        raise OverloadedError("too many consumers in this group", limit=sessions_max)


def _read_unheard(connection: Connection, group_id: int) -> tuple[Announcement, ...]:
    """Return the announcements to send to brokers. Must be called in the durable transaction that
    creates the group, so that even after a crash no broker has a group that is missing in SQL.
    """
    return tuple(pending_announcements(connection, group_id=group_id))


_instance_sessions_query = sa.select(
    sessions.c.session,
    sessions.c.heard,
    sessions.c.predecessors,
    (sessions.c.expires_at > now_ms()).label("alive"),
).where(
    sessions.c.group_id == sa.bindparam("of_group"),
    sessions.c.instance == sa.bindparam("of_instance"),
)
_transfer_leases = (
    sa.update(leases)
    .where(leases.c.group_id == sa.bindparam("of_group"), leases.c.wanted.in_(sa.bindparam("ids")))
    .values(wanted=sa.bindparam("heir"))
)


def _replace_instance(
    connection: Connection, group_id: int, request: Join
) -> tuple[tuple[SessionId, ...], str]:
    """
    End the earlier sessions of an instance. Leases promised to them are promised to the new session
    instead.

    Returns:
        The ended sessions, and the space-separated predecessors to store with the new session.

    Raises:
        FencedError: the request is a rejoin while another session of the instance is live, so the
            other process started later; or the request is late and its session has already been
            replaced.
        BusyError: the request is a rejoin and the live session has not sent a heartbeat yet; its
            join may be a late request of a process that no longer exists.
    """
    if not request.instance:
        return (), ""
    parameters = {"of_group": group_id, "of_instance": request.instance}
    predecessor_rows = connection.execute(_instance_sessions_query, parameters).all()
    live_rows = [session for session in predecessor_rows if session.alive]
    was_replaced = any(
        request.session in session.predecessors.split() for session in predecessor_rows
    )
    if was_replaced or (request.again and any(session.heard for session in live_rows)):
        raise FencedError(
            Reason.INSTANCE_TAKEN,
            instance=request.instance,
            subject=request.subject,
            group=request.group,
        )
    if request.again and live_rows:
        error = BusyError(
            Reason.GROUP_BUSY,
            f"a session with the instance name {request.instance!r} has joined, but has not "
            "sent a heartbeat yet",
        )
        error.hint = (
            "Join again in a moment: the session sends its first heartbeat, or expires after its "
            "ttl."
        )
        raise error
    ids = [SessionId(session.session) for session in predecessor_rows]
    if ids:
        transfer_parameters = {"of_group": group_id, "ids": ids, "heir": request.session}
        connection.execute(_transfer_leases, transfer_parameters)
        end_sessions(connection, ids, LeaseEnd.REPLACED)
    earlier_predecessors = [
        predecessor for session in predecessor_rows for predecessor in session.predecessors.split()
    ]
    return tuple(ids), " ".join((earlier_predecessors + ids)[-PREDECESSORS_MAX:])


def _check_not_reset(connection: Connection, group_id: int) -> None:
    """Check that the group's cursors are not being reset. Raises BusyError."""
    left_ms = duty_left_ms(connection, reset_duty(group_id))
    if (
        left_ms
        and not connection.execute(_reset_running_query, {"of_group": group_id}).scalar_one()
    ):
        raise BusyError(
            Reason.GROUP_BUSY,
            "the progress of this consumer group is being reset; join again in a moment",
            left_ms=left_ms,
        )


def _check_filter(connection: Connection, group_id: int, request: Join) -> None:
    """Check that no live session has a different filter. Raises ConflictError."""
    parameters = {"of_group": group_id, "of_filter": request.filter}
    conflicting_filter = connection.execute(_other_filter_query, parameters).first()
    if conflicting_filter is not None:
        raise ConflictError(
            Reason.GROUP_FILTER,
            f"this consumer of group {request.group!r} has {_describe_filter(request.filter)}; "
            f"{conflicting_filter.client!r:.80}, another member, has "
            f"{_describe_filter(conflicting_filter.filter)}",
            stored=conflicting_filter.filter,
            asked=request.filter,
            client=conflicting_filter.client,
        )


def _describe_filter(text: str) -> str:
    return text or "no filter"


def _check_same_subject(connection: Connection, request: Join) -> None:
    """Check that the subject of the client's earlier session has not been deleted, even if another
    one has been created under its name since. Raises SubjectDeletedError.
    """
    if not request.group_id:  # this is its first join
        return
    deleted_subject_id = subject_of_deleted_group(connection, request.subject, request.group_id)
    if deleted_subject_id is None:
        return
    row = find_subject(connection, request.subject)
    if row is None or row.subject_id != deleted_subject_id:
        raise SubjectDeletedError(
            f"subject {request.subject!r} was deleted since this consumer joined its group "
            f"{request.group!r}",
            subject=request.subject,
        )


def _lock_or_create_group(
    connection: Connection, subject: SubjectRow, request: Join
) -> tuple[bool, sa.Row[Any]]:
    """
    Lock the group of a join, creating it if it does not exist.

    Returns:
        True if the group was created, and its row.

    Raises:
        ConflictError, OverloadedError, GroupDeletedError
        GroupUnknownError: the group does not exist, and its start is not the earliest message.
    """
    subject_id = subject.subject_id
    parameters = {"of_subject": subject_id, "of_name": request.group}
    known_id = connection.execute(_group_id_query, parameters).scalar_one_or_none()
    new_group = known_id is None
    group_replaced = request.group_id not in {0, known_id}
    if group_replaced and was_deleted(connection, request.subject, group_id=request.group_id):
        raise GroupDeletedError(
            f"consumer group {request.group!r} was deleted since this consumer joined it",
            subject=request.subject,
            group=request.group,
        )
    if new_group:
        if request.start not in {None, EARLIEST}:
            raise GroupUnknownError(
                f"consumer group {request.group!r} must be created before its first session joins",
                subject=request.subject,
                group=request.group,
            )
        new_group = insert_group(
            connection, subject, request.group, strategy=request.strategy, version=1
        )
    group = connection.execute(_lock_group_query, parameters).one()
    if group.deleting:
        raise GroupDeletedError(
            f"consumer group {request.group!r} is being deleted; join again when its brokers have "
            f"forgotten it",
            subject=request.subject,
            group=request.group,
            left=count_removals(connection, subject_id, group.group_id),
        )
    if group.strategy != request.strategy:
        raise ConflictError(
            Reason.GROUP_STRATEGY,
            f"group {request.group!r} is {group.strategy}, but this consumer is {request.strategy}",
            subject=request.subject,
            group=request.group,
            stored=group.strategy,
            asked=request.strategy.value,
        )
    return new_group, group


def select_locked_in_order(
    *conditions: sa.ColumnElement[bool], skip_locked: bool = False
) -> sa.Select[Any]:
    """Build a query that selects and locks sessions in ascending order, so that transactions cannot
    deadlock.
    """
    query = sa.select(sessions.c.session).where(*conditions)
    return query.order_by(sessions.c.session).with_for_update(skip_locked=skip_locked)


_listed_and_live = (sessions.c.session.in_(sa.bindparam("ids")), sessions.c.expires_at > now_ms())
_live_groups_query = sa.select(sessions.c.session, sessions.c.group_id).where(*_listed_and_live)
_withdrawn_from = sa.select(leases.c.session).where(
    leases.c.session.in_(sa.bindparam("ids")), leases.c.withdrawn
)


def _renew_statement(*, skip_locked: bool) -> ReturningUpdate[Any]:
    """Build the UPDATE that renews the listed live sessions."""
    renewable = select_locked_in_order(*_listed_and_live, skip_locked=skip_locked).cte("renewable")
    return (
        sa.update(sessions)
        .where(sessions.c.session.in_(sa.select(renewable.c.session)))
        .values(expires_at=now_ms() + sessions.c.ttl_ms, heard=True)
        .returning(
            *_session_query.selected_columns,
            # Not correlated, because in RETURNING, SQLite's columns have no table name and would
            # resolve to those of the leases.
            sessions.c.session.in_(_withdrawn_from).label("handing_over"),
        )
    )


_renew_waiting, _renew_skipping_locked = (
    _renew_statement(skip_locked=skip_locked) for skip_locked in (False, True)
)


def renew_sessions(connection: Connection, ids: Sequence[str]) -> dict[str, SessionRow]:
    """Renew the live sessions among `ids`, each for its ttl from now. Return a dict that maps each
    session to its row.
    """
    return _renewed_rows(connection.execute(_renew_waiting, {"ids": ids}))


class RenewalResult(NamedTuple):
    """The result of renewals that did not wait for locks."""

    rows: dict[str, SessionRow]
    locked_groups: dict[str, int]
    """Maps each live session that was not renewed because its row is locked to the id of its
    group.
    """


def renew_unlocked(connection: Connection, ids: Sequence[str]) -> RenewalResult:
    """Renew sessions without waiting for locks. In PostgreSQL, those whose rows are locked are
    listed in `locked_groups` instead.
    """
    if connection.dialect.name != "postgresql":
        return RenewalResult(renew_sessions(connection, ids), {})
    rows = _renewed_rows(connection.execute(_renew_skipping_locked, {"ids": ids}))
    missing_sessions = [session for session in ids if session not in rows]
    locked_rows = (
        connection.execute(_live_groups_query, {"ids": missing_sessions}).all()
        if missing_sessions
        else []
    )
    return RenewalResult(rows, {row.session: row.group_id for row in locked_rows})


def _renewed_rows(renewed: Iterable[sa.Row[Any]]) -> dict[str, SessionRow]:
    """Return a dict that maps each renewed session to its row, with `handing_over` set."""
    return {
        row.session: replace(_session_row(row), handing_over=True)
        if row.handing_over
        else _session_row(row)
        for row in renewed
    }


_live_session_query = _session_query.where(
    sessions.c.session == sa.bindparam("of_session"), sessions.c.expires_at > now_ms()
)


def read_live_session(connection: Connection, session: str) -> SessionRow:
    """
    Return the row of a live session.

    Raises:
        SessionUnknownError: the session has ended or never began.
    """
    check_session(session)
    row = connection.execute(_live_session_query, {"of_session": session}).one_or_none()
    if row is None:
        raise SessionUnknownError(session=session)
    return _session_row(row)


_live_sessions_query = _session_query.where(*_listed_and_live)


def read_live_sessions(connection: Connection, ids: Collection[str]) -> dict[str, SessionRow]:
    """Return a dict that maps each live session among `ids` to its row."""
    rows = connection.execute(_live_sessions_query, {"ids": list(ids)}) if ids else ()
    return {row.session: _session_row(row) for row in rows}


_live_members_query = (
    _session_query.add_columns(*MEMBER_COLUMNS)
    .join(groups, groups.c.group_id == sessions.c.group_id)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(*_listed_and_live)
)


def read_live_members(
    connection: Connection, ids: Collection[str]
) -> list[tuple[SessionRow, MemberSettings]]:
    """Return the live sessions among `ids`, each with its group's settings for members."""
    rows = connection.execute(_live_members_query, {"ids": list(ids)}).all()
    return [(_session_row(row), build_member_settings(row)) for row in rows]


def suspend_session(connection: Connection, request: Suspend) -> int:
    """
    Suspend or resume a session.

    Returns:
        The id of its group, which must be settled next.

    Raises:
        SessionUnknownError: the session has ended.
    """
    row = read_live_session(connection, request.session)
    mark_unsettled(connection, row.group_id)
    is_this_session = sessions.c.session == request.session
    version = sa.select(groups.c.version).where(groups.c.group_id == row.group_id)
    connection.execute(
        sa.update(sessions)
        .where(is_this_session)
        .values(suspended=request.suspended, grants_version=version.scalar_subquery())
    )
    return row.group_id


def find_group_id(connection: Connection, session: str) -> int | None:
    """Return the id of a session's group, or None if the session's row was deleted."""
    check_session(session)
    query = sa.select(sessions.c.group_id).where(sessions.c.session == session)
    group_id: int | None = connection.execute(query).scalar_one_or_none()
    return group_id


def leave_group(connection: Connection, session: str) -> int | None:
    """End a session and return the id of its group. Return None if the session had already
    ended.
    """
    group_id = find_group_id(connection, session)
    if group_id is None:
        return None
    mark_unsettled(connection, group_id)
    query = sa.select(sessions.c.client, _heard_at).where(sessions.c.session == session)
    row = connection.execute(query).one_or_none()
    if row is not None:
        _note_end(connection, group_id, row.client, row.heard_at, left=True)
    end_sessions(connection, [SessionId(session)], LeaseEnd.LEFT)
    return group_id


_heard_at = (sessions.c.expires_at - sessions.c.ttl_ms).label("heard_at")
"""The time of a session's last heartbeat."""


def _note_end(
    connection: Connection, group_id: int, client: str, heard_at: int, *, left: bool
) -> None:
    """Record, for operators, which consumer of the group was the last to end, and whether it
    left.
    """
    ended = {
        "ended_client": client,
        "ended_left": left,
        "ended_at": now_ms(),
        "ended_heard_at": heard_at,
    }
    connection.execute(sa.update(groups).where(groups.c.group_id == group_id).values(**ended))


_delete_expired = (
    sa.delete(sessions)
    .where(sessions.c.group_id == sa.bindparam("of_group"), sessions.c.expires_at <= now_ms())
    .returning(sessions.c.session, sessions.c.client, _heard_at)
)
_delete_sessions = (
    sa.delete(sessions)
    .where(sessions.c.session.in_(sa.bindparam("ids")))
    .returning(sessions.c.session, sessions.c.client)
)
_free_leases = (
    sa.update(leases)
    .where(leases.c.session == sa.bindparam("of_session"))
    .values(
        session=None,
        withdrawn=False,
        previous_client=sa.bindparam("of_client"),
        previous_end=sa.bindparam("of_end"),
    )
)


def end_expired_sessions(connection: Connection, group_id: int) -> list[SessionId]:
    """End the expired sessions of a group and return their ids."""
    expired_sessions = connection.execute(_delete_expired, {"of_group": group_id}).all()
    ids = [SessionId(row.session) for row in expired_sessions]
    if ids:
        _free_leases_of(connection, expired_sessions, LeaseEnd.EXPIRED)
        heard_at, client = max((row.heard_at, row.client) for row in expired_sessions)
        _note_end(connection, group_id, client, heard_at, left=False)
    return ids


def end_sessions(
    connection: Connection, ids: Collection[SessionId], end: LeaseEnd = LeaseEnd.ENDED
) -> None:
    """End sessions and free their leases. `end` says why, for the next owners."""
    ended_sessions = connection.execute(_delete_sessions, {"ids": list(ids)}).all()
    _free_leases_of(connection, ended_sessions, end)


def _free_leases_of(connection: Connection, ended_sessions: Iterable[Any], end: LeaseEnd) -> None:
    """Free the leases of sessions whose rows were deleted."""
    parameters = [
        {"of_session": row.session, "of_client": row.client, "of_end": end}
        for row in ended_sessions
    ]
    if parameters:
        connection.execute(_free_leases, parameters)


def check_session(session: str) -> None:
    """Raise SessionUnknownError if the text cannot be a session id."""
    if _SESSION.fullmatch(session) is None:
        raise SessionUnknownError


def _session_row(row: Any) -> SessionRow:
    return SessionRow(
        session=SessionId(row.session),
        group_id=row.group_id,
        ttl_ms=row.ttl_ms,
        grants_version=row.grants_version,
        suspended=row.suspended,
        unreached=tuple(row.unreached.split()),
    )
