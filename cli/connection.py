"""
A command's own connection to the metaserver, and to the brokers it is told of.

The network library is loaded when a connection is made: the help needs none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..protocol.address import addresses_of
from ..protocol.errors import KeylaneError

if TYPE_CHECKING:
    from ..protocol.control import PartitionStatus
    from ..protocol.routing import Partition
    from ..rpc.client import MetaClient
    from ..rpc.network import Network


@asynccontextmanager
async def connect(meta: str) -> AsyncIterator[tuple[MetaClient, Network]]:
    """A client of the metaserver at `meta`, and its network.  Raises ConfigError."""
    from ..rpc.client import MetaClient
    from ..rpc.http_network import HttpNetwork

    addresses = addresses_of(meta)
    network = HttpNetwork()
    try:
        yield MetaClient(network, addresses), network
    finally:
        await network.close()


async def partition_status(network: Network, partition: Partition) -> PartitionStatus | str:
    """The partition as its broker has it, or why the broker cannot be asked now."""
    from ..rpc.client import BrokerClient

    if partition.address is None:
        return "its broker group is not available"
    try:
        return await BrokerClient(network, partition.address).partition(partition.partition_id)
    except KeylaneError as error:
        return error.message


async def available_brokers(client: MetaClient, count: int) -> None:
    """Return when the metaserver knows of `count` available broker groups."""
    import asyncio

    while True:
        brokers = (await client.health()).details.get("brokers", [])
        if sum(bool(broker["available"]) for broker in brokers) >= count:
            return
        await asyncio.sleep(0.02)
