"""How long the hand-over of a partition waits for messages that a program has taken."""

from __future__ import annotations

import asyncio

import pytest

from keylane import Consumer, ConsumerSettings, LeaseLostError
from keylane.consumer.dispatch.failures import FailureRecords
from keylane.consumer.dispatch.loop import LoopDispatch
from keylane.consumer.handed_out import shell_of
from keylane.errors import Reason
from keylane.protocol.clock import SystemClock
from keylane.protocol.message import Message
from keylane.testing import VirtualCluster
from support.cluster import eventually
from support.pulling import NotingOwner, ScriptedBroker, opened
from support.raising import raises
from unit.consumer.dispatch.test_loop import consume, take

LONG_MS = 600_000


async def ask_in_vain(consumer: Consumer, timeout_s: float) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(consumer), timeout_s)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_hand_over_that_waits_for_the_body_of_a_loop_is_logged_once(
    caplog: pytest.LogCaptureFixture,
):
    """It waits for the ack, however short `handover_ms` is; what was not taken is forgotten."""

    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        message = await anext(consumer)
        shell = shell_of(message)
        suspending = asyncio.ensure_future(consumer.suspend())
        await asyncio.sleep(60)
        assert not shell.ended.is_set()
        assert shell.state.intake.held == 1
        await message.ack()
        await asyncio.wait_for(shell.ended.wait(), 5)
        await suspending

    consume(body, b"a", b"b", b"c", handover_ms=0)
    [line] = [each for each in caplog.messages if "is to be handed over" in each]
    assert "orders partition" in line
    assert "in group g is to be handed over, but 1 of its messages" in line


def test_hand_over_waits_for_messages_that_were_passed_over_as_long_as_it_may():
    """Who asks for the next message works on earlier ones no more, but may still ack them. The
    lease is renewed meanwhile.
    """

    async def body(cluster: VirtualCluster, consumer: Consumer) -> None:
        taken = [await anext(consumer), await anext(consumer)]
        shell = shell_of(taken[0])
        asking = asyncio.ensure_future(ask_in_vain(consumer, 200))
        suspending = asyncio.ensure_future(consumer.suspend())
        await asyncio.sleep(85)
        assert not shell.ended.is_set()
        await taken[1].ack()
        await asyncio.wait_for(shell.ended.wait(), 10)
        with pytest.raises(LeaseLostError):
            await taken[0].ack()
        await suspending
        async with Consumer(cluster.address, subject="orders", group="g") as other:
            assert await take(other, 2, timeout_ms=1_000) == [0]
        asking.cancel()

    consume(body, b"a", b"b", handover_ms=90_000)


def test_hand_over_waits_for_several_messages_while_the_body_of_the_loop_runs():
    """Also after the program has asked for more in vain."""

    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        taken = [await anext(consumer) for _ in range(3)]
        shell = shell_of(taken[0])
        await ask_in_vain(consumer, 1)
        suspending = asyncio.ensure_future(consumer.suspend())
        for message in taken:
            await asyncio.sleep(20)
            assert not shell.ended.is_set()
            await message.ack()
        await asyncio.wait_for(shell.ended.wait(), 5)
        await suspending

    consume(body, b"a", b"b", b"c", handover_ms=0)


def test_hand_over_ends_when_the_next_message_is_asked_for_after_its_time():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        message = await anext(consumer)
        shell = shell_of(message)
        suspending = asyncio.ensure_future(consumer.suspend())
        await asyncio.sleep(20)
        assert not shell.ended.is_set()
        await ask_in_vain(consumer, 5)
        assert shell.ended.is_set()
        await suspending

    consume(body, b"a", handover_ms=1_000)


def test_message_in_the_body_of_a_loop_is_left_when_its_consumer_closes():
    """At once, however long a hand-over may take."""

    async def body(cluster: VirtualCluster, consumer: Consumer) -> None:
        message = await anext(consumer)
        began_s = now_s()
        await consumer.close()
        assert now_s() - began_s < 5
        with pytest.raises(LeaseLostError):
            await message.ack()
        async with Consumer(cluster.address, subject="orders", group="g") as other:
            assert await take(other, 1) == [0]

    consume(body, b"a", handover_ms=LONG_MS)


async def test_another_task_goes_on_when_the_partition_of_unacked_messages_is_lost():
    """Their next owner gets them, so they hold no other partition."""
    clock = SystemClock()
    records = FailureRecords(client="c", wall_ms=clock.wall_ms)
    loop = LoopDispatch(clock=clock, handover_ms=0, check=lambda: None, records=records)
    owner = NotingOwner()
    owner.by_hand = True

    async def next_offset() -> int:
        return (await loop.next()).offset

    async with opened(ScriptedBroker(), owner, ConsumerSettings(), dispatch=loop) as lost:
        await eventually(lambda: lost.state.lanes.stored)
        unacked: Message = await loop.next()
        with raises(Reason.OTHER_TASK, match="it took 1 message"):
            await asyncio.create_task(next_offset())
        loop.leave()
        lost.stop()
        await asyncio.wait_for(loop.quiesce(lost), 30)
        async with opened(ScriptedBroker(), owner, ConsumerSettings(), dispatch=loop) as other:
            await eventually(lambda: other.state.lanes.stored)
            assert await asyncio.create_task(next_offset()) == 0
            with pytest.raises(LeaseLostError):
                await loop.ack(lost, unacked)
            await loop.close()


async def test_no_message_is_taken_after_the_end_of_the_lease():
    """Neither the next one of a run, nor a new one."""
    clock = SystemClock()
    records = FailureRecords(client="c", wall_ms=clock.wall_ms)
    loop = LoopDispatch(clock=clock, handover_ms=0, check=lambda: None, records=records)
    owner = NotingOwner()
    owner.by_hand = True
    async with opened(ScriptedBroker(batches=4), owner, ConsumerSettings(), dispatch=loop) as shell:
        await eventually(lambda: len(shell.state.lanes.stored) == 4)
        message = await loop.next()
        await loop.ack(shell, message)
        assert loop._runs.iterated is not None
        shell.begin_until_s = 0.0
        shell.state.tenure.until_ms = 0
        assert loop.take_unregistered() is None
        assert await loop_many(loop) == []
        await loop.close()


async def loop_many(loop: LoopDispatch) -> list[Message]:
    """What the program would get now."""
    message = loop._take_one()
    return [] if message is None else [message]
