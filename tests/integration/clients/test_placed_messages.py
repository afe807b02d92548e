"""Messages of a static subject whose sender names the logic queue, on real servers."""

from __future__ import annotations

from keylane import Producer, QueueReader
from keylane.protocol.operations import OperationKind, Reshape
from support.cluster import Cluster


async def test_receipts_say_the_logic_offset_when_a_queue_has_moved(cluster: Cluster):
    """A queue is read as it was sent, whatever the keys, and each receipt has the queue and offset
    of its message.
    """
    route = await cluster.create("placed", partitions=2, static=True)
    home = next(each for each in route.partitions if each.queue == 1)
    other = next(each.broker_group for each in route.partitions if each.queue == 0)
    sent = [b"%d" % number for number in range(40)]
    async with Producer(cluster.meta) as producer:
        futures = [producer.send("placed", value, key=value, queue=1) for value in sent[:20]]
        receipts = [await future for future in futures]
        await cluster.reshape(
            Reshape(
                kind=OperationKind.MOVE,
                partition_ids=(home.partition_id,),
                broker_group=other,
            )
        )
        futures = [producer.send("placed", value, key=value, queue=1) for value in sent[20:]]
        receipts += [await future for future in futures]
    messages, offset = [], 0
    async with QueueReader(cluster.meta, subject="placed") as reader:
        while len(messages) < len(sent):
            part = await reader.read(1, offset)
            messages += part.messages
            offset = part.next_offset
        assert await reader.bounds(0) == (0, 0)

    assert [message.value for message in messages] == sent
    assert [(message.queue, message.logic_offset) for message in messages] == [
        (receipt.queue, receipt.logic_offset) for receipt in receipts
    ]
    assert len({receipt.partition_id for receipt in receipts}) == 2
