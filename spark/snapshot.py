"""Asks the metaserver and the brokers what there is to read, once.  Network only.

metaserver: the route ──▶ brokers, one status call each, all at once ──▶ `planner.plan_ranges`
"""

from __future__ import annotations

import asyncio

from ..rpc.client import BrokerClient, MetaClient
from ..rpc.http_network import HttpNetwork
from ..rpc.network import Network
from .options import ReadOptions
from .planner import PlannedRange, plan_ranges, select_partitions


def take_snapshot(options: ReadOptions) -> list[PlannedRange]:
    """
    The ranges to read, one per physical partition, ends fixed now.  Blocks; needs a thread without event loop.

    Raises:
        RefusedError and its kin: the subject, a partition or an offset is not there.
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
    """As `take_snapshot`, over a network given."""
    route = await MetaClient(network, options.meta).route(options.subject)
    partitions = select_partitions(route, options)
    addresses = sorted({str(one.address) for one in partitions})
    lists = await asyncio.gather(
        *(BrokerClient(network, address).partitions() for address in addresses)
    )
    told = {
        (address, status.partition_id): status
        for address, listed in zip(addresses, lists, strict=True)
        for status in listed.partitions
    }
    statuses = {
        int(one.partition_id): told[str(one.address), one.partition_id]
        for one in partitions
        if (str(one.address), one.partition_id) in told
    }
    return plan_ranges(partitions, statuses, options)
