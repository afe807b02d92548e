"""Rows of brokers: their reports, their addresses, and the refused ones. SQL, synchronous.

Invariants
    A broker group belongs to one data folder; another folder replaces it only when it is silent and
    has no partitions.
    An older copy of that folder does not replace it: the copy does not know the newest opening, or
    its log ends earlier.
    A data folder whose loss was accepted is refused for ever.
    A change of the address that clients use raises the version of every route with partitions
    there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import BrokerHeartbeat, BrokerView, RefusedBroker
from ...protocol.errors import FolderRefusedError, NotFoundError, Reason, UnavailableError
from ...protocol.ids import BrokerGroup, check_name
from ...protocol.routing import PartitionState
from ...protocol.text import counted, listed, seconds
from ..sql.dialect import insert_new, insert_or_replace, now_ms
from ..sql.schema import (
    brokers,
    lost_folders,
    partitions,
    refused_brokers,
    subjects,
)

PROBLEM_CHARS_MAX = 1_024

_ttl_ms = sa.bindparam("for_ms", type_=sa.BigInteger)
_reported = (
    sa.update(brokers)
    .where(brokers.c.broker_group == sa.bindparam("of_group"))
    .values(
        seen_at=now_ms(),
        expires_at=now_ms() + _ttl_ms,
        log_end=sa.bindparam("at_end"),
        hosted=sa.bindparam("hosts"),
        version=sa.bindparam("of_version"),
    )
)
IN_TIME_SHARE = 4
"""A broker counts as silent once only a quarter of its ttl is left: a reader may see it as silent
before the report is committed, and its route has to be sent again.
"""
_in_time = brokers.c.expires_at > now_ms() + _ttl_ms // IN_TIME_SHARE
_renewed = _reported.where(
    brokers.c.broker_id == sa.bindparam("of_id"),
    brokers.c.address == sa.bindparam("at_address"),
    brokers.c.opening == sa.bindparam("of_opening"),
    brokers.c.log_end <= sa.bindparam("at_end"),
    brokers.c.version == sa.bindparam("of_version"),
    _in_time,
)


def renew_broker(connection: Connection, report: BrokerHeartbeat, *, ttl_ms: int) -> bool:
    """Renew a live broker whose address has not changed; returns False if `report_broker` has to be
    called.
    """
    where_it_was = {
        "of_id": report.broker_id,
        "at_address": report.address,
        "of_opening": report.opening,
    }
    renewed = connection.execute(_renewed, _values(report, ttl_ms) | where_it_was)
    return renewed.rowcount == 1


def _values(report: BrokerHeartbeat, ttl_ms: int) -> dict[str, Any]:
    return {
        "of_group": report.broker_group,
        "for_ms": ttl_ms,
        "readable": report.readable,
        "writable": report.writable,
        "problem": "" if report.writable else report.problem,
        "at_end": report.log_end,
        "hosts": report.hosted,
        "of_version": report.version,
    }


known_broker = (
    sa.select(
        brokers.c.broker_id,
        brokers.c.address,
        brokers.c.opening,
        brokers.c.log_end,
        (brokers.c.expires_at > now_ms()).label("alive"),
        _in_time.label("in_time"),
    )
    .where(brokers.c.broker_group == sa.bindparam("of_group"))
    .with_for_update()
)


def report_broker(connection: Connection, report: BrokerHeartbeat, *, ttl_ms: int) -> list[int]:
    """
    Store that a broker is alive, and its address.

    Returns:
        The ids of the subjects whose routes changed.

    Raises:
        FolderRefusedError: the group belongs to another data folder.
        FolderRefusedError: the data folder is an older copy of the group's.
        FolderRefusedError: an operator has accepted the loss of this data folder.
    """
    here = {"of_group": report.broker_group, "for_ms": ttl_ms}
    who = {"broker_id": report.broker_id, "address": report.address}
    wait_turn(connection, alone=True)
    row = connection.execute(known_broker, here).one_or_none()
    if row is None:
        empty = {"readable": False, "writable": False, "seen_at": 0, "expires_at": 0}
        insert_new(connection, brokers, {"broker_group": report.broker_group, **who, **empty})
        row = connection.execute(known_broker, here).one()
    _check_not_lost(connection, report)  # under the lock: its loss may be accepted just now
    if row.broker_id != report.broker_id:
        hosted = _hosted(connection, report.broker_group)
        if row.alive or hosted:
            state = (
                f"reported itself from {row.address} within its ttl"
                if row.alive
                else f"is silent, with {counted(hosted, 'partition')}"
            )
            raise FolderRefusedError(
                Reason.BROKER_GROUP_TAKEN,
                f"broker group {report.broker_group!r} belongs to another data "
                f"folder, which {state}",
                broker_group=report.broker_group,
            )
        known = {"opening": report.opening}
    else:
        _check_not_behind(report, row)
        known = {"opening": report.opening or row.opening}
    values = _values(report, ttl_ms) | who | known
    if not report.opening:
        values["at_end"] = row.log_end
    connection.execute(_reported, values)
    connection.execute(_taken, {"of_group": report.broker_group, "at_address": report.address})
    if row.in_time and row.address == report.address:
        return []
    return _renew_routes(connection, report.broker_group)


_taken = sa.delete(refused_brokers).where(
    refused_brokers.c.broker_group == sa.bindparam("of_group"),
    refused_brokers.c.address == sa.bindparam("at_address"),
)


def _check_not_lost(connection: Connection, report: BrokerHeartbeat) -> None:
    lost = sa.select(lost_folders.c.broker_group).where(
        lost_folders.c.broker_id == report.broker_id
    )
    if connection.execute(lost).first() is not None:
        raise FolderRefusedError(
            Reason.FOLDER_GIVEN_UP,
            f"the loss of the data folder of broker group {report.broker_group!r} was accepted",
            broker_group=report.broker_group,
        )


def _check_not_behind(report: BrokerHeartbeat, known: sa.Row[Any]) -> None:
    """Check that the reporting data folder is not an older copy of the group's. Raises
    FolderRefusedError.
    """
    why = ""
    if known.opening not in {"", report.opening, *report.opened_after}:
        why = "does not know of the last start of its broker"
    elif report.log_end < known.log_end:
        why = f"has a log that ends at {report.log_end}, the known one ended at {known.log_end}"
    if why:
        raise FolderRefusedError(
            Reason.FOLDER_BEHIND,
            f"the data folder of broker group {report.broker_group!r} at {report.address} {why}: "
            "it is an older copy, and messages may be missing in it",
            broker_group=report.broker_group,
            address=report.address,
            log_end=report.log_end,
            known_log_end=known.log_end,
        )


class KnownBroker(NamedTuple):
    """A broker group's data folder and address, and whether it reported itself within its ttl."""

    broker_id: str
    address: str
    alive: bool


def find_broker(connection: Connection, broker_group: str) -> KnownBroker | None:
    """Return what is known of a broker group; None if it has never reported itself."""
    chosen = sa.select(
        brokers.c.broker_id, brokers.c.address, (brokers.c.expires_at > now_ms()).label("alive")
    ).where(brokers.c.broker_group == broker_group)
    row = connection.execute(chosen).one_or_none()
    return None if row is None else KnownBroker(row.broker_id, row.address, bool(row.alive))


def note_refused(
    connection: Connection, report: BrokerHeartbeat, problem: str = "", *, ttl_ms: int
) -> None:
    """Store for `ttl_ms` that a refused broker reported itself under a group's name, and delete
    expired rows.
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
    here = sa.and_(
        refused_brokers.c.broker_group == report.broker_group,
        refused_brokers.c.address == report.address,
    )
    connection.execute(sa.update(refused_brokers).where(here).values(expires_at=now_ms() + ttl_ms))


refused_now = (
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
    """Return the refused brokers that report themselves, by broker group."""
    return [refused_view(row) for row in connection.execute(refused_now)]


def refused_view(row: sa.Row[Any]) -> RefusedBroker:
    """Convert a row of `refused_now` to the view for operators."""
    return RefusedBroker(
        broker_group=row.broker_group,
        address=row.address,
        problem=row.problem,
        log_end=row.log_end,
        known_log_end=row.known_log_end,
        advice=_way_out(row),
    )


def _way_out(row: sa.Row[Any]) -> str:
    """Return what an operator can do about a row of `refused_now`."""
    if row.given_up:
        return "start the broker with an empty folder"
    if row.own and row.alive:
        return "stop this broker: the folder is in use elsewhere"
    if row.own:
        return (
            "start the broker on the folder that was in use last; "
            f"if that is gone: keylane broker accept {row.broker_group}"
        )
    return (
        "start the broker with the group's own data folder; "
        f"if that is lost for good: keylane broker evacuate {row.broker_group} --accept-loss"
    )


def _hosted(connection: Connection, broker_group: str) -> int:
    there = partitions.c.broker_group == broker_group
    live = partitions.c.state != PartitionState.EXPIRED
    count = sa.select(sa.func.count()).select_from(partitions).where(there, live)
    return connection.execute(count).scalar_one()


def _renew_routes(connection: Connection, broker_group: str) -> list[int]:
    """Raise the version of every open route with a partition on the broker group; returns the ids
    of the subjects.
    """
    there = partitions.c.broker_group == broker_group
    inside = sa.select(partitions.c.subject_id).where(there).distinct()
    raised = (
        sa.update(subjects)
        .where(subjects.c.subject_id.in_(inside), subjects.c.route_version > 0)
        .values(route_version=subjects.c.route_version + 1)
        .returning(subjects.c.subject_id)
    )
    return list(connection.execute(raised).scalars())


def writable_groups(connection: Connection) -> dict[BrokerGroup, int]:
    """Return broker group → number of its open partitions, fewest first, for the groups that are
    available, writable and not cordoned.
    """
    count = (
        sa.select(sa.func.count())
        .where(
            partitions.c.broker_group == brokers.c.broker_group,
            partitions.c.state.in_([PartitionState.PLANNED, PartitionState.OPEN]),
        )
        .scalar_subquery()
    )
    chosen = (
        sa.select(brokers.c.broker_group, count.label("load"))
        .where(brokers.c.expires_at > now_ms(), brokers.c.writable, brokers.c.readable)
        .where(sa.not_(brokers.c.cordoned))
        .order_by(count, brokers.c.broker_group)
    )
    return {BrokerGroup(row.broker_group): row.load for row in connection.execute(chosen)}


class LastReport(NamedTuple):
    """The time since a broker group's last report, and until it counts as silent, in milliseconds;
    it is silent at 0 or less.
    """

    since_ms: int
    left_ms: int

    @property
    def age(self) -> str:
        """The age of the report, for people."""
        return f"reported itself {seconds(self.since_ms)} ago, within its ttl"

    @property
    def ask_again(self) -> str:
        """The time at which the group will count as silent if it is dead, for people."""
        return f"ask again once it is silent, at the latest in {-(-self.left_ms // 1000)} s"


def last_report(connection: Connection, broker_group: str) -> LastReport:
    """
    Return the time since a broker group's last report, by the database's clock.

    Raises:
        NotFoundError: it has never reported itself.
    """
    since, left = now_ms() - brokers.c.seen_at, brokers.c.expires_at - now_ms()
    chosen = sa.select(since, left).where(brokers.c.broker_group == broker_group)
    row = connection.execute(chosen).one_or_none()
    if row is None:
        raise unknown_group(connection, broker_group)
    return LastReport(max(0, row[0]), row[1])


def broker_alive(connection: Connection, broker_group: str) -> bool:
    """
    Return whether a broker group has reported itself within its ttl.

    Raises:
        NotFoundError: it has never reported itself.
    """
    chosen = sa.select(brokers.c.expires_at > now_ms()).where(
        brokers.c.broker_group == broker_group
    )
    alive = connection.execute(chosen).scalar_one_or_none()
    if alive is None:
        raise unknown_group(connection, broker_group)
    return bool(alive)


def unknown_group(connection: Connection, broker_group: str) -> NotFoundError:
    """Make the error for a broker group that has never reported itself; it lists the known ones."""
    known = connection.execute(sa.select(brokers.c.broker_group).order_by(brokers.c.broker_group))
    text = (
        f"there is no broker group {broker_group!r}; the known ones are: {listed(known.scalars())}"
    )
    return NotFoundError(Reason.BROKER_GROUP_UNKNOWN, text, broker_group=broker_group)


def cordon_broker(connection: Connection, broker_group: str, cordoned: bool) -> None:
    """
    Cordon or uncordon a broker group.

    Raises:
        InvalidRequestError
        NotFoundError: it has never reported itself.
    """
    check_name("broker group", broker_group)
    here = brokers.c.broker_group == broker_group
    wait_turn(connection, alone=True)
    # FOR UPDATE waits for plans, see `lock_brokers`; the update alone does not.
    connection.execute(sa.select(brokers.c.broker_group).where(here).with_for_update()).all()
    if not connection.execute(sa.update(brokers).where(here).values(cordoned=cordoned)).rowcount:
        raise unknown_group(connection, broker_group)


def lock_brokers(connection: Connection, *, alone: bool = False) -> None:
    """
    Lock every broker group's row until the transaction ends; call it before a subject is locked.

    A plan of partitions and a cordon of their host exclude each other, so that the later one sees
    the earlier one. Renewals of brokers do not wait for plans: with FOR SHARE, which overlapping
    plans can hold without a gap, they might wait for ever.

    Args:
        alone: exclude other plans too.
    """
    wait_turn(connection, alone=alone)
    rows = sa.select(brokers.c.broker_group).order_by(brokers.c.broker_group)
    connection.execute(rows.with_for_update(read=not alone, key_share=not alone)).all()


TURN = 0x6B65796C616E6562
"""Key of the advisory lock of `wait_turn`; migrations have another one."""


def wait_turn(connection: Connection, *, alone: bool) -> None:
    """
    Wait in turn for the locks of broker rows; call it before any other lock.

    PostgreSQL lets transactions that share a row lock overtake one that waits to hold it alone, so
    that a stream of rounds and plans would block the report of a restarted broker. Its advisory
    locks are granted in turn.
    """
    if connection.dialect.name == "postgresql":
        turn = sa.func.pg_advisory_xact_lock if alone else sa.func.pg_advisory_xact_lock_shared
        connection.execute(sa.select(turn(TURN)))


def read_openings(
    connection: Connection, ids: Collection[int], *, lock: bool = False
) -> dict[int, str]:
    """
    Return partition id → opening of its broker group's data folder; "" if the broker did not report
    it.

    Args:
        lock: until the transaction ends, no other opening can report itself and no older copy can
            be accepted; renewals do not wait. Call it before a subject is locked.
    """
    if lock:  # also without ids: what the transaction writes afterwards may lock broker rows
        wait_turn(connection, alone=False)
    if not ids:
        return {}
    rows = connection.execute(_openings_locked if lock else _openings, {"ids": sorted(ids)})
    return {row.partition_id: row.opening for row in rows}


_openings = (
    sa.select(partitions.c.partition_id, brokers.c.opening)
    .join(brokers, brokers.c.broker_group == partitions.c.broker_group)
    .where(partitions.c.partition_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(brokers.c.broker_group)
)
_openings_locked = _openings.with_for_update(read=True, key_share=True, of=brokers)


def is_cordoned(connection: Connection, broker_group: str) -> bool:
    """Return whether a broker group is cordoned."""
    chosen = sa.select(brokers.c.cordoned).where(brokers.c.broker_group == broker_group)
    return bool(connection.execute(chosen).scalar_one_or_none())


def broker_views(connection: Connection) -> list[BrokerView]:
    """Return every broker group that ever reported itself, by name."""
    chosen = sa.select(
        brokers.c.broker_group,
        brokers.c.address,
        (brokers.c.expires_at > now_ms()).label("available"),
        (now_ms() - brokers.c.seen_at).label("silent_ms"),
        brokers.c.cordoned,
        brokers.c.version,
        sa.and_(brokers.c.writable, brokers.c.readable).label("writable"),
        brokers.c.problem,
    ).order_by(brokers.c.broker_group)
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
        )
        for row in connection.execute(chosen)
    ]


def no_host(connection: Connection, *, without: str = "") -> UnavailableError:
    """Make the error for new partitions that no broker group can host, with the reason of each
    group other than `without`.
    """
    views = [view for view in broker_views(connection) if view.broker_group != without]
    states = [
        f"{view.broker_group} is cordoned"
        if view.available and view.writable
        else f"{view.broker_group} {'' if view.available else 'is '}{view.state}"
        for view in views
    ]
    other = "other " if without else ""
    if not states:
        return UnavailableError(
            Reason.NOT_ENOUGH_BROKERS, f"no {other}broker has reported itself yet"
        )
    return UnavailableError(
        Reason.NOT_ENOUGH_BROKERS,
        f"no {other}broker group can take new partitions: {listed(states)}",
    )
