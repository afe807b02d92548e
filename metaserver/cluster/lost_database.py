"""A database that cannot be the one that the brokers' partitions come from: it knows no subject.  SQL, synchronous.

Invariants
    Beside brokers with partitions an empty database is a lost one: nothing is made of it by calls.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import DatabaseEmptyError
from ...protocol.text import counted
from ..sql.schema import brokers, subjects

_subjects = sa.exists(sa.select(subjects.c.subject_id))
_beside = (
    sa.select(brokers.c.broker_group, brokers.c.hosted)
    .where(brokers.c.hosted > 0, sa.not_(_subjects))
    .order_by(brokers.c.broker_group)
    .limit(1)
)


def is_empty(connection: Connection) -> bool:
    """Does the database know no subject."""
    return not connection.execute(sa.select(_subjects)).scalar_one()


def database_lost(connection: Connection) -> DatabaseEmptyError | None:
    """Why this database cannot be the one that the brokers' partitions come from; None if it may be."""
    row = connection.execute(_beside).one_or_none()
    if row is None:
        return None
    return DatabaseEmptyError(
        f"the database knows no subject, and broker group {row.broker_group!r} has "
        f"{counted(row.hosted, 'partition')}: it was lost, or is another one",
        broker_group=row.broker_group,
        partitions=row.hosted,
    )


def check_not_lost(connection: Connection) -> None:
    """Raises DatabaseEmptyError."""
    lost = database_lost(connection)
    if lost is not None:
        raise lost
