"""Rows of consumer groups that no consumer has joined for a time. SQL, synchronous.

Invariants
    A group's idle time starts when it is first found without a session. A session that begins or
    ends, or a reset, stops it.
    Idle times are measured by the database's clock, and start again when that clock restarts.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..sql.dialect import now_ms
from ..sql.portions import portions
from ..sql.schema import groups, sessions, subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleGroup:
    """A group without consumers, with its idle time."""

    group_id: int
    subject: str
    group: str
    idle_ms: int


_has_session = sa.exists().where(sessions.c.group_id == groups.c.group_id)
_without_session = sa.and_(
    groups.c.idle_since.is_(None), sa.not_(groups.c.deleting), sa.not_(_has_session)
)
_newly_idle = (
    sa.select(groups.c.group_id)
    .where(_without_session)
    .order_by(groups.c.group_id)
    .with_for_update()
)
_idle_ms = now_ms() - groups.c.idle_since
_idle = (
    sa.select(
        groups.c.group_id,
        groups.c.name.label("group"),
        subjects.c.name.label("subject"),
        _idle_ms.label("idle_ms"),
    )
    .join(subjects, subjects.c.subject_id == groups.c.subject_id)
    .where(
        _idle_ms >= sa.bindparam("at_least_ms", type_=sa.BigInteger),
        sa.not_(groups.c.deleting),
        sa.not_(subjects.c.deleting),
        sa.not_(_has_session),
    )
    .order_by(groups.c.group_id)
)


def note_idle(connection: Connection) -> None:
    """Start the idle time of groups that have no session now."""
    ids = list(connection.execute(_newly_idle).scalars())
    for portion in portions(ids):
        # Checked again under the locks, because a join that held one may have begun a session.
        here = sa.and_(groups.c.group_id.in_(portion), _without_session)
        connection.execute(sa.update(groups).where(here).values(idle_since=now_ms()))


def idle_groups(connection: Connection, *, at_least_ms: int) -> list[IdleGroup]:
    """Return the groups that have been idle for at least this time."""
    rows = connection.execute(_idle, {"at_least_ms": at_least_ms})
    return [
        IdleGroup(group_id=row.group_id, subject=row.subject, group=row.group, idle_ms=row.idle_ms)
        for row in rows
    ]
