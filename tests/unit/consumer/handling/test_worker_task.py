"""What a worker notes of messages that it handles one after another, while nothing else runs."""

from __future__ import annotations

import asyncio

import pytest

from keylane.consumer.handling.workers import MESSAGES_PER_TURN
from keylane.protocol.message import Message
from support.cluster import eventually
from support.handling import Client, workers_of


async def test_messages_before_one_that_waits_are_told_at_once():
    """Their acks do not wait for a handler that takes long; the messages behind it run beside it, but for its key."""
    client, going = Client(), asyncio.Event()
    begun: list[int] = []

    async def handle(message: Message) -> None:
        begun.append(message.offset)
        if message.offset == 2:
            await going.wait()

    workers = workers_of(handle, concurrency=2)
    client.give(workers, b"a", b"b", b"c", b"c", b"d")
    await eventually(lambda: begun == [0, 1, 2, 4])
    await eventually(lambda: client.in_flight.count == 2)
    assert client.handled == [0, 1, 4]
    going.set()
    await eventually(lambda: client.handled == [0, 1, 4, 2, 3])
    assert client.in_flight.count == 0
    await workers.close()


@pytest.mark.parametrize("count", [1, MESSAGES_PER_TURN, 3 * MESSAGES_PER_TURN + 1])
async def test_messages_of_several_turns_are_each_told_once(count: int):
    """The pauses between turns lose and repeat nothing."""
    client = Client()

    async def handle(_message: Message) -> None:
        return None

    workers = workers_of(handle, concurrency=4)
    client.give(workers, *[b"k"] * count)
    await eventually(lambda: client.in_flight.count == 0)
    assert client.handled == list(range(count))
    await workers.close()


async def test_failed_message_blocks_its_key_and_those_before_it_are_told():
    """Also where it is the first message of a turn; its next try, and the messages of another client, come in order."""
    client, other = Client(1), Client(2)
    tried: list[tuple[int, int]] = []

    async def handle(message: Message) -> None:
        tried.append((message.partition_id, message.offset))
        if tried.count((1, 1)) < 3 and (message.partition_id, message.offset) == (1, 1):
            raise ValueError("not yet")

    workers = workers_of(handle)
    client.give(workers, b"a", b"a", b"a", b"b")
    other.give(workers, b"a", b"c")
    await eventually(lambda: client.in_flight.count + other.in_flight.count == 0)
    assert sorted(client.handled) == [0, 1, 2, 3]
    assert client.handled.index(1) < client.handled.index(2)
    assert other.handled == [1, 0]
    await workers.close()


async def test_handler_that_pauses_its_partition_loses_no_message():
    """The queue that the worker takes from is another one afterwards."""
    client, other = Client(1), Client(2)

    async def handle(message: Message) -> None:
        if message.partition_id == 1 and message.offset == 1:
            workers.pause(1)
            await asyncio.sleep(0)

    workers = workers_of(handle)
    client.give(workers, b"a", b"b", b"c")
    other.give(workers, b"d", b"e")
    await eventually(lambda: other.handled == [0, 1])
    assert client.handled == [0, 1]
    workers.resume(1)
    await eventually(lambda: client.handled == [0, 1, 2])
    assert client.in_flight.count == other.in_flight.count == 0
    await workers.close()


async def test_lease_that_ends_during_a_turn_starts_no_further_handler():
    """The clock is read before each handler; what was handled before is told."""
    client = Client()

    async def handle(message: Message) -> None:
        if message.offset == 1:
            client.lose()

    workers = workers_of(handle)
    client.give(workers, b"a", b"b", b"a", b"c")
    await eventually(lambda: client.in_flight.count == 0)
    assert client.handled == [0, 1]
    await workers.close()
