"""Lets operators change a consumer group with live members: its strategy, its failure policy and
its suspension. Runs SQL synchronously.

Invariants
    A change of the policy or a suspension raises the version of every session's grants in the same
    transaction. So each member learns about it with its next heartbeat, from any metaserver.
    Suspension by an operator and suspension by a session's own code are independent: a session has
    grants only if neither is in effect.
    A change of the strategy ends all sessions in the same transaction, so no session that joined
    with the old strategy has a grant afterwards.
    Tokens keep increasing after a change of the strategy, so the first new Acquire of a partition
    fences its old owner.
"""

from __future__ import annotations

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy.engine import Connection

from ...protocol.errors import InvalidRequestError, OverloadedError, Reason
from ...protocol.groups import FailurePolicy, GroupPolicy, GroupSettings, SetGroup, SuspendGroup
from ...protocol.ids import SessionId
from ...protocol.routing import ConsumeStrategy, OrderStrategy
from ..cluster.announcements import mark_unsettled
from ..cluster.subjects import open_subject_row
from ..sql.dialect import calendar_ms, insert_new, read_calendar_ms
from ..sql.schema import groups, leases, sessions, suspended_clients
from .group_rows import POLICY_COLUMNS, build_policy, policy_values, read_stored
from .lease_rows import NO_CHANGES, Changes
from .locked_group import lock_group, raise_group_versions
from .sessions import end_sessions
from .views import find_open_group, grants_versions

SUSPENDED_CLIENTS_MAX = 1_000


def group_settings(connection: Connection, subject: str, group: str) -> GroupSettings:
    """
    Return the stored settings of a group.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError
    """
    group_id, _ = find_open_group(connection, subject, group)
    return read_stored(connection, group_id, subject=subject, group=group)


def set_policy(
    connection: Connection, subject: str, group: str, request: SetGroup
) -> tuple[int, Changes]:
    """
    Change the stored failure policy of a group.

    Returns:
        The id of the group, and the new versions of the grants of its members.

    Raises:
        SubjectUnknownError, GroupUnknownError
        InvalidRequestError: the group's name is invalid, the resulting fields contradict each
            other, or the group cannot use the failure policy RETRY; nothing was changed.
    """
    group_id = _lock_group_by_name(connection, subject, group)
    is_this_group = groups.c.group_id == group_id
    current_policy = build_policy(
        connection.execute(sa.select(*POLICY_COLUMNS).where(is_this_group)).one()
    )
    policy = change_policy(current_policy, request)
    if request.on_failure is FailurePolicy.RETRY:
        _check_retry_allowed(connection, subject, group, group_id)
    connection.execute(sa.update(groups).where(is_this_group).values(policy_values(policy)))
    return group_id, _raise_member_versions(connection, group_id)


def _check_retry_allowed(connection: Connection, subject: str, group: str, group_id: int) -> None:
    """Check that the group can use the failure policy RETRY. Raises InvalidRequestError."""
    query = sa.select(groups.c.strategy).where(groups.c.group_id == group_id)
    is_shared = connection.execute(query).scalar_one() == ConsumeStrategy.SHARED
    is_strict = open_subject_row(connection, subject).order_strategy is OrderStrategy.STRICT
    if is_strict and not is_shared:
        raise InvalidRequestError(
            Reason.RETRY_POLICY, f"subject {subject!r} is strict", subject=subject, group=group
        )


def change_policy(current: GroupPolicy, request: SetGroup) -> GroupPolicy:
    """
    Return the policy that results from a change.

    Raises:
        InvalidRequestError: the resulting fields contradict each other.
    """
    current_values = {} if request.forget else asdict(current)
    changes = {name: value for name, value in asdict(request).items() if name in asdict(current)}
    policy = GroupPolicy(
        **current_values | {name: value for name, value in changes.items() if value is not None}
    )
    first_ms, max_ms = policy.backoff_first_ms, policy.backoff_max_ms
    if (first_ms is None) != (max_ms is None):
        raise InvalidRequestError(
            Reason.POLICY_INVALID, "backoff_first_ms and backoff_max_ms go together"
        )
    if first_ms is not None and max_ms is not None and first_ms > max_ms:
        raise InvalidRequestError(
            Reason.POLICY_INVALID,
            f"backoff_first_ms ({first_ms}) is greater than backoff_max_ms ({max_ms})",
        )
    return policy


def suspend_members(
    connection: Connection, subject: str, group: str, request: SuspendGroup
) -> tuple[int, Changes]:
    """
    Suspend or resume a group or one of its clients. Idempotent.

    Returns:
        The id of the group, which must be settled next, and the new versions of the grants of its
        members.

    Raises:
        SubjectUnknownError, GroupUnknownError
        InvalidRequestError: the group's name is invalid, or the client's name contains a NUL.
        OverloadedError: SUSPENDED_CLIENTS_MAX clients are already suspended.
    """
    group_id = _lock_group_by_name(connection, subject, group)
    if request.client is None:
        is_this_group = groups.c.group_id == group_id
        since = sa.case((groups.c.suspended, groups.c.suspended_since), else_=calendar_ms())
        connection.execute(
            sa.update(groups)
            .where(is_this_group)
            .values(
                suspended=request.suspended,
                suspended_since=since if request.suspended else None,
            )
        )
    else:
        _suspend_client(connection, group_id, request.client, suspended=request.suspended)
    return group_id, _raise_member_versions(connection, group_id)


def _suspend_client(connection: Connection, group_id: int, client: str, *, suspended: bool) -> None:
    """Suspend or resume a client of a group."""
    if "\0" in client:
        raise InvalidRequestError("the client's name contains a NUL")
    is_in_group = suspended_clients.c.group_id == group_id
    if not suspended:
        is_client = sa.and_(is_in_group, suspended_clients.c.client == client)
        connection.execute(sa.delete(suspended_clients).where(is_client))
        return
    row = {"group_id": group_id, "client": client, "since": read_calendar_ms(connection)}
    insert_new(connection, suspended_clients, row)
    count = sa.select(sa.func.count()).select_from(suspended_clients).where(is_in_group)
    if connection.execute(count).scalar_one() > SUSPENDED_CLIENTS_MAX:
        raise OverloadedError(Reason.SUSPENDED_CLIENTS, limit=SUSPENDED_CLIENTS_MAX)


def _lock_group_by_name(connection: Connection, subject: str, group: str) -> int:
    """Lock a group until the transaction ends and return its id."""
    group_id, _ = find_open_group(connection, subject, group)
    lock_group(connection, group_id)
    return group_id


def _raise_member_versions(connection: Connection, group_id: int) -> Changes:
    mark_unsettled(connection, group_id)
    raise_group_versions(connection, [group_id])
    return Changes(versions=grants_versions(connection, [group_id]))


def switch_group(
    connection: Connection, subject: str, group: str, strategy: ConsumeStrategy
) -> Changes:
    """
    Change a group's strategy and end its sessions. Does nothing if it already has that strategy.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError
    """
    group_id, _ = find_open_group(connection, subject, group)
    is_this_group = groups.c.group_id == group_id
    locked_row = connection.execute(
        sa.select(groups.c.strategy).where(is_this_group).with_for_update()
    ).one()
    if locked_row.strategy == strategy:
        return NO_CHANGES
    query = sa.select(sessions.c.session).where(sessions.c.group_id == group_id)
    session_ids = [SessionId(session) for session in connection.execute(query).scalars()]
    end_sessions(connection, session_ids)
    free_leases = sa.update(leases).where(leases.c.group_id == group_id)
    connection.execute(free_leases.values(session=None, wanted=None, withdrawn=False))
    connection.execute(sa.update(groups).where(is_this_group).values(strategy=strategy))
    mark_unsettled(connection, group_id)
    return Changes(versions={}, ended_sessions=session_ids)
