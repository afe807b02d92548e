"""Parks very many keys at real brokers, each with a message of its own."""

from __future__ import annotations

from msgspec.structs import replace

from keylane import Admin, Producer
from keylane.protocol.parked import Park
from keylane.protocol.routing import logical_partition
from support.cluster import Cluster
from support.parked.raw_owner import FAILURE, RawOwner

AT_ONCE = 500
"""How many keys a request parks."""
UNACKED_MAX = 50_000


async def park_many(
    cluster: Cluster, subject: str, group: str, *, partitions: int, keys: int
) -> dict[int, list[bytes]]:
    """Create a subject, and park `keys` keys on each of its partitions. Returns the keys of each
    partition, in the order of their offsets.
    """
    await cluster.create(subject, partitions=partitions)
    async with Admin(cluster.meta) as admin:
        described = (await admin.describe_subject(subject)).partitions
    owners = [0] * 1024
    for each in described:
        owners[each.range_start : each.range_end] = [each.partition_id] * (
            each.range_end - each.range_start
        )
    found: dict[int, list[bytes]] = {each.partition_id: [] for each in described}
    left, number = partitions * keys, 0
    async with Producer(cluster.meta) as producer:
        while left:
            key = b"customer-%d" % number
            number += 1
            chosen = found[owners[logical_partition(key)]]
            if len(chosen) < keys:
                chosen.append(key)
                producer.send(subject, b"v", key=key)
                left -= 1
                if left % UNACKED_MAX == 0:
                    await producer.flush()
        await producer.flush()
    async with RawOwner(cluster.meta, subject, group) as owner:
        for partition_id, chosen in found.items():
            for start in range(0, keys, AT_ONCE):
                await owner.change(
                    partition_id,
                    *(
                        Park(key, ((start + index, start + index + 1),), _failure(start + index))
                        for index, key in enumerate(chosen[start : start + AT_ONCE])
                    ),
                )
    return found


def _failure(number: int) -> object:
    return replace(FAILURE, text=f"no such customer: {number}", at_ms=FAILURE.at_ms + number)
