"""All rows of a database as plain values, and the way back into an empty one, on SQLite and
PostgreSQL.  SQL, synchronous.

What belongs to running programs is left out: sessions, duties, metaservers, refused brokers, the
machine's boot.

Invariants
    Tokens, ids of partitions and versions of routes go on above all that were given after the
    backup was taken, as far as `AHEAD` goes: a fence that a broker has seen since is below the next
    one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import ConfigError, Reason
from ..sql.clock_restart import restart_times
from ..sql.cluster_facts import CLUSTER, CLUSTER_VERSION
from ..sql.dialect import begin_snapshot, insert_or_replace
from ..sql.duties import rebuilt_duty, take_duty
from ..sql.schema import (
    duties,
    facts,
    groups,
    leases,
    metadata,
    metaservers,
    refused_brokers,
    sessions,
    subjects,
)

AHEAD = 1 << 32
"""What is added to every group's last token: more grants than there are between a backup and its
restore.
"""
IDS_AHEAD = 1 << 20
"""Ids that are skipped: of what was made after the backup."""
HOLD_MS = 30_000
"""Sessions from before may be at work for so long: nothing is granted meanwhile."""
_LEFT_OUT = {sessions.name, duties.name, metaservers.name, refused_brokers.name}
_KEPT_FACTS = (CLUSTER, CLUSTER_VERSION)


def backup_tables() -> list[sa.Table]:
    """The tables in a backup; those that others refer to come first."""
    return [table for table in metadata.sorted_tables if table.name not in _LEFT_OUT]


def read_rows(
    connection: Connection, tables: Sequence[sa.Table] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """
    Every row of a backup, as of one instant: the name of its table, and its values by column.

    Args:
        tables: None: all of a backup.
    """
    begin_snapshot(connection)
    for table in backup_tables() if tables is None else tables:
        for row in connection.execute(sa.select(table)).mappings():
            if table is not facts or row["name"] in _KEPT_FACTS:
                yield str(table.name), {str(name): value for name, value in row.items()}


def check_unused(connection: Connection) -> None:
    """Check that nothing was ever stored in the database.  Raises ConfigError."""
    for table in metadata.sorted_tables:
        if table in {facts, duties, metaservers}:
            continue
        if connection.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first():
            raise ConfigError(
                Reason.DATABASE_NOT_EMPTY, f"the database is not empty: {table.name} has rows"
            )


def store_rows(
    connection: Connection,
    rows: Iterable[tuple[str, dict[str, Any]]],
    *,
    route_version: int,
    broker_ttl_ms: int,
) -> None:
    """
    Store the rows of a backup in an empty database.

    Args:
        route_version: the least version of every route; above every version that clients know.

    Raises:
        ConfigError
    """
    check_unused(connection)
    tables = {table.name: table for table in backup_tables()}
    for name, values in rows:
        if name == facts.name:
            insert_or_replace(connection, facts, values)
        else:
            connection.execute(sa.insert(tables[name]), values)
    connection.execute(sa.update(leases).values(session=None, wanted=None, withdrawn=False))
    connection.execute(sa.update(groups).values(last_token=groups.c.last_token + AHEAD))
    opened = sa.and_(subjects.c.route_version > 0, subjects.c.route_version < route_version)
    connection.execute(sa.update(subjects).where(opened).values(route_version=route_version))
    for group_id in connection.execute(sa.select(groups.c.group_id)).scalars().all():
        take_duty(connection, rebuilt_duty(group_id), holder="restore", lease_ms=HOLD_MS)
    for table in tables.values():
        number_ahead(connection, table)
    held = sa.select(duties.c.name, duties.c.holder, duties.c.held_until)
    kept = [dict(row) for row in connection.execute(held).mappings()]
    restart_times(connection, broker_ttl_ms=broker_ttl_ms)  # which ends duties as well
    if kept:
        connection.execute(sa.insert(duties), kept)


def number_ahead(connection: Connection, table: sa.Table) -> None:
    """Have the database give ids to later rows that no row made since the backup can have."""
    (column, *more) = table.primary_key.columns
    if more or column.autoincrement is not True:
        return
    highest = connection.execute(sa.select(sa.func.max(column))).scalar_one() or 0
    if connection.dialect.name == "postgresql":
        sequence = sa.func.pg_get_serial_sequence(table.name, column.name)
        connection.execute(sa.select(sa.func.setval(sequence, highest + IDS_AHEAD)))
        return
    given = sa.table("sqlite_sequence", sa.column("name"), sa.column("seq"))
    connection.execute(sa.delete(given).where(given.c.name == table.name))
    connection.execute(sa.insert(given).values(name=table.name, seq=highest + IDS_AHEAD))
