"""Changes that operators make to a consumer group with live members: its strategy, its failure
policy and its suspension. SQL, synchronous.

Invariants
    A change raises the version of every session's grants in its transaction, so that each member
    gets it with its next heartbeat, from any metaserver.
    The switches of operators and the switch of a session's own code are separate: a session has
    grants only if none is set.

Invariants
    Sessions, strategy and tokens change in one transaction: no session that joined under the old
    strategy has a grant afterwards.
    Every later token is above all earlier ones, so that the first new Acquire of a partition fences
    its old owner.
"""

from __future__ import annotations

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy.engine import Connection

from ...protocol.errors import InvalidRequestError, OverloadedError, Reason
from ...protocol.groups import FailurePolicy, GroupPolicy, GroupSettings, SetGroup, SuspendGroup
from ...protocol.ids import SessionId
from ...protocol.routing import ConsumeStrategy, OrderStrategy
from ..cluster.heard import mark_unsettled
from ..cluster.subjects import open_subject_row
from ..sql.dialect import insert_new
from ..sql.schema import groups, leases, sessions, suspended_clients
from .group_rows import POLICY_COLUMNS, policy_of, policy_values, read_stored
from .lease_rows import NO_CHANGES, Changes
from .locked_group import lock_group, raise_group_versions
from .sessions import end_sessions
from .views import find_group, grants_versions

SUSPENDED_CLIENTS_MAX = 1_000


def group_settings(connection: Connection, subject: str, group: str) -> GroupSettings:
    """
    Return the stored settings of a group.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError
    """
    row = open_subject_row(connection, subject)
    group_id, _ = find_group(connection, row.subject_id, subject, group)
    return read_stored(connection, group_id, subject=subject, group=group)


def set_policy(
    connection: Connection, subject: str, group: str, ask: SetGroup
) -> tuple[int, Changes]:
    """
    Change the stored failure policy of a group.

    Returns:
        The id of the group, and the new versions of its members' grants.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError
        InvalidRequestError: the fields contradict each other; nothing was changed.
        InvalidRequestError: messages of the group are not set aside for retry.
    """
    group_id = _lock(connection, subject, group)
    here = groups.c.group_id == group_id
    before = policy_of(connection.execute(sa.select(*POLICY_COLUMNS).where(here)).one())
    policy = changed_policy(before, ask)
    if ask.on_failure is FailurePolicy.RETRY:
        _check_retries(connection, subject, group, group_id)
    connection.execute(sa.update(groups).where(here).values(policy_values(policy)))
    return group_id, _notify_members(connection, group_id)


def _check_retries(connection: Connection, subject: str, group: str, group_id: int) -> None:
    """Check that messages of the group can be set aside for retry. Raises InvalidRequestError."""
    chosen = sa.select(groups.c.strategy).where(groups.c.group_id == group_id)
    shared = connection.execute(chosen).scalar_one() == ConsumeStrategy.SHARED
    strict = open_subject_row(connection, subject).order_strategy is OrderStrategy.STRICT
    if strict and not shared:
        raise InvalidRequestError(
            Reason.RETRY_POLICY, f"subject {subject!r} is strict", subject=subject, group=group
        )


def changed_policy(before: GroupPolicy, ask: SetGroup) -> GroupPolicy:
    """
    Return the policy after a change.

    Raises:
        InvalidRequestError: its fields contradict each other.
    """
    kept = {} if ask.forget else asdict(before)
    given = {name: value for name, value in asdict(ask).items() if name in asdict(before)}
    policy = GroupPolicy(
        **kept | {name: value for name, value in given.items() if value is not None}
    )
    first_ms, max_ms = policy.backoff_first_ms, policy.backoff_max_ms
    if (first_ms is None) != (max_ms is None):
        raise InvalidRequestError(
            Reason.POLICY_INVALID, "backoff_first_ms and backoff_max_ms go together"
        )
    if first_ms is not None and max_ms is not None and first_ms > max_ms:
        raise InvalidRequestError(
            Reason.POLICY_INVALID,
            f"backoff_first_ms is {first_ms}, and backoff_max_ms only {max_ms}",
        )
    return policy


def suspend_members(
    connection: Connection, subject: str, group: str, ask: SuspendGroup
) -> tuple[int, Changes]:
    """
    Suspend or resume a group or a client of it; a repeat changes nothing.

    Returns:
        The id of the group, which has to be settled, and the new versions of its members' grants.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError
        InvalidRequestError: the client's name contains a NUL.
        OverloadedError: SUSPENDED_CLIENTS_MAX clients are suspended.
    """
    group_id = _lock(connection, subject, group)
    if ask.client is None:
        here = groups.c.group_id == group_id
        connection.execute(sa.update(groups).where(here).values(suspended=ask.suspended))
    else:
        _switch_client(connection, group_id, ask.client, suspended=ask.suspended)
    return group_id, _notify_members(connection, group_id)


def _switch_client(connection: Connection, group_id: int, client: str, *, suspended: bool) -> None:
    if "\0" in client:
        raise InvalidRequestError("the client's name contains a NUL")
    of_group = suspended_clients.c.group_id == group_id
    if not suspended:
        here = sa.and_(of_group, suspended_clients.c.client == client)
        connection.execute(sa.delete(suspended_clients).where(here))
        return
    insert_new(connection, suspended_clients, {"group_id": group_id, "client": client})
    count = sa.select(sa.func.count()).select_from(suspended_clients).where(of_group)
    if connection.execute(count).scalar_one() > SUSPENDED_CLIENTS_MAX:
        raise OverloadedError(Reason.SUSPENDED_CLIENTS, limit=SUSPENDED_CLIENTS_MAX)


def _lock(connection: Connection, subject: str, group: str) -> int:
    row = open_subject_row(connection, subject)
    group_id, _ = find_group(connection, row.subject_id, subject, group)
    lock_group(connection, group_id)
    return group_id


def _notify_members(connection: Connection, group_id: int) -> Changes:
    mark_unsettled(connection, group_id)
    raise_group_versions(connection, [group_id])
    return Changes(versions=grants_versions(connection, [group_id]))


def switch_group(
    connection: Connection, subject: str, group: str, strategy: ConsumeStrategy
) -> Changes:
    """
    End the sessions of a group and give it another strategy; does nothing if it has that strategy.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError
    """
    row = open_subject_row(connection, subject)
    group_id, _ = find_group(connection, row.subject_id, subject, group)
    here = groups.c.group_id == group_id
    locked = connection.execute(sa.select(groups.c.strategy).where(here).with_for_update()).one()
    if locked.strategy == strategy:
        return NO_CHANGES
    chosen = sa.select(sessions.c.session).where(sessions.c.group_id == group_id)
    ended = [SessionId(session) for session in connection.execute(chosen).scalars()]
    end_sessions(connection, ended)
    free = sa.update(leases).where(leases.c.group_id == group_id)
    connection.execute(free.values(session=None, wanted=None, withdrawn=False))
    connection.execute(sa.update(groups).where(here).values(strategy=strategy))
    mark_unsettled(connection, group_id)
    return Changes(versions={}, ended=ended)
