"""`keylane meta` rebuild, backup, restore and migrate, which work directly on the database."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from ...metaserver.backup.service import backup_database, restore_database
from ...metaserver.rebuild.rights import ImportedRights
from ...metaserver.rebuild.rows import RebuildOptions, RebuiltSubject
from ...metaserver.rebuild.service import (
    read_rights_database,
    read_rights_file,
    rebuild_database,
)
from ...metaserver.settings import (
    DATABASE_URL_VARIABLE,
    MetaserverSettings,
    machine_boot,
    metaserver_settings,
    prepare_folder,
)
from ...metaserver.sql.database import open_database
from ...metaserver.sql.migrate import HEAD
from ...protocol.address import parse_addresses
from ...protocol.clock import SystemClock
from ...protocol.errors import ConfigError, Reason
from ...protocol.operations import OperationState
from ...protocol.routing import OrderStrategy
from ...protocol.text import counted, listed, mask_password
from ...rpc.http_network import client_network
from ..options import OutputFormat
from ..screen import make_table, show_data, show_line, show_table
from ..status import showing, showing_progress

PRIVATE_MODE = 0o600
CORDONS = "brokers do not store cordons: keylane broker cordon GROUP"
NO_RIGHTS = (
    "brokers do not store tokens, grants and quotas: create them again with keylane access, "
    "or rebuild into another empty database with --access-from BACKUP, FOLDER or URL"
)
RIGHTS_IMPORTED = (
    "from {}: {}, {}, {}; those that were revoked after it was written are valid again: keylane "
    "access list"
)
HISTORY = "brokers do not store the audit log, finished operations and canceled or waiting resets"
SETTINGS = (
    "brokers do not store policies, starts and suspensions of consumer groups; "
    "set them again with keylane group set, create and suspend; the groups: {}"
)
LOSSES = (
    "brokers do not store what groups lost earlier with disks that were given up; "
    "the audit log of a backup shows who accepted a loss"
)


def database_settings(data: Path | None, database_url: str | None) -> MetaserverSettings:
    """
    Return the settings of a metaserver with this database. A database server needs no folder.

    If neither is given, the URL is read from the environment, as a metaserver would do.

    Raises:
        ConfigError: no database was given, or the URL is invalid.
    """
    if data is None and database_url is None:
        database_url = os.environ.get(DATABASE_URL_VARIABLE)
    if data is None and database_url is not None:
        data = Path()
    return metaserver_settings({"data": data, "database_url": database_url})


async def _read_rights(settings: MetaserverSettings, source: str) -> ImportedRights:
    """Read the rights from a backup file, the folder of an embedded database, or a database URL."""
    source_settings = _source_settings(settings, source)
    if source_settings is not None:
        return await read_rights_database(source_settings)
    return read_rights_file(settings, backup_content(Path(source)), source)


def _source_settings(settings: MetaserverSettings, source: str) -> MetaserverSettings | None:
    """Return the settings for a source database, or None if the source is a backup file."""
    if "://" in source:
        return replace(settings, database_url=source)
    path = Path(source)
    return replace(settings, data=path, database_url=None) if path.is_dir() else None


async def rebuild(
    data: Path | None,
    database_url: str | None,
    output: OutputFormat,
    *,
    brokers: list[str],
    options: dict[str, Any],
    access_from: str | None = None,
) -> None:
    """Rebuild a database and show what was restored and what is missing."""
    settings = database_settings(data, database_url)
    addresses = [address for text in brokers for address in parse_addresses(text)]
    rights = None if access_from is None else await _read_rights(settings, access_from)
    network = client_network()
    answered = (0, len(set(addresses)))

    def on_progress(count: int, total: int) -> None:
        nonlocal answered
        answered = (count, total)

    def text() -> str:
        count, total = answered
        return f"rebuilding the database: {count} of {counted(total, 'broker')} answered"

    try:
        with showing(text):
            cluster = await rebuild_database(
                settings,
                network,
                addresses,
                on_progress=on_progress,
                options=RebuildOptions(**options),
                rights=rights,
            )
    finally:
        await network.close()
    rebuilt = [_subject_fields(subject) for subject in cluster.subjects]
    for fields in rebuilt:
        for lost_partition in fields["gone"]:
            unread_groups = ", ".join(lost_partition["unread_by"])
            show_line(
                f"partition {lost_partition['partition_id']} of {fields['subject']!r} is lost, "
                f"with all its messages"
                + (f"; perhaps not read by {unread_groups}" if unread_groups else ""),
                errors=True,
            )
    groups = [
        f"{fields['group']} of {subject['subject']}"
        for subject in rebuilt
        for fields in subject["groups"]
    ]
    notes = [_rights_line(rights, access_from), CORDONS, HISTORY]
    if groups:
        notes += [SETTINGS.format(listed(groups)), LOSSES]
    if output is not OutputFormat.TABLE:
        show_data(output, rebuilt)
        for line in notes:
            show_line(line, errors=True)
        return
    rows = [
        (
            fields["subject"],
            fields["order_strategy"],
            fields["partitions"],
            len(fields["groups"]),
            fields["operation"],
        )
        for fields in rebuilt
    ]
    columns = ("subject", "strategy", "partitions#", "groups#", "unfinished")
    show_table(make_table(f"rebuilt from {counted(len(addresses), 'broker')}", columns, rows))
    for line in notes:
        show_line(line)


def _rights_line(rights: ImportedRights | None, source: str | None) -> str:
    """Return a note about tokens, grants and quotas."""
    if rights is None or source is None:
        return NO_RIGHTS
    counts = (
        counted(rights.tokens, "token"),
        counted(rights.grants, "grant"),
        counted(rights.quotas, "quota"),
    )
    return RIGHTS_IMPORTED.format(mask_password(source), *counts)


class GroupFields(TypedDict):
    """A consumer group of a rebuilt subject, as JSON."""

    group: str
    last_token: int


class LostFields(TypedDict):
    """A lost partition of a rebuilt subject, as JSON."""

    partition_id: int
    unread_by: list[str]


class RebuiltFields(TypedDict):
    """A rebuilt subject, as JSON."""

    subject: str
    order_strategy: OrderStrategy
    partitions: int
    groups: list[GroupFields]
    operation: OperationState | None
    gone: list[LostFields]


class MigratedDatabase(TypedDict):
    """A database with the schema of this program, as JSON."""

    database: str
    revision: str


class RestoredDatabase(TypedDict):
    """What a backup restored, as JSON."""

    rows: int
    cluster: str
    program: str


def _subject_fields(subject: RebuiltSubject) -> RebuiltFields:
    """Return a rebuilt subject as JSON fields."""
    unfinished = [each.state for each in (subject.operation, *subject.fences) if each is not None]
    return {
        "subject": subject.name,
        "order_strategy": subject.order_strategy,
        "partitions": len(subject.partitions),
        "groups": [
            {"group": group.name, "last_token": group.last_token} for group in subject.groups
        ],
        "operation": unfinished[0] if unfinished else None,
        "gone": [
            {
                "partition_id": lost_partition.partition.partition_id,
                "unread_by": list(lost_partition.unread_by),
            }
            for lost_partition in subject.gone
        ],
    }


async def migrate(data: Path | None, database_url: str | None, output: OutputFormat) -> None:
    """Upgrade the schema and show its revision."""
    settings = database_settings(data, database_url)
    database_context = open_database(
        folder=prepare_folder(settings.data),
        url=settings.database_url,
        clock=SystemClock(),
        boot=machine_boot(),
        broker_ttl_ms=settings.broker_ttl_ms,
    )
    with showing(f"migrating the schema to revision {HEAD}"):
        async with database_context as database:
            name = database.name
    if output is not OutputFormat.TABLE:
        show_data(output, MigratedDatabase(database=name, revision=HEAD))
    else:
        show_line(f"{name}: the schema is at revision {HEAD}")


def backup_content(file: Path) -> bytes:
    """Return the content of a backup file. Raises ConfigError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            Reason.BACKUP_FILE, f"cannot read {file}: {error.strerror}", path=str(file)
        ) from error


async def backup(
    data: Path | None, database_url: str | None, file: Path, output: OutputFormat
) -> None:
    """Write a backup to a new file."""

    def write(content: bytes) -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE)
        with open(descriptor, "wb") as output_file:
            output_file.write(content)
            output_file.flush()
            os.fsync(descriptor)

    settings = database_settings(data, database_url)
    row_count = 0

    def on_row(count: int) -> None:
        nonlocal row_count
        row_count = count

    try:
        with showing(lambda: f"backing up the database: {counted(row_count, 'row')}"):
            head = await backup_database(settings, write, on_row)
    except OSError as error:
        raise ConfigError(
            Reason.BACKUP_FILE, f"cannot write {file}: {error.strerror}", path=str(file)
        ) from error
    if output is not OutputFormat.TABLE:
        show_data(output, head)
    else:
        show_line(f"{file} is a complete backup of the database, of schema {head.revision}")


async def restore(
    data: Path | None, database_url: str | None, file: Path, output: OutputFormat
) -> None:
    """Fill an empty database from a backup."""
    settings = database_settings(data, database_url)
    with showing_progress(f"restoring the database from {file}") as reach:
        head, rows = await restore_database(settings, backup_content(file), str(file), reach)
    if output is not OutputFormat.TABLE:
        restored = RestoredDatabase(rows=rows, cluster=head.cluster, program=head.program)
        show_data(output, restored)
        return
    show_line(f"{rows} rows are restored. Start the metaserver, then: keylane meta verify")
