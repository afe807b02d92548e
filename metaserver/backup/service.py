"""Backs up and restores a database. Runs SQL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.clock import SystemClock
from ...protocol.errors import ConfigError, DataFolderError, Reason
from ...protocol.membership.versions import VERSION, check_member, parse_version
from ..settings import MetaserverSettings, machine_boot, prepare_folder
from ..sql.cluster_facts import check_cluster, read_facts
from ..sql.database import FILE, SqlDatabase, open_database
from ..sql.migrate import HEAD, check_revision
from .file import FORMAT, BackupHead, Row, decode_backup, encode_backup
from .rows import check_unused, read_rows, store_rows


def _read_tables(connection: Connection, tables: Sequence[sa.Table]) -> list[Row]:
    return list(read_rows(connection, tables))


def _encode_database(
    connection: Connection, on_row: Callable[[int], None]
) -> tuple[BackupHead, list[bytes]]:
    rows = []
    for row in read_rows(connection):
        rows.append(row)
        on_row(len(rows))
    cluster = read_facts(connection)
    head = BackupHead(
        format=FORMAT,
        program=VERSION,
        revision=HEAD,
        cluster=cluster.name,
        cluster_version=str(cluster.version),
    )
    return head, [*encode_backup(head, rows)]


async def backup_database(
    settings: MetaserverSettings,
    write: Callable[[bytes], None],
    on_row: Callable[[int], None],
) -> BackupHead:
    """
    Back up a database while metaservers use it.

    Args:
        write: called once with the whole file.
        on_row: called in another thread, after each row with the number of rows that were read.

    Raises:
        DataFolderError: there is no database in the data folder.
        ConfigError: the schema has another version; nothing was changed.
        ConflictError, VersionError, StorageError
    """
    async with _open_existing_database(settings) as database:
        head, lines = await database.read(_encode_database, on_row)
    write(b"".join(lines))
    return head


async def read_tables(settings: MetaserverSettings, tables: Sequence[sa.Table]) -> list[Row]:
    """Read the rows of some tables in one snapshot. Raises the same errors as `backup_database`."""
    async with _open_existing_database(settings) as database:
        return await database.read(_read_tables, tables)


def _open_existing_database(
    settings: MetaserverSettings,
) -> AbstractAsyncContextManager[SqlDatabase]:
    """Return a context manager that opens an existing database. Raises the same errors as
    `backup_database`.
    """
    if settings.database_url is None and not (settings.data / FILE).exists():
        error = DataFolderError(f"{settings.data} has no {FILE}", path=settings.data)
        error.hint = "Name the data folder of the metaserver: --data DIR"
        raise error
    return open_database(
        folder=settings.data,
        url=settings.database_url,
        clock=SystemClock(),
        boot=machine_boot(),
        broker_ttl_ms=settings.broker_ttl_ms,
        cluster=settings.cluster,
        before=check_revision,
    )


def read_backup(
    settings: MetaserverSettings, content: bytes, path: str
) -> tuple[BackupHead, list[Row]]:
    """
    Decode a backup and check that its schema and its cluster match this program.

    Raises:
        ConfigError, ConflictError
    """
    head, rows = decode_backup(content, path)
    if head.revision != HEAD:
        raise ConfigError(
            Reason.BACKUP_FILE,
            f"{path} was written by keylane {head.program}, with the schema {head.revision}; this "
            f"is {VERSION}, with {HEAD}",
            path=path,
        )
    check_cluster(settings.cluster, head.cluster, path)
    return head, rows


async def restore_database(
    settings: MetaserverSettings,
    content: bytes,
    path: str,
    on_progress: Callable[[int, int], None],
) -> tuple[BackupHead, int]:
    """
    Fill an empty database from a backup. Return the head of the backup and the number of rows.

    Args:
        on_progress: called in another thread, after each row with the number of rows that were
            stored, and their total.

    Raises:
        ConfigError: the file is damaged or has another version, or the database is not empty.
        ConflictError: the settings or the database belong to another cluster.
        VersionError: the cluster's version does not allow this program.
        DataFolderError, StorageError
    """
    head, rows = read_backup(settings, content, path)
    check_member(VERSION, parse_version(head.cluster_version), "this program")
    clock = SystemClock()
    database_context = open_database(
        folder=prepare_folder(settings.data),
        url=settings.database_url,
        clock=clock,
        boot=machine_boot(),
        broker_ttl_ms=settings.broker_ttl_ms,
        before=partial(_check_target, head),
    )
    async with database_context as database:
        await database.write(
            store_rows,
            rows,
            route_version=clock.wall_ms(),
            broker_ttl_ms=settings.broker_ttl_ms,
            on_row=lambda count: on_progress(count, len(rows)),
        )
    return head, len(rows)


def _check_target(head: BackupHead, connection: Connection) -> None:
    """Check the target database before anything in it is changed."""
    check_revision(connection)
    check_cluster(head.cluster, read_facts(connection).name, "the database")
    check_unused(connection)
