"""Rows of subjects and their routes: planned first, opened when every partition is hosted. SQL,
synchronous.

Invariants
    A route is served only when it is complete: it has exactly one OPEN partition for each logical
    partition.
    Its version only rises.

Checks the limits on the number of subjects: in the cluster, and of those with a common prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.access.quota import limits_of
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
from ..sql.dialect import insert_new, now_ms, rows_of
from ..sql.schema import name_limits, partitions, subjects
from .brokers import lock_brokers, no_host, writable_groups
from .lost_database import check_not_lost
from .partitions import subject_partitions
from .removals import being_deleted, name_was_deleted, was_deleted
from .rows import SubjectRow

CLUSTER_HINT = (
    "Delete subjects that no program uses (keylane subject list), or raise subjects_max of the "
    "metaservers. A limit for "
    "the names of one tenant: keylane access quota set 'shop.*' --subject --subjects N"
)
NAMES_HINT = (
    "Delete subjects of these names that no program uses, or have the limit raised: "
    "keylane access quota set {!r} --subject --subjects N"
)


def check_subject_room(
    connection: Connection, name: str, *, subjects_max: int, limited: bool
) -> None:
    """
    Check that a subject of this name may be created; an unfinished creation of it does not count.

    Args:
        limited: apply the limits of names, too. They need access control, without which they cannot
            be changed.

    Raises:
        OverloadedError: there are `subjects_max` other subjects, or a pattern has reached its
            limit.
    """
    others = sa.select(sa.func.count()).select_from(subjects).where(subjects.c.name != name)
    count = connection.execute(others).scalar_one()
    if count >= subjects_max:
        raise _no_room("too many subjects", CLUSTER_HINT, count, subjects_max)
    if not limited:
        return
    chosen = sa.select(name_limits.c.name, name_limits.c.subjects).where(name_limits.c.subjects > 0)
    # On PostgreSQL plans share the locks of brokers, and two would count the same subjects. All
    # rows are locked, in one order, because a hidden subject counts under two names.
    locked = chosen.order_by(name_limits.c.name).with_for_update()
    limits = {row.name: row.subjects for row in connection.execute(locked)}
    for pattern, limit in limits_of(name, limits):
        prefix = pattern.removesuffix("*")
        # LIKE ignores case on SQLite.
        alike = sa.func.substr(subjects.c.name, 1, len(prefix)) == prefix
        count = connection.execute(others.where(alike)).scalar_one()
        if count >= limit:
            text = f"{pattern!r} has {counted(count, 'subject')}, and the limit is {limit}"
            raise _no_room(text, NAMES_HINT.format(pattern), count, limit)


def _no_room(text: str, hint: str, count: int, limit: int) -> OverloadedError:
    error = OverloadedError(text, subjects=count, limit=limit)
    error.hint = hint
    return error


SERVED = (PartitionState.OPEN, PartitionState.SEALED)
"""The states of partitions that still have data."""


_by_name = sa.select(subjects).where(subjects.c.name == sa.bindparam("of_name"))
_by_name_locked = _by_name.with_for_update()


def find_subject(connection: Connection, name: str, *, lock: bool = False) -> SubjectRow | None:
    """Return the row of a subject, planned or open, or None; `lock` locks it until the transaction
    ends.
    """
    check_name("subject", name)
    chosen = _by_name_locked if lock else _by_name
    row = connection.execute(chosen, {"of_name": name}).one_or_none()
    return None if row is None else _subject_row(row)


def all_subjects(connection: Connection) -> list[SubjectRow]:
    """Return the rows of all subjects, planned or open, by name."""
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
        SubjectUnknownError: the subject does not exist, or is planned and not open yet.
        SubjectDeletedError: it is being deleted.
        ConflictError: its creation has failed.
    """
    return check_open(connection, name, find_subject(connection, name))


def check_open(connection: Connection, name: str, row: SubjectRow | None) -> SubjectRow:
    """
    Return the row if the subject is open.

    Raises:
        SubjectUnknownError, SubjectDeletedError, ConflictError, UnavailableError
    """
    if row is None:
        check_not_lost(connection)
    elif row.deleting:
        raise being_deleted(connection, row.subject_id, name)
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
    Return whether an earlier subject of the name was deleted; if so, a later one is planned or
    open.

    Raises:
        SubjectDeletedError: it was deleted, and no later one was created.
    """
    deleted = name_was_deleted(connection, name)
    if deleted and find_subject(connection, name) is None:
        raise SubjectDeletedError(
            f"subject {name!r} was deleted, and messages do not create it again; an operator can",
            subject=name,
        )
    return deleted


def plan_subject(
    connection: Connection, ask: CreateSubject, *, subjects_max: int, limited: bool = False
) -> SubjectRow:
    """
    Store a subject and its PLANNED partitions, spread over the available broker groups; changes
    nothing if it exists.

    Raises:
        ConflictError: the subject exists with other settings.
        SubjectDeletedError: the earlier subject of this name is being deleted.
        UnavailableError: no broker group is available.
        OverloadedError: there are `subjects_max` subjects, or, if `limited`, a pattern has reached
            its limit.
        UnavailableError: the database was lost, see `cluster/lost_database.py`.
    """
    check_name("subject", ask.subject)
    split_ranges(ask.partitions)  # refuses impossible counts
    row = find_subject(connection, ask.subject)
    if row is None or row.problem:
        check_not_lost(connection)
        lock_brokers(connection)
        if row is not None:  # another metaserver may have planned it again
            row = find_subject(connection, ask.subject, lock=True)
    if row is None or row.problem:
        hosts = list(writable_groups(connection))[: ask.partitions]
        if not hosts:
            raise no_host(connection)
        check_subject_room(connection, ask.subject, subjects_max=subjects_max, limited=limited)
        settings = {
            "order_strategy": ask.order_strategy,
            "partitions_wanted": ask.partitions,
            "retention": ask.retention,
            "static": ask.static,
            "message_bytes_max": ask.message_bytes_max,
        }
        new = {"name": ask.subject, "partitions_named": ask.partitions, "route_version": 0}
        insert_new(connection, subjects, new | settings)
        row = find_subject(connection, ask.subject, lock=True)
        assert row is not None
        named = _begin_again(connection, row, settings) if row.problem else 0
        row = find_subject(connection, ask.subject)
        assert row is not None
        _insert_planned(connection, row, named, hosts)
    if row.deleting:
        raise being_deleted(connection, row.subject_id, row.name)
    check_not_hidden(row)
    _check_settings(row, ask)
    return row


def _check_settings(row: SubjectRow, ask: CreateSubject) -> None:
    """Check that the subject was created with these settings. Raises ConflictError."""
    pairs = {
        "order_strategy": (row.order_strategy, ask.order_strategy),
        "partitions": (row.partitions_wanted, ask.partitions),
        "retention": (row.retention, ask.retention),
        "static": (row.static, ask.static),
        "message_bytes_max": (row.message_bytes_max, ask.message_bytes_max),
    }
    differences = [
        f"{name} {there}, not {wanted}".lower()
        for name, (there, wanted) in pairs.items()
        if there != wanted
    ]
    if differences:
        raise ConflictError(
            Reason.SUBJECT_EXISTS,
            f"subject {row.name!r} exists; it was created with {'; '.join(differences)}",
            subject=row.name,
            **{name: there for name, (there, _wanted) in pairs.items()},
        )


def _insert_planned(
    connection: Connection, row: SubjectRow, named: int, hosts: Sequence[str]
) -> None:
    """Insert the PLANNED partitions of a creation; `named` partition names were used before."""
    planned = [
        {
            "subject_id": row.subject_id,
            "name": partition_name(row.name, named + queue),
            "queue": queue,
            "range_start": start,
            "range_end": end,
            "broker_group": hosts[queue % len(hosts)],
            "state": PartitionState.PLANNED,
        }
        for queue, (start, end) in enumerate(split_ranges(row.partitions_wanted))
    ]
    # Two metaservers may plan at once: the rows of the first one have these names already.
    insert_new(connection, partitions, planned)


def _begin_again(connection: Connection, row: SubjectRow, settings: Mapping[str, Any]) -> int:
    """Use the row of a failed creation for a new one; returns the number of partition names used
    before.
    """
    here = subjects.c.subject_id == row.subject_id
    named: int = connection.execute(sa.select(subjects.c.partitions_named).where(here)).scalar_one()
    more = {"partitions_named": named + settings["partitions_wanted"], "problem": ""}
    connection.execute(sa.update(subjects).where(here).values(**settings, **more))
    return named


def planned_partitions(connection: Connection, subject_id: int) -> tuple[Partition, ...]:
    """Return the partitions of a creation that are not open yet."""
    return subject_partitions(connection, subject_id, [PartitionState.PLANNED])


PLANNED = sa.select(subjects.c.name).where(
    subjects.c.route_version == 0, subjects.c.problem == "", sa.not_(subjects.c.deleting)
)
"""Names of the subjects whose creation is not finished."""


def planned_subjects(connection: Connection) -> list[SubjectRow]:
    """Return the subjects whose creation is not finished."""
    names = connection.execute(PLANNED).scalars().all()
    rows = [find_subject(connection, name) for name in names]
    return [row for row in rows if row is not None]


def open_subject(connection: Connection, name: str, hosted: Collection[int] | None = None) -> bool:
    """
    Open the partitions of a subject and serve its route.

    Args:
        hosted: the ids of the partitions that brokers host; None: all of them.

    Returns:
        False if the subject is open or deleted already, or was planned again and has partitions
        that are not hosted.
    """
    row = find_subject(connection, name, lock=True)
    if row is None or row.deleting or row.route_version > 0:
        return False
    wanted = {
        partition.partition_id for partition in planned_partitions(connection, row.subject_id)
    }
    if hosted is not None and not wanted <= set(hosted):
        return False
    here = subjects.c.subject_id == row.subject_id
    planned = sa.and_(
        partitions.c.subject_id == row.subject_id,
        partitions.c.state == PartitionState.PLANNED,
    )
    connection.execute(sa.update(partitions).where(planned).values(state=PartitionState.OPEN))
    connection.execute(sa.update(subjects).where(here).values(route_version=1))
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
        subject_id: id of the subject that the caller knows under this name; 0: it knows none.

    Raises:
        SubjectUnknownError
        SubjectDeletedError: it is being deleted, or the subject with this id was deleted.
        ConflictError: the subject has another `order_strategy`.
    """
    row = find_subject(connection, name)
    other = subject_id and (row is None or row.subject_id != subject_id)
    if other and was_deleted(connection, name, subject_id=subject_id):
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


_route_versions = sa.select(subjects.c.name, subjects.c.route_version).where(
    subjects.c.name.in_(sa.bindparam("ids"))
)


def route_versions(connection: Connection, names: Sequence[str]) -> dict[str, int]:
    """Return subject → present version of its route."""
    return {row.name: row.route_version for row in rows_of(connection, _route_versions, names)}


_subject_names = sa.select(subjects.c.name).where(subjects.c.subject_id.in_(sa.bindparam("ids")))


def subject_names(connection: Connection, ids: list[int]) -> list[Subject]:
    """Return the names of the subjects with these ids."""
    return [Subject(row.name) for row in rows_of(connection, _subject_names, ids)]


def subject_summaries(
    connection: Connection, *, hidden_expires_ms: int = 0
) -> list[SubjectSummary]:
    """
    Return all open subjects, including hidden ones, and those whose creation has failed, by name.

    Args:
        hidden_expires_ms: idle time after which hidden subjects are deleted; 0: they are not.

    Raises:
        UnavailableError
    """
    check_not_lost(connection)
    count = (
        sa.select(sa.func.count())
        .where(
            partitions.c.subject_id == subjects.c.subject_id,
            partitions.c.state == PartitionState.OPEN,
        )
        .scalar_subquery()
        .label("partitions")
    )
    chosen = (
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
        for row in connection.execute(chosen)
    ]
