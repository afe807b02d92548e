"""Creates subjects and reads their routes. A subject is planned first, and is opened once all its
partitions are hosted. Runs SQL synchronously.

Invariants
    A route is served only when it is complete: it has exactly one OPEN partition for each logical
    partition.
    The version of a route never decreases.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.access.quota import matching_limits
from ...protocol.control import CreateSubject, Retention, SubjectSummary, SubjectView
from ...protocol.errors import (
    ConflictError,
    OverloadedError,
    Reason,
    SubjectDeletedError,
    SubjectUnknownError,
)
from ...protocol.ids import RouteVersion, Subject, check_name, partition_name
from ...protocol.routing import (
    OrderStrategy,
    Partition,
    PartitionState,
    Route,
    route_table,
    split_ranges,
)
from ...protocol.text import counted
from ..sql.dialect import calendar_ms, insert_new, now_ms, read_in_chunks
from ..sql.schema import name_limits, partitions, subjects
from .brokers import lock_brokers, no_host_error, writable_groups
from .lost_database import check_database_complete
from .partitions import subject_partitions
from .removals import being_deleted_error, name_was_deleted, was_deleted
from .rows import SubjectRow

CLUSTER_HINT = (
    "Delete subjects that no program uses (keylane subject list), or raise subjects_max of the "
    "metaservers. A limit for "
    "the names of one tenant: keylane access quota set 'shop.*' --for-subjects --subjects N"
)
NAMES_HINT = (
    "Delete subjects of these names that no program uses, or have the limit raised: "
    "keylane access quota set {!r} --for-subjects --subjects N"
)


def check_subject_limits(
    connection: Connection, name: str, *, subjects_max: int, limited: bool
) -> None:
    """
    Check that a subject with this name may be created without exceeding a limit.

    Args:
        subjects_max: the maximum number of subjects in the cluster.
        limited: also apply the limits on names with a common prefix. They only apply with access
            control, without which they could not be changed.

    Raises:
        OverloadedError: there are `subjects_max` other subjects, or a prefix has reached its limit.
    """
    count_query = sa.select(sa.func.count()).select_from(subjects).where(subjects.c.name != name)
    count = connection.execute(count_query).scalar_one()
    if count >= subjects_max:
        raise _limit_error("too many subjects", CLUSTER_HINT, count, subjects_max)
    if not limited:
        return
    query = sa.select(name_limits.c.name, name_limits.c.subjects).where(name_limits.c.subjects > 0)
    # In PostgreSQL, concurrent plans share the locks on brokers and would count the same subjects.
    # All rows are locked in order, because a hidden subject counts under two names.
    locked_query = query.order_by(name_limits.c.name).with_for_update()
    limits = {row.name: row.subjects for row in connection.execute(locked_query)}
    for pattern, limit in matching_limits(name, limits):
        prefix = pattern.removesuffix("*")
        # LIKE would ignore case in SQLite.
        has_prefix = sa.func.substr(subjects.c.name, 1, len(prefix)) == prefix
        count = connection.execute(count_query.where(has_prefix)).scalar_one()
        if count >= limit:
            message = f"{pattern!r} has {counted(count, 'subject')}, and the limit is {limit}"
            raise _limit_error(message, NAMES_HINT.format(pattern), count, limit)


def _limit_error(text: str, hint: str, count: int, limit: int) -> OverloadedError:
    error = OverloadedError(text, subjects=count, limit=limit)
    error.hint = hint
    return error


SERVED = (PartitionState.OPEN, PartitionState.SEALED)
"""The states of partitions that still have data."""


_by_name_query = sa.select(subjects).where(subjects.c.name == sa.bindparam("of_name"))
_by_name_locked_query = _by_name_query.with_for_update()


def find_subject(connection: Connection, name: str, *, lock: bool = False) -> SubjectRow | None:
    """Return the row of a planned or open subject, or None. With `lock`, the row is locked until
    the transaction ends.
    """
    check_name("subject", name)
    query = _by_name_locked_query if lock else _by_name_query
    row = connection.execute(query, {"of_name": name}).one_or_none()
    return None if row is None else _subject_row(row)


def all_subjects(connection: Connection) -> list[SubjectRow]:
    """Return the rows of all subjects, planned or open, ordered by name."""
    rows = connection.execute(sa.select(subjects).order_by(subjects.c.name))
    return [_subject_row(row) for row in rows]


def _subject_row(row: sa.Row[Any]) -> SubjectRow:
    return SubjectRow(
        subject_id=row.subject_id,
        name=Subject(row.name),
        order_strategy=OrderStrategy(row.order_strategy),
        partitions_wanted=row.partitions_wanted,
        partitions_named=row.partitions_named,
        route_version=row.route_version,
        retention=Retention(row.retention),
        static=row.static,
        problem=row.problem,
        deleting=row.deleting,
        tokens_above=row.tokens_above,
        message_bytes_max=row.message_bytes_max,
        hidden_for=row.hidden_for,
        filled_by=row.filled_by,
    )


def open_subject_row(connection: Connection, name: str) -> SubjectRow:
    """
    Return the row of an open subject.

    Raises:
        InvalidRequestError, UnavailableError
        SubjectUnknownError: the subject does not exist or is not open yet.
        SubjectDeletedError: the subject is being deleted.
        ConflictError: the subject's creation failed.
    """
    return check_open(connection, name, find_subject(connection, name))


def check_open(connection: Connection, name: str, row: SubjectRow | None) -> SubjectRow:
    """
    Return the row if the subject is open.

    Raises:
        SubjectUnknownError, SubjectDeletedError, ConflictError, UnavailableError
    """
    if row is None:
        check_database_complete(connection)
    elif row.deleting:
        raise being_deleted_error(connection, row.subject_id, name)
    elif row.route_version > 0:
        return row
    elif row.problem:
        raise ConflictError(Reason.CREATION_FAILED, row.problem, subject=name)
    raise SubjectUnknownError(subject=name)


def check_not_hidden(row: SubjectRow) -> None:
    """Check that a subject is not hidden. Raises ConflictError."""
    if row.hidden_for:
        raise ConflictError(
            Reason.SUBJECT_HIDDEN,
            f"subject {row.name!r} is hidden until it is published in {row.hidden_for!r}",
            subject=row.name,
            target=row.hidden_for,
        )


def check_not_deleted(connection: Connection, name: str) -> bool:
    """
    Check that the subject was not deleted, or that another one has been created under its name
    since.

    Returns:
        True if an earlier subject with this name was deleted.

    Raises:
        SubjectDeletedError: the subject was deleted and no later one exists.
    """
    was_name_deleted = name_was_deleted(connection, name)
    if was_name_deleted and find_subject(connection, name) is None:
        raise SubjectDeletedError(
            f"subject {name!r} was deleted; sending does not recreate it, but an operator can",
            subject=name,
        )
    return was_name_deleted


def plan_subject(
    connection: Connection, request: CreateSubject, *, subjects_max: int, limited: bool = False
) -> SubjectRow:
    """
    Store a subject and its PLANNED partitions, which are spread over the available broker groups.
    Idempotent.

    Args:
        subjects_max, limited: see `check_subject_limits`.

    Raises:
        ConflictError: the subject exists with other settings.
        SubjectDeletedError: an earlier subject with this name is being deleted.
        UnavailableError: no broker group is available, or the database has lost data (see
            `cluster/lost_database.py`).
        OverloadedError: a limit on the number of subjects is reached.
    """
    check_name("subject", request.subject)
    split_ranges(request.partitions)  # rejects invalid counts
    row = find_subject(connection, request.subject)
    if row is None or row.problem:
        check_database_complete(connection)
        lock_brokers(connection)
        if row is not None:  # another metaserver may have planned it in the meantime
            row = find_subject(connection, request.subject, lock=True)
    if row is None or row.problem:
        hosts = list(writable_groups(connection))[: request.partitions]
        if not hosts:
            raise no_host_error(connection)
        check_subject_limits(
            connection, request.subject, subjects_max=subjects_max, limited=limited
        )
        settings = {
            "order_strategy": request.order_strategy,
            "partitions_wanted": request.partitions,
            "retention": request.retention,
            "static": request.static,
            "message_bytes_max": request.message_bytes_max,
        }
        initial_columns = {
            "name": request.subject,
            "partitions_named": request.partitions,
            "route_version": 0,
        }
        insert_new(connection, subjects, initial_columns | settings)
        row = find_subject(connection, request.subject, lock=True)
        assert row is not None
        names_used = _reuse_failed_creation(connection, row, settings) if row.problem else 0
        row = find_subject(connection, request.subject)
        assert row is not None
        _insert_planned(connection, row, names_used, hosts)
    if row.deleting:
        raise being_deleted_error(connection, row.subject_id, row.name)
    check_not_hidden(row)
    _check_settings(row, request)
    return row


def _check_settings(row: SubjectRow, request: CreateSubject) -> None:
    """Check that the subject was created with these settings. Raises ConflictError."""
    settings = {
        "order_strategy": (row.order_strategy, request.order_strategy),
        "partitions": (row.partitions_wanted, request.partitions),
        "retention": (row.retention, request.retention),
        "static": (row.static, request.static),
        "message_bytes_max": (row.message_bytes_max, request.message_bytes_max),
    }
    differences = [
        f"{name} {stored_value}, not {requested_value}".lower()
        for name, (stored_value, requested_value) in settings.items()
        if stored_value != requested_value
    ]
    if differences:
        raise ConflictError(
            Reason.SUBJECT_EXISTS,
            f"subject {row.name!r} exists; it was created with {'; '.join(differences)}",
            subject=row.name,
            **{name: stored_value for name, (stored_value, _requested) in settings.items()},
        )


def _insert_planned(
    connection: Connection, row: SubjectRow, names_used: int, hosts: Sequence[str]
) -> None:
    """Insert the PLANNED partitions of a new subject. `names_used` is the number of partition names
    already taken.
    """
    planned = [
        {
            "subject_id": row.subject_id,
            "name": partition_name(row.name, names_used + queue),
            "queue": queue,
            "range_start": start,
            "range_end": end,
            "broker_group": hosts[queue % len(hosts)],
            "state": PartitionState.PLANNED,
        }
        for queue, (start, end) in enumerate(split_ranges(row.partitions_wanted))
    ]
    # If two metaservers plan concurrently, the rows of the first already have these names.
    insert_new(connection, partitions, planned)


def _reuse_failed_creation(
    connection: Connection, row: SubjectRow, settings: Mapping[str, Any]
) -> int:
    """Reuse the row of a failed creation and return the number of partition names already used."""
    is_this_subject = subjects.c.subject_id == row.subject_id
    names_used: int = connection.execute(
        sa.select(subjects.c.partitions_named).where(is_this_subject)
    ).scalar_one()
    reset_columns = {"partitions_named": names_used + settings["partitions_wanted"], "problem": ""}
    connection.execute(
        sa.update(subjects).where(is_this_subject).values(**settings, **reset_columns)
    )
    return names_used


def planned_partitions(connection: Connection, subject_id: int) -> tuple[Partition, ...]:
    """Return the partitions of a subject that are planned but not open yet."""
    return subject_partitions(connection, subject_id, [PartitionState.PLANNED])


_is_planned = sa.and_(
    subjects.c.route_version == 0, subjects.c.problem == "", sa.not_(subjects.c.deleting)
)
PLANNED = sa.select(subjects.c.name).where(_is_planned)
"""Selects the names of the subjects whose creation is not finished."""


def planned_subjects(connection: Connection) -> list[SubjectRow]:
    """Return the rows of the subjects whose creation is not finished."""
    rows = connection.execute(sa.select(subjects).where(_is_planned))
    return [_subject_row(row) for row in rows]


def open_subject(
    connection: Connection, name: str, hosted_ids: Collection[int] | None = None
) -> bool:
    """
    Open the partitions of a planned subject, whose route is served from then on.

    Args:
        hosted_ids: the ids of the partitions that brokers host; None means all of them.

    Returns:
        False if the subject is already open, was deleted, or was planned again and has partitions
        that are not hosted yet.
    """
    row = find_subject(connection, name, lock=True)
    if row is None or row.deleting or row.route_version > 0:
        return False
    planned_ids = {
        partition.partition_id for partition in planned_partitions(connection, row.subject_id)
    }
    if hosted_ids is not None and not planned_ids <= set(hosted_ids):
        return False
    is_this_subject = subjects.c.subject_id == row.subject_id
    is_planned = sa.and_(
        partitions.c.subject_id == row.subject_id,
        partitions.c.state == PartitionState.PLANNED,
    )
    opened_values = {"state": PartitionState.OPEN, "opened_at": calendar_ms()}
    connection.execute(sa.update(partitions).where(is_planned).values(opened_values))
    connection.execute(sa.update(subjects).where(is_this_subject).values(route_version=1))
    route_table(read_route(connection, name))
    return True


def read_route(
    connection: Connection,
    name: str,
    *,
    order_strategy: OrderStrategy | None = None,
    subject_id: int = 0,
) -> Route:
    """
    Return the route of an open subject.

    Args:
        order_strategy: the order strategy that the caller expects, if any.
        subject_id: id of the subject that the caller knows by this name; 0 if none.

    Raises:
        SubjectUnknownError
        SubjectDeletedError: the subject is being deleted, or the subject with this id was deleted.
        ConflictError: the subject has another order strategy.
    """
    row = find_subject(connection, name)
    is_another = subject_id and (row is None or row.subject_id != subject_id)
    if is_another and was_deleted(connection, name, subject_id=subject_id):
        raise SubjectDeletedError(f"subject {name!r} was deleted", subject=name)
    row = check_open(connection, name, row)
    if order_strategy is not None and order_strategy is not row.order_strategy:
        raise ConflictError(
            Reason.ORDER_STRATEGY,
            subject=name,
            stored=row.order_strategy.value,
            asked=order_strategy.value,
        )
    return Route(
        subject=row.name,
        version=RouteVersion(row.route_version),
        order_strategy=row.order_strategy,
        partitions=subject_partitions(connection, row.subject_id, SERVED),
        static=row.static,
        subject_id=row.subject_id,
        message_bytes_max=row.message_bytes_max,
    )


def read_subject(connection: Connection, name: str) -> SubjectView:
    """
    Return an open subject with its route.

    Raises:
        SubjectUnknownError
    """
    row = open_subject_row(connection, name)
    return SubjectView(
        subject=row.name,
        order_strategy=row.order_strategy,
        route=read_route(connection, name),
        retention=row.retention,
        static=row.static,
        message_bytes_max=row.message_bytes_max,
    )


_route_versions_query = sa.select(subjects.c.name, subjects.c.route_version).where(
    subjects.c.name.in_(sa.bindparam("ids"))
)


def route_versions(connection: Connection, names: Sequence[str]) -> dict[str, int]:
    """Return a dict that maps each subject to the current version of its route."""
    return {
        row.name: row.route_version
        for row in read_in_chunks(connection, _route_versions_query, names)
    }


_subject_names_query = sa.select(subjects.c.name).where(
    subjects.c.subject_id.in_(sa.bindparam("ids"))
)


def subject_names(connection: Connection, ids: list[int]) -> list[Subject]:
    """Return the names of the subjects with these ids."""
    return [Subject(row.name) for row in read_in_chunks(connection, _subject_names_query, ids)]


def subject_summaries(
    connection: Connection, *, hidden_expires_ms: int = 0
) -> list[SubjectSummary]:
    """
    Return all open subjects, including hidden ones, and those whose creation failed, ordered by
    name.

    Args:
        hidden_expires_ms: idle time in milliseconds after which hidden subjects are deleted; 0
            means that they are never deleted.

    Raises:
        UnavailableError
    """
    check_database_complete(connection)
    count = (
        sa.select(sa.func.count())
        .where(
            partitions.c.subject_id == subjects.c.subject_id,
            partitions.c.state == PartitionState.OPEN,
        )
        .scalar_subquery()
        .label("partitions")
    )
    query = (
        sa.select(
            subjects.c.name,
            subjects.c.order_strategy,
            subjects.c.route_version,
            subjects.c.problem,
            subjects.c.deleting,
            subjects.c.hidden_for,
            (now_ms() - subjects.c.hidden_since).label("hidden_ms"),
            count,
        )
        .where(sa.or_(subjects.c.route_version > 0, subjects.c.problem != ""))
        .order_by(subjects.c.name)
    )
    return [
        SubjectSummary(
            subject=row.name,
            order_strategy=OrderStrategy(row.order_strategy),
            partitions=row.partitions,
            route_version=row.route_version,
            problem="it is being deleted" if row.deleting else row.problem,
            hidden_for=row.hidden_for,
            expires_in_ms=max(0, hidden_expires_ms - (row.hidden_ms or 0))
            if row.hidden_for and hidden_expires_ms
            else None,
        )
        for row in connection.execute(query)
    ]
