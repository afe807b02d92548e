"""Batches that a producer packs, on real servers: read by consumers and readers, with those that it
does not pack.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane import Consumer, ConsumerSettings, Message, Producer, ProducerSettings, QueueReader
from support.cluster import Cluster


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
async def test_packed_batches_arrive_as_they_were_sent(
    shared_cluster: Cluster, compression: str, strategy: str
):
    """Keys, values and properties, also of messages that were sent before without packing; they
    take less of the disk.
    """
    subject = f"packed-{compression}-{strategy}"
    route = await shared_cluster.create(subject, partitions=1, static=True)
    text = b'{"carrier": "UA", "origin": "JFK", "number": %d}'
    sent = [(b"k%d" % (number % 7), text % number) for number in range(600)]
    for settings, part in (
        (ProducerSettings(), sent[:200]),
        (ProducerSettings(compression=compression, batch_count=50), sent[200:]),
    ):
        async with Producer(shared_cluster.meta, settings=settings) as producer:
            for key, value in part:
                producer.send(subject, value, key=key, properties={"key": key})

    got: list[Message] = []
    everything = asyncio.Event()

    def handle(message: Message) -> None:
        got.append(message)
        if len(got) == len(sent):
            everything.set()

    async with Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        handler=handle,
        settings=ConsumerSettings(consume_strategy=strategy),
    ):
        await asyncio.wait_for(everything.wait(), 60)
    assert sorted((m.offset, m.key, m.value, m.properties["key"]) for m in got) == [
        (offset, key, value, key) for offset, (key, value) in enumerate(sent)
    ]
    async with QueueReader(shared_cluster.meta, subject=subject) as reader:
        read = (await reader.read(0, 130)).messages
    assert [(m.logic_offset, m.key, m.value) for m in read] == [
        (130 + offset, key, value)
        for offset, (key, value) in enumerate(sent[130 : 130 + len(read)])
    ]
    assert len(read) > 100
    log = await shared_cluster.log(route)
    assert [m.value for m in log[route.partitions[0].partition_id]] == [value for _, value in sent]
