"""Programs that take messages themselves: which task may ask, what is logged and told of messages
in hand, and what becomes of messages that are given back.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from keylane import (
    Admin,
    Consumer,
    ConsumerSettings,
    InvalidRequestError,
    Message,
    Producer,
)
from keylane.consumer.session.events import Event, MessageHangs
from keylane.consumer.session_shell import SessionShell
from keylane.errors import Reason
from keylane.protocol.parked import HANGS_MS
from keylane.testing import VirtualCluster
from support.raising import raises
from unit.consumer.dispatch.test_loop import consume, take_messages, values


def test_step_is_refused_while_another_task_waits_for_a_message():
    """The first task waits on, and gets the next message."""

    async def body(cluster: VirtualCluster, consumer: Consumer) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer), 0.01)
        waiting = asyncio.create_task(anext(consumer))
        await asyncio.sleep(1)
        with raises(Reason.OTHER_TASK, match="another task waits"):
            await anext(consumer)
        with raises(Reason.OTHER_TASK, match="another task waits"):
            await consumer.getmany()
        async with Producer(cluster.address) as producer:
            await producer.send("orders", b"7")
        assert (await waiting).value == b"7"

    consume(body)


@pytest.mark.parametrize("count", [1, 2])
def test_step_is_refused_until_the_other_task_has_acked_its_messages(count: int):
    """Including those that the other task went on without. Then any task may go on."""

    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        taken: list[Message] = []
        acked = asyncio.Event()

        async def hold() -> None:
            taken.extend([await anext(consumer) for _ in range(count)])
            await acked.wait()

        holding = asyncio.create_task(hold())
        await asyncio.sleep(1)
        with raises(Reason.OTHER_TASK, match=f"it took {count} message"):
            await anext(consumer)
        for message in taken:
            await message.ack()
        assert (await anext(consumer)).value == b"%d" % count
        acked.set()
        await holding

    consume(body, b"a", b"b", b"c")


def test_step_within_a_time_limit_is_a_step_of_the_task_that_waits():
    """`wait_for` runs it in a task of its own; the message before it is not acked."""

    async def body(_cluster: VirtualCluster, consumer: Consumer) -> list[Message]:
        first = await asyncio.wait_for(anext(consumer), 5)
        return [first, await asyncio.wait_for(anext(consumer), 5)]

    assert values(consume(body, b"a", b"b")) == [0, 1]


def test_messages_are_taken_in_one_way():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        await consumer.ack(await consumer.getmany(max_records=1, timeout_ms=5_000))
        with raises(Reason.MIXED_USE, match=r"iteration on a consumer .* getmany"):
            await anext(consumer)
        with raises(Reason.MIXED_USE):
            await anext(consumer.batches())
        assert len(await consumer.getmany(timeout_ms=5_000)) == 1

    consume(body, b"a", b"b")


def test_iteration_ends_when_its_consumer_is_closed_by_another_task():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> list[int]:
        async def count() -> list[int]:
            taken = []
            async for message in consumer:
                taken.append(int(message.value))
                await message.ack()
            return taken

        counting = asyncio.create_task(count())
        await asyncio.sleep(1)
        await consumer.close()
        return await asyncio.wait_for(counting, 5)

    assert consume(body, b"a", b"b") == [0, 1]


def test_message_is_acked_once_and_not_given_back_after_that():
    """And only the one of its partition, although another partition has its offset."""

    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        taken: list[Message] = []
        while len({message.partition_id for message in taken}) < 2:
            taken += await consumer.getmany(timeout_ms=5_000)
        first, second = {message.partition_id: message for message in reversed(taken)}.values()
        assert first.offset == second.offset == 0
        await first.nack()
        with pytest.raises(InvalidRequestError, match="ack it when it is delivered again"):
            await first.ack()
        await second.ack()
        await second.ack()
        with pytest.raises(
            InvalidRequestError,
            match=f"message 0 of partition {second.partition_id} is already acked or given back",
        ):
            await second.nack()
        await consumer.ack([message for message in taken if message not in (first, second)])
        [again] = await consumer.getmany(max_records=1, timeout_ms=5_000)
        assert again is first
        await again.ack()
        await asyncio.sleep(1)
        assert all(position.cursor >= 1 for position in consumer.position.values())

    consume(body, *[b"%d" % number for number in range(8)], partitions=2)


def test_paused_partition_is_held_back_in_its_order():
    """Also messages that were given back or wait for those."""

    async def body(_cluster: VirtualCluster, consumer: Consumer) -> list[int]:
        (first,) = await consumer.getmany(max_records=1, timeout_ms=5_000)
        await first.nack()
        await consumer.pause()
        assert await consumer.getmany(timeout_ms=1_000) == []
        await consumer.resume(first.partition_id)
        return values(await consumer.getmany(timeout_ms=5_000))

    assert consume(body, b"a", b"a", b"b", b"a") == [0, 1, 2, 3]


def test_program_that_waits_behind_messages_it_has_not_acked_is_logged(
    caplog: pytest.LogCaptureFixture,
):
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        await anext(consumer)
        waiting = asyncio.create_task(asyncio.wait_for(anext(consumer), 60))
        await asyncio.sleep(30)
        waiting.cancel()

    consume(body, b"a", b"a")
    lines = [line for line in caplog.messages if "waits for acks" in line]
    assert len(lines) == 1
    assert "1 message waits until earlier messages of their keys" in lines[0]
    assert "orders partition 1 offset 0" in lines[0]


@pytest.mark.parametrize("is_iterated", [False, True])
def test_consumer_that_is_never_iterated_is_logged(
    caplog: pytest.LogCaptureFixture, is_iterated: bool
):
    """A consumer created without its handler by mistake keeps its partitions idle."""

    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        if is_iterated:
            await anext(consumer)
        await asyncio.sleep(60)

    consume(body, b"a", b"b")
    lines = [line for line in caplog.messages if "is not iterated" in line]
    assert len(lines) == (not is_iterated)


def test_body_of_a_loop_that_takes_long_is_logged(caplog: pytest.LogCaptureFixture):
    """After ten and twenty seconds, and once when the next message is asked for; a quick body is
    not.
    """
    caplog.set_level(logging.INFO, "keylane.consumer")

    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        message = await anext(consumer)
        await asyncio.sleep(25)
        await message.ack()
        await anext(consumer)
        await asyncio.sleep(2)

    consume(body, b"a", b"b")
    about = [
        each for each in caplog.records if "of the loop" in each.message or "left" in each.message
    ]
    running, longer, left = [each.message for each in about]
    for line, seconds in ((running, 10), (longer, 20)):
        assert f"body of the loop has been running for {seconds} s on orders partition 1" in line
    assert "offset 0" in left
    assert "is left by the loop" in left
    levels = [each.levelno for each in about]
    assert levels == [logging.WARNING, logging.WARNING, logging.INFO]


def test_message_that_a_loop_holds_is_told_until_it_is_acked(monkeypatch: pytest.MonkeyPatch):
    """Of each partition, the message that the program has had for longest."""
    told: list[tuple[bytes, int]] = []

    def report(shell: SessionShell, event: Event) -> None:
        if isinstance(event, MessageHangs):
            told.append((event.message.value, event.running_ms))
        else:
            feed(shell, event)

    feed = SessionShell.feed
    monkeypatch.setattr(SessionShell, "feed", report)

    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        first, second = await consumer.getmany(max_records=2, timeout_ms=5_000)
        await asyncio.sleep(14)
        assert told
        assert {value for value, _ in told} == {b"0"}
        assert HANGS_MS <= told[0][1] < HANGS_MS + 1_500
        await first.ack()
        told.clear()
        await asyncio.sleep(8)
        assert told == []
        await asyncio.sleep(8)
        assert {value for value, _ in told} == {b"1"}
        await second.nack()
        await consumer.getmany(timeout_ms=5_000)
        told.clear()
        await asyncio.sleep(8)
        assert told == [], "another attempt begins anew"

    consume(body, b"a", b"b")


def test_message_of_each_partition_that_a_loop_holds_is_told(monkeypatch: pytest.MonkeyPatch):
    """Also messages without a key, which no other message waits for."""
    told: set[int] = set()

    def report(shell: SessionShell, event: Event) -> None:
        if isinstance(event, MessageHangs):
            told.add(event.message.partition_id)
        else:
            feed(shell, event)

    feed = SessionShell.feed
    monkeypatch.setattr(SessionShell, "feed", report)

    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        taken: list[Message] = []
        while len({message.partition_id for message in taken}) < 2:
            taken.append(await anext(consumer))
        await asyncio.sleep(8)
        assert told == set()
        await asyncio.sleep(4)
        assert told == {message.partition_id for message in taken}

    consume(body, *[b""] * 8, partitions=2)


def test_message_that_is_given_back_too_often_is_parked_with_those_behind_it():
    """In hand, waiting, or just arrived; other keys go on."""

    async def body(cluster: VirtualCluster, consumer: Consumer) -> None:
        first, _, other = await take_messages(consumer, 3)
        assert await consumer.getmany(timeout_ms=100) == [], "one waits for those in hand"
        await first.nack()
        again = await take_messages(consumer, 2)
        assert [(int(each.value), each.attempt) for each in again] == [(0, 2), (1, 2)]
        async with Producer(cluster.address) as producer:
            await producer.send("orders", b"5", key=b"a")
        await asyncio.sleep(1)
        await again[0].nack()
        await other.ack()
        assert values(await take_messages(consumer, 1)) == [4]
        assert await consumer.getmany(timeout_ms=2_000) == []
        [shell] = consumer._clients.values()
        failure = shell.state.parking.failures[b"a"]
        assert (failure.kind, failure.attempts) == ("nack", 2)
        assert not shell.state.parking
        async with Admin(cluster.address) as admin:
            views = [view async for view in admin.parked("orders", "g")]
        assert [(view.key, view.messages) for view in views] == [(b"a", 4)]

    consume(body, b"a", b"a", b"b", b"a", b"b", on_failure="park", tries_max=2)


def test_messages_behind_a_failed_filter_come_once_when_their_partition_was_paused():
    broken = True

    def wanted(message: Message) -> bool:
        if broken:
            raise ValueError("no such country")
        return message.value != b"9"

    async def body(cluster: VirtualCluster, consumer: Consumer) -> list[int]:
        nonlocal broken
        assert await consumer.getmany(timeout_ms=500) == []
        await consumer.pause()
        assert await consumer.getmany(timeout_ms=2_000) == []
        async with Producer(cluster.address) as producer:
            await producer.send("orders", b"2", key=b"a")
        broken = False
        await consumer.resume(*consumer.position)
        taken = await take_messages(consumer, 3)
        await consumer.ack(taken)
        assert await consumer.getmany(timeout_ms=2_000) == []
        return values(taken)

    assert consume(body, b"a", b"a", filter=wanted) == [0, 1, 2]


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
def test_message_that_is_given_back_too_often_is_buried_alone(strategy: str):
    """Later messages of its key go on."""

    async def body(cluster: VirtualCluster, consumer: Consumer) -> list[tuple[bytes, int]]:
        seen = []
        async with asyncio.timeout(60):
            while len(seen) < 3:
                message = await anext(consumer)
                seen.append((message.value, message.attempt))
                await (message.nack() if message.value == b"0" else message.ack())
        await asyncio.sleep(1)
        async with Admin(cluster.address) as admin:
            views = [view async for view in admin.parked("orders", "g", dead=True)]
        assert [view.messages for view in views] == [1]
        return seen

    options = {"on_failure": "dead", "tries_max": 2, "consume_strategy": strategy}
    assert consume(body, b"a", b"a", **options) == [(b"0", 1), (b"0", 2), (b"1", 1)]


def test_late_ack_of_a_shared_group_counts():
    """The message was not acked in time, and its broker would hand it out again."""

    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        late = await anext(consumer)
        other = await anext(consumer)  # it goes on without the first one
        await asyncio.sleep(9.5)
        await late.nack()  # it changes nothing
        await late.ack()
        await other.ack()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer), 20)

    settings = ConsumerSettings(in_flight_ms=10_000)
    consume(body, b"a", b"b", consume_strategy="shared", settings=settings)
