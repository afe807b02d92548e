"""Consumers that hand over and stay open: suspended, resumed, closing slowly."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.control import Heartbeat, Join, Suspend
from keylane.protocol.errors import ClosedError, LeaseLostError, SessionUnknownError
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from keylane.testing import VirtualCluster, run
from support.cluster import Cluster, eventually


@pytest.fixture
async def meta(shared_cluster: Cluster) -> AsyncIterator[MetaClient]:
    network = HttpNetwork()
    yield MetaClient(network, [shared_cluster.meta])
    await network.close()


async def test_suspended_consumer_gets_nothing_until_it_resumes(shared_cluster: Cluster):
    """A suspended consumer hands everything over and handles nothing until it resumes."""
    await shared_cluster.create("suspended", partitions=4)
    handled: dict[str, list[Message]] = {"one": [], "two": []}

    def consumer(name: str) -> Consumer:
        return Consumer(
            shared_cluster.meta, subject="suspended", group="g", handler=handled[name].append
        )

    async with Producer(shared_cluster.meta) as producer:
        async with consumer("one") as first, consumer("two") as second:
            await eventually(lambda: len(first.assignment) == len(second.assignment) == 2)
            await first.suspend()
            assert first.assignment == []
            await eventually(lambda: len(second.assignment) == 4)
            for number in range(100):
                await producer.send("suspended", b"%d" % number, key=b"k%d" % number)
            await eventually(lambda: len(handled["two"]) == 100)
            assert not handled["one"]
            await second.suspend()
            await first.resume()
            await eventually(lambda: len(first.assignment) == 4)
            await producer.send("suspended", b"more", key=b"k")
            await eventually(lambda: handled["one"])
        assert [message.value for message in handled["one"]] == [b"more"]
    with pytest.raises(ClosedError):
        await first.suspend()
    with pytest.raises(ClosedError):
        await first.resume()


@pytest.mark.parametrize("method", ["async for", "getmany"])
async def test_suspend_returns_when_its_own_task_has_messages(shared_cluster: Cluster, method: str):
    """The hand-over waits for that task, which would wait for the hand-over."""
    subject = f"suspended-{method.replace(' ', '-')}"
    await shared_cluster.create(subject, partitions=1)
    async with Producer(shared_cluster.meta) as producer:
        await producer.send(subject, b"one", key=b"k")
    settings = ConsumerSettings(handover_ms=600_000)
    async with Consumer(
        shared_cluster.meta, subject=subject, group="g", settings=settings
    ) as consumer:
        if method == "getmany":
            (message,) = await consumer.getmany(timeout_ms=10_000)
        else:
            message = await anext(consumer)
        async with asyncio.timeout(10):
            await consumer.suspend()
        await message.ack()
        await eventually(lambda: consumer.assignment == [])


async def test_slow_handler_delays_the_hand_over_of_its_partition_only(shared_cluster: Cluster):
    """A closing consumer hands each partition over as soon as the handlers of that partition have
    ended.
    """
    route = await shared_cluster.create("leaving", partitions=4)
    stuck = asyncio.Event()
    handled: list[Message] = []

    async def handle(message: Message) -> None:
        if message.value == b"slow":
            await stuck.wait()

    first = Consumer(shared_cluster.meta, subject="leaving", group="g", handler=handle)
    second = Consumer(shared_cluster.meta, subject="leaving", group="g", handler=handled.append)
    async with Producer(shared_cluster.meta) as producer:
        await first.__aenter__()
        slow = await producer.send("leaving", b"slow", key=b"k")
        await eventually(lambda: sum(held.outstanding for held in first.assignment) == 1)
        async with second:
            closing = asyncio.create_task(first.close())
            others = {int(partition.partition_id) for partition in route.partitions} - {
                slow.partition_id
            }
            await eventually(lambda: {held.partition_id for held in second.assignment} == others)
            assert not closing.done()
            stuck.set()
            await closing
            await eventually(lambda: len(second.assignment) == 4)


async def test_second_ack_changes_nothing(shared_cluster: Cluster):
    """A message acked twice counts once: the close waits for every other message."""
    await shared_cluster.create("acked", partitions=1)
    async with Producer(shared_cluster.meta) as producer:
        for number in range(10):
            await producer.send("acked", b"%d" % number)
    async with Consumer(shared_cluster.meta, subject="acked", group="g") as consumer:
        seen = [await anext(consumer) for _ in range(4)]
        for message in (*seen[:3], *seen[:3]):
            await message.ack()
        await eventually(lambda: consumer.assignment[0].outstanding == 7)
        await seen[3].ack()
    async with Consumer(shared_cluster.meta, subject="acked", group="g") as again:
        left = [(await anext(again)).value for _ in range(6)]
    assert left == [b"%d" % number for number in range(4, 10)]


PATIENT = ConsumerSettings(handover_ms=600_000, ttl_ms=60_000)


async def test_closing_an_iteration_gives_up_unacked_messages(shared_cluster: Cluster):
    """Closing waits for no ack: messages taken and not acked are redelivered, acked ones are
    not.
    """
    await shared_cluster.create("given-up", partitions=1)
    meta = shared_cluster.meta
    async with Producer(meta) as producer:
        for number in range(4):
            await producer.send("given-up", b"%d" % number, key=b"%d" % number)
    async with asyncio.timeout(60):
        async with Consumer(meta, subject="given-up", group="g", settings=PATIENT) as consumer:
            taken = [await anext(consumer) for _ in range(3)]
            await taken[0].ack()
        with pytest.raises(LeaseLostError):
            await taken[1].ack()
        async with Consumer(meta, subject="given-up", group="g", settings=PATIENT) as consumer:
            again = [(await anext(consumer)).value for _ in range(3)]
    assert again == [b"1", b"2", b"3"]


async def test_partition_is_handed_over_after_the_acks_while_the_iteration_continues(
    shared_cluster: Cluster,
):
    """A partition is not handed over before its taken messages are acked; closing the consumer ends
    the wait.
    """
    await shared_cluster.create("held", partitions=2)
    first, second = (
        Consumer(shared_cluster.meta, subject="held", group="g", settings=PATIENT) for _ in range(2)
    )
    async with Producer(shared_cluster.meta) as producer, asyncio.timeout(90):
        await first.__aenter__()
        await eventually(lambda: len(first.assignment) == 2)
        held = []
        for number in itertools.count():
            receipt = await producer.send("held", b"%d" % number, key=b"%d" % number)
            if receipt.partition_id not in {message.partition_id for message in held}:
                held.append(await anext(first))
            else:
                await (await anext(first)).ack()
            if len(held) == 2:
                break
        async with second:
            await eventually(lambda: len(first.assignment) == 1)
            await asyncio.sleep(0.5)
            assert second.assignment == []
            await first.close()
            await eventually(lambda: len(second.assignment) == 2)
            again = {(message.partition_id, message.value) for message in held}
            assert again == {
                (message.partition_id, message.value)
                for message in [await anext(second), await anext(second)]
            }


async def test_session_may_begin_suspended(shared_cluster: Cluster, meta: MetaClient):
    """A session that replaces a suspended one is granted nothing until it resumes."""
    await shared_cluster.create("quietly", partitions=2)
    session = "5" * 16
    await meta.call(
        endpoints.JOIN, Join(subject="quietly", group="g", session=session, suspended=True)
    )
    assert not (await meta.call(endpoints.HEARTBEAT, Heartbeat(session=session))).grants
    await meta.call(endpoints.SUSPEND, Suspend(session=session, suspended=False))
    assert len((await meta.call(endpoints.HEARTBEAT, Heartbeat(session=session))).grants) == 2
    with pytest.raises(SessionUnknownError):
        await meta.call(endpoints.SUSPEND, Suspend(session="6" * 16))


async def test_late_call_to_suspend_is_undone_by_the_next_heartbeat(
    shared_cluster: Cluster, meta: MetaClient
):
    """A call that arrives late or twice does not outlast what the consumer asked for last."""
    await shared_cluster.create("late", partitions=2)
    settings = ConsumerSettings(ttl_ms=6_000)
    revoked: list[int] = []
    async with Consumer(
        shared_cluster.meta,
        subject="late",
        group="g",
        handler=print,
        settings=replace(settings, on_revoked=revoked.extend),
    ) as consumer:
        await eventually(lambda: len(consumer.assignment) == 2)
        assert consumer._last_opening.membership is not None
        session = consumer._last_opening.membership.session
        await consumer.suspend()
        await consumer.resume()
        await eventually(lambda: len(consumer.assignment) == 2)
        revoked.clear()
        await meta.call(endpoints.SUSPEND, Suspend(session=session, suspended=True))
        await eventually(lambda: len(revoked) == 2)  # for less than a poll of the assignment
        await eventually(lambda: len(consumer.assignment) == 2)
        await consumer.suspend()
        await meta.call(endpoints.SUSPEND, Suspend(session=session, suspended=False))
        await asyncio.sleep(0.2)
        await eventually(lambda: not consumer.assignment)
        assert consumer._last_opening.membership.session == session
        await consumer.resume()
        await eventually(lambda: len(consumer.assignment) == 2)


async def test_heartbeat_with_an_old_version_changes_no_suspension(
    shared_cluster: Cluster, meta: MetaClient
):
    """Only a heartbeat that knows the newest version decides whether the session takes part."""
    await shared_cluster.create("stale", partitions=2)
    session = "7" * 16
    await meta.call(
        endpoints.JOIN, Join(subject="stale", group="g", session=session, suspended=True)
    )
    first = await meta.call(endpoints.HEARTBEAT, Heartbeat(session=session))
    await meta.call(endpoints.SUSPEND, Suspend(session=session))
    late = Heartbeat(session=session, known_version=first.version, suspended=False)
    second = await meta.call(endpoints.HEARTBEAT, late)
    assert not second.grants
    newest = Heartbeat(session=session, known_version=second.version, suspended=False)
    assert len((await meta.call(endpoints.HEARTBEAT, newest)).grants) == 2


def test_suspend_has_nothing_to_hand_over_when_the_consumer_closes_meanwhile():
    """A consumer may close while `suspend` waits for the metaserver's answer."""

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders")
        for after_ms in range(7):  # a close takes about 7 virtual milliseconds
            consumer = Consumer(
                cluster.address, subject="orders", group="billing", handler=_ignore_message
            )
            await consumer.__aenter__()
            closing = asyncio.create_task(consumer.close())
            await asyncio.sleep(after_ms / 1000)
            with suppress(ClosedError):
                await consumer.suspend()
            await closing

    for seed in range(2):
        run(story, seed=seed)


def _ignore_message(_message: Message) -> None:
    """Handle a message."""
