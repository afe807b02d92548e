"""Rows of hidden subjects that are neither filled nor published. SQL, synchronous.

Invariants
    The idle time of a hidden subject starts when it is made, asked for again, or found with more
    messages than before.
    Idle times are measured by the database's clock, and start again when that clock restarts.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..sql.dialect import now_ms
from ..sql.schema import subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleHidden:
    """A hidden subject, with the number of messages that it had when its idle time started."""

    subject_id: int
    subject: str
    target: str
    messages: int


_counted = sa.and_(subjects.c.hidden_for != "", sa.not_(subjects.c.deleting))


_noted = (
    sa.update(subjects)
    .where(_counted, subjects.c.hidden_since.is_(None))
    .values(hidden_since=now_ms())
)
_idle = (
    sa.select(subjects)
    .where(_counted, now_ms() - subjects.c.hidden_since >= sa.bindparam("at_least_ms"))
    .order_by(subjects.c.subject_id)
)


def note_hidden(connection: Connection) -> None:
    """Start the idle time of hidden subjects for which it has not started."""
    connection.execute(_noted)


def idle_hidden(connection: Connection, *, at_least_ms: int) -> list[IdleHidden]:
    """Return the hidden subjects that have been idle for at least this time."""
    return [
        IdleHidden(
            subject_id=row.subject_id,
            subject=row.name,
            target=row.hidden_for,
            messages=row.hidden_messages,
        )
        for row in connection.execute(_idle, {"at_least_ms": at_least_ms})
    ]


def restart_idle_time(connection: Connection, subject_id: int, messages: int) -> None:
    """Start the idle time of a hidden subject again, because its number of messages has changed."""
    here = sa.update(subjects).where(subjects.c.subject_id == subject_id)
    connection.execute(here.values(hidden_since=now_ms(), hidden_messages=messages))
