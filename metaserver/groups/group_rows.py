"""Inserts the row of a consumer group and reads its settings. Runs SQL synchronously."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy.engine import Connection

from ...protocol.errors.refusals import too_many_groups
from ...protocol.groups import (
    FailurePolicy,
    FullPolicy,
    GroupPolicy,
    GroupSettings,
    GroupStart,
    OperatorSwitch,
    StartAt,
)
from ...protocol.limits import GROUPS_PER_SUBJECT_MAX
from ...protocol.routing import ConsumeStrategy, OrderStrategy
from ..cluster.announcements import unheard_ids_of_group
from ..cluster.lost_database import check_database_complete
from ..cluster.rows import SubjectRow
from ..cluster.subjects import check_not_hidden
from ..sql.dialect import calendar_ms, insert_new
from ..sql.schema import accepted_folders, groups, sessions, starts, subjects, suspended_clients

POLICY_COLUMNS = (
    groups.c.on_failure,
    groups.c.tries_max,
    groups.c.backoff_first_ms,
    groups.c.backoff_max_ms,
)

_ON_FULL_SEPARATOR = "+"
_FULL_POLICIES = {policy.value[0]: policy for policy in FullPolicy}

client_is_suspended = (
    sa.select(sa.literal(1))
    .where(
        suspended_clients.c.group_id == sessions.c.group_id,
        suspended_clients.c.client == sessions.c.client,
    )
    .correlate(sessions)
    .exists()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    """The group settings that a member receives along with its grants."""

    strategy: ConsumeStrategy
    policy: GroupPolicy
    suspended_by: OperatorSwitch
    order_strategy: OrderStrategy


MEMBER_COLUMNS = (
    groups.c.strategy,
    groups.c.suspended.label("group_suspended"),
    client_is_suspended.label("client_suspended"),
    subjects.c.order_strategy,
    *POLICY_COLUMNS,
)
"""The columns of a session's group and subject that `build_member_settings` reads."""


def build_member_settings(row: Any) -> MemberSettings:
    """Build the settings from a row with `MEMBER_COLUMNS`."""
    switch = OperatorSwitch.OFF
    if row.group_suspended:
        switch = OperatorSwitch.GROUP
    elif row.client_suspended:
        switch = OperatorSwitch.CLIENT
    return MemberSettings(
        strategy=ConsumeStrategy(row.strategy),
        policy=build_policy(row),
        suspended_by=switch,
        order_strategy=OrderStrategy(row.order_strategy),
    )


_settings_query = sa.select(
    groups.c.strategy,
    groups.c.suspended,
    (calendar_ms() - groups.c.suspended_since).label("suspended_ms"),
    groups.c.start_at,
    groups.c.start_ms,
    *POLICY_COLUMNS,
).where(groups.c.group_id == sa.bindparam("of_group"))
_unstarted_query = sa.union(
    sa.select(starts.c.partition_id).where(starts.c.group_id == sa.bindparam("of_group")),
    unheard_ids_of_group,
).order_by("partition_id")
_suspended_clients_query = (
    sa.select(suspended_clients.c.client, calendar_ms() - suspended_clients.c.since)
    .where(suspended_clients.c.group_id == sa.bindparam("of_group"))
    .order_by(suspended_clients.c.client)
)


def read_stored(
    connection: Connection, group_id: int, *, subject: str, group: str
) -> GroupSettings:
    """Return the stored settings of an existing group."""
    parameters = {"of_group": group_id}
    row = connection.execute(_settings_query, parameters).one()
    clients = connection.execute(_suspended_clients_query, parameters).all()
    clients_ms = [ms for _, ms in clients if ms is not None]
    return GroupSettings(
        subject=subject,
        group=group,
        strategy=ConsumeStrategy(row.strategy),
        policy=build_policy(row),
        start=build_start(row),
        unstarted=tuple(connection.execute(_unstarted_query, parameters).scalars()),
        suspended=row.suspended,
        suspended_clients=tuple(client for client, _ in clients),
        suspended_ms=None if row.suspended_ms is None else max(0, row.suspended_ms),
        clients_suspended_ms=max(0, min(clients_ms))
        if len(clients_ms) == len(clients) > 0
        else None,
    )


def build_start(row: Any) -> GroupStart:
    """Build the start from a row of `groups`."""
    return GroupStart(at=StartAt(row.start_at), at_ms=row.start_ms)


def build_policy(row: Any) -> GroupPolicy:
    """Build the policy from a row of `groups`."""
    on_failure, _, on_full = (row.on_failure or "").partition(_ON_FULL_SEPARATOR)
    return GroupPolicy(
        on_failure=FailurePolicy(on_failure) if on_failure else None,
        on_full=_FULL_POLICIES[on_full] if on_full else None,
        tries_max=row.tries_max,
        backoff_first_ms=row.backoff_first_ms,
        backoff_max_ms=row.backoff_max_ms,
    )


def policy_values(policy: GroupPolicy) -> dict[str, object]:
    """Return the column values of a policy. `on_full` is stored as a suffix of `on_failure`, as in
    "park+d".
    """
    columns = asdict(policy)
    on_full = columns.pop("on_full")
    if on_full is not None:
        columns["on_failure"] = f"{policy.on_failure or ''}{_ON_FULL_SEPARATOR}{on_full[0]}"
    return columns


EARLIEST = GroupStart()
_limits_query = sa.select(
    sa.select(sa.func.count())
    .where(groups.c.subject_id == sa.bindparam("of_subject"))
    .scalar_subquery()
    .label("group_count"),
    sa.select(sa.func.coalesce(sa.func.max(accepted_folders.c.fence), 0))
    .scalar_subquery()
    .label("fence"),
)
"""The number of groups of a subject, and the fence up to which brokers refuse tokens; see
`catalogue/accepted.py`.
"""


def insert_group(
    connection: Connection,
    subject: SubjectRow,
    name: str,
    *,
    strategy: ConsumeStrategy,
    start: GroupStart = EARLIEST,
    version: int = 0,
) -> bool:
    """
    Insert an unsettled group, unless one with this name exists.

    Returns:
        True if it was inserted.

    Raises:
        ConflictError: the subject is hidden.
        OverloadedError: the subject has the maximum number of groups.
        UnavailableError: the database has lost data that brokers still have.
    """
    check_not_hidden(subject)
    check_database_complete(connection)
    limits_row = connection.execute(_limits_query, {"of_subject": subject.subject_id}).one()
    if limits_row.group_count >= GROUPS_PER_SUBJECT_MAX:
        raise too_many_groups("the subject", GROUPS_PER_SUBJECT_MAX)
    row = {
        "subject_id": subject.subject_id,
        "name": name,
        "strategy": strategy,
        "last_token": max(limits_row.fence, subject.tokens_above),
        "version": version,
        "settled": False,
        "route_version": 0,
        "start_at": start.at,
        "start_ms": start.at_ms,
    }
    return insert_new(connection, groups, row) > 0
