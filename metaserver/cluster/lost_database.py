"""Detects a database that lacks data that brokers have: it is empty even though brokers have
partitions, or an older backup was restored. Runs SQL synchronously.

Invariants
    Nothing is created in such a database: no subjects, partitions, operations or consumer groups.
    A row of `facts` records that the database is behind, so that all metaservers know about it. The
    row is written and deleted after a comparison with the brokers.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import Reason, UnavailableError
from ...protocol.text import counted
from ..sql.dialect import insert_or_replace
from ..sql.schema import brokers, facts, partitions, subjects

BEHIND = "behind"
"""Name of the fact that the database is behind the brokers. Its value describes what is missing."""
BEHIND_CHARS_MAX = 512
_has_subjects = sa.exists(sa.select(subjects.c.subject_id))
_hosting_broker_query = (
    sa.select(brokers.c.broker_group, brokers.c.hosted)
    .where(brokers.c.hosted > 0, sa.not_(_has_subjects))
    .order_by(brokers.c.broker_group)
    .limit(1)
)
_behind_query = sa.select(facts.c.value).where(facts.c.name == BEHIND)
_highest_id_query = sa.select(sa.func.coalesce(sa.func.max(partitions.c.partition_id), 0))


def is_empty(connection: Connection) -> bool:
    """Return True if the database has no subjects."""
    return not connection.execute(sa.select(_has_subjects)).scalar_one()


def database_lost_error(connection: Connection) -> UnavailableError | None:
    """Return an error if the database lacks data that brokers have; otherwise None."""
    row = connection.execute(_hosting_broker_query).one_or_none()
    if row is not None:
        return UnavailableError(
            Reason.DATABASE_BEHIND,
            f"the database has no subjects, but broker group {row.broker_group!r} has "
            f"{counted(row.hosted, 'partition')}: it was lost, or is the wrong database",
            broker_group=row.broker_group,
            partitions=row.hosted,
        )
    missing_data = read_missing_data(connection)
    return database_behind_error(missing_data) if missing_data else None


def database_behind_error(missing_data: str) -> UnavailableError:
    """Build the error for a database that is behind the brokers. `missing_data` describes what is
    missing.
    """
    return UnavailableError(
        Reason.DATABASE_BEHIND, f"the database is older than the brokers' data: {missing_data}"
    )


def check_database_complete(connection: Connection) -> None:
    """Raise UnavailableError if the database lacks data that brokers have."""
    error = database_lost_error(connection)
    if error is not None:
        raise error


def read_missing_data(connection: Connection) -> str:
    """Return a description of the data that the last comparison with the brokers found missing, or
    "".
    """
    return connection.execute(_behind_query).scalar_one_or_none() or ""


def store_missing_data(connection: Connection, missing_data: str) -> None:
    """Store a description of the data missing in the database; "" deletes the record."""
    if missing_data:
        insert_or_replace(
            connection, facts, {"name": BEHIND, "value": missing_data[:BEHIND_CHARS_MAX]}
        )
    else:
        connection.execute(sa.delete(facts).where(facts.c.name == BEHIND))


def has_higher_id(connection: Connection, highest_id: int) -> bool:
    """Return True if a broker's highest partition id is higher than every id in the database."""
    return highest_id > 0 and highest_id > connection.execute(_highest_id_query).scalar_one()
