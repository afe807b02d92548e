"""Clients made before a fork, given equal generators or opened twice, against real brokers: each is
one of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.errors import GroupUnknownError, Reason
from keylane.rpc.client import MetaClient
from keylane.rpc.environment import Environment
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually
from support.forked import Child, error_of

COUNT = 400
TTL_MS = 1_500
QUICK = ConsumerSettings(ttl_ms=TTL_MS)


async def send(producer: Producer, subject: str, name: str) -> int:
    """Open the producer and send `COUNT` messages of a key of its own; how many were told to be
    duplicates.
    """
    async with producer:
        futures = [
            producer.send(subject, b"%s %d" % (name.encode(), number), key=name.encode())
            for number in range(COUNT)
        ]
        return sum([(await future).duplicate for future in futures])


def run_send(producer: Producer, subject: str, name: str) -> int:
    return asyncio.run(send(producer, subject, name))


async def assert_stored(cluster: Cluster, subject: str, names: list[str]) -> None:
    """Every message of each, once, in its order."""
    sent = {
        name.encode(): [b"%s %d" % (name.encode(), number) for number in range(COUNT)]
        for name in names
    }
    await cluster.check_history(subject, sent)


def created(cluster: Cluster, subject: str, *, partitions: int = 2) -> None:
    asyncio.run(cluster.create(subject, partitions=partitions))


@pytest.mark.parametrize("rng", [None, random.Random(7)], ids=["system", "seeded"])
def test_producer_made_before_a_fork_stores_what_each_process_sends(
    shared_cluster: Cluster, rng: random.Random | None
):
    """As under gunicorn --preload: the object is copied into every worker, and each of them opens
    it.
    """
    subject = f"preloaded-{'seeded' if rng else 'system'}"
    created(shared_cluster, subject, partitions=1)
    producer = Producer(shared_cluster.meta, _environment=Environment(rng=rng))
    workers = [
        Child(lambda name=name: run_send(producer, subject, name)) for name in ("one", "two")
    ]
    assert [worker.result() for worker in workers] == [0, 0]
    assert run_send(producer, subject, "parent") == 0
    asyncio.run(assert_stored(shared_cluster, subject, ["one", "two", "parent"]))


def test_producer_that_a_process_of_multiprocessing_gets_stores_everything(
    shared_cluster: Cluster,
):
    """With the context "fork" arguments are not pickled: the child has the parent's object."""
    created(shared_cluster, "handed-on")
    producer = Producer(shared_cluster.meta)
    context = multiprocessing.get_context("fork")
    names = ["one", "two", "three"]
    processes = [
        context.Process(target=run_send, args=(producer, "handed-on", name)) for name in names
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    asyncio.run(assert_stored(shared_cluster, "handed-on", names))


async def test_producers_with_equal_generators_store_everything(shared_cluster: Cluster):
    """A generator that is seeded says where messages without a key go, and not who sends them."""
    await shared_cluster.create("seeded", partitions=2)
    producers = {
        name: Producer(shared_cluster.meta, _environment=Environment(rng=random.Random(7)))
        for name in ("one", "two")
    }
    failed = await asyncio.gather(
        *(send(producer, "seeded", name) for name, producer in producers.items())
    )
    assert failed == [0, 0]
    await assert_stored(shared_cluster, "seeded", ["one", "two"])


async def test_producer_stores_everything_when_it_is_opened_again(shared_cluster: Cluster):
    """Each opening is a producer of its own to the brokers."""
    await shared_cluster.create("reopened", partitions=1)
    producer = Producer(shared_cluster.meta)
    names = ["first", "second", "third"]
    for name in names:
        assert await send(producer, "reopened", name) == 0
        assert producer.stats.acked == COUNT
    await assert_stored(shared_cluster, "reopened", names)


def test_forked_producer_sends_nothing_when_it_was_open(shared_cluster: Cluster):
    """The child's calls are refused, and the parent's connections are as they were."""
    created(shared_cluster, "open-fork", partitions=1)
    loop = asyncio.new_event_loop()
    producer = Producer(shared_cluster.meta)

    async def send_some(start: int, end: int) -> None:
        for number in range(start, end):
            await producer.send("open-fork", b"%d" % number, key=b"k")

    async def send_here() -> None:
        producer.send("open-fork", b"child", key=b"k")

    def child() -> list[str]:
        calls = (send_here, producer.flush)
        errors = [error_of(lambda call=call: asyncio.run(call())) for call in calls]
        asyncio.run(producer.close())
        return errors

    try:
        loop.run_until_complete(producer.__aenter__())
        loop.run_until_complete(send_some(0, 20))
        assert Child(child).result() == ["FORKED", "FORKED"]
        loop.run_until_complete(send_some(20, 40))
        loop.run_until_complete(producer.close())
        sent = {b"k": [b"%d" % number for number in range(40)]}
        loop.run_until_complete(shared_cluster.check_history("open-fork", sent))
    finally:
        loop.close()


class Handled:
    """What several processes have handled, each in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._end = folder / "end"

    def note(self, name: str, message: Message) -> None:
        with (self._folder / f"{name}.txt").open("ab") as file:
            file.write(message.value + b"\n")

    def of(self, name: str) -> list[bytes]:
        path = self._folder / f"{name}.txt"
        return path.read_bytes().split() if path.exists() else []

    async def until_end(self) -> None:
        while not self._end.exists():
            await asyncio.sleep(0.02)

    def end(self) -> None:
        self._end.touch()

    async def meet(self, name: str, names: Sequence[str]) -> None:
        """Wait until the processes of all `names` are here: one that left first would leave its
        partitions to others.
        """
        (self._folder / f"{name}.here").touch()
        while not all((self._folder / f"{other}.here").exists() for other in names):
            await asyncio.sleep(0.02)


async def filled(cluster: Cluster, subject: str, count: int, *, partitions: int = 4) -> set[bytes]:
    await cluster.create(subject, partitions=partitions)
    values = [b"%d" % number for number in range(count)]
    async with Producer(cluster.meta) as producer:
        await producer.send_all(subject, ((b"k%s" % value[-2:], value) for value in values))
    return set(values)


async def holders(cluster: Cluster, subject: str, group: str) -> set[str]:
    """The sessions that hold a partition."""
    network = HttpNetwork()
    try:
        view = await MetaClient(network, [cluster.meta]).call(
            endpoints.GROUP, subject=subject, group=group
        )
        return {owner.session for owner in view.owners if owner.session}
    except GroupUnknownError:  # no consumer has joined yet
        return set()
    finally:
        await network.close()


def call_with_future(condition: Callable[[], Any], *, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_consumer_made_before_a_fork_has_a_session_in_each_process(
    shared_cluster: Cluster, tmp_path: Path
):
    """Each process is a member of the group: partitions are shared out, and each message is handled
    by one of them.
    """
    handled = Handled(tmp_path)
    asyncio.run(shared_cluster.create("preloaded-consumer", partitions=4))
    name, names = "parent", ("one", "two")

    def handle(message: Message) -> None:
        handled.note(name, message)

    consumer = Consumer(
        shared_cluster.meta,
        subject="preloaded-consumer",
        group="g",
        handler=handle,
        settings=QUICK,
        _environment=Environment(rng=random.Random(7)),
    )

    async def consume() -> int:
        async with consumer:
            await handled.until_end()
            count = len(consumer.assignment)
            await handled.meet(name, names)
            return count

    def child(own: str) -> int:
        nonlocal name
        name = own
        return asyncio.run(consume())

    workers = [Child(lambda own=own: child(own)) for own in names]
    call_with_future(
        lambda: len(asyncio.run(holders(shared_cluster, "preloaded-consumer", "g"))) == 2
    )
    values = asyncio.run(filled(shared_cluster, "preloaded-consumer", 600))
    call_with_future(lambda: sum(len(handled.of(own)) for own in names) >= len(values))
    handled.end()
    assert [worker.result() for worker in workers] == [2, 2]
    first, second = (handled.of(own) for own in names)
    assert sorted([*first, *second]) == sorted(values)
    assert first
    assert second


def test_forked_consumer_handles_nothing_when_it_was_open(shared_cluster: Cluster):
    """The child's calls are refused, it has no partition, and the parent handles on under its
    lease.
    """
    loop = asyncio.new_event_loop()
    seen: list[bytes] = []
    sent = loop.run_until_complete(filled(shared_cluster, "open-consumer", 100))
    consumer = Consumer(
        shared_cluster.meta,
        subject="open-consumer",
        group="g",
        handler=lambda message: seen.append(message.value),
        settings=QUICK,
    )

    def child() -> list[Any]:
        calls = (consumer.wait, consumer.suspend, consumer.resume, consumer.__anext__)
        errors: list[Any] = [error_of(lambda call=call: asyncio.run(call())) for call in calls]
        errors.append(error_of(lambda: asyncio.run(consumer.__aenter__())))
        asyncio.run(consumer.close())
        return [*errors, len(consumer.assignment)]

    async def handle_on() -> None:
        await eventually(lambda: len(seen) >= len(sent))
        tokens = {assignment.fencing_token for assignment in consumer.assignment}
        await asyncio.sleep(2 * TTL_MS / 1000)
        assert {assignment.fencing_token for assignment in consumer.assignment} == tokens
        async with Producer(shared_cluster.meta) as producer:
            await producer.send("open-consumer", b"later", key=b"k")
        await eventually(lambda: b"later" in seen)
        await consumer.close()

    try:
        loop.run_until_complete(consumer.__aenter__())
        assert Child(child).result() == [*["FORKED"] * 5, 0]
        loop.run_until_complete(handle_on())
    finally:
        loop.close()
    assert sorted(seen) == sorted([*sent, b"later"])


async def test_consumer_continues_when_it_is_opened_again(shared_cluster: Cluster):
    """With a handler and without: the second opening gets what came since, under a session of its
    own.
    """
    await shared_cluster.create("again", partitions=2)
    seen: list[bytes] = []
    handling = Consumer(
        shared_cluster.meta,
        subject="again",
        group="handled",
        handler=lambda message: seen.append(message.value),
        settings=QUICK,
    )
    iterating = Consumer(shared_cluster.meta, subject="again", group="iterated", settings=QUICK)
    sessions: list[set[str]] = []
    async with Producer(shared_cluster.meta) as producer:
        for number in range(3):
            for key in range(10):
                await producer.send("again", b"%d.%d" % (number, key), key=b"%d" % key)
            async with handling:
                await eventually(lambda upto=10 * (number + 1): len(seen) == upto)
                sessions.append(await holders(shared_cluster, "again", "handled"))
            async with iterating:
                values = []
                async for message in iterating:
                    values.append(message.value)
                    await message.ack()
                    if len(values) == 10:
                        break
            assert sorted(values) == [b"%d.%d" % (number, key) for key in range(10)]
            assert handling.assignment == iterating.assignment == []
    assert len(set(seen)) == len(seen) == 30
    assert all(len(opening) == 1 for opening in sessions)
    assert len(set().union(*sessions)) == 3


async def test_open_consumer_is_not_opened_again(shared_cluster: Cluster):
    """It is refused, and the client works on."""
    sent = await filled(shared_cluster, "open-twice", 50)
    seen: list[bytes] = []
    consumer = Consumer(
        shared_cluster.meta,
        subject="open-twice",
        group="g",
        handler=lambda message: seen.append(message.value),
    )
    async with consumer:
        opening = asyncio.gather(consumer.__aenter__(), return_exceptions=True)
        assert [error.reason for error in await opening] == [Reason.ALREADY_OPEN]
        await eventually(lambda: set(seen) == sent)


async def test_consumer_used_in_another_event_loop_is_refused(shared_cluster: Cluster):
    """Waiting, iterating, acking and closing in a thread with a loop of its own are told at
    once.
    """
    await filled(shared_cluster, "elsewhere", 4, partitions=1)
    consumer = Consumer(shared_cluster.meta, subject="elsewhere", group="g", settings=QUICK)
    async with consumer:
        message = await anext(consumer)
        calls = (consumer.wait, consumer.__anext__, message.ack, consumer.suspend, consumer.close)
        errors = [
            await asyncio.to_thread(lambda call=call: error_of(lambda: asyncio.run(call())))
            for call in calls
        ]
        assert errors == ["OTHER_LOOP"] * 5
        await message.ack()
        assert (await anext(consumer)).offset == message.offset + 1
