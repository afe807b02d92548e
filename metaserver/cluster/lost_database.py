"""An empty database beside brokers with partitions: the real one was lost.  SQL, synchronous.

Invariants
    Calls create nothing in such a database.
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
    """Return whether the database has no subject."""
    return not connection.execute(sa.select(_subjects)).scalar_one()


def database_lost(connection: Connection) -> DatabaseEmptyError | None:
    """Return the error if brokers have partitions and the database has no subject, else None."""
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
    """Raise DatabaseEmptyError if the database was lost."""
    lost = database_lost(connection)
    if lost is not None:
        raise lost
