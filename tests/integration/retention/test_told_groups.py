"""A broker is told of the groups of several partitions in one call."""

from __future__ import annotations

from keylane.protocol import endpoints
from keylane.protocol.progress import PartitionGroups, RegisterGroups, RegisterGroupsBatch
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, meta_of

UNKNOWN = 999_999


async def test_partitions_know_their_groups_when_one_of_the_call_is_unknown(
    shared_cluster: Cluster,
):
    """The answer names the unknown partition; the others have the groups, and no more is
    missing.
    """
    await shared_cluster.create("told", partitions=2)
    async with meta_of(shared_cluster) as meta:
        route = await meta.route("told")
    network = HttpNetwork()
    try:
        for partition in route.open_partitions():
            assert partition.address is not None
            broker = BrokerClient(network, partition.address)
            registration = RegisterGroups(groups=("a", "b"), complete=True)
            ids = (UNKNOWN, partition.partition_id)
            told = tuple(
                PartitionGroups(partition_id=each, registration=registration) for each in ids
            )
            answer = await broker.control(
                endpoints.REGISTER_GROUPS_BATCH, RegisterGroupsBatch(partitions=told)
            )
            assert [left.partition_id for left in answer.refused_partitions] == [UNKNOWN]
            status = await broker.control(endpoints.PARTITION, id=partition.partition_id)
            assert sorted(group.group for group in status.groups) == ["a", "b"]
            assert status.groups_told
    finally:
        await network.close()
