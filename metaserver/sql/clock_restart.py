"""Restarts the stored times after the database's clock has restarted or jumped. Runs SQL
synchronously.

With SQLite, times come from the machine's boot-time clock and are meaningless after a reboot. With
PostgreSQL, they are wall-clock times, which people and time servers may set (see `clock_watch.py`).
In both cases, every live session and broker gets a full ttl from now, so no lease ends early. A
broker whose loss was accepted remains silent. Offers of brokers that hand over are withdrawn, and
the rows of refused brokers, metaservers and duties are deleted.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .dialect import insert_or_replace, now_ms
from .duties import forget_duties
from .schema import (
    brokers,
    copy_sets,
    facts,
    groups,
    lost_folders,
    metaservers,
    operations,
    refused_brokers,
    sessions,
    subjects,
)

BOOT = "boot"
GIVEN_BACK = "time given back"
"""The name of the fact when time was given back last."""
AWAY_MS_MIN = 3_000
"""A shorter time without the database does not count as an outage, in milliseconds. It is longer
than the pauses between the periodic reads of a metaserver.
"""


def restart_times_after_boot(connection: Connection, boot: str, *, broker_ttl_ms: int) -> bool:
    """
    Restart the stored times if they belong to an earlier boot.

    Args:
        boot: id of the current boot; "" if unknown.

    Returns:
        True if the times were restarted.
    """
    query = sa.select(facts.c.value).where(facts.c.name == BOOT)
    if boot and connection.execute(query).scalar_one_or_none() == boot:
        return False
    restart_times(connection, broker_ttl_ms=broker_ttl_ms)
    insert_or_replace(connection, facts, {"name": BOOT, "value": boot})
    return True


def give_time_back(connection: Connection, *, away_ms: int | None, broker_ttl_ms: int) -> int:
    """
    Give sessions and brokers the time back in which no metaserver reached the database, because
    they could not be renewed.

    Args:
        away_ms: how long this metaserver has not reached the database; None: it has just started.
        broker_ttl_ms: the ttl that brokers get.

    Returns:
        The length of the outage in milliseconds, which began at the last renewal of any session, or
        when time was given back last; 0 if there was none.

    Those that were alive when it began get twice that time, but no more than their ttl: they have
    as much time left as the outage took. Those that were not renewed since time was given back last
    get it once, and each time lose a quarter of their ttl, in which the living are heard: a dead
    one does not stay because a metaserver, or its connection, breaks again and again. If the clock
    was set back while no metaserver ran, all times are restarted instead.
    """
    last_renewal = sa.func.max(sessions.c.expires_at - sessions.c.ttl_ms)
    silence = sa.select(now_ms() - last_renewal)
    silent_ms: int | None = connection.execute(silence).scalar_one_or_none()
    if silent_ms is None:
        return 0
    if silent_ms < 0:  # no watch saw the clock jump
        restart_times(connection, broker_ttl_ms=broker_ttl_ms)
        return 0
    fact = sa.select(facts.c.value).where(facts.c.name == GIVEN_BACK)
    given_at_ms = int(connection.execute(fact).scalar_one_or_none() or 0)
    at_ms: int = connection.execute(sa.select(now_ms())).scalar_one()
    silent_ms = min(silent_ms, at_ms - given_at_ms)
    outage_ms = silent_ms if away_ms is None else min(away_ms, silent_ms)
    if away_ms is not None and outage_ms < AWAY_MS_MIN:
        return 0
    for table, ttl_ms in ((sessions, sessions.c.ttl_ms), (brokers, sa.literal(broker_ttl_ms))):
        ends_at = table.c.expires_at
        was_alive = ends_at + outage_ms >= now_ms()
        extended = sa.case(
            (ends_at - ttl_ms > given_at_ms, ends_at + 2 * outage_ms),
            (ends_at + outage_ms - ttl_ms // 4 > ends_at, ends_at + outage_ms - ttl_ms // 4),
            else_=ends_at,
        )
        whole = now_ms() + ttl_ms
        expires_at = sa.case((extended < whole, extended), else_=whole)
        connection.execute(sa.update(table).where(was_alive).values(expires_at=expires_at))
    insert_or_replace(connection, facts, {"name": GIVEN_BACK, "value": str(at_ms)})
    return outage_ms


def restart_times(connection: Connection, *, broker_ttl_ms: int) -> None:
    """Restart all ttls and end all leases of duties and operations."""
    connection.execute(sa.delete(facts).where(facts.c.name == GIVEN_BACK))
    connection.execute(sa.update(sessions).values(expires_at=now_ms() + sessions.c.ttl_ms))
    is_lost = sa.exists().where(lost_folders.c.broker_id == brokers.c.broker_id)
    expires_at = sa.case((is_lost, 0), else_=now_ms() + broker_ttl_ms)
    connection.execute(sa.update(brokers).values(seen_at=now_ms(), expires_at=expires_at))
    connection.execute(
        sa.update(groups).values(idle_since=None, ended_at=None, ended_heard_at=None)
    )
    connection.execute(sa.update(subjects).values(hidden_since=None))
    connection.execute(sa.update(operations).values(driven_until=now_ms()))
    connection.execute(sa.update(copy_sets).values(handing_to=None, handing_until=None))
    connection.execute(sa.delete(refused_brokers))  # a refused broker sends its report again
    connection.execute(sa.delete(metaservers))  # each of them registers itself again
    forget_duties(connection)
