"""Reads all rows of a database as plain values and stores them in an empty one, with SQLite or
PostgreSQL. Runs SQL synchronously.

A backup does not contain rows that belong to running programs: sessions, duties, metaservers,
refused brokers, and the boot id of the machine.

Invariants
    After a restore, tokens, partition ids and route versions are higher than any that were issued
    after the backup was taken, within the limits of `TOKENS_AHEAD` and `IDS_AHEAD`. So the next
    token is higher than every fence that a broker has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import ConfigError, Reason
from ..sql.clock_restart import restart_times
from ..sql.cluster_facts import CLUSTER, CLUSTER_ID, CLUSTER_VERSION
from ..sql.dialect import begin_snapshot, insert_or_replace, skip_ids
from ..sql.duties import rebuilt_duty, take_duty
from ..sql.quarantine import quarantine_copies
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

TOKENS_AHEAD = 1 << 32
"""The number that a restore adds to every group's last token; it must exceed the number of grants
between a backup and its restore.
"""
IDS_AHEAD = 1 << 20
"""The number of ids that a restore skips, because rows inserted after the backup may have used
them.
"""
HOLD_MS = 30_000
"""How long, in milliseconds, nothing is granted after a restore, because consumers of earlier
sessions may still be running.
"""
_EXCLUDED_TABLES = {sessions.name, duties.name, metaservers.name, refused_brokers.name}
_INCLUDED_FACTS = (CLUSTER, CLUSTER_ID, CLUSTER_VERSION)


def backup_tables() -> list[sa.Table]:
    """Return the tables of a backup; referenced tables come before those that refer to them."""
    return [table for table in metadata.sorted_tables if table.name not in _EXCLUDED_TABLES]


def read_rows(
    connection: Connection, tables: Sequence[sa.Table] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """
    Yield (table name, values by column) for every row of one snapshot.

    Args:
        tables: the tables to read; None means all tables of a backup.
    """
    begin_snapshot(connection)
    for table in backup_tables() if tables is None else tables:
        for row in connection.execute(sa.select(table)).mappings():
            if table is not facts or row["name"] in _INCLUDED_FACTS:
                yield str(table.name), {str(name): value for name, value in row.items()}


def check_unused(connection: Connection) -> None:
    """Check that the database is empty. Raises ConfigError."""
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
    on_row: Callable[[int], None] = lambda _count: None,
) -> None:
    """
    Store the rows of a backup in an empty database.

    Args:
        route_version: the minimum version of the routes, which must be higher than every version
            that clients know.
        on_row: called after each row with the number of rows so far.

    Raises:
        ConfigError
    """
    check_unused(connection)
    tables = {table.name: table for table in backup_tables()}
    for count, (name, values) in enumerate(rows, 1):
        if name == facts.name:
            insert_or_replace(connection, facts, values)
        else:
            connection.execute(sa.insert(tables[name]), values)
        on_row(count)
    freed_columns = {"session": None, "wanted": None, "withdrawn": False}
    unknown_columns = {"previous_client": None, "previous_end": None}
    connection.execute(sa.update(leases).values(freed_columns | unknown_columns))
    connection.execute(sa.update(groups).values(last_token=groups.c.last_token + TOKENS_AHEAD))
    quarantine_copies(connection, "the database was restored from a backup")
    has_lower_route = sa.and_(
        subjects.c.route_version > 0, subjects.c.route_version < route_version
    )
    connection.execute(
        sa.update(subjects).where(has_lower_route).values(route_version=route_version)
    )
    for group_id in connection.execute(sa.select(groups.c.group_id)).scalars().all():
        take_duty(connection, rebuilt_duty(group_id), holder="restore", lease_ms=HOLD_MS)
    for table in tables.values():
        skip_later_ids(connection, table)
    query = sa.select(duties.c.name, duties.c.holder, duties.c.held_until)
    held_duties = [dict(row) for row in connection.execute(query).mappings()]
    restart_times(connection, broker_ttl_ms=broker_ttl_ms)  # this also ends all duties
    if held_duties:
        connection.execute(sa.insert(duties), held_duties)


def skip_later_ids(connection: Connection, table: sa.Table) -> None:
    """Skip IDS_AHEAD ids of a table, which rows inserted after the backup may have."""
    (column, *other_columns) = table.primary_key.columns
    if not other_columns and column.autoincrement is True:
        highest_id = connection.execute(sa.select(sa.func.max(column))).scalar_one() or 0
        skip_ids(connection, table, highest_id + IDS_AHEAD)
