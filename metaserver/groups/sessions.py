"""Rows of consumer sessions: joined, renewed, ended. SQL, synchronous.

Invariants
    A session is live while `expires_at` is after the database's time.
    Only live sessions are renewed: an expired one stays dead even before its row is deleted.
    The transaction that begins or ends a session marks its group unsettled.

Checks whether a principal may have one more consumer.

Two simultaneous joins in different groups may both get the last place, because their transactions
do not wait for each other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.access.quota import EVERYBODY
from ...protocol.control import Join, Suspend
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
from ..cluster.heard import Announcement, mark_unsettled, unheard_partitions
from ..cluster.removals import removals_left, subject_of_deleted_group, was_deleted
from ..cluster.rows import SubjectRow
from ..cluster.subjects import find_subject, open_subject_row
from ..sql.dialect import now_ms
from ..sql.duties import duty_left_ms, reset_duty
from ..sql.schema import access_quotas, groups, leases, live_resets, sessions, subjects
from .group_rows import (
    EARLIEST,
    MEMBER_COLUMNS,
    MemberSettings,
    insert_group,
    settings_of_member,
    start_of,
)

if TYPE_CHECKING:
    from sqlalchemy.sql.dml import ReturningUpdate


RETRY_AFTER_MS = 5_000

_quotas = sa.select(access_quotas.c.name, access_quotas.c.sessions).where(
    access_quotas.c.kind == PRINCIPAL,
    access_quotas.c.name.in_((EVERYBODY, sa.bindparam("of_principal"))),
)
_live_of_principal = sa.select(sa.func.count()).where(
    sessions.c.principal == sa.bindparam("of_principal"), sessions.c.expires_at > now_ms()
)


def check_session_quota(connection: Connection, principal: str, *, more: int = 1) -> None:
    """
    Check that a principal may begin `more` sessions; "" has no limit.

    Raises:
        QuotaExceededError: it would have more than its quota, or, if it has none, than the quota of
            EVERYBODY.
    """
    if not principal:
        return
    who = {"of_principal": principal}
    limits = {row.name: row.sessions for row in connection.execute(_quotas, who)}
    limit = limits.get(principal, limits.get(EVERYBODY, 0))
    if limit and connection.execute(_live_of_principal, who).scalar_one() + more > limit:
        raise QuotaExceededError(
            Reason.SESSION_QUOTA,
            f"{principal!r} has {limit} consumers, and may have no more",
            principal=principal,
            limit=limit,
            retry_after_ms=RETRY_AFTER_MS,
        )


PREDECESSORS_MAX = 16
"""Number of earlier sessions of an instance that are remembered; calls of still earlier ones are
older than any call waits.
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
    """True if it was asked to hand over a lease and has not released it; set by `renew_sessions`
    only.
    """
    new_group: bool = False
    """True if its group was created with it; set by `join_group` only."""
    unheard: tuple[Announcement, ...] = ()
    """Partitions of a new group whose brokers do not know it yet; set by `join_group` only."""
    start: GroupStart | None = None
    """Place where its group began; set by `join_group` only."""
    replaced: tuple[SessionId, ...] = ()
    """Sessions of the same instance that ended with this join; set by `join_group` only."""
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    """Order strategy of its subject; set by `join_group` only."""
    unreached: tuple[str, ...] = ()
    """Broker groups to which it cannot connect."""


_row = sa.select(
    sessions.c.session,
    sessions.c.group_id,
    sessions.c.ttl_ms,
    sessions.c.grants_version,
    sessions.c.suspended,
    sessions.c.unreached,
)
_named = sa.and_(
    groups.c.subject_id == sa.bindparam("of_subject"), groups.c.name == sa.bindparam("of_name")
)
_group_id = sa.select(groups.c.group_id).where(_named)
_locked_group = (
    sa.select(
        groups.c.group_id,
        groups.c.version,
        groups.c.strategy,
        groups.c.start_at,
        groups.c.start_ms,
        sa.or_(groups.c.deleting, subjects.c.deleting).label("deleting"),
    )
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(_named)
    .with_for_update(of=groups)
)
_joined_before = _row.add_columns((sessions.c.expires_at > now_ms()).label("alive")).where(
    sessions.c.session == sa.bindparam("of_session")
)
_members = sa.select(sa.func.count()).where(sessions.c.group_id == sa.bindparam("of_group"))
_pending_reset = sa.select(
    sa.exists().where(
        live_resets.c.group_id == sa.bindparam("of_group"), live_resets.c.answer.is_(None)
    )
)
"""True if a reset with live sessions is running: further sessions may join, and are granted nothing
until it is done.
"""
_other_filter = (
    sa.select(sessions.c.filter, sessions.c.client)
    .where(
        sessions.c.group_id == sa.bindparam("of_group"),
        sessions.c.expires_at > now_ms(),
        sessions.c.filter != sa.bindparam("of_filter"),
    )
    .limit(1)
)
_joined = sa.insert(sessions).values(expires_at=now_ms() + sa.bindparam("for_ms"))


def join_group(
    connection: Connection, ask: Join, *, sessions_max: int, principal: str = ""
) -> SessionRow:
    """
    Begin a session, unless it is live. The first session of a group creates the group.

    Raises:
        InvalidRequestError, SubjectUnknownError
        InvalidRequestError: the session belongs to another group.
        ConflictError: the group has another strategy.
        ConflictError: a live session of the group has another filter.
        QuotaExceededError: `principal` has the maximum number of sessions; "" has no limit.
        OverloadedError: the group has `sessions_max` sessions, or the subject has too many groups.
        BusyError: the group's cursors are being set.
        SubjectDeletedError, GroupDeletedError: it is being deleted, or the client's earlier session
            was of one that was deleted.
        GroupUnknownError: the group does not exist, and would not begin at the earliest message, so
            that `starts/` has to make it.
        FencedError: another live session has the instance, and this client joins once more;
            see `_replace_instance`.
    """
    _check_texts(ask)
    _check_same_subject(connection, ask)
    subject = open_subject_row(connection, ask.subject)
    new_group, group = _lock_or_create_group(connection, subject, ask)
    group_id, start = group.group_id, start_of(group)
    known = connection.execute(_joined_before, {"of_session": ask.session}).one_or_none()
    if known is not None and known.group_id != group_id:
        raise InvalidRequestError("this session has joined another group", session=ask.session)
    if known is not None and known.alive:
        return replace(_session_row(known), start=start, order_strategy=subject.order_strategy)
    replaced: tuple[SessionId, ...] = ()
    predecessors = ""
    if not new_group:  # a new one has no sessions, and no reset
        _check_not_reset(connection, group_id)
        if known is not None:  # it has expired: its leases are freed before it begins again
            end_sessions(connection, [SessionId(ask.session)])
        replaced, predecessors = _replace_instance(connection, group_id, ask)
        _check_members(connection, group_id, ask, sessions_max)
    check_session_quota(connection, principal)
    version = group.version if new_group else group.version + 1
    row = {
        **_columns_of(ask),
        "group_id": group_id,
        "joined": version,
        "grants_version": version,
        "predecessors": predecessors,
        "principal": principal,
    }
    connection.execute(_joined, row)
    if not new_group:  # a new one is not settled yet
        mark_unsettled(connection, group_id)
    return SessionRow(
        session=SessionId(ask.session),
        group_id=group_id,
        ttl_ms=ask.ttl_ms,
        grants_version=version,
        suspended=ask.suspended,
        new_group=new_group,
        unheard=_unheard(connection, group_id) if new_group else (),
        start=start,
        replaced=replaced,
        order_strategy=subject.order_strategy,
    )


class JoinAsk(NamedTuple):
    """A join, and the principal whose quota counts it; "": no quota."""

    join: Join
    principal: str

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for joins of one group for which every check has the same result."""
        ask = self.join
        own = ask.session if ask.instance else ""
        return ask.strategy, ask.filter, ask.group_id, repr(ask.start), self.principal, own


def join_together(
    connection: Connection, asks: Sequence[JoinAsk], *, sessions_max: int
) -> dict[str, SessionRow | KeylaneError]:
    """
    Call `join_group` for several sessions of one group; each gets a row or an error of its own.

    Many consumers often start at once and differ only in their ids: then one of them is checked,
    and all others are stored in one statement.
    """
    answers: dict[str, SessionRow | KeylaneError] = {}
    by_session = {ask.join.session: ask for ask in asks}
    known = set(connection.execute(_known, {"ids": list(by_session)}).scalars())
    kinds: dict[tuple[object, ...], list[JoinAsk]] = {}
    for session, ask in by_session.items():
        kind = (*ask.kind, session) if session in known else ask.kind
        kinds.setdefault(kind, []).append(ask)
    for alike in kinds.values():
        for at, ask in enumerate(alike):
            row: SessionRow | KeylaneError
            try:
                with connection.begin_nested():
                    row = join_group(
                        connection, ask.join, sessions_max=sessions_max, principal=ask.principal
                    )
            except KeylaneError as error:
                row = error
            answers[ask.join.session] = row
            rest = alike[at + 1 :]
            if isinstance(row, KeylaneError) or not rest:
                continue
            if _is_room(connection, row.group_id, rest, sessions_max):
                answers |= _join_alike(connection, row, rest)
                break
    return answers


_known = sa.select(sessions.c.session).where(sessions.c.session.in_(sa.bindparam("ids")))


def _is_room(
    connection: Connection, group_id: int, asks: Sequence[JoinAsk], sessions_max: int
) -> bool:
    """Return whether the group and the principal may have these sessions too."""
    members: int = connection.execute(_members, {"of_group": group_id}).scalar_one()
    try:
        check_session_quota(connection, asks[0].principal, more=len(asks))
    except QuotaExceededError:
        return False
    return members + len(asks) <= sessions_max


def _join_alike(
    connection: Connection, first: SessionRow, asks: Sequence[JoinAsk]
) -> dict[str, SessionRow | KeylaneError]:
    """Begin sessions whose joins differ from that of `first`, which has just begun, in nothing that
    is checked.
    """
    version = first.grants_version
    begun = {
        "group_id": first.group_id,
        "joined": version,
        "grants_version": version,
        "predecessors": "",
    }
    rows = [{**_columns_of(ask.join), **begun, "principal": ask.principal} for ask in asks]
    connection.execute(_joined, rows)
    mark_unsettled(connection, first.group_id)
    return {
        ask.join.session: replace(
            first,
            session=SessionId(ask.join.session),
            ttl_ms=ask.join.ttl_ms,
            suspended=ask.join.suspended,
            new_group=False,
            unheard=(),
        )
        for ask in asks
    }


def _columns_of(ask: Join) -> dict[str, object]:
    """What the row of a session has from its join."""
    return {
        "session": ask.session,
        "client": ask.client,
        "ttl_ms": ask.ttl_ms,
        "suspended": ask.suspended,
        "instance": ask.instance,
        "filter": ask.filter,
        "for_ms": ask.ttl_ms,
    }


def _check_texts(ask: Join) -> None:
    """Check the names in a join. Raises InvalidRequestError."""
    check_name("consumer group", ask.group)
    if ask.instance:
        check_name("instance", ask.instance)


def _check_members(connection: Connection, group_id: int, ask: Join, sessions_max: int) -> None:
    """Check that a session fits the live ones. Raises ConflictError, OverloadedError."""
    _check_filter(connection, group_id, ask)
    if connection.execute(_members, {"of_group": group_id}).scalar_one() >= sessions_max:
        raise OverloadedError("too many consumers in this group", limit=sessions_max)


def _unheard(connection: Connection, group_id: int) -> tuple[Announcement, ...]:
    """Read the brokers to notify in the durable transaction that makes the group: after a crash no
    broker has a group that SQL lacks.
    """
    return tuple(unheard_partitions(connection, group_id=group_id))


_of_instance = sa.select(
    sessions.c.session,
    sessions.c.heard,
    sessions.c.predecessors,
    (sessions.c.expires_at > now_ms()).label("alive"),
).where(
    sessions.c.group_id == sa.bindparam("of_group"),
    sessions.c.instance == sa.bindparam("of_instance"),
)
_inherited = (
    sa.update(leases)
    .where(leases.c.group_id == sa.bindparam("of_group"), leases.c.wanted.in_(sa.bindparam("ids")))
    .values(wanted=sa.bindparam("heir"))
)


def _replace_instance(
    connection: Connection, group_id: int, ask: Join
) -> tuple[tuple[SessionId, ...], str]:
    """
    End the earlier sessions of an instance; their leases, and those they were about to get, are
    granted to the new session instead.

    Returns:
        The ended sessions, and those that the new one has to remember.

    Raises:
        FencedError: one of them is live, and this client joins once more, so that the other
            process started later; or one of them has replaced this session, whose late call this
            is.
        BusyError: the live one has sent no heartbeat since its join, which may be a late call
            of a process that is gone.
    """
    if not ask.instance:
        return (), ""
    here = {"of_group": group_id, "of_instance": ask.instance}
    known = connection.execute(_of_instance, here).all()
    live = [session for session in known if session.alive]
    late = any(ask.session in session.predecessors.split() for session in known)
    if late or (ask.again and any(session.heard for session in live)):
        raise FencedError(
            Reason.INSTANCE_TAKEN, instance=ask.instance, subject=ask.subject, group=ask.group
        )
    if ask.again and live:
        error = BusyError(
            Reason.GROUP_BUSY,
            f"a session with the instance name {ask.instance!r} has joined, and was not "
            "heard since",
        )
        error.hint = "Join again in a moment: it sends its first heartbeat, or ends with its ttl."
        raise error
    ids = [SessionId(session.session) for session in known]
    if ids:
        heirs = {"of_group": group_id, "ids": ids, "heir": ask.session}
        connection.execute(_inherited, heirs)
        end_sessions(connection, ids)
    earlier = [each for session in known for each in session.predecessors.split()]
    return tuple(ids), " ".join((earlier + ids)[-PREDECESSORS_MAX:])


def _check_not_reset(connection: Connection, group_id: int) -> None:
    """Check that the group's cursors are not being set. Raises BusyError."""
    left_ms = duty_left_ms(connection, reset_duty(group_id))
    if left_ms and not connection.execute(_pending_reset, {"of_group": group_id}).scalar_one():
        raise BusyError(
            Reason.GROUP_BUSY,
            "the progress of this consumer group is being set; join again in a moment",
            left_ms=left_ms,
        )


def _check_filter(connection: Connection, group_id: int, ask: Join) -> None:
    """Check that no live session has another filter. Raises ConflictError."""
    which = {"of_group": group_id, "of_filter": ask.filter}
    other = connection.execute(_other_filter, which).first()
    if other is not None:
        raise ConflictError(
            Reason.GROUP_FILTER,
            f"this consumer of group {ask.group!r} has {_shown(ask.filter)}; {other.client!r:.80}, "
            f"another member, "
            f"has {_shown(other.filter)}",
            stored=other.filter,
            asked=ask.filter,
            client=other.client,
        )


def _shown(text: str) -> str:
    return text or "no filter"


def _check_same_subject(connection: Connection, ask: Join) -> None:
    """Check that the subject of the client's earlier session was not deleted; a later one of its
    name is another one. Raises SubjectDeletedError.
    """
    if not ask.group_id:  # it joins for the first time
        return
    gone = subject_of_deleted_group(connection, ask.subject, ask.group_id)
    if gone is None:
        return
    row = find_subject(connection, ask.subject)
    if row is None or row.subject_id != gone:
        raise SubjectDeletedError(
            f"subject {ask.subject!r} was deleted since this consumer joined its group "
            f"{ask.group!r}",
            subject=ask.subject,
        )


def _lock_or_create_group(
    connection: Connection, subject: SubjectRow, ask: Join
) -> tuple[bool, sa.Row[Any]]:
    """
    Lock the group of a join; create it if there is none.

    Returns:
        True if it was created, and its row.

    Raises:
        ConflictError, OverloadedError, GroupDeletedError
        GroupUnknownError: the group does not exist, and would not begin at the earliest message.
    """
    subject_id = subject.subject_id
    named = {"of_subject": subject_id, "of_name": ask.group}
    known_id = connection.execute(_group_id, named).scalar_one_or_none()
    new_group = known_id is None
    gone = ask.group_id not in {0, known_id}
    if gone and was_deleted(connection, ask.subject, group_id=ask.group_id):
        raise GroupDeletedError(
            f"consumer group {ask.group!r} was deleted since this consumer joined it",
            subject=ask.subject,
            group=ask.group,
        )
    if new_group:
        if ask.start not in {None, EARLIEST}:
            raise GroupUnknownError(
                f"consumer group {ask.group!r} is made before its first session joins",
                subject=ask.subject,
                group=ask.group,
            )
        new_group = insert_group(connection, subject, ask.group, strategy=ask.strategy, version=1)
    group = connection.execute(_locked_group, named).one()
    if group.deleting:
        raise GroupDeletedError(
            f"consumer group {ask.group!r} is being deleted; join again when its brokers have "
            f"forgotten it",
            subject=ask.subject,
            group=ask.group,
            left=removals_left(connection, subject_id, group.group_id),
        )
    if group.strategy != ask.strategy:
        raise ConflictError(
            Reason.GROUP_STRATEGY,
            f"group {ask.group!r} is {group.strategy}, this consumer {ask.strategy}",
            stored=group.strategy,
            asked=ask.strategy.value,
        )
    return new_group, group


def lock_in_order(*conditions: sa.ColumnElement[bool], skip_locked: bool = False) -> sa.Select[Any]:
    """Select sessions and lock them in ascending order, because transactions with different orders
    would deadlock.
    """
    chosen = sa.select(sessions.c.session).where(*conditions)
    return chosen.order_by(sessions.c.session).with_for_update(skip_locked=skip_locked)


_asked_and_live = (sessions.c.session.in_(sa.bindparam("ids")), sessions.c.expires_at > now_ms())
_live = sa.select(sessions.c.session, sessions.c.group_id).where(*_asked_and_live)
_asked_to_hand_over = sa.select(leases.c.session).where(
    leases.c.session.in_(sa.bindparam("ids")), leases.c.withdrawn
)


def _renewal(*, skip_locked: bool) -> ReturningUpdate[Any]:
    renewable = lock_in_order(*_asked_and_live, skip_locked=skip_locked).cte("renewable")
    return (
        sa.update(sessions)
        .where(sessions.c.session.in_(sa.select(renewable.c.session)))
        .values(expires_at=now_ms() + sessions.c.ttl_ms, heard=True)
        .returning(
            *_row.selected_columns,
            # Not correlated: in RETURNING, SQLite's columns have no table, and would be those of
            # the leases.
            sessions.c.session.in_(_asked_to_hand_over).label("handing_over"),
        )
    )


_renewed, _renewed_at_once = (_renewal(skip_locked=skip_locked) for skip_locked in (False, True))


def renew_sessions(connection: Connection, ids: Sequence[str]) -> dict[str, SessionRow]:
    """Renew those sessions that are live, each for its ttl from now; the answer lacks
    expired ones.
    """
    return _rows_of(connection.execute(_renewed, {"ids": ids}))


class Renewed(NamedTuple):
    """The result of renewals that did not wait for another transaction."""

    rows: dict[str, SessionRow]
    held: dict[str, int]
    """Live sessions whose rows other transactions have locked → ids of their groups."""


def renew_at_once(connection: Connection, ids: Sequence[str]) -> Renewed:
    """Renew sessions without waiting: on PostgreSQL, sessions whose rows are locked are
    only named.
    """
    if connection.dialect.name != "postgresql":
        return Renewed(renew_sessions(connection, ids), {})
    rows = _rows_of(connection.execute(_renewed_at_once, {"ids": ids}))
    left = [session for session in ids if session not in rows]
    held = connection.execute(_live, {"ids": left}).all() if left else []
    return Renewed(rows, {row.session: row.group_id for row in held})


def _rows_of(renewed: Iterable[sa.Row[Any]]) -> dict[str, SessionRow]:
    return {
        row.session: replace(_session_row(row), handing_over=True)
        if row.handing_over
        else _session_row(row)
        for row in renewed
    }


_live_session = _row.where(
    sessions.c.session == sa.bindparam("of_session"), sessions.c.expires_at > now_ms()
)


def live_session(connection: Connection, session: str) -> SessionRow:
    """
    Return the row of a live session.

    Raises:
        SessionUnknownError: it has ended or never began.
    """
    check_session(session)
    row = connection.execute(_live_session, {"of_session": session}).one_or_none()
    if row is None:
        raise SessionUnknownError(session=session)
    return _session_row(row)


_live_sessions = _row.where(*_asked_and_live)


def live_sessions(connection: Connection, ids: Collection[str]) -> dict[str, SessionRow]:
    """Return session → row, for those that are live."""
    rows = connection.execute(_live_sessions, {"ids": list(ids)}) if ids else ()
    return {row.session: _session_row(row) for row in rows}


_live_members = (
    _row.add_columns(*MEMBER_COLUMNS)
    .join(groups, groups.c.group_id == sessions.c.group_id)
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(*_asked_and_live)
)


def live_members(
    connection: Connection, ids: Collection[str]
) -> list[tuple[SessionRow, MemberSettings]]:
    """Return `live_sessions`, each with the settings that a member gets."""
    rows = connection.execute(_live_members, {"ids": list(ids)}).all()
    return [(_session_row(row), settings_of_member(row)) for row in rows]


def suspend_session(connection: Connection, ask: Suspend) -> int:
    """
    Suspend or resume a session.

    Returns:
        The id of its group, which has to be settled.

    Raises:
        SessionUnknownError: the session has ended.
    """
    row = live_session(connection, ask.session)
    mark_unsettled(connection, row.group_id)
    here = sessions.c.session == ask.session
    version = sa.select(groups.c.version).where(groups.c.group_id == row.group_id)
    connection.execute(
        sa.update(sessions)
        .where(here)
        .values(suspended=ask.suspended, grants_version=version.scalar_subquery())
    )
    return row.group_id


def group_of(connection: Connection, session: str) -> int | None:
    """Return the id of a session's group; None: its row was deleted."""
    check_session(session)
    chosen = sa.select(sessions.c.group_id).where(sessions.c.session == session)
    group_id: int | None = connection.execute(chosen).scalar_one_or_none()
    return group_id


def leave_group(connection: Connection, session: str) -> int | None:
    """End a session, and return the id of its group; None: the session had ended."""
    group_id = group_of(connection, session)
    if group_id is None:
        return None
    mark_unsettled(connection, group_id)
    end_sessions(connection, [SessionId(session)])
    return group_id


_swept = (
    sa.delete(sessions)
    .where(sessions.c.group_id == sa.bindparam("of_group"), sessions.c.expires_at <= now_ms())
    .returning(sessions.c.session)
)
_ended = sa.delete(sessions).where(sessions.c.session.in_(sa.bindparam("ids")))
_freed = (
    sa.update(leases)
    .where(leases.c.session.in_(sa.bindparam("ids")))
    .values(session=None, withdrawn=False)
)


def sweep_sessions(connection: Connection, group_id: int) -> list[SessionId]:
    """End the expired sessions of a group; returns their ids."""
    swept = connection.execute(_swept, {"of_group": group_id}).scalars()
    ids = [SessionId(session) for session in swept]
    if ids:
        connection.execute(_freed, {"ids": ids})
    return ids


def end_sessions(connection: Connection, ids: Collection[SessionId]) -> None:
    """End sessions and free their leases."""
    for statement in (_ended, _freed):
        connection.execute(statement, {"ids": list(ids)})


def check_session(session: str) -> None:
    """Raise SessionUnknownError unless this may be a session's id."""
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
