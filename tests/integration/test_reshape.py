"""Resize, split, merge, move and evacuate against real processes: order, nothing lost, nothing twice."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest

from cluster import Cluster
from keylane.protocol.errors import (
    BrokerGroupUnknownError,
    InvalidRequestError,
    NotEnoughBrokersError,
    OperationRunningError,
    PartitionUnknownError,
    SubjectUnknownError,
)
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from load import Load


@contextlib.asynccontextmanager
async def meta_of(cluster: Cluster) -> AsyncIterator[MetaClient]:
    network = HttpNetwork()
    try:
        yield MetaClient(network, [cluster.meta])
    finally:
        await network.close()


def resize(subject: str, count: int) -> Reshape:
    return Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=count)


async def test_resizes_under_load_keep_the_order(shared_cluster: Cluster):
    """2 → 4 → 8 → 3 partitions under load: both groups handle each message once, in the order of its key."""
    await shared_cluster.create("sizes", partitions=2)
    async with Load(shared_cluster.meta, "sizes", groups=("a", "b"), keys=200) as load:
        for count in (4, 8, 3):
            await load.progress(1_000)
            await shared_cluster.reshape(resize("sizes", count))
        await load.progress(1_000)
        await load.finish()
    load.check()
    await shared_cluster.check_history("sizes", load.sent)
