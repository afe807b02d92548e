"""What looks at the partitions of a stream closes the connections that it has opened, and no
others.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane.arrow.selection import ReadBound, ReadOptions, StoredAt
from keylane.rpc.environment import Environment
from keylane.rpc.http_network import HttpNetwork
from keylane.spark.streaming.watch import PartitionWatcher
from keylane.testing import VirtualCluster
from unit.consumer.reading.test_times_in_order import moved

OPTIONS = ReadOptions(meta=("127.0.0.1:1",), subjects=("s",))


def is_closed(network: HttpNetwork) -> bool:
    return network._session.closed


async def test_watch_closes_its_own_network_when_it_is_closed():
    watch = PartitionWatcher(OPTIONS)
    watch.open()
    assert not is_closed(watch._own_network)
    await watch.close()
    assert is_closed(watch._own_network)


async def test_watch_leaves_a_network_open_that_it_was_given():
    network = HttpNetwork()
    watch = PartitionWatcher(OPTIONS, environment=Environment(network=network))
    watch.open()
    await watch.close()
    assert not is_closed(network)
    await network.close()


async def test_watch_closes_everything_before_its_cancellation_is_raised():
    watch = PartitionWatcher(OPTIONS)
    watch.open()
    closing = asyncio.create_task(watch.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert is_closed(watch._own_network)


def test_stream_begins_and_ends_in_order_when_a_child_is_behind_in_time():
    """The start passes over none that is behind a message which is read, and the end meets it."""
    cluster = VirtualCluster(brokers=2)

    async def story() -> None:
        between = await moved(cluster)
        watch = PartitionWatcher(ReadOptions(meta=(cluster.address,), subjects=("orders",)))
        watch.open()
        view = await watch.fetch_view()
        places = await watch.resolve_bound(
            view, ReadBound(StoredAt(int(between.timestamp() * 1000)))
        )
        assert list(places.values()) == [1, 0]
        await watch.close()

    cluster.run(story)
