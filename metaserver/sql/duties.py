"""A duty: which of several metaservers does a piece of work alone, and until when.  SQL,
synchronous.

A duty is a named lease. It saves work that would be done twice, or keeps others off for a while.
It ends by the database's time.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .dialect import insert_new, now_ms
from .schema import duties

_named = duties.c.name == sa.bindparam("of_name")
_taken = (
    sa.update(duties)
    .where(
        _named,
        sa.or_(duties.c.holder == sa.bindparam("of_holder"), duties.c.held_until <= now_ms()),
    )
    .values(
        holder=sa.bindparam("of_holder"),
        held_until=now_ms() + sa.bindparam("for_ms", type_=sa.BigInteger),
    )
)
_left = (
    sa.delete(duties)
    .where(_named, duties.c.holder == sa.bindparam("of_holder"))
    .returning(duties.c.held_until > now_ms())
)
DUTY_LEFT_MS = sa.select(duties.c.held_until - now_ms()).where(_named)
"""For how long the lease `of_name` still holds; below 0 if it has ended."""


def take_duty(connection: Connection, name: str, *, holder: str, lease_ms: int) -> bool:
    """Take a lease for `lease_ms`, or renew it; False while another holder has it."""
    insert_new(connection, duties, {"name": name, "holder": "", "held_until": 0})
    taken = {"of_name": name, "of_holder": holder, "for_ms": lease_ms}
    return connection.execute(_taken, taken).rowcount == 1


def leave_duty(connection: Connection, name: str, *, holder: str) -> bool:
    """Give a lease back; False if it had ended or is another holder's, who keeps it."""
    held = connection.execute(_left, {"of_name": name, "of_holder": holder}).scalar_one_or_none()
    return bool(held)


def duty_left_ms(connection: Connection, name: str) -> int:
    """Return for how long a lease still holds; 0 if it has no holder."""
    left_ms = connection.execute(DUTY_LEFT_MS, {"of_name": name}).scalar_one_or_none()
    return max(0, left_ms or 0)


def forget_duties(connection: Connection) -> None:
    """End every lease, because the database's time has begun anew."""
    connection.execute(sa.delete(duties))


def reset_duty(group_id: int) -> str:
    """Name the lease under which a consumer group's progress is set."""
    return f"reset:{group_id}"


def rebuilt_duty(group_id: int) -> str:
    """Name the lease that keeps grants from a group after a rebuild: sessions from before may still
    be at work.
    """
    return f"rebuilt:{group_id}"
