"""Messages that are not acked come again before later ones of their key: `nack` in an iteration,
`Retry` in a handler.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane import NACK, Consumer, ConsumerSettings, Message, Producer, Retry
from keylane.protocol.errors import ClosedError, InvalidRequestError
from support.cluster import Cluster, eventually


async def send(cluster: Cluster, subject: str, *keys: bytes) -> None:
    await cluster.create(subject, partitions=1)
    async with Producer(cluster.meta) as producer:
        for number, key in enumerate(keys):
            await producer.send(subject, b"%d" % number, key=key)


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
async def test_message_given_back_comes_before_later_ones_of_its_key(
    shared_cluster: Cluster, strategy: str
):
    """Other keys come meanwhile; attempts are counted; everything is acked at the end."""
    subject = f"nack-{strategy}"
    await send(shared_cluster, subject, b"a", b"a", b"b", b"a", b"b")
    seen: list[tuple[bytes, bytes, int]] = []
    async with Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        settings=ConsumerSettings(consume_strategy=strategy),
    ) as consumer:
        async with asyncio.timeout(60):
            while len(seen) < 7:
                message = await anext(consumer)
                seen.append((message.key, message.value, message.attempt))
                if message.value == b"0" and message.attempt < 3:
                    await message.nack(after_s=0.3)
                else:
                    await message.ack()
        await eventually(lambda: not any(each.outstanding for each in consumer.assignment))
    assert [each[1:] for each in seen if each[0] == b"a"] == [
        (b"0", 1),
        (b"0", 2),
        (b"0", 3),
        (b"1", 1),
        (b"3", 1),
    ]
    assert [value for key, value, _ in seen[:3] if key == b"b"] == [b"2", b"4"]


async def test_message_given_back_goes_to_the_next_owner_at_once(shared_cluster: Cluster):
    """A long wait delays neither the end of the consumer nor its successor."""
    await send(shared_cluster, "nack-owner", b"a", b"a")
    async with Consumer(shared_cluster.meta, subject="nack-owner", group="g") as consumer:
        message = await anext(consumer)
        await message.nack(after_s=3_600)
    async with (
        asyncio.timeout(20),
        Consumer(shared_cluster.meta, subject="nack-owner", group="g") as consumer,
    ):
        assert (await anext(consumer)).value == b"0"


async def test_nack_is_refused_when_the_message_is_not_in_hand(shared_cluster: Cluster):
    """Acked, given back, read by no consumer, or with a wait that is no time; the message itself is
    unharmed.
    """
    await send(shared_cluster, "nack-refused", b"a")
    async with Consumer(shared_cluster.meta, subject="nack-refused", group="g") as consumer:
        message = await anext(consumer)
        with pytest.raises(InvalidRequestError, match="after_s must be seconds"):
            await message.nack(after_s=-1)
        await message.nack()
        with pytest.raises(InvalidRequestError):
            await message.nack()
        with pytest.raises(InvalidRequestError, match="was given back"):
            await message.ack()
        again = await anext(consumer)
        assert (again.offset, again.attempt) == (message.offset, 2)
        await again.ack()
        with pytest.raises(InvalidRequestError):
            await again.nack()
    with pytest.raises(ClosedError) as caught:
        await Message("s", b"k", b"v", 0, 1, 0).nack()
    assert "Ack or give back only messages" in caught.value.hint


async def test_handler_decides_whether_its_message_is_acked(shared_cluster: Cluster):
    """NACK and Retry bring the message again, in a coroutine and before later ones of its key."""
    await send(shared_cluster, "nack-handler", b"a", b"a", b"b")
    seen: list[tuple[bytes, int]] = []

    async def handle(message: Message) -> object:
        seen.append((message.value, message.attempt))
        if message.value == b"0" and message.attempt == 1:
            return NACK
        if message.value == b"0" and message.attempt == 2:
            raise Retry("not yet", after_s=0.2)
        return None

    async with Consumer(
        shared_cluster.meta, subject="nack-handler", group="g", handler=handle
    ) as consumer:
        await eventually(lambda: len(seen) >= 5)
        await eventually(lambda: not any(each.outstanding for each in consumer.assignment))
    assert [each for each in seen if each[0] != b"2"] == [
        (b"0", 1),
        (b"0", 2),
        (b"0", 3),
        (b"1", 1),
    ]


async def test_message_cannot_be_given_back_by_its_handler(shared_cluster: Cluster):
    """A handler raises Retry; `nack` there would leave two owners of one message."""
    await send(shared_cluster, "nack-in-handler", b"a")
    refused: list[bool] = []

    async def handle(message: Message) -> None:
        with pytest.raises(InvalidRequestError, match=r"keylane\.Retry"):
            await message.nack()
        refused.append(True)

    async with Consumer(shared_cluster.meta, subject="nack-in-handler", group="g", handler=handle):
        await eventually(lambda: refused)
