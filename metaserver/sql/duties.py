"""Named leases in the table of facts: who of several metaservers does something alone, and until when.  SQL, synchronous.

A lease is a fact `duty:NAME` with the value `UNTIL HOLDER`, the time being the database's.  It saves work that would be
done twice, or keeps others off for a while.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .dialect import insert_new, now_ms
from .schema import facts

_PREFIX = "duty:"


def take_duty(connection: Connection, name: str, *, holder: str, lease_ms: int) -> bool:
    """Take or renew a lease; False if it is another's."""
    insert_new(connection, facts, {"name": _PREFIX + name, "value": "0 "})
    until, owner = _read(connection, name, lock=True)
    now = _now(connection)
    if owner != holder and now < until:
        return False
    _write(connection, name, f"{now + lease_ms} {holder}")
    return True


def leave_duty(connection: Connection, name: str, *, holder: str) -> bool:
    """Give a lease back; False if it had ended, or is another's, whose it stays."""
    until, owner = _read(connection, name, lock=True)
    if owner != holder:
        return False
    connection.execute(sa.delete(facts).where(facts.c.name == _PREFIX + name))
    return _now(connection) < until


def duty_left_ms(connection: Connection, name: str) -> int:
    """For how long a lease still holds; 0 if nobody has it."""
    return max(0, _read(connection, name)[0] - _now(connection))


def forget_duties(connection: Connection) -> None:
    """The database's time has begun anew: every lease is over."""
    connection.execute(sa.delete(facts).where(facts.c.name.startswith(_PREFIX)))


def reset_duty(group_id: int) -> str:
    """The lease under which a consumer group's progress is set."""
    return f"reset:{group_id}"


def rebuilt_duty(group_id: int) -> str:
    """The lease for which a group is granted nothing after its rows were made anew: old sessions may still be at work."""
    return f"rebuilt:{group_id}"


def _read(connection: Connection, name: str, *, lock: bool = False) -> tuple[int, str]:
    found = sa.select(facts.c.value).where(facts.c.name == _PREFIX + name)
    value = connection.execute(found.with_for_update() if lock else found).scalar_one_or_none()
    until, _, holder = (value or "0 ").partition(" ")
    return int(until), holder


def _write(connection: Connection, name: str, value: str) -> None:
    here = facts.c.name == _PREFIX + name
    connection.execute(sa.update(facts).where(here).values(value=value))


def _now(connection: Connection) -> int:
    return int(connection.execute(sa.select(now_ms())).scalar_one())
