"""Rebuilds a lost database: asks every broker named, plans, writes.  Shell around `plan.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...protocol.clock import SystemClock
from ...protocol.errors import InvalidRequestError
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..settings import MetaserverSettings, machine_boot, prepare_folder
from ..sql.database import open_database
from .plan import NO_WORD, plan_rebuild
from .rows import RebuiltCluster, Source, Word
from .writer import check_empty, store_rebuilt


async def rebuild_database(
    settings: MetaserverSettings,
    network: Network,
    brokers: Sequence[str],
    *,
    word: Word = NO_WORD,
) -> RebuiltCluster:
    """
    Fill an empty database with what these brokers keep.

    Its routes are numbered from this machine's wall clock in milliseconds, which is above all that clients have
    seen, as routes are counted from 1.  No order rests on it: a client that knew a higher number would go on with
    the route it has, which the brokers refuse where it is wrong.

    Args:
        brokers: the address of every one, host:port.
        word: what the operator says of those that are not named.

    Raises:
        ConfigError: the database is not empty.
        InvalidNameError: of a broker group that is gone.
        InvalidRequestError: the brokers contradict each other, or some are missing.
        UnreachableError: one of them does not answer.
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
        answers = await asyncio.gather(*(BrokerClient(network, one).partitions() for one in wanted))
        sources = [
            Source(address=address, hosted=hosted)
            for address, hosted in zip(wanted, answers, strict=True)
        ]
        cluster = plan_rebuild(sources, word)
        await database.write(store_rebuilt, cluster, route_version=clock.wall_ms())
        return cluster
