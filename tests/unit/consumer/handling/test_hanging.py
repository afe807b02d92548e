"""Handlers that do not return, and messages that a program holds, are reported to brokers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

from keylane import Message
from keylane.consumer.handling.batch_workers import BatchWorkers
from keylane.consumer.handling.failing import FailureRules
from keylane.consumer.handling.in_hand import UnackedMessages
from keylane.consumer.handling.taken import UnackedMessageTracker
from keylane.consumer.handling.workers import Workers
from keylane.protocol.backoff import Backoff
from keylane.protocol.clock import Clock
from keylane.protocol.parked import HANGS_MS
from support.handling import Client, in_virtual_time, virtual_loop, workers_of

HUNG = "its handler has not returned"


async def watch(workers: Workers) -> None:
    while True:
        await asyncio.sleep(1)
        workers.check_long_running()


def test_handler_that_does_not_return_is_told_at_every_look():
    """After ten seconds, until it returns; a quick handler beside it is never reported."""
    loop, machine = virtual_loop()
    client = Client()

    async def handle(message: Message) -> None:
        await asyncio.sleep(14.5 if message.key == b"slow" else 1)

    async def story() -> None:
        workers = workers_of(handle, concurrency=2, clock=machine)
        watching = asyncio.create_task(watch(workers))
        client.give(workers, b"slow", *[b"quick"] * 30)
        while len(client.handled) < 31:
            await asyncio.sleep(1)
        watching.cancel()
        await workers.close()

    in_virtual_time(story(), loop)
    assert client.hanging
    assert {told[:3] for told in client.hanging} == {(0, HUNG, 0)}
    times = [running_ms for *_, running_ms in client.hanging]
    assert HANGS_MS <= times[0] < HANGS_MS + 1_100
    assert times == sorted(times)
    assert 3 <= len(times) <= 5


def test_hanging_second_try_counts_the_failed_one_before():
    loop, machine = virtual_loop()
    client = Client()

    async def handle(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError
        await asyncio.sleep(12)

    async def story() -> None:
        workers = workers_of(handle, clock=machine)
        watching = asyncio.create_task(watch(workers))
        client.give(workers, b"k")
        while not client.handled:
            await asyncio.sleep(1)
        watching.cancel()
        await workers.close()

    in_virtual_time(story(), loop)
    assert {told[:3] for told in client.hanging} == {(0, HUNG, 1)}


def batch_workers(handler: object, clock: Clock) -> BatchWorkers:
    return BatchWorkers(
        handler,  # type: ignore[arg-type]
        max_records=8,
        max_wait_ms=0,
        concurrency=1,
        handover_ms=0,
        backoff=Backoff(first_ms=1, max_ms=1),
        clock=clock,
        rng=random.Random(1),
        on_crash=[].append,
    )


def test_batch_that_hangs_is_told_by_its_first_message():
    loop, machine = virtual_loop()
    client = Client()

    async def handle(_batch: list[Message]) -> None:
        await asyncio.sleep(12)

    async def story() -> None:
        workers = batch_workers(handle, machine)
        watching = asyncio.create_task(watch(workers))
        client.give(workers, b"a", b"b", b"c", start=5)
        while not client.handled:
            await asyncio.sleep(1)
        watching.cancel()
        await workers.close()

    in_virtual_time(story(), loop)
    assert {told[:3] for told in client.hanging} == {
        (5, "the handler of its batch of 3 messages has not returned", 0)
    }


class Hand(UnackedMessages):
    """The messages in hand."""

    def __init__(self, *messages: Message) -> None:
        super().__init__(ordered=True)
        self.held = list(messages)

    def messages(self) -> Iterator[Message]:
        return iter(self.held)


def told(client: Client) -> list[tuple[int, int]]:
    taken, client.hanging = client.hanging, []
    return [(offset, running_ms) for offset, _, _, running_ms in taken]


def test_message_that_a_loop_holds_is_told_until_it_is_acked():
    """Of each partition, the message that the program has held longest is reported."""
    client, held, failing = Client(), UnackedMessageTracker(), FailureRules()
    first, second = client.messages(b"a", b"b")
    hand = Hand(first, second)
    held.check_long_running(None, hand, failing, 0)
    held.check_long_running(None, hand, failing, HANGS_MS - 1)
    assert told(client) == []
    held.check_long_running(None, hand, failing, HANGS_MS)
    held.check_long_running(None, hand, failing, HANGS_MS + 1_000)
    assert told(client) == [(0, HANGS_MS), (0, HANGS_MS + 1_000)]
    hand.held = [second]
    held.check_long_running(None, hand, failing, HANGS_MS + 2_000)
    assert told(client) == []
    held.check_long_running(None, hand, failing, 2 * HANGS_MS + 2_000)
    assert told(client) == [(1, HANGS_MS)]


def test_message_whose_loop_body_runs_is_told_unless_it_is_acked():
    """Also a message without a key, which no other message waits for."""
    client, held, failing = Client(), UnackedMessageTracker(), FailureRules()
    (current,) = client.messages(b"")
    held.check_long_running(current, Hand(), failing, 0)
    held.check_long_running(current, Hand(), failing, HANGS_MS)
    assert told(client) == [(0, HANGS_MS)]
    client.handled.append(0)
    held.check_long_running(current, Hand(), failing, HANGS_MS + 1_000)
    assert told(client) == []


def test_message_given_back_and_taken_again_begins_anew():
    client, held, failing = Client(), UnackedMessageTracker(), FailureRules()
    (message,) = client.messages(b"a")
    held.check_long_running(message, Hand(message), failing, 0)
    message.attempt = 2
    held.check_long_running(message, Hand(message), failing, HANGS_MS)
    assert told(client) == []


def test_each_partition_is_told_of():
    first, second = Client(1), Client(2)
    held, failing = UnackedMessageTracker(), FailureRules()
    hand = Hand(*first.messages(b"a", b"b"), *second.messages(b"c"))
    held.check_long_running(None, hand, failing, 0)
    held.check_long_running(None, hand, failing, HANGS_MS)
    assert told(first) == told(second) == [(0, HANGS_MS)]
