"""Rows of hidden subjects that are neither filled nor published.  SQL, synchronous.

Invariants
    A hidden subject counts as idle from when it was made, asked for again, or found with more
    messages than before. Idle times are the database's; when its clock begins anew, so do they.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..sql.dialect import now_ms
from ..sql.schema import subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleHidden:
    """A hidden subject, and how many messages it had when it began to count as idle."""

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
    """Begin to count for hidden subjects that do not count yet."""
    connection.execute(_noted)


def idle_hidden(connection: Connection, *, at_least_ms: int) -> list[IdleHidden]:
    """The hidden subjects that have been idle for so long."""
    return [
        IdleHidden(
            subject_id=row.subject_id,
            subject=row.name,
            target=row.hidden_for,
            messages=row.hidden_messages,
        )
        for row in connection.execute(_idle, {"at_least_ms": at_least_ms})
    ]


def count_anew(connection: Connection, subject_id: int, messages: int) -> None:
    """Let a hidden subject count from now on: it has other messages than before."""
    here = sa.update(subjects).where(subjects.c.subject_id == subject_id)
    connection.execute(here.values(hidden_since=now_ms(), hidden_messages=messages))
