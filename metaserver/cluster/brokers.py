"""Stores the brokers' reports and addresses, and the brokers that are refused. Runs SQL
synchronously.

Invariants
    A broker group belongs to one data folder. Another folder can replace it only while the group is
    silent and has no partitions.
    An older copy of that folder cannot replace it. A copy is recognized by not knowing the newest
    opening, or by its shorter log.
    A data folder whose loss was accepted is refused forever.
    A change of a broker's address raises the version of every route with partitions on that broker.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import BrokerHeartbeat, BrokerView, RefusedBroker
from ...protocol.errors import FolderRefusedError, NotFoundError, Reason, UnavailableError
from ...protocol.ids import BrokerGroup, check_name
from ...protocol.routing import PartitionState
from ...protocol.text import counted, format_seconds, listed
from ..sql.dialect import calendar_ms, insert_new, insert_or_replace, now_ms
from ..sql.schema import (
    brokers,
    copy_sets,
    lost_folders,
    partitions,
    refused_brokers,
    subjects,
)

PROBLEM_CHARS_MAX = 1_024
TERMS_AHEAD = 1_000
"""By how much the term rises when an operator promotes a copy in quarantine: the database may lack
some.
"""

_ttl_ms = sa.bindparam("for_ms", type_=sa.BigInteger)
_update_report = (
    sa.update(brokers)
    .where(brokers.c.broker_group == sa.bindparam("of_group"))
    .values(
        seen_at=now_ms(),
        expires_at=now_ms() + _ttl_ms,
        log_end=sa.bindparam("at_end"),
        hosted=sa.bindparam("hosts"),
        version=sa.bindparam("of_version"),
        refusing_since=sa.case(
            (
                sa.bindparam("refuses", type_=sa.Boolean),
                sa.func.coalesce(brokers.c.refusing_since, calendar_ms()),
            ),
            else_=sa.null(),
        ),
    )
)
IN_TIME_SHARE = 4
"""A report that arrives in the last quarter of the broker's ttl counts as late. Readers may have
seen the broker as silent before the report is committed, so its routes must be sent again.
"""
_renewed_in_time = brokers.c.expires_at > now_ms() + _ttl_ms // IN_TIME_SHARE
_renew_unchanged = _update_report.where(
    brokers.c.broker_id == sa.bindparam("of_id"),
    brokers.c.address == sa.bindparam("at_address"),
    brokers.c.opening == sa.bindparam("of_opening"),
    brokers.c.log_end <= sa.bindparam("at_end"),
    brokers.c.version == sa.bindparam("of_version"),
    _renewed_in_time,
)


def renew_broker(connection: Connection, report: BrokerHeartbeat, *, ttl_ms: int) -> bool:
    """Renew a live broker whose identity, address and version have not changed. Return False if
    `store_report` must be called instead.
    """
    unchanged = {
        "of_id": report.broker_id,
        "at_address": report.address,
        "of_opening": report.opening,
    }
    result = connection.execute(_renew_unchanged, _report_parameters(report, ttl_ms) | unchanged)
    return result.rowcount == 1


def _report_parameters(report: BrokerHeartbeat, ttl_ms: int) -> dict[str, Any]:
    return {
        "of_group": report.broker_group,
        "for_ms": ttl_ms,
        "readable": report.readable,
        "writable": report.writable,
        "problem": "" if report.writable else report.problem,
        "refuses": not (report.readable and report.writable),
        "at_end": report.log_end,
        "hosts": report.hosted,
        "of_version": report.version,
    }


lock_broker_query = (
    sa.select(
        brokers.c.broker_id,
        brokers.c.address,
        brokers.c.opening,
        brokers.c.log_end,
        (brokers.c.expires_at > now_ms()).label("alive"),
        _renewed_in_time.label("in_time"),
    )
    .where(brokers.c.broker_group == sa.bindparam("of_group"))
    .with_for_update()
)


def store_report(connection: Connection, report: BrokerHeartbeat, *, ttl_ms: int) -> list[int]:
    """
    Record that a broker is alive and store its address.

    Returns:
        The ids of the subjects whose routes changed.

    Raises:
        FolderRefusedError: the group belongs to another data folder, the reported folder is an
            older copy of the group's, or an operator has accepted its loss.
    """
    parameters = {"of_group": report.broker_group, "for_ms": ttl_ms}
    identity = {"broker_id": report.broker_id, "address": report.address}
    wait_for_broker_locks(connection, alone=True)
    stored = connection.execute(lock_broker_query, parameters).one_or_none()
    if stored is None:
        default_values = {"readable": False, "writable": False, "seen_at": 0, "expires_at": 0}
        insert_new(
            connection, brokers, {"broker_group": report.broker_group, **identity, **default_values}
        )
        stored = connection.execute(lock_broker_query, parameters).one()
    _check_not_given_up(
        connection, report
    )  # checked under the lock, because its loss may be accepted concurrently
    if stored.broker_id != report.broker_id:
        hosted_count = _count_hosted(connection, report.broker_group)
        if stored.alive or hosted_count:
            state = (
                f"reported itself from {stored.address} within its ttl"
                if stored.alive
                else f"is silent and has {counted(hosted_count, 'partition')}"
            )
            problem = (
                f"broker group {report.broker_group!r} belongs to another data folder, "
                f"which {state}"
            )
            if copies := _count_copies(connection, report.broker_group):
                raise FolderRefusedError(
                    Reason.FOLDER_HAS_COPIES,
                    f"{problem}; {counted(copies, 'copy', 'copies')} of it may take its place",
                    broker_group=report.broker_group,
                )
            raise FolderRefusedError(
                Reason.BROKER_GROUP_TAKEN, problem, broker_group=report.broker_group
            )
        opening_values = {"opening": report.opening}
        forget_copies(connection, report.broker_group)
    else:
        if not _knows_newer_term(connection, report):
            _check_not_behind(report, stored)
        opening_values = {"opening": report.opening or stored.opening}
    values = _report_parameters(report, ttl_ms) | identity | opening_values
    if not report.opening:
        values["at_end"] = stored.log_end
    connection.execute(_update_report, values)
    connection.execute(
        _delete_refusal, {"of_group": report.broker_group, "at_address": report.address}
    )
    if stored.in_time and stored.address == report.address:
        return []
    return _raise_route_versions(connection, report.broker_group)


_delete_refusal = sa.delete(refused_brokers).where(
    refused_brokers.c.broker_group == sa.bindparam("of_group"),
    refused_brokers.c.address == sa.bindparam("at_address"),
)


def _check_not_given_up(connection: Connection, report: BrokerHeartbeat) -> None:
    """Check that the loss of the reporting data folder has not been accepted. Raises
    FolderRefusedError.
    """
    query = sa.select(lost_folders.c.broker_group).where(
        lost_folders.c.broker_id == report.broker_id
    )
    if connection.execute(query).first() is not None:
        raise FolderRefusedError(
            Reason.FOLDER_GIVEN_UP,
            f"the loss of the data folder of broker group {report.broker_group!r} was accepted",
            broker_group=report.broker_group,
        )


def _knows_newer_term(connection: Connection, report: BrokerHeartbeat) -> bool:
    """Return True if a broker runs on a copy that was promoted, and the database has lost that: its
    openings may be those of the folder before.
    """
    query = sa.select(copy_sets.c.term).where(copy_sets.c.broker_group == report.broker_group)
    return report.term > (connection.execute(query).scalar_one_or_none() or 0)


def _check_not_behind(report: BrokerHeartbeat, stored_row: sa.Row[Any]) -> None:
    """Check that the reported data folder is not an older copy of the group's. Raises
    FolderRefusedError.
    """
    problem = ""
    if stored_row.opening not in {"", report.opening, *report.opened_after}:
        problem = "does not know the last start of its broker, or that a copy was promoted"
    elif report.log_end < stored_row.log_end:
        problem = (
            f"has a log that ends at {report.log_end}, while its known end is {stored_row.log_end}"
        )
    if problem:
        raise FolderRefusedError(
            Reason.FOLDER_BEHIND,
            f"the data folder of broker group {report.broker_group!r} at {report.address} "
            f"{problem}: it is an older copy, which may lack messages",
            broker_group=report.broker_group,
            address=report.address,
            log_end=report.log_end,
            known_log_end=stored_row.log_end,
        )


class KnownBroker(NamedTuple):
    """A broker group's data folder and address, and whether it has sent a report within its ttl."""

    broker_id: str
    address: str
    alive: bool
    opening: str
    """The newest opening of the folder; the id of a copy that was promoted since."""


def find_broker(connection: Connection, broker_group: str) -> KnownBroker | None:
    """Return a broker group's folder, address and liveness; None if it has never sent a report."""
    query = sa.select(
        brokers.c.broker_id,
        brokers.c.address,
        (brokers.c.expires_at > now_ms()).label("alive"),
        brokers.c.opening,
    ).where(brokers.c.broker_group == broker_group)
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    return KnownBroker(row.broker_id, row.address, bool(row.alive), row.opening)


def store_refusal(
    connection: Connection, report: BrokerHeartbeat, problem: str = "", *, ttl_ms: int
) -> None:
    """Record for `ttl_ms` that a report of a broker for a group was refused. Also deletes expired
    rows.
    """
    connection.execute(sa.delete(refused_brokers).where(refused_brokers.c.expires_at <= now_ms()))
    row = {
        "broker_group": report.broker_group,
        "address": report.address,
        "broker_id": report.broker_id,
        "expires_at": 0,
        "opening": report.opening,
        "log_end": report.log_end,
        "problem": problem[:PROBLEM_CHARS_MAX],
    }
    insert_or_replace(connection, refused_brokers, row)
    is_this_broker = sa.and_(
        refused_brokers.c.broker_group == report.broker_group,
        refused_brokers.c.address == report.address,
    )
    connection.execute(
        sa.update(refused_brokers).where(is_this_broker).values(expires_at=now_ms() + ttl_ms)
    )


refused_query = (
    sa.select(
        refused_brokers,
        brokers.c.opening.label("known_opening"),
        brokers.c.log_end.label("known_log_end"),
        (brokers.c.broker_id == refused_brokers.c.broker_id).label("own"),
        (brokers.c.expires_at > now_ms()).label("alive"),
        sa.exists()
        .where(lost_folders.c.broker_id == refused_brokers.c.broker_id)
        .label("given_up"),
    )
    .join(brokers, brokers.c.broker_group == refused_brokers.c.broker_group)
    .where(refused_brokers.c.expires_at > now_ms())
    .order_by(refused_brokers.c.broker_group, refused_brokers.c.address)
)


def refused_views(connection: Connection) -> list[RefusedBroker]:
    """Return the refused brokers that are still sending reports, by broker group."""
    return [refused_view(row) for row in connection.execute(refused_query)]


def refused_view(row: sa.Row[Any]) -> RefusedBroker:
    """Convert a row of `refused_query` to the view for operators."""
    return RefusedBroker(
        broker_group=row.broker_group,
        address=row.address,
        problem=row.problem,
        log_end=row.log_end,
        known_log_end=row.known_log_end,
        advice=_build_advice(row),
    )


def _build_advice(row: sa.Row[Any]) -> str:
    """Return advice for an operator about a row of `refused_query`."""
    if row.given_up:
        return "start the broker with an empty folder"
    if row.own and row.alive:
        return (
            "the folder is in use elsewhere: stop this broker, unless it runs with failover and "
            "becomes a copy by itself"
        )
    if row.own:
        return (
            "start the broker on the folder that was last in use; "
            f"if that folder is gone: keylane broker accept {row.broker_group}"
        )
    return (
        "start the broker with the group's own data folder; "
        f"if that is lost for good: keylane broker evacuate {row.broker_group} --accept-loss"
    )


def _count_hosted(connection: Connection, broker_group: str) -> int:
    """Return the number of partitions of a broker group that have not expired."""
    is_on_broker = partitions.c.broker_group == broker_group
    has_data = partitions.c.state != PartitionState.EXPIRED
    count = sa.select(sa.func.count()).select_from(partitions).where(is_on_broker, has_data)
    return connection.execute(count).scalar_one()


def _raise_route_versions(connection: Connection, broker_group: str) -> list[int]:
    """Increment the version of every open route that has a partition on the broker group. Return
    the ids of the subjects.
    """
    is_on_broker = partitions.c.broker_group == broker_group
    subject_ids = sa.select(partitions.c.subject_id).where(is_on_broker).distinct()
    raise_versions = (
        sa.update(subjects)
        .where(subjects.c.subject_id.in_(subject_ids), subjects.c.route_version > 0)
        .values(route_version=subjects.c.route_version + 1)
        .returning(subjects.c.subject_id)
    )
    return list(connection.execute(raise_versions).scalars())


def writable_groups(connection: Connection) -> dict[BrokerGroup, int]:
    """Return a dict that maps each broker group that is available, writable and not cordoned to its
    number of open and planned partitions, sorted by that number.
    """
    count = (
        sa.select(sa.func.count())
        .where(
            partitions.c.broker_group == brokers.c.broker_group,
            partitions.c.state.in_([PartitionState.PLANNED, PartitionState.OPEN]),
        )
        .scalar_subquery()
    )
    query = (
        sa.select(brokers.c.broker_group, count.label("load"))
        .where(brokers.c.expires_at > now_ms(), brokers.c.writable, brokers.c.readable)
        .where(sa.not_(brokers.c.cordoned))
        .order_by(count, brokers.c.broker_group)
    )
    return {BrokerGroup(row.broker_group): row.load for row in connection.execute(query)}


class LastReport(NamedTuple):
    """Milliseconds since a broker group's last report, and until it counts as silent; it is silent
    if the latter is 0 or less.
    """

    since_ms: int
    left_ms: int

    @property
    def age_text(self) -> str:
        """The age of the report, as a phrase for error messages."""
        return f"reported itself {format_seconds(self.since_ms)} ago, within its ttl"

    @property
    def advice(self) -> str:
        """Advice for error messages, which says when the group will count as silent if its broker
        is dead.
        """
        return f"try again once it is silent, at the latest in {-(-self.left_ms // 1000)} s"


def last_report(connection: Connection, broker_group: str) -> LastReport:
    """
    Return the time since a broker group's last report, measured by the database's clock.

    Raises:
        NotFoundError: it has never sent a report.
    """
    since_ms, left_ms = now_ms() - brokers.c.seen_at, brokers.c.expires_at - now_ms()
    query = sa.select(since_ms, left_ms).where(brokers.c.broker_group == broker_group)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise unknown_broker_group_error(connection, broker_group)
    return LastReport(max(0, row[0]), row[1])


def unknown_broker_group_error(connection: Connection, broker_group: str) -> NotFoundError:
    """Build the error for a broker group that has never sent a report. It lists the known
    groups.
    """
    names = connection.execute(sa.select(brokers.c.broker_group).order_by(brokers.c.broker_group))
    text = (
        f"there is no broker group {broker_group!r}; the known ones are: {listed(names.scalars())}"
    )
    return NotFoundError(Reason.BROKER_GROUP_UNKNOWN, text, broker_group=broker_group)


def cordon_broker(connection: Connection, broker_group: str, cordoned: bool) -> None:
    """
    Cordon or uncordon a broker group.

    Raises:
        InvalidRequestError
        NotFoundError: it has never sent a report.
    """
    check_name("broker group", broker_group)
    is_this_group = brokers.c.broker_group == broker_group
    wait_for_broker_locks(connection, alone=True)
    # FOR UPDATE waits for concurrent plans (see `lock_brokers`); the UPDATE alone would not.
    connection.execute(
        sa.select(brokers.c.broker_group).where(is_this_group).with_for_update()
    ).all()
    if not connection.execute(
        sa.update(brokers).where(is_this_group).values(cordoned=cordoned)
    ).rowcount:
        raise unknown_broker_group_error(connection, broker_group)


def lock_brokers(connection: Connection, *, alone: bool = False) -> None:
    """
    Lock the rows of all broker groups until the transaction ends. Must be called before a subject
    is locked.

    Planning partitions and cordoning a broker exclude each other, so the later one sees the result
    of the earlier one. Renewals of brokers do not wait for plans. With FOR SHARE they might wait
    forever, because overlapping plans can hold the lock without a gap.

    Args:
        alone: also exclude other plans.
    """
    wait_for_broker_locks(connection, alone=alone)
    query = sa.select(brokers.c.broker_group).order_by(brokers.c.broker_group)
    connection.execute(query.with_for_update(read=not alone, key_share=not alone)).all()


ADVISORY_LOCK_KEY = 0x6B65796C616E6562
"""Key of the advisory lock used by `wait_for_broker_locks`; migrations use a different one."""


def forget_copies(connection: Connection, broker_group: str) -> None:
    """Empty the set of a broker group's copies, because another folder, or one with less, is the
    group's now.
    """
    connection.execute(
        sa.update(copy_sets)
        .where(copy_sets.c.broker_group == broker_group)
        .values(
            members="[]",
            promoted="",
            durable_end=0,
            version=copy_sets.c.version + 1,
            quarantine="",
        )
    )


def _count_copies(connection: Connection, broker_group: str) -> int:
    """Return how many copies acks of a broker group wait for."""
    query = sa.select(copy_sets.c.members).where(copy_sets.c.broker_group == broker_group)
    return len(msgspec.json.decode(connection.execute(query).scalar() or "[]"))


def wait_for_broker_locks(connection: Connection, *, alone: bool) -> None:
    """
    Wait in line for the locks on broker rows. Must be called before any other lock is taken.

    In PostgreSQL, transactions that share a row lock overtake one that is waiting for an exclusive
    lock, so a stream of rounds and plans could block the report of a restarted broker indefinitely.
    Advisory locks are granted in order of arrival.

    Args:
        alone: the transaction needs an exclusive lock.
    """
    if connection.dialect.name == "postgresql":
        acquire = sa.func.pg_advisory_xact_lock if alone else sa.func.pg_advisory_xact_lock_shared
        connection.execute(sa.select(acquire(ADVISORY_LOCK_KEY)))


def read_openings(
    connection: Connection, ids: Collection[int], *, lock: bool = False
) -> dict[int, str]:
    """
    Return a dict that maps each partition id to the opening of its broker group's data folder, or
    to "" if the broker did not report one.

    Args:
        lock: prevent reports from other openings and the acceptance of older copies, but not
            renewals, until the transaction ends. Must be called before a subject is locked.
    """
    if lock:  # even without ids, because later writes of the transaction may lock broker rows
        wait_for_broker_locks(connection, alone=False)
    if not ids:
        return {}
    rows = connection.execute(
        _openings_locked_query if lock else _openings_query, {"ids": sorted(ids)}
    )
    return {row.partition_id: row.opening for row in rows}


_openings_query = (
    sa.select(partitions.c.partition_id, brokers.c.opening)
    .join(brokers, brokers.c.broker_group == partitions.c.broker_group)
    .where(partitions.c.partition_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(brokers.c.broker_group)
)
_openings_locked_query = _openings_query.with_for_update(read=True, key_share=True, of=brokers)


def broker_views(connection: Connection) -> list[BrokerView]:
    """Return every broker group that has ever sent a report, by name."""
    query = (
        sa.select(
            brokers.c.broker_group,
            brokers.c.address,
            (brokers.c.expires_at > now_ms()).label("available"),
            (now_ms() - brokers.c.seen_at).label("silent_ms"),
            brokers.c.cordoned,
            brokers.c.version,
            sa.and_(brokers.c.writable, brokers.c.readable).label("writable"),
            brokers.c.problem,
            (calendar_ms() - brokers.c.refusing_since).label("refusing_ms"),
            sa.func.coalesce(copy_sets.c.wanted, 1).label("wanted"),
            sa.func.coalesce(copy_sets.c.members, "[]").label("members"),
            sa.func.coalesce(copy_sets.c.quarantine, "").label("quarantine"),
            sa.func.coalesce(copy_sets.c.promoted, "").label("promoted"),
            sa.exists()
            .where(
                partitions.c.broker_group == brokers.c.broker_group,
                partitions.c.state != PartitionState.EXPIRED,
            )
            .label("has_partitions"),
        )
        .outerjoin(copy_sets, copy_sets.c.broker_group == brokers.c.broker_group)
        .order_by(brokers.c.broker_group)
    )
    return [
        BrokerView(
            broker_group=row.broker_group,
            address=row.address,
            available=bool(row.available),
            silent_ms=max(0, row.silent_ms),
            cordoned=row.cordoned,
            version=row.version,
            writable=bool(row.writable),
            problem=row.problem,
            folders_wanted=row.wanted,
            folders=1 + len(members := msgspec.json.decode(row.members)),
            quarantine=row.quarantine,
            has_partitions=bool(row.has_partitions),
            refusing_ms=None if row.refusing_ms is None else max(0, row.refusing_ms),
            copies=tuple(members),
            promoted=row.promoted,
        )
        for row in connection.execute(query)
    ]


def no_host_error(connection: Connection, *, excluded: str = "") -> UnavailableError:
    """Build the error raised when no broker group can host new partitions. It states the reason for
    each group except `excluded`.
    """
    views = [view for view in broker_views(connection) if view.broker_group != excluded]
    state_texts = [
        f"{view.broker_group} is cordoned"
        if view.available and view.writable
        else f"{view.broker_group} {'' if view.available else 'is '}{view.state}"
        for view in views
    ]
    qualifier = "other " if excluded else ""
    if not state_texts:
        return UnavailableError(
            Reason.NOT_ENOUGH_BROKERS, f"no {qualifier}broker has reported itself yet"
        )
    return UnavailableError(
        Reason.NOT_ENOUGH_BROKERS,
        f"no {qualifier}broker group can take new partitions: {listed(state_texts)}",
    )
