"""Handlers that hang, end with what is no Exception, or ack what is not theirs; calls that cannot
be right. Others go on.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane import Admin, Consumer, ConsumerSettings, InvalidRequestError, Message, Producer
from keylane.errors import GroupDeletedError, OffsetOutOfRangeError
from keylane.protocol.backoff import Backoff
from support.cluster import Cluster, eventually

QUICK = ConsumerSettings(
    handover_ms=200, handler_backoff=Backoff(first_ms=5, max_ms=5), concurrency=4
)


class Ended(BaseException):
    """What a handler raises that is no Exception."""


async def fill(cluster: Cluster, subject: str, *pairs: tuple[bytes, bytes]) -> int:
    """Messages on one partition; returns its id."""
    route = await cluster.create(subject, partitions=1)
    async with Producer(cluster.meta) as producer:
        await producer.send_all(subject, pairs)
    return int(route.partitions[0].partition_id)


def consumer_of(cluster: Cluster, subject: str, handler: object, group: str = "g") -> Consumer:
    return Consumer(cluster.meta, subject=subject, group=group, handler=handler, settings=QUICK)  # type: ignore[arg-type]


def numbered(key: bytes, count: int) -> list[tuple[bytes, bytes]]:
    return [(key, b"%d" % number) for number in range(count)]


async def test_handler_that_hangs_holds_its_key_alone(shared_cluster: Cluster):
    """Other keys go on; when the consumer closes, the handler is cancelled, and the next owner gets
    its message.
    """
    subject = "member-hangs"
    await fill(shared_cluster, subject, *numbered(b"hangs", 3), *numbered(b"other", 40))
    handled: list[bytes] = []
    cancelled: list[bytes] = []

    async def hang(message: Message) -> None:
        if message.key == b"other":
            handled.append(message.value)
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(message.value)
            raise

    async with asyncio.timeout(30):
        async with consumer_of(shared_cluster, subject, hang):
            await eventually(lambda: len(handled) == 40)
        assert cancelled == [b"0"]
        later: list[Message] = []
        async with consumer_of(shared_cluster, subject, later.append):
            await eventually(lambda: len(later) == 3)
    assert [(message.key, message.value) for message in later] == numbered(b"hangs", 3)


async def test_handler_that_raises_no_exception_ends_its_consumer_alone(shared_cluster: Cluster):
    """`wait` raises it; consumers of other groups go on, and the message comes again first."""
    subject = "member-ends"
    await fill(shared_cluster, subject, *numbered(b"k", 20))
    handled: list[bytes] = []

    async def end(message: Message) -> None:
        if message.value == b"3":
            raise Ended

    async with (
        asyncio.timeout(30),
        consumer_of(shared_cluster, subject, lambda m: handled.append(m.value), "h"),
    ):
        async with consumer_of(shared_cluster, subject, end) as consumer:
            with pytest.raises(Ended):
                await consumer.wait()
        await eventually(lambda: len(handled) == 20)
        later: list[bytes] = []
        async with consumer_of(shared_cluster, subject, lambda m: later.append(m.value)):
            await eventually(lambda: later[-1:] == [b"19"])
    assert later == [b"%d" % number for number in range(3, 20)]


async def test_handler_that_acks_the_message_of_another_settles_nothing(shared_cluster: Cluster):
    """That one fails afterwards, and is tried again; no message is left out."""
    subject = "member-acks"
    await fill(shared_cluster, subject, (b"victim", b"v"), (b"thief", b"t"), *numbered(b"k", 5))
    victims: list[Message] = []
    acked = asyncio.Event()
    attempts: list[int] = []
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        if message.key == b"thief":
            await eventually(lambda: victims)
            for _ in range(2):
                with pytest.raises(InvalidRequestError):
                    await victims[0].ack()
            acked.set()
        if message.key == b"victim":
            victims.append(message)
            attempts.append(message.attempt)
            await acked.wait()
            if message.attempt == 1:
                raise ValueError("it was not handled")
        handled.append(message.value)

    async with (
        asyncio.timeout(30),
        consumer_of(shared_cluster, subject, handle),
        Admin(shared_cluster.meta) as admin,
    ):
        await eventually(lambda: len(handled) == 7)
        while await admin.lag(subject, "g"):
            await asyncio.sleep(0.02)
    assert attempts == [1, 2]
    assert sorted(handled) == sorted([b"v", b"t", b"0", b"1", b"2", b"3", b"4"])


async def test_group_is_not_set_beyond_the_end(shared_cluster: Cluster):
    """A typed error with what is stored; the progress stays, and the next consumer continues."""
    subject = "member-seeks"
    partition_id = await fill(shared_cluster, subject, *numbered(b"k", 6))
    handled: list[bytes] = []
    async with asyncio.timeout(30), Admin(shared_cluster.meta) as admin:
        async with consumer_of(shared_cluster, subject, lambda m: handled.append(m.value)):
            await eventually(lambda: len(handled) == 6)
        for offset in (7, 2**62):
            with pytest.raises(OffsetOutOfRangeError) as refused:
                await admin.reset_group(
                    subject, "g", "offset", partition_id=partition_id, offset=offset
                )
            assert refused.value.next_offset == 6
        assert await admin.lag(subject, "g") == 0
        async with (
            Producer(shared_cluster.meta) as producer,
            consumer_of(shared_cluster, subject, lambda m: handled.append(m.value)),
        ):
            await producer.send(subject, b"6", key=b"k")
            await eventually(lambda: len(handled) == 7)
    assert handled == [b"%d" % number for number in range(7)]


async def test_group_deleted_under_its_consumers_ends_them_alone(shared_cluster: Cluster):
    """In the midst of a handler; the consumers of another group get everything."""
    subject = "member-deleted"
    await fill(shared_cluster, subject, *numbered(b"k", 10))
    started = asyncio.Event()
    handled: list[bytes] = []

    async def slow(_message: Message) -> None:
        started.set()
        await asyncio.sleep(0.05)

    async with (
        asyncio.timeout(30),
        Admin(shared_cluster.meta) as admin,
        Producer(shared_cluster.meta) as producer,
        consumer_of(shared_cluster, subject, lambda m: handled.append(m.value), "h"),
    ):
        async with consumer_of(shared_cluster, subject, slow) as consumer:
            await started.wait()
            await admin.delete_group(subject, "g", force=True)
            with pytest.raises(GroupDeletedError):
                await consumer.wait()
        await producer.send(subject, b"10", key=b"k")
        await eventually(lambda: handled == [b"%d" % number for number in range(11)])
