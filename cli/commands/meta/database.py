"""`keylane meta` rebuild, migrate: a metaserver's database, while no metaserver runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ....metaserver.rebuild.rows import RebuildOptions, RebuiltSubject
from ....metaserver.rebuild.service import rebuild_database
from ....metaserver.settings import (
    DATABASE_URL_VARIABLE,
    MetaserverSettings,
    machine_boot,
    metaserver_settings,
    prepare_folder,
)
from ....metaserver.sql.database import open_database
from ....metaserver.sql.migrate import HEAD
from ....protocol.address import addresses_of
from ....protocol.clock import SystemClock
from ....protocol.text import counted, listed
from ....rpc.http_network import client_network
from ...options import OutputFormat
from ...screen import make_table, show_json, show_line, show_table

CORDONS = "cordons are not kept by brokers: keylane broker cordon GROUP"
SETTINGS = (
    "stored policies, starts and suspensions of consumer groups are not kept by brokers; "
    "set them again with keylane group set, create and suspend; the groups: {}"
)
LOSSES = (
    "what groups lost earlier with disks that were given up is not kept by brokers; "
    "the audit log of a backup says who accepted a loss"
)


def database_settings(data: Path | None, database_url: str | None) -> MetaserverSettings:
    """
    Settings of a metaserver with this database; one on a server needs no folder.

    Where neither is given, the URL is that of the environment, which metaservers read too.

    Raises:
        ConfigError: neither is given, or a URL that cannot work.
    """
    if data is None and database_url is None:
        database_url = os.environ.get(DATABASE_URL_VARIABLE)
    if data is None and database_url is not None:
        data = Path()
    return metaserver_settings({"data": data, "database_url": database_url})


async def rebuild(
    data: Path | None,
    database_url: str | None,
    output: OutputFormat,
    *,
    brokers: list[str],
    options: dict[str, Any],
) -> None:
    """Rebuild a database and show what is in it, and what is not.  Raises KeylaneError."""
    settings = database_settings(data, database_url)
    addresses = [address for text in brokers for address in addresses_of(text)]
    network = client_network()
    try:
        cluster = await rebuild_database(
            settings, network, addresses, options=RebuildOptions(**options)
        )
    finally:
        await network.close()
    rebuilt = [_subject_facts(subject) for subject in cluster.subjects]
    for facts in rebuilt:
        for gone in facts["gone"]:
            unread = ", ".join(gone["unread_by"])
            show_line(
                f"partition {gone['partition_id']} of {facts['subject']!r} is gone, with whatever was in it"
                + (f"; perhaps not read by {unread}" if unread else ""),
                errors=True,
            )
    groups = [
        f"{facts['group']} of {subject['subject']}"
        for subject in rebuilt
        for facts in subject["groups"]
    ]
    lost = [CORDONS, SETTINGS.format(listed(groups)), LOSSES] if groups else [CORDONS]
    if output is OutputFormat.JSON:
        show_json(rebuilt)
        for line in lost:
            show_line(line, errors=True)
        return
    rows = [
        (
            facts["subject"],
            facts["order_strategy"],
            facts["partitions"],
            len(facts["groups"]),
            facts["operation"],
        )
        for facts in rebuilt
    ]
    columns = ("subject", "strategy", "partitions#", "groups#", "unfinished")
    show_table(make_table(f"rebuilt from {counted(len(addresses), 'broker')}", columns, rows))
    for line in lost:
        show_line(line)


def _subject_facts(subject: RebuiltSubject) -> dict[str, Any]:
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
            {"partition_id": gone.partition.partition_id, "unread_by": list(gone.unread_by)}
            for gone in subject.gone
        ],
    }


async def migrate(data: Path | None, database_url: str | None, output: OutputFormat) -> None:
    """Bring a schema up to date and say where it is.  Raises KeylaneError."""
    settings = database_settings(data, database_url)
    async with open_database(
        folder=prepare_folder(settings.data),
        url=settings.database_url,
        clock=SystemClock(),
        boot=machine_boot(),
        broker_ttl_ms=settings.broker_ttl_ms,
    ) as database:
        name = database.name
    if output is OutputFormat.JSON:
        show_json({"database": name, "revision": HEAD})
    else:
        show_line(f"{name}: the schema is at revision {HEAD}")
