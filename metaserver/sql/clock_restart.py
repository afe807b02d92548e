"""Restarts the times in a database after its clock restarted or jumped. SQL, synchronous.

SQLite's time here is the machine's boot-time clock, so that stored times mean nothing after another
boot. PostgreSQL's is a calendar, which people and time servers set (`clock_watch.py`). In both
cases every live session and broker gets a whole ttl from now, so that no lease ends early. A broker
whose loss was accepted stays silent. Refused brokers and duties are forgotten.
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


def adopt_boot(connection: Connection, boot: str, *, broker_ttl_ms: int) -> bool:
    """
    Restart the stored times if they belong to another boot.

    Args:
        boot: id of the present boot; "": unknown.

    Returns:
        True if the times were restarted.
    """
    stored = sa.select(facts.c.value).where(facts.c.name == BOOT)
    if boot and connection.execute(stored).scalar_one_or_none() == boot:
        return False
    restart_times(connection, broker_ttl_ms=broker_ttl_ms)
    insert_or_replace(connection, facts, {"name": BOOT, "value": boot})
    return True


def restart_times(connection: Connection, *, broker_ttl_ms: int) -> None:
    """Start every ttl again, and end every lease of a duty or an operation."""
    connection.execute(sa.update(sessions).values(expires_at=now_ms() + sessions.c.ttl_ms))
    lost = sa.exists().where(lost_folders.c.broker_id == brokers.c.broker_id)
    until = sa.case((lost, 0), else_=now_ms() + broker_ttl_ms)
    connection.execute(sa.update(brokers).values(seen_at=now_ms(), expires_at=until))
    connection.execute(sa.update(groups).values(idle_since=None))
    connection.execute(sa.update(subjects).values(hidden_since=None))
    connection.execute(sa.update(operations).values(driven_until=now_ms()))
    connection.execute(sa.delete(refused_brokers))  # a refused broker reports itself again
    connection.execute(sa.delete(metaservers))  # each registers itself again
    forget_duties(connection)
