"""What it means for the times in a database when its clock begins anew, or jumps.  SQL, synchronous.

SQLite's time here is the machine's boot-time clock: after another boot it says nothing about the times stored
before.  PostgreSQL's is a calendar, which people and time servers set (`clock_watch.py`).  Either way whoever was
alive gets a whole ttl from now, so nobody's lease can end early.  Who was refused lately is forgotten.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .dialect import insert_or_replace, now_ms
from .duties import forget_duties
from .schema import brokers, facts, operations, refused_brokers, sessions

BOOT = "boot"


def adopt_boot(connection: Connection, boot: str, *, broker_ttl_ms: int) -> bool:
    """
    Bring the stored times to the present boot, unless they are of it already.

    Args:
        boot: id of the present boot; empty for unknown.

    Returns:
        True if the times were moved.
    """
    found = sa.select(facts.c.value).where(facts.c.name == BOOT)
    if boot and connection.execute(found).scalar_one_or_none() == boot:
        return False
    restart_times(connection, broker_ttl_ms=broker_ttl_ms)
    insert_or_replace(connection, facts, {"name": BOOT, "value": boot})
    return True


def restart_times(connection: Connection, *, broker_ttl_ms: int) -> None:
    """Let every time count from now."""
    connection.execute(sa.update(sessions).values(expires_at=now_ms() + sessions.c.ttl_ms))
    connection.execute(
        sa.update(brokers).values(seen_at=now_ms(), expires_at=now_ms() + broker_ttl_ms)
    )
    connection.execute(sa.update(operations).values(driven_until=now_ms()))
    connection.execute(sa.delete(refused_brokers))  # one that is there still reports itself again
    forget_duties(connection)
