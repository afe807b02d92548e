"""The order of a key that a loop parks, while batches that were pulled before wait unopened."""

from __future__ import annotations

import asyncio

import pytest

from keylane import Admin, Consumer, Message, Producer
from keylane.testing import VirtualCluster, run

KEPT = [b"a%d" % number for number in range(25)]


async def send_pairs(producer: Producer, numbers: range) -> None:
    """Each in a batch of its own, so that a consumer has pulled batches that it has not opened."""
    for number in numbers:
        await producer.send("orders", b"a%d" % number, key=b"a")
        await producer.send("orders", b"b%d" % number, key=b"b")


class Loop:
    """Takes messages one at a time; gives the first one back, once."""

    def __init__(self, consumer: Consumer, manner: str) -> None:
        self._consumer = consumer
        self._manner = manner
        self._fails = True
        self.handled: list[bytes] = []

    async def _next(self) -> list[Message]:
        if self._manner == "iteration":
            return [await anext(aiter(self._consumer))]
        return await self._consumer.getmany(max_records=1, timeout_ms=20_000)

    async def step(self, count: int) -> None:
        """Handle `count` messages."""
        for _ in range(count):
            for message in await self._next():
                if message.value == b"a0" and self._fails:
                    self._fails = False
                    await message.nack()
                else:
                    self.handled.append(message.value)
                    await message.ack()

    def of_key(self, start: bytes) -> list[bytes]:
        """What was handled of a key."""
        return [value for value in self.handled if value.startswith(start)]


@pytest.mark.parametrize("manner", ["iteration", "getmany"])
def test_redriven_key_is_handled_before_batches_that_were_pulled_earlier(manner: str):
    async def story(cluster: VirtualCluster) -> list[bytes]:
        await cluster.create_subject("orders", partitions=1)
        async with (
            Producer(cluster.address) as producer,
            Admin(cluster.address) as admin,
            Consumer(
                cluster.address, subject="orders", group="g", on_failure="park", tries_max=1
            ) as consumer,
        ):
            loop = Loop(consumer, manner)
            await send_pairs(producer, range(20))
            await asyncio.sleep(2)
            await loop.step(2)
            await asyncio.sleep(2)
            await send_pairs(producer, range(20, 25))
            await asyncio.sleep(5)  # pulled while older batches wait
            await admin.redrive("orders", "g", key=b"a")
            await asyncio.sleep(5)
            while len(loop.handled) < 50:
                await asyncio.wait_for(loop.step(1), 60)
            return loop.of_key(b"a")

    assert run(story) == KEPT


@pytest.mark.parametrize("manner", ["iteration", "getmany"])
def test_parked_key_stays_parked_when_the_policy_changes_while_batches_wait(manner: str):
    async def story(cluster: VirtualCluster) -> list[bytes]:
        await cluster.create_subject("orders", partitions=1)
        async with (
            Producer(cluster.address) as producer,
            Admin(cluster.address) as admin,
            Consumer(
                cluster.address, subject="orders", group="g", on_failure="park", tries_max=1
            ) as consumer,
        ):
            loop = Loop(consumer, manner)
            await send_pairs(producer, range(20))
            await asyncio.sleep(2)
            await loop.step(2)
            await cluster.until(lambda: cluster.parked("orders", "g"))
            await admin.set_group("orders", "g", on_failure="block")
            await asyncio.sleep(20)
            while len(loop.of_key(b"b")) < 20:
                await asyncio.wait_for(loop.step(1), 60)
            await asyncio.sleep(2)  # parks are sent together
            (parked,) = await cluster.parked("orders", "g")
            assert parked.messages == 20
            return loop.of_key(b"a")

    assert run(story) == []


@pytest.mark.parametrize("strict", [True, False])
def test_loop_gets_later_messages_again_when_one_of_many_is_a_dead_letter_or_is_retried(
    strict: bool,
):
    """Also a program that passes over them, as they are given back with the first one."""

    async def story(cluster: VirtualCluster) -> list[bytes]:
        strategy = "strict" if strict else "best_tried"
        await cluster.create_subject("orders", partitions=1, order_strategy=strategy)
        policy = {"on_failure": "dead", "tries_max": 1} if strict else {}
        async with (
            Producer(cluster.address) as producer,
            Consumer(cluster.address, subject="orders", group="g", **policy) as consumer,
        ):
            for number in range(4):
                await producer.send("orders", b"a%d" % number, key=b"a")
            await asyncio.sleep(2)
            first, *_later = await consumer.getmany(timeout_ms=20_000)
            await first.nack()
            handled: list[bytes] = []
            while len(handled) < 3:
                messages = await consumer.getmany(timeout_ms=1_000)
                await consumer.ack(messages)
                handled += [message.value for message in messages]
            return handled

    assert run(story) == [b"a1", b"a2", b"a3"]


@pytest.mark.parametrize("ends", ["ack", "nack"])
def test_message_in_hand_holds_its_key_until_it_is_acked_or_given_back(ends: str):
    """On a best_tried subject too, whose failed messages let later ones of their key go on."""

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=1, order_strategy="best_tried")
        async with Producer(cluster.address) as producer:
            for value in (b"a0", b"a1"):
                await producer.send("orders", value, key=b"a")
            await producer.send("orders", b"b0", key=b"b")
        async with Consumer(cluster.address, subject="orders", group="g") as consumer:
            first = await anext(aiter(consumer))
            other = await anext(aiter(consumer))
            assert (first.value, other.value) == (b"a0", b"b0")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(60):
                    await anext(aiter(consumer))
            await (first.ack() if ends == "ack" else first.nack())
            assert (await anext(aiter(consumer))).value == b"a1"

    run(story, seed=7)
