"""Restarts the stored times after the database's clock has restarted or jumped. Runs SQL
synchronously.

With SQLite, times come from the machine's boot-time clock and are meaningless after a reboot. With
PostgreSQL, they are wall-clock times, which people and time servers may set (see `clock_watch.py`).
In both cases, every live session and broker gets a full ttl from now, so no lease ends early. A
broker whose loss was accepted remains silent. The rows of refused brokers, metaservers and duties
are deleted.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .dialect import insert_or_replace, now_ms
from .duties import forget_duties
from .schema import (
    brokers,
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


def restart_times(connection: Connection, *, broker_ttl_ms: int) -> None:
    """Restart all ttls and end all leases of duties and operations."""
    connection.execute(sa.update(sessions).values(expires_at=now_ms() + sessions.c.ttl_ms))
    is_lost = sa.exists().where(lost_folders.c.broker_id == brokers.c.broker_id)
    expires_at = sa.case((is_lost, 0), else_=now_ms() + broker_ttl_ms)
    connection.execute(sa.update(brokers).values(seen_at=now_ms(), expires_at=expires_at))
    connection.execute(sa.update(groups).values(idle_since=None, ended_at=None))
    connection.execute(sa.update(subjects).values(hidden_since=None))
    connection.execute(sa.update(operations).values(driven_until=now_ms()))
    connection.execute(sa.delete(refused_brokers))  # a refused broker sends its report again
    connection.execute(sa.delete(metaservers))  # each of them registers itself again
    forget_duties(connection)
