"""The programs of a virtual cluster: ended in every way, started again, and what their ends do to
others.
"""

from __future__ import annotations

import asyncio
import sys

import pytest

from keylane import Consumer, ConsumerSettings, Message, Producer, testing
from keylane.errors import InvalidRequestError, Reason, StoryError
from keylane.testing import VirtualCluster
from support.consumer_options import consumer_options
from support.raising import raises


def consume(address: str, handled: list[bytes], **options):
    """A program that handles the subject `orders`."""

    async def work() -> None:
        async def handle(message: Message) -> None:
            handled.append(message.value)

        consumer = Consumer(
            address,
            **consumer_options(subject="orders", group="billing", handler=handle, **options),
        )
        await consumer.run()

    return work


async def test_broker_serves_its_messages_when_it_starts_again(keylane_cluster: VirtualCluster):
    """Killed, and crashed with its machine: what was acked is there."""
    (broker,) = keylane_cluster.brokers
    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        for end in (broker.kill, broker.crash):
            await producer.send("orders", end.__name__.encode())
            end()
            assert not broker.running
            waiting = producer.send("orders", b"after " + end.__name__.encode())
            await asyncio.sleep(20)
            assert not waiting.done()
            broker.start()
            await waiting
    values = [message.value for message in await keylane_cluster.messages("orders")]
    assert values == [b"kill", b"after kill", b"crash", b"after crash"]


@pytest.mark.keylane(copies=2)
async def test_acked_messages_outlive_the_disks_of_their_broker(keylane_cluster: VirtualCluster):
    """One after the other: each copy that takes the place is followed by a new one."""
    (broker,) = keylane_cluster.brokers
    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        for value in (b"1", b"2", b"3"):
            receipt = await producer.send("orders", value)
            assert receipt.copies == 2
            await keylane_cluster.lose_disk(broker)
            await keylane_cluster.until(lambda: broker.running)
            await asyncio.sleep(30)
    values = [message.value for message in await keylane_cluster.messages("orders")]
    assert values == [b"1", b"2", b"3"]


async def test_disk_is_not_lost_when_nothing_else_has_the_messages(keylane_cluster: VirtualCluster):
    (broker,) = keylane_cluster.brokers
    with pytest.raises(InvalidRequestError, match="copies=2"):
        await keylane_cluster.lose_disk(broker)
    with pytest.raises(InvalidRequestError, match=r"cluster\.brokers\[0\]"):
        await keylane_cluster.lose_disk(keylane_cluster.metaserver)
    assert broker.running


async def test_consumers_go_on_when_the_metaserver_starts_again(keylane_cluster: VirtualCluster):
    """Its database is there; sessions go on for their ttl."""
    handled: list[bytes] = []
    await keylane_cluster.create_subject("orders")
    keylane_cluster.start(consume(keylane_cluster.address, handled))
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"1")
        await keylane_cluster.until(lambda: handled)
        await keylane_cluster.metaserver.stop()
        await producer.send("orders", b"2")
        await keylane_cluster.until(lambda: len(handled) == 2)
        await asyncio.sleep(5)
        keylane_cluster.metaserver.start()
        await asyncio.sleep(300)
        await producer.send("orders", b"3")
        await keylane_cluster.until(lambda: len(handled) == 3)


async def test_stopped_consumer_hands_over_before_its_ttl(keylane_cluster: VirtualCluster):
    """As SIGTERM; a killed one keeps its partitions for its ttl, and what it had not acked comes
    again.
    """
    handled: list[bytes] = []
    await keylane_cluster.create_subject("orders", partitions=1)
    work = consume(keylane_cluster.address, handled, ttl_ms=60_000)
    first = keylane_cluster.start(work)
    await asyncio.sleep(5)
    second = keylane_cluster.start(work)
    assert (first.name, second.name) == ("work", "work 2")
    await first.stop()
    assert (first.running, second.running) == (False, True)
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"1")
        await keylane_cluster.until(lambda: handled, within_s=5)
        second.kill()
        first.start()
        await producer.send("orders", b"2")
        await asyncio.sleep(50)
        assert handled == [b"1"]
        await keylane_cluster.until(lambda: b"2" in handled, within_s=20)


async def test_paused_consumer_loses_its_partition_when_its_ttl_is_over(
    keylane_cluster: VirtualCluster,
):
    """It wakes up in the middle of its handler, which is cancelled: another consumer has the
    message.
    """
    order: list[str] = []
    lost: list[list[int]] = []
    await keylane_cluster.create_subject("orders", partitions=1)

    async def work(name: str) -> None:
        async def handle(_message: Message) -> None:
            order.append(f"{name} begins")
            await asyncio.sleep(1)
            order.append(f"{name} ends")

        consumer = Consumer(
            keylane_cluster.address,
            subject="orders",
            group="billing",
            handler=handle,
            settings=ConsumerSettings(ttl_ms=10_000, on_lost=lost.append),
        )
        await consumer.run()

    first = keylane_cluster.start(work, "first")
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"1")
    await keylane_cluster.until(lambda: order)
    first.pause()
    keylane_cluster.start(work, "second")
    await keylane_cluster.until(lambda: "second ends" in order)
    first.resume()
    await asyncio.sleep(60)
    assert order == ["first begins", "second begins", "second ends"]
    assert lost == [[1]]
    assert await keylane_cluster.lag("orders", "billing") == 0


async def test_cut_program_goes_on_when_the_network_is_healed(keylane_cluster: VirtualCluster):
    """A cut breaks nothing by itself: what is sent waits."""
    await keylane_cluster.create_subject("orders", partitions=1)
    (broker,) = keylane_cluster.brokers
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"1")
        keylane_cluster.cut(keylane_cluster.test, broker)
        waiting = producer.send("orders", b"2")
        await asyncio.sleep(120)
        assert not waiting.done()
        keylane_cluster.heal()
        await waiting
        keylane_cluster.cut(keylane_cluster.test)
        waiting = producer.send("orders", b"3")
        await asyncio.sleep(120)
        assert not waiting.done()
        keylane_cluster.heal()
        await waiting
    assert len(await keylane_cluster.messages("orders")) == 3


async def test_full_disk_holds_messages_back_until_there_is_room(keylane_cluster: VirtualCluster):
    """The producer waits; nothing is lost or stored twice."""
    (broker,) = keylane_cluster.brokers
    await keylane_cluster.create_subject("orders", partitions=1)
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"1")
        broker.fill_disk()
        waiting = producer.send("orders", b"2")
        await asyncio.sleep(60)
        assert not waiting.done()
        broker.empty_disk()
        await waiting
    values = [message.value for message in await keylane_cluster.messages("orders")]
    assert values == [b"1", b"2"]


async def test_message_that_ends_its_process_is_tried_again_when_the_process_starts(
    keylane_cluster: VirtualCluster,
):
    """`sys.exit` in a handler ends the program, and nothing else."""
    tries: list[int] = []
    await keylane_cluster.create_subject("orders", partitions=1)

    async def work() -> None:
        async def handle(message: Message) -> None:
            tries.append(message.attempt)
            if len(tries) < 3:
                sys.exit(1)

        await Consumer(
            keylane_cluster.address, subject="orders", group="billing", handler=handle
        ).run()

    program = keylane_cluster.start(work)
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"1")
    while len(tries) < 3:
        with pytest.raises(SystemExit):
            await program.wait()
        before = len(tries)
        program.start()
        await keylane_cluster.until(lambda before=before: len(tries) > before)
    assert program.running


async def test_program_that_kills_itself_runs_no_further(keylane_cluster: VirtualCluster):
    """As SIGKILL of its own process id."""
    after: list[str] = []

    async def work() -> None:
        program.kill()
        after.append("alive")

    program = keylane_cluster.start(work)
    assert await program.wait() is None
    assert not after


async def test_wait_gives_what_the_program_returned(keylane_cluster: VirtualCluster):
    """Or raises what it raised."""

    async def add(left: int, right: int) -> int:
        await asyncio.sleep(1_000)
        if right == 0:
            raise ValueError("nothing to add")
        return left + right

    assert await keylane_cluster.start(add, 1, 2).wait() == 3
    with pytest.raises(ValueError, match="nothing to add"):
        await keylane_cluster.start(add, 1, right=0).wait()


def test_program_that_failed_fails_the_story_that_did_not_wait_for_it():
    """With the exception as the cause, and the seed."""

    async def work() -> None:
        raise ValueError("not today")

    async def story(cluster: VirtualCluster) -> None:
        cluster.start(work)
        await asyncio.sleep(1)

    with raises(Reason.PROGRAM_FAILED, match="work ended with ValueError") as raised:
        testing.run(story, seed=7)
    assert isinstance(raised.value.__cause__, ValueError)
    assert raised.value.program == "work"
    assert "seed 7" in "".join(raised.value.__notes__)


async def test_running_program_is_not_started_again(keylane_cluster: VirtualCluster):
    with pytest.raises(StoryError, match="broker 0 is running"):
        keylane_cluster.brokers[0].start()
    keylane_cluster.brokers[0].kill()
    keylane_cluster.brokers[0].kill()
    assert "not running" in repr(keylane_cluster.brokers[0])
