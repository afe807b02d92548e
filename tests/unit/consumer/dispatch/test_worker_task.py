"""What a worker registers of messages that it handles in a row while nothing else runs."""

from __future__ import annotations

import asyncio
from itertools import groupby

import pytest

from keylane.consumer.dispatch.workers import IdleWorkers
from keylane.consumer.session.events import LeaseGranted
from keylane.protocol.message import Message
from sim.machines.clock import ManualClock
from support.cluster import eventually
from support.dispatching import WorkerStory
from support.handling import Client, workers_of


async def test_messages_before_one_that_waits_are_told_at_once():
    """Their acks do not wait for a slow handler; later messages of other keys run beside it."""
    client, going = Client(), asyncio.Event()
    started: list[int] = []

    async def handle(message: Message) -> None:
        started.append(message.offset)
        if message.offset == 2:
            await going.wait()

    workers = workers_of(handle, concurrency=2)
    client.give(workers, b"a", b"b", b"c", b"c", b"d")
    await eventually(lambda: started == [0, 1, 2, 4])
    await eventually(lambda: client.held == 2)
    assert client.handled == [0, 1, 4]
    going.set()
    await eventually(lambda: client.handled == [0, 1, 4, 2, 3])
    assert client.held == 0
    await workers.close()


@pytest.mark.parametrize("count", [1, 256, 769])
async def test_messages_of_several_turns_are_each_told_once(count: int):
    """Yielding between turns neither loses nor repeats a message."""
    client = Client()

    async def handle(_message: Message) -> None:
        return None

    workers = workers_of(handle, concurrency=4)
    client.give(workers, *[b"k"] * count)
    await eventually(lambda: client.held == 0)
    assert client.handled == list(range(count))
    await workers.close()


async def test_failed_message_blocks_its_key_and_those_before_it_are_told():
    """Also if it is the first message of a turn; its retry and the messages of another client run
    in order.
    """
    client, other = Client(1), Client(2)
    tried: list[tuple[int, int]] = []

    async def handle(message: Message) -> None:
        tried.append((message.partition_id, message.offset))
        if tried.count((1, 1)) < 3 and (message.partition_id, message.offset) == (1, 1):
            raise ValueError("not yet")

    workers = workers_of(handle)
    client.give(workers, b"a", b"a", b"a", b"b")
    other.give(workers, b"a", b"c")
    await eventually(lambda: client.held + other.held == 0)
    assert sorted(client.handled) == [0, 1, 2, 3]
    assert client.handled.index(1) < client.handled.index(2)
    assert other.handled == [0, 1]
    await workers.close()


async def test_handler_that_pauses_its_partition_loses_no_message():
    """Pausing replaces the queue from which the worker takes."""
    client, other = Client(1), Client(2)

    async def handle(message: Message) -> None:
        if message.partition_id == 1 and message.offset == 1:
            client.shell.pause()
            await asyncio.sleep(0)

    workers = workers_of(handle)
    client.give(workers, b"a", b"b", b"c")
    other.give(workers, b"d", b"e")
    await eventually(lambda: other.handled == [0, 1])
    assert client.handled == [0, 1]
    client.shell.resume()
    await eventually(lambda: client.handled == [0, 1, 2])
    assert client.held == other.held == 0
    await workers.close()


async def test_lease_that_ends_during_a_turn_starts_no_further_handler():
    """The clock is read before each handler; messages handled before are reported."""
    client = Client()

    async def handle(message: Message) -> None:
        if message.offset == 1:
            client.lose()

    workers = workers_of(handle)
    client.give(workers, b"a", b"b", b"a", b"c")
    await eventually(lambda: client.held == 0)
    assert client.handled == [0, 1]
    await workers.close()


async def test_batch_is_opened_when_what_came_before_it_was_handled():
    """Its messages count as in flight from the start."""
    client, going = Client(), asyncio.Event()

    async def handle(message: Message) -> None:
        if message.offset == 1:
            await going.wait()

    workers = workers_of(handle)
    batches = [client.give_batch(workers, *[b"a", b"b"] * 600) for _ in range(3)]
    await eventually(lambda: client.handled == [0])
    assert [batch.is_opened for batch in batches] == [True, False, False]
    assert client.held == 3_599
    going.set()
    await eventually(lambda: client.held == 0)
    assert client.handled == list(range(3_600))
    await workers.close()


async def test_batches_that_were_not_opened_are_forgotten_at_a_hand_over():
    client, other, going = Client(1), Client(2), asyncio.Event()

    async def handle(message: Message) -> None:
        if message.partition_id == 1:
            await going.wait()

    workers = workers_of(handle)
    first = client.give_batch(workers, *[b"a", b"b"] * 600)
    second = client.give_batch(workers, b"a", b"b")
    await eventually(lambda: first.is_opened)
    other.give_batch(workers, b"c", start=9)
    ending = asyncio.create_task(client.hand_over(grace_ms=60_000))
    await asyncio.sleep(0)
    going.set()
    await ending
    await eventually(lambda: other.handled == [9])
    assert not second.is_opened
    assert client.held == 0
    await workers.close()


async def test_messages_of_a_key_that_waits_for_its_next_try_are_passed_over_by_a_run():
    """Messages of other keys proceed; those of the key run in order when it is handled."""
    client = Client()
    tried: list[int] = []

    async def handle(message: Message) -> None:
        tried.append(message.offset)
        if message.key == b"bad" and tried.count(message.offset) < 3 and message.offset == 1:
            raise ValueError("not yet")

    workers = workers_of(handle, first_ms=20, max_ms=20)
    client.give(workers, b"a", b"bad", b"b", b"bad", b"a", b"bad", b"c")
    await eventually(lambda: client.held == 0)
    assert tried == [0, 1, 2, 4, 6, 1, 1, 3, 5]
    assert sorted(client.handled) == list(range(7))
    await workers.close()


@pytest.mark.parametrize("blocking_ms", [1, 100])
async def test_handler_that_blocks_past_the_lease_is_the_last_one(blocking_ms: int):
    """However quick the earlier handlers of the run were."""
    client, clock = Client(), ManualClock()
    started: list[int] = []

    async def handle(message: Message) -> None:
        started.append(message.offset)
        if message.offset == 40:
            clock.now_ms += blocking_ms

    workers = workers_of(handle, clock=clock)
    client.of(workers).feed(LeaseGranted(clock.boot_ms() + 1))
    client.give(workers, *[b"k%d" % number for number in range(100)])
    await eventually(lambda: client.held == 0)
    assert started == client.handled == list(range(41))
    await workers.close()


async def test_idle_worker_wakes_alone_when_no_handler_waits():
    """The others wake when its handler waits, and run the remaining messages."""
    client, going = Client(), asyncio.Event()
    names: list[str] = []

    async def handle(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        names.append(task.get_name())
        if message.key == b"slow":
            await going.wait()

    workers = workers_of(handle, concurrency=8)
    await asyncio.sleep(0)
    for _ in range(5):
        client.give(workers, b"a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(names) == 5
    assert len(set(names)) == 1, "the worker that became idle last is the next"
    client.give(workers, b"slow", *[b"slow%d" % number for number in range(3)])
    client.give(workers, b"slow", b"b", b"c")
    await eventually(lambda: len(names) == 11)
    going.set()
    await eventually(lambda: len(names) == 12)
    await workers.close()


async def test_message_is_another_workers_when_the_one_it_woke_is_cancelled():
    idle, woken = IdleWorkers(), []

    async def wait(name: str) -> None:
        await idle.wait()
        woken.append(name)

    tasks = [asyncio.create_task(wait(name)) for name in ("first", "second")]
    await asyncio.sleep(0)
    idle.wake_one()
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert woken == ["first"]
    assert not len(idle)


async def test_message_runs_beside_a_single_one_when_its_handler_waits():
    """A lone message is registered only when another one arrives."""
    client, going = Client(), asyncio.Event()
    started: list[int] = []

    async def handle(message: Message) -> None:
        started.append(message.offset)
        if message.offset == 0:
            await going.wait()

    workers = workers_of(handle, concurrency=2)
    client.give(workers, b"a")
    await eventually(lambda: started == [0])
    await asyncio.sleep(0.01)
    client.give(workers, b"a", b"b", start=1)
    await eventually(lambda: started == [0, 2])
    assert client.handled == [2]
    going.set()
    await eventually(lambda: client.handled == [2, 0, 1])
    await workers.close()


async def test_lone_message_is_waited_for_when_its_partition_is_handed_over():
    client, going = Client(), asyncio.Event()

    async def handle(_message: Message) -> None:
        await going.wait()

    workers = workers_of(handle, concurrency=2, handover_ms=60_000)
    client.give(workers, b"a")
    await asyncio.sleep(0.01)
    ending = asyncio.create_task(client.hand_over(grace_ms=60_000))
    await asyncio.sleep(0.01)
    assert not ending.done()
    going.set()
    await ending
    assert client.handled == [0]
    await workers.close()


async def test_suspect_begins_before_what_has_arrived_of_other_partitions():
    """All other suspects wait for it, and thousands of messages of other partitions may."""
    begun: list[int] = []

    async def handle(message: Message) -> None:
        begun.append(message.partition_id)
        await asyncio.sleep(0.001)

    story = WorkerStory(handle, batched=False, concurrency=1)
    story.shell.give(*[b""] * 5_000)
    await eventually(lambda: begun)
    other = story.other_partition(suspects_upto=2)
    other.give(b"a", b"b")
    await eventually(lambda: other.ended == [0, 1])
    assert begun.count(2) == 2
    assert begun[:100].count(2) == 2
    await story.pool.close()


async def test_partitions_take_turns_when_messages_of_several_wait():
    """Otherwise the last one would wait for everything that was pulled from the others."""
    begun: list[int] = []
    story = WorkerStory(lambda message: begun.append(message.partition_id), batched=False)
    others = [story.other_partition(number) for number in (2, 3)]
    await asyncio.sleep(0)
    for shell in (story.shell, *others):
        shell.give(*[b""] * 2_000)
    await eventually(lambda: len(begun) == 6_000)
    first_turns = [partition for partition, _ in groupby(begun)][:6]
    assert first_turns[:3] == first_turns[3:]
    assert sorted(first_turns[:3]) == [1, 2, 3]
    await story.pool.close()


async def test_single_messages_that_have_arrived_of_a_partition_are_handled_in_one_turn():
    begun: list[tuple[int, int]] = []

    async def handle(message: Message) -> None:
        begun.append((message.partition_id, message.offset))

    story = WorkerStory(handle, batched=False, concurrency=1)
    other = story.other_partition()
    await asyncio.sleep(0)
    story.shell.give(b"a")
    other.give(b"b")
    story.shell.give(b"c")
    await eventually(lambda: len(begun) == 3)
    assert begun == [(1, 0), (1, 1), (2, 0)]
    await story.pool.close()
