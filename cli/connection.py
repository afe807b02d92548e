"""A command's own connection to the metaserver, and to the brokers it is told of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..protocol.control import PartitionStatus
from ..protocol.errors import KeylaneError
from ..protocol.routing import Partition
from ..rpc.client import BrokerClient, MetaClient
from ..rpc.http_network import HttpNetwork
from ..rpc.network import Network
from .options import parse_addresses


@asynccontextmanager
async def connect(meta: str) -> AsyncIterator[tuple[MetaClient, Network]]:
    """A client of the metaserver at `meta`, and its network.  Raises InvalidRequestError."""
    addresses = parse_addresses(meta)
    network = HttpNetwork()
    try:
        yield MetaClient(network, addresses), network
    finally:
        await network.close()


async def partition_status(network: Network, partition: Partition) -> PartitionStatus | str:
    """The partition as its broker has it, or why the broker cannot be asked now."""
    if partition.address is None:
        return "its broker group is not available"
    try:
        return await BrokerClient(network, partition.address).partition(partition.partition_id)
    except KeylaneError as error:
        return error.message


async def available_brokers(client: MetaClient, count: int) -> None:
    """Return when the metaserver knows of `count` available broker groups."""
    while True:
        brokers = (await client.health()).details.get("brokers", [])
        if sum(bool(broker["available"]) for broker in brokers) >= count:
            return
        await asyncio.sleep(0.02)
