"""Asks the metaserver and the brokers what there is to read, once.  Network only.

metaserver: the route ──▶ brokers, one status call each, all at once ──▶ `planner.plan_ranges`
"""

from __future__ import annotations

import asyncio

from ..rpc.client import BrokerClient, MetaClient
from ..rpc.http_network import HttpNetwork
from ..rpc.network import Network
from .planner import PlannedRange, plan_ranges, select_partitions
from .selection import ReadOptions


def take_snapshot(options: ReadOptions) -> list[PlannedRange]:
    """
    The ranges to read, one for each physical partition, with their ends as of now.  Blocks; needs a thread without
    event loop.

    Raises:
        RefusedError: the subject, a partition or an offset does not exist.
        UnreachableError: the metaserver or a broker does not answer.
    """
    return asyncio.run(_ask(options))


async def _ask(options: ReadOptions) -> list[PlannedRange]:
    network = HttpNetwork()
    try:
        return await ask_cluster(network, options)
    finally:
        await network.close()


async def ask_cluster(network: Network, options: ReadOptions) -> list[PlannedRange]:
    """As `take_snapshot`, over a given network."""
    route = await MetaClient(network, options.meta).route(options.subjects[0])
    partitions = select_partitions(route, options)
    addresses = sorted({str(partition.address) for partition in partitions})
    lists = await asyncio.gather(
        *(BrokerClient(network, address).partitions() for address in addresses)
    )
    hosted = {
        (address, status.partition_id): status
        for address, listed in zip(addresses, lists, strict=True)
        for status in listed.partitions
    }
    statuses = {
        int(partition.partition_id): hosted[str(partition.address), partition.partition_id]
        for partition in partitions
        if (str(partition.address), partition.partition_id) in hosted
    }
    return plan_ranges(route, partitions, statuses, options)
