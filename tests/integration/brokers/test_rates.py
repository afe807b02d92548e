"""`keylane subject describe` shows what each partition stores, and names hot partitions."""

import asyncio

from keylane import Producer
from keylane.admin import Admin
from support.cluster import Cluster
from support.server_process import run_keylane

VALUE = bytes(1_000)
MANY = 20_000
"""More than 100 a second over two windows of 30 s, if the brokers have run for long."""


async def test_partition_is_named_hot_when_one_key_gets_nearly_all_messages(
    shared_cluster: Cluster,
):
    await shared_cluster.create("hot", partitions=4)
    async with Producer(shared_cluster.meta) as producer:
        keys = [b"busy"] * MANY + [b"%d" % number for number in range(400)]
        await asyncio.gather(*[producer.send("hot", VALUE, key=key) for key in keys])
    async with Admin(shared_cluster.meta) as admin:
        description = await admin.describe_subject("hot", sizes=True)
        unsized = await admin.describe_subject("hot", holds=False)
    partitions = {partition.partition_id: partition for partition in description.partitions}
    (hot,) = [partition for partition in description.partitions if partition.is_hot]
    assert hot.messages_per_s > 100
    for partition in partitions.values():
        value_bytes = partition.next_offset * len(VALUE)
        # Values of zeros may be compressed, but their batches have keys, times and a header.
        assert 0 < partition.stored_bytes < 2 * value_bytes
        assert 0 < partition.messages_per_s <= partition.next_offset
    assert hot.stored_bytes == max(each.stored_bytes for each in partitions.values())
    assert [each.stored_bytes for each in unsized.partitions] == [None] * 4
    assert sum(each.messages_per_s for each in unsized.partitions) > 0

    shown = await asyncio.to_thread(
        run_keylane, "subject", "describe", "hot", "--meta", shared_cluster.meta
    )
    assert shown.returncode == 0, shown.stderr
    assert f"partition {hot.partition_id} is hot: it stores " in shown.stdout
    assert f"keylane subject split {hot.partition_id}." in shown.stdout
    assert shown.stdout.count(" is hot") == 1
    assert "stored: about " in shown.stdout


async def test_queue_to_grow_is_named_when_a_partition_of_a_static_subject_is_hot(
    shared_cluster: Cluster,
):
    await shared_cluster.create("hot.static", partitions=2, static=True)
    async with Producer(shared_cluster.meta) as producer:
        await asyncio.gather(
            *[producer.send("hot.static", VALUE, key=b"busy") for _ in range(MANY)]
        )
    shown = await asyncio.to_thread(
        run_keylane, "subject", "describe", "hot.static", "--meta", shared_cluster.meta
    )
    assert "keylane subject grow hot.static --queue " in shown.stdout
