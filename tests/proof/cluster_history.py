"""What brokers of a cluster under watch have stored, and whether it is handled; asked over the
network.
"""

from __future__ import annotations

from collections.abc import Sequence

from keylane.checker.events import Stored
from keylane.protocol.control import PartitionStatus
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from proof.stage import GROUP, SUBJECT
from support.cluster import read_partition


async def hosted(network: HttpNetwork, addresses: Sequence[str]) -> list[PartitionStatus]:
    """Every partition of these brokers."""
    partitions: list[PartitionStatus] = []
    for address in addresses:
        client = BrokerClient(network, address)
        try:
            partitions += (await client.partitions()).partitions
        finally:
            await client.close()
    return partitions


def lag(status: PartitionStatus) -> int:
    """How many messages the group has not acked."""
    (cursor,) = [group.cursor for group in status.groups if group.group == GROUP] or [0]
    return status.next_offset - cursor


async def stored_log(
    network: HttpNetwork, addresses: Sequence[str], stamps_ns: list[int]
) -> list[Stored]:
    """Every message of these brokers; `stamps_ns` gets the times at which they were sent."""
    stored = []
    for address in addresses:
        client = BrokerClient(network, address)
        for status in (await client.partitions()).partitions:
            number = status.partition_id
            messages = await read_partition(client, SUBJECT, number)
            stamps_ns += [message.sent_at_ns for message in messages]
            stored += [
                Stored(number, message.offset, message.key, message.value) for message in messages
            ]
        await client.close()
    return stored
