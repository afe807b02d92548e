"""Rebuilds a lost database: asks the named brokers for their partitions, plans the rows, writes them.  Shell around `plan.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...protocol.clock import SystemClock
from ...protocol.errors import InvalidRequestError
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..settings import MetaserverSettings, machine_boot, prepare_folder
from ..sql.database import open_database
from .plan import NO_OPTIONS, plan_rebuild
from .rows import BrokerSource, RebuildOptions, RebuiltCluster
from .writer import check_empty, store_rebuilt


async def rebuild_database(
    settings: MetaserverSettings,
    network: Network,
    brokers: Sequence[str],
    *,
    options: RebuildOptions = NO_OPTIONS,
) -> RebuiltCluster:
    """
    Fill an empty database with the facts that these brokers keep.

    Route versions start at this machine's wall clock in milliseconds.  That is above every version that clients know,
    because versions count from 1.  The order does not depend on the clock: a client with a higher version keeps its old
    route, and the brokers refuse requests for partitions that are sealed or not theirs.

    Args:
        brokers: the address of every broker, host:port.
        options: the operator's statements about brokers that are not named.

    Raises:
        ConfigError: the database is not empty.
        InvalidNameError: the name of a gone broker group is not valid.
        InvalidRequestError: the brokers contradict each other, or brokers are missing.
        UnreachableError: a broker does not answer.
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
        wanted = list(dict.fromkeys(brokers))
        answers = await asyncio.gather(
            *(BrokerClient(network, address).partitions() for address in wanted)
        )
        sources = [
            BrokerSource(address=address, hosted=hosted)
            for address, hosted in zip(wanted, answers, strict=True)
        ]
        cluster = plan_rebuild(sources, options)
        await database.write_long(store_rebuilt, cluster, route_version=clock.wall_ms())
        return cluster
