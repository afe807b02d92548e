"""Retention while rows of a job wait for their publication: it waits for them too, or the job is
not published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pyarrow as pa
import pytest

import keylane.arrow
from keylane.errors import Reason
from keylane.protocol import endpoints
from keylane.protocol.control import PartitionStatus, Retention
from keylane.protocol.ids import PartitionId
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from keylane.spark.writing.job import check_job
from support.cluster import Cluster
from support.raising import raises
from support.spark.written_job import WrittenJob

SEGMENT = 16_384
KEEP_LITTLE = f"segment_bytes = {SEGMENT}\nretention_bytes = {2 * SEGMENT}\n"
"""A broker looks for segments to remove when it starts."""
COUNT = 300
ROWS_ARE_IN = PartitionId(2)
REPORTED_S = 3.0
pytestmark = pytest.mark.cluster(brokers=1, broker_settings=KEEP_LITTLE)


def rows() -> Iterator[pa.RecordBatch]:
    for number in range(COUNT):
        yield pa.record_batch({"key": [b"k"], "value": [b"%d:" % number + bytes(1_000)]})


async def restarted(cluster: Cluster) -> tuple[str, PartitionStatus]:
    """Start the broker again; returns why retention waits, once it does or has removed something,
    and the partition of the rows.
    """
    (broker,) = cluster.brokers
    broker.kill()
    broker.restart()
    network = HttpNetwork()
    client = BrokerClient(network, broker.address)
    try:
        async with asyncio.timeout(60):
            while True:
                waits = (await client.health()).details["retention"]
                status = await client.control(endpoints.PARTITION, id=ROWS_ARE_IN)
                if status.first_offset or "should be removed" in waits:
                    return waits, status
                await asyncio.sleep(0.05)
    finally:
        await client.close()
        await network.close()


async def test_rows_stay_until_they_are_published(cluster):
    """No consumer group is there that could need them; the broker's health says for what retention
    waits.
    """
    await cluster.create("kept", partitions=1)
    work = WrittenJob(cluster.meta, "kept", "a")
    await work.subject.create()
    report = await work.attempt(0, rows())
    said, _ = await restarted(cluster)
    assert "rows of hidden subject 'kept.hidden-a' are not published" in said
    await asyncio.sleep(REPORTED_S)  # it has told that it does not know the groups
    said, status = await restarted(cluster)
    assert "'kept.hidden-a'" in said
    assert (status.first_offset, status.groups_told) == (0, False)
    assert check_job([report], await work.subject.count_complete()) == COUNT
    await work.subject.publish()
    await work.network.close()
    table = await asyncio.to_thread(
        lambda: keylane.arrow.read(cluster.meta, "kept", columns=("value",)).read_all()
    )
    values = [int(value.partition(b":")[0]) for value in table["value"].to_pylist()]
    assert values == list(range(COUNT))


async def test_job_is_refused_when_retention_by_time_has_removed_rows(cluster):
    await cluster.create("aged", partitions=1, retention=Retention.TIME)
    work = WrittenJob(cluster.meta, "aged", "a")
    await work.subject.create()
    report = await work.attempt(0, rows())
    await restarted(cluster)
    with raises(Reason.ROWS_REMOVED, match="rows of partition 2") as caught:
        await work.subject.count_complete()
    assert 0 < (caught.value.rows or 0) < COUNT
    assert check_job([report], await work.subject.count_messages()) == COUNT
    await work.subject.delete()
    await work.network.close()
