"""Leases duties to metaservers. Runs SQL synchronously.

A duty is a named lease that lets only one of several metaservers do a piece of work. It prevents
duplicate work, or excludes others for a limited time. It expires according to the database's clock.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .dialect import insert_new, now_ms
from .schema import duties

_by_name = duties.c.name == sa.bindparam("of_name")
_take = (
    sa.update(duties)
    .where(
        _by_name,
        sa.or_(duties.c.holder == sa.bindparam("of_holder"), duties.c.held_until <= now_ms()),
    )
    .values(
        holder=sa.bindparam("of_holder"),
        held_until=now_ms() + sa.bindparam("for_ms", type_=sa.BigInteger),
    )
)
_release = (
    sa.delete(duties)
    .where(_by_name, duties.c.holder == sa.bindparam("of_holder"))
    .returning(duties.c.held_until > now_ms())
)
DUTY_LEFT_MS = sa.select(duties.c.held_until - now_ms()).where(_by_name)
"""Remaining time, in milliseconds, of the lease `of_name`; negative if it has expired."""


def take_duty(connection: Connection, name: str, *, holder: str, lease_ms: int) -> bool:
    """Take or renew a lease for `lease_ms`. Return False if another holder has it."""
    insert_new(connection, duties, {"name": name, "holder": "", "held_until": 0})
    parameters = {"of_name": name, "of_holder": holder, "for_ms": lease_ms}
    return connection.execute(_take, parameters).rowcount == 1


def release_duty(connection: Connection, name: str, *, holder: str) -> bool:
    """Release a lease. Return False if it had expired or another holder has it."""
    was_held = connection.execute(
        _release, {"of_name": name, "of_holder": holder}
    ).scalar_one_or_none()
    return bool(was_held)


def duty_left_ms(connection: Connection, name: str) -> int:
    """Return the remaining time of a lease in milliseconds; 0 if it has no holder."""
    left_ms = connection.execute(DUTY_LEFT_MS, {"of_name": name}).scalar_one_or_none()
    return max(0, left_ms or 0)


def forget_duties(connection: Connection) -> None:
    """End all leases, because the database's clock has restarted or jumped."""
    connection.execute(sa.delete(duties))


def reset_duty(group_id: int) -> str:
    """Return the name of the lease under which a consumer group's cursors are reset."""
    return f"reset:{group_id}"


def rebuilt_duty(group_id: int) -> str:
    """Return the name of the lease that prevents grants to a group after a rebuild, while earlier
    sessions may still be active.
    """
    return f"rebuilt:{group_id}"
