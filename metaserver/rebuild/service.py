"""Rebuilds a lost database: asks the named brokers for their partitions, plans the rows, and writes
them. Does network I/O and runs SQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sqlalchemy.engine import Connection

from ...protocol.clock import SystemClock
from ...protocol.control import PartitionStatusList
from ...protocol.errors import AccessDeniedError, InvalidRequestError, UnauthenticatedError
from ...rpc.client import BrokerClient
from ...rpc.network import KnowsMetaservers, Network
from ..backup.service import read_backup, read_tables
from ..settings import MetaserverSettings, machine_boot, prepare_folder
from ..sql.database import open_database
from .plan import NO_OPTIONS, plan_rebuild
from .rights import RIGHTS, ImportedRights, check_no_rights, store_rights
from .rows import BrokerSource, RebuildOptions, RebuiltCluster
from .writer import check_empty, store_rebuilt

HINT = (
    "Set KEYLANE_TOKEN_FILE to a file with the administrator's token, or with the token of a "
    "broker (its token_file): while no metaserver runs, brokers accept only these."
)


async def rebuild_database(
    settings: MetaserverSettings,
    network: Network,
    brokers: Sequence[str],
    *,
    on_progress: Callable[[int, int], None],
    options: RebuildOptions = NO_OPTIONS,
    rights: ImportedRights | None = None,
) -> RebuiltCluster:
    """
    Fill an empty database with the data that these brokers store.

    Route versions start at the current wall-clock time of this machine in milliseconds. This is
    higher than every version that clients know, because versions count from 1. The order of
    messages does not depend on the clock: a client with a higher version keeps its old route, and
    brokers refuse requests for partitions that are sealed or that they do not have.

    Args:
        brokers: the address of every broker, as `host:port`.
        on_progress: called after each answer with the number of brokers that have answered, and of
            all brokers.
        options: what the operator states about brokers that are not in `brokers`.
        rights: tokens, grants and quotas to store, which brokers do not have; None stores none.

    Raises:
        ConfigError: the database is not empty.
        UnauthenticatedError: a broker has access control, and the network has none of the tokens in
            the settings of the broker.
        InvalidRequestError: the name of a gone broker group is invalid, the brokers contradict each
            other, or some brokers are missing.
        UnreachableError: a broker does not respond.
        DataFolderError, StorageError
    """
    if not brokers:
        raise InvalidRequestError("name every broker: --broker HOST:PORT")
    clock = SystemClock()
    async with open_database(
        folder=prepare_folder(settings.data),
        url=settings.database_url,
        clock=clock,
        boot=machine_boot(),
        broker_ttl_ms=settings.broker_ttl_ms,
    ) as database:
        await database.read(check_empty)
        if rights is not None:
            await database.read(check_no_rights)
        addresses = list(dict.fromkeys(brokers))
        if isinstance(network, KnowsMetaservers):
            # No metaserver can issue capabilities at this point, so brokers are sent the token
            # itself.
            network.add_metaservers(addresses)
        answered = 0

        async def ask(address: str) -> PartitionStatusList:
            nonlocal answered
            hosted = await _read_hosted(network, address)
            answered += 1
            on_progress(answered, len(addresses))
            return hosted

        hosted_lists = await asyncio.gather(*map(ask, addresses))
        sources = [
            BrokerSource(address=address, hosted=hosted)
            for address, hosted in zip(addresses, hosted_lists, strict=True)
        ]
        cluster = plan_rebuild(sources, options)
        await database.write_long(_store, cluster, rights, now_ms=clock.wall_ms())
        return cluster


def _store(
    connection: Connection, cluster: RebuiltCluster, rights: ImportedRights | None, *, now_ms: int
) -> None:
    store_rebuilt(connection, cluster, route_version=now_ms)
    if rights is not None:
        store_rights(connection, rights, now_ms=now_ms)


async def _read_hosted(network: Network, address: str) -> PartitionStatusList:
    """Ask a broker for its partitions. Raises the same errors as `rebuild_database`."""
    try:
        return await BrokerClient(network, address).partitions()
    except (UnauthenticatedError, AccessDeniedError) as error:
        refusal = UnauthenticatedError(
            f"the broker at {address} refuses the rebuild: {error.message}", problem="rebuild"
        )
        refusal.hint = HINT
        raise refusal from error


def read_rights_file(settings: MetaserverSettings, content: bytes, path: str) -> ImportedRights:
    """
    Return the rights in a file written by `keylane meta backup`. `settings` are those of the
    rebuild.

    Raises:
        ConfigError: the file is damaged, or has another version.
        ConflictError: it belongs to another cluster.
    """
    return ImportedRights(rows=read_backup(settings, content, path)[1])


async def read_rights_database(settings: MetaserverSettings) -> ImportedRights:
    """Return the rights in another database, which may be in use. Raises the same errors as
    `backup_database`.
    """
    return ImportedRights(rows=await read_tables(settings, RIGHTS))
