"""Programs that take and ack messages themselves, beside a real cluster in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from threading import Thread
from typing import Any

import pytest

from keylane import Consumer, InvalidRequestError, LeaseLostError, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.consumer.dispatch.failures import FailureRecords
from keylane.consumer.dispatch.loop import LoopDispatch
from keylane.consumer.session.events import RunEnded, RunSpread, WorkWanted
from keylane.consumer.session_shell import SessionShell
from keylane.errors import Reason, UsageError
from keylane.protocol.clock import SystemClock
from keylane.testing import VirtualCluster, run
from sim.machines.clock import ManualClock
from support.cluster import eventually
from support.consumer_options import consumer_options
from support.pulling import FAST, NotingOwner, ScriptedBroker, SuspectingBroker, opened
from support.raising import raises

Body = Callable[[VirtualCluster, Consumer], Awaitable[Any]]


def consume(body: Body, *keys: bytes, partitions: int = 1, **options: Any) -> Any:
    """Run `body` with an open consumer of messages with these keys, whose values count up."""

    async def story(cluster: VirtualCluster) -> Any:
        await cluster.create_subject("orders", partitions=partitions)
        async with Producer(cluster.address) as producer:
            for number, key in enumerate(keys):
                producer.send("orders", b"%d" % number, key=key)
        given = consumer_options(subject="orders", group="g", **options)
        async with Consumer(cluster.address, **given) as consumer:
            return await body(cluster, consumer)

    return run(story)


async def take(consumer: Consumer, count: int, **given: Any) -> list[int]:
    """The values of what `getmany` returns until there are so many."""
    return values(await take_messages(consumer, count, **given))


async def take_messages(consumer: Consumer, count: int, timeout_ms: int = 5_000) -> list[Message]:
    taken: list[Message] = []
    while len(taken) < count:
        more = await consumer.getmany(max_records=count - len(taken), timeout_ms=timeout_ms)
        if not more:
            break
        taken += more
    return taken


def values(messages: list[Message]) -> list[int]:
    return [int(message.value) for message in messages]


def watch(consumer: Consumer) -> list[type]:
    """The kinds of events by which the program's session learns what the program does."""
    kinds: list[type] = []
    for client in consumer._clients.values():
        shell: Any = client
        ask = shell.ask

        def watched(event: Any, ask: Any = ask) -> Any:
            if type(event) in {RunEnded, RunSpread, WorkWanted}:
                kinds.append(type(event))
            return ask(event)

        shell.ask = watched
    return kinds


def test_iteration_takes_runs_while_its_body_does_not_wait():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        first = await anext(consumer)
        await first.ack()
        kinds = watch(consumer)
        got = []
        async for message in consumer:
            got.append(int(message.value))
            await message.ack()
            if len(got) == 99:
                break
        assert got == list(range(1, 100))
        assert kinds.count(WorkWanted) < 20
        await asyncio.sleep(1)
        assert consumer.lag.messages == 0

    consume(body, *[b"a", b"b"] * 50)


def test_iteration_gets_messages_in_order_when_its_body_waits():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> list[int]:
        got = []
        async for message in consumer:
            await asyncio.sleep(0.01)
            got.append(int(message.value))
            await message.ack()
            if len(got) == 40:
                break
        return got

    assert consume(body, *[b"a", b"b"] * 20) == list(range(40))


def test_iteration_gets_other_keys_while_a_message_is_not_acked():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        first, other = await anext(consumer), await anext(consumer)
        assert values([first, other]) == [0, 2]
        await first.ack()
        following = await anext(consumer)
        assert int(following.value) == 1

    consume(body, b"a", b"a", b"b")


async def test_loop_gets_messages_that_may_have_ended_a_process_one_at_a_time():
    """Each once its broker knows that it begins, whatever the program asks for."""
    clock = SystemClock()
    records = FailureRecords(client="till", wall_ms=clock.wall_ms)
    dispatch = LoopDispatch(clock=clock, handover_ms=100, check=lambda: None, records=records)
    broker = SuspectingBroker()
    broker.end = 4
    settings = ConsumerSettings(backoff=FAST)
    async with opened(broker, NotingOwner(), settings, dispatch=dispatch) as shell:
        await eventually(lambda: shell.state.intake.held == 4)
        for offset in range(2):
            [message] = await dispatch.take_many(4, 5_000)
            assert (message.offset, broker.begun) == (offset, list(range(offset + 1)))
            assert await dispatch.take_many(4, 20) == []
            await dispatch.ack(shell, message)
        rest = await dispatch.take_many(4, 5_000)
        assert [message.offset for message in rest] == [2, 3]
        for message in rest:
            await dispatch.ack(shell, message)


@asynccontextmanager
async def iterated(clock: ManualClock) -> AsyncIterator[tuple[SessionShell, LoopDispatch, Message]]:
    """A partition, and the second message of a run of `async for`, which the loop body has."""
    records = FailureRecords(client="till", wall_ms=clock.wall_ms)
    dispatch = LoopDispatch(clock=clock, handover_ms=100, check=lambda: None, records=records)
    broker = ScriptedBroker()
    broker.end = 4
    settings = ConsumerSettings(backoff=FAST)
    async with opened(broker, NotingOwner(), settings, dispatch=dispatch, clock=clock) as shell:
        await eventually(lambda: shell.state.intake.held == 4)
        await dispatch.ack(shell, await dispatch.next())
        message = await dispatch.next()
        assert dispatch._runs.iterated is not None
        yield shell, dispatch, message


async def test_ack_in_a_run_is_refused_when_the_lease_has_ended():
    """No event tells the session that the time is over."""
    clock = ManualClock()
    async with iterated(clock) as (shell, dispatch, message):
        clock.advance(60_000)
        with pytest.raises(LeaseLostError):
            await dispatch.ack(shell, message)
        assert not shell.state.offsets.is_acked(message.offset)


async def test_ack_in_a_run_counts_when_the_partition_is_paused():
    async with iterated(ManualClock()) as (shell, dispatch, message):
        dispatch.pause()
        shell.gate.add("resume")
        await dispatch.ack(shell, message)
        assert message.offset in shell.state.acks.handled
        assert not shell.state.lanes.in_hand


async def test_ack_in_a_run_is_refused_when_it_comes_from_another_thread():
    async with iterated(ManualClock()) as (shell, dispatch, message):
        refused: list[UsageError] = []

        def ack_elsewhere() -> None:
            try:
                asyncio.run(dispatch.ack(shell, message))
            except UsageError as error:
                refused.append(error)

        elsewhere = Thread(target=ack_elsewhere)  # the loop does not run meanwhile: the run lasts
        elsewhere.start()
        elsewhere.join()
        assert len(refused) == 1
        await dispatch.ack(shell, message)
        await asyncio.sleep(0)
        assert message.offset in shell.state.acks.handled


def test_getmany_that_is_acked_as_a_whole_stays_a_run():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        await asyncio.sleep(1)
        kinds = watch(consumer)
        messages = await consumer.getmany(max_records=50)
        assert values(messages) == list(range(50))
        await consumer.ack(messages)
        assert kinds == [WorkWanted, RunEnded]
        await consumer.ack(messages)
        assert kinds == [WorkWanted, RunEnded], "a second ack does nothing"

    consume(body, *[b"a"] * 50)


def test_ack_of_no_message_acks_none_when_getmany_has_returned_a_run_beside_others():
    """One that failed before comes beside a run of another partition, and all of them fail."""

    async def body(cluster: VirtualCluster, consumer: Consumer) -> None:
        await asyncio.sleep(1)
        [failed] = await consumer.getmany(max_records=1)
        await consumer.nack([failed])
        await asyncio.sleep(1)
        messages = await consumer.getmany(max_records=50)
        assert {message.attempt for message in messages} == {1, 2}
        kinds = watch(consumer)
        await consumer.ack([])
        assert RunEnded not in kinds
        await consumer.nack(messages)
        again = await take_messages(consumer, len(messages))
        assert sorted(values(again)) == sorted(values(messages))
        assert await cluster.lag("orders", "g") == 8

    consume(body, *[b"a", b"b", b"c", b"d"] * 2, partitions=4)


def test_getmany_of_which_a_message_is_acked_alone_is_spread():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        messages = await take_messages(consumer, 4)
        await messages[2].ack()
        await consumer.ack(messages[:2])
        assert await consumer.getmany(timeout_ms=100) == [], "the last one of the key is in hand"
        await messages[3].ack()
        assert await take(consumer, 2) == [4, 5]

    consume(body, *[b"a"] * 4, *[b"a"] * 2)


def test_ack_of_a_message_given_back_is_refused_until_it_comes_again():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        first, second = await take_messages(consumer, 2)
        await first.nack()
        for message in (first, second):  # the later one of its key comes back with it
            with pytest.raises(InvalidRequestError, match="given back"):
                await message.ack()
        with pytest.raises(InvalidRequestError, match="already acked or given back"):
            await second.nack()
        again = await take_messages(consumer, 2)
        assert values(again) == [0, 1]
        assert [message.attempt for message in again] == [2, 2]
        await consumer.ack(again)

    consume(body, b"a", b"a")


def test_messages_that_never_reached_the_program_come_next_as_the_same_attempt():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        messages = await take_messages(consumer, 3)
        consumer._put_back(messages)
        again = await take_messages(consumer, 3)
        assert sorted(values(again)) == [0, 1, 2]
        assert {message.attempt for message in again} == {1}

    consume(body, b"a", b"a", b"b")


def test_ack_with_ack_each_is_durable_when_it_returns():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        first, second = await take_messages(consumer, 2)
        await first.ack()
        await first.ack()  # waits for the same ack
        assert consumer.position[first.partition_id].cursor == first.offset + 1
        await consumer.ack([second])
        assert consumer.lag.messages == 0

    consume(body, b"a", b"a", ack="each")


def test_filter_that_fails_takes_later_messages_of_the_key_back():
    broken = True

    def wanted(message: Message) -> bool:
        if broken and message.value == b"1":
            raise ValueError("not yet")
        return message.value != b"3"

    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        nonlocal broken
        messages = await take_messages(consumer, 2, timeout_ms=500)
        assert values(messages) == [0, 4]
        await consumer.ack(messages)
        broken = False
        assert await take(consumer, 2) == [1, 2]

    consume(body, b"a", b"a", b"a", b"a", b"b", filter=wanted)


def test_messages_that_are_not_acked_come_again_after_the_consumer_is_closed():
    async def body(cluster: VirtualCluster, consumer: Consumer) -> None:
        acked, kept = await take_messages(consumer, 2)
        await acked.ack()
        await consumer.close()
        with pytest.raises(LeaseLostError):
            await kept.ack()
        async with Consumer(cluster.address, subject="orders", group="g") as other:
            assert await take(other, 1) == [1]

    consume(body, b"a", b"b")


def test_hand_over_waits_for_the_body_of_a_loop():
    async def body(cluster: VirtualCluster, consumer: Consumer) -> None:
        message = await anext(consumer)
        suspending = asyncio.ensure_future(consumer.suspend())
        await asyncio.sleep(20)
        assert not message.delivery.shell.ended.is_set(), "its body still runs"
        await message.ack()
        await suspending
        async with Consumer(cluster.address, subject="orders", group="g") as other:
            assert await take(other, 1) == [1]

    consume(body, b"a", b"b", handover_ms=1_000)


def test_batches_take_the_place_of_sessions_of_which_nothing_was_taken():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        assert isinstance(consumer._last_opening.dispatcher, LoopDispatch)
        await asyncio.sleep(1)
        rows = 0
        async for batch in consumer.batches():
            rows += len(batch)
            await batch.ack()
            if rows == 30:
                break
        with raises(Reason.MIXED_USE):
            await consumer.getmany()
        await asyncio.sleep(1)
        assert consumer.lag.messages == 0

    consume(body, *[b"a", b"b", b"c"] * 10, partitions=2)


def test_batches_are_refused_after_other_ways_to_take_messages():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        await take_messages(consumer, 1)
        with raises(Reason.MIXED_USE):
            await anext(consumer.batches())
        with pytest.raises(UsageError):
            await anext(consumer)

    consume(body, b"a", b"b")


def test_paused_partition_stays_paused_when_batches_are_asked_for():
    async def body(_cluster: VirtualCluster, consumer: Consumer) -> None:
        await asyncio.sleep(1)
        await consumer.pause()
        batches = consumer.batches()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(batches), 5)
        await consumer.resume(*consumer.position)
        batch = await anext(batches)
        assert len(batch) == 2

    consume(body, b"a", b"b")
