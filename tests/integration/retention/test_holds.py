"""A hold over the public API, on a real broker: retention waits for it through a restart, and
removes when it ends.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane import Admin, Producer
from keylane.admin import HoldView
from keylane.cli.commands.subject.subjects import describe_subject
from keylane.cli.options import OutputFormat
from keylane.errors import OffsetOutOfRangeError, PartitionUnknownError
from keylane.protocol.control import Retention
from support.cluster import Cluster

SEGMENT = 16_384
KEEP_LITTLE = f"segment_bytes = {SEGMENT}\nretention_bytes = {2 * SEGMENT}\n"
pytestmark = pytest.mark.cluster(brokers=1, broker_settings=KEEP_LITTLE)


async def first_offset(admin: Admin) -> int:
    (partition,) = (await admin.describe_subject("held")).partitions
    assert partition.first_offset is not None
    return partition.first_offset


async def test_held_messages_stay_through_restarts_until_the_hold_ends(cluster: Cluster, capsys):
    """A broker looks for segments to remove when it starts: held it removes none, released it
    does.
    """
    route = await cluster.create("held", partitions=1, retention=Retention.TIME)
    (broker,) = cluster.brokers
    partition_id = route.partitions[0].partition_id
    async with Producer(cluster.meta) as producer, Admin(cluster.meta) as admin:
        with pytest.raises(PartitionUnknownError):
            await admin.hold("held", {999: 0}, job="backfill", ttl_ms=60_000)
        holds = await admin.hold("held", {partition_id: 0}, job="backfill", ttl_ms=600_000)
        assert [hold.job for hold in holds[partition_id]] == ["backfill"]
        for number in range(100):
            await producer.send("held", b"%d" % number + b"." * 1_000, key=b"k")
        broker.kill()
        broker.restart()
        await asyncio.sleep(1)
        assert await first_offset(admin) == 0
        (partition,) = (await admin.describe_subject("held")).partitions
        (hold,) = partition.holds
        assert isinstance(hold, HoldView)
        assert (hold.job, hold.from_offset, hold.ttl_ms) == ("backfill", 0, 600_000)
        await describe_subject(cluster.meta, OutputFormat.TABLE, subject="held")
        assert "job backfill holds messages from offset 0 on" in capsys.readouterr().out
        await admin.release_hold("held", "backfill")
        await admin.release_hold("held", "backfill")
        broker.kill()
        broker.restart()
        async with asyncio.timeout(30):
            while not await first_offset(admin):
                await asyncio.sleep(0.05)
        with pytest.raises(OffsetOutOfRangeError):
            await admin.hold("held", {partition_id: 0}, job="backfill", ttl_ms=60_000)
