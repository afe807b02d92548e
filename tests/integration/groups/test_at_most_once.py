"""Acks before handlers: no message is handled twice, whatever its handler, its process or its
partition does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from keylane import NACK, Admin, Consumer, ConsumerSettings, Message, Producer, Retry
from keylane.errors import ConfigError
from support.cluster import Cluster, eventually
from support.consumer_options import consumer_options
from support.server_process import ServerProcess

PROGRAM = """
import asyncio, sys
from keylane import Consumer, ConsumerSettings

async def handle(message):
    print(int(message.value), flush=True)
    await asyncio.sleep(0.02)

asyncio.run(Consumer(sys.argv[1], subject=sys.argv[2], group="g", handler=handle, ack="before", settings=ConsumerSettings(concurrency=8, ttl_ms=1_000)).run())
"""


async def fill(cluster: Cluster, subject: str, count: int, *, keys: int = 10) -> None:
    await cluster.create(subject, partitions=2)
    async with Producer(cluster.meta) as producer:
        for number in range(count):
            producer.send(subject, b"%d" % number, key=b"k%d" % (number % keys))


async def cursors(cluster: Cluster, subject: str) -> int:
    async with Admin(cluster.meta) as admin:
        described = await admin.describe_group(subject, "g")
    return sum(partition.offset or 0 for partition in described.partitions)


class Fails:
    """Notes what it gets, in groups as given; fails in every way."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    async def one(self, message: Message) -> object:
        number = int(message.value)
        self.seen.append(number)
        match number % 5:
            case 0:
                raise ValueError("bad")
            case 1:
                raise Retry("later")
            case 2:
                return NACK
            case 3:
                raise asyncio.CancelledError
        return None

    async def many(self, messages: list[Message]) -> object:
        self.seen += [int(message.value) for message in messages]
        if self.seen[-1] % 2:
            raise ValueError("bad")
        return NACK

    def block(self, message: Message) -> None:
        self.seen.append(int(message.value))
        raise ValueError("bad")


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
@pytest.mark.parametrize("how", ["one", "many", "block"])
async def test_message_whose_handler_fails_is_lost_and_told(
    shared_cluster: Cluster, how: str, strategy: str, caplog: pytest.LogCaptureFixture
):
    """Each is handed out once, in the order of its key; the log counts them."""
    subject, fails = f"before-{how}-{strategy}", Fails()
    await fill(shared_cluster, subject, 60)
    given: dict[str, object] = {
        "one": {"handler": fails.one},
        "many": {"batch_handler": fails.many, "max_records": 7},
        "block": {"handler": fails.block, "threads": 4},
    }[how]  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR, "keylane.consumer"):
        async with (
            asyncio.timeout(30),
            Consumer(
                shared_cluster.meta,
                **consumer_options(
                    subject=subject,
                    group="g",
                    ack="before",
                    settings=ConsumerSettings(consume_strategy=strategy),
                    **given,
                ),
            ),
        ):
            await eventually(lambda: len(fails.seen) >= 60)
            while await cursors(shared_cluster, subject) < 60:
                await asyncio.sleep(0.02)
    assert sorted(fails.seen) == list(range(60))
    if strategy == "exclusive":
        of_key = [number for number in fails.seen if number % 10 == 4]
        assert of_key == sorted(of_key)
    assert "already acked" in caplog.text


async def test_ack_is_durable_when_a_handler_starts(shared_cluster: Cluster):
    """The broker's cursors and ranges already have every message whose handler runs."""
    subject = "before-durable"
    await fill(shared_cluster, subject, 20, keys=20)
    running: list[int] = []
    gate = asyncio.Event()

    async def handle(message: Message) -> None:
        running.append(int(message.value))
        await gate.wait()

    async with (
        asyncio.timeout(30),
        Consumer(
            shared_cluster.meta,
            subject=subject,
            group="g",
            ack="before",
            handler=handle,
            settings=ConsumerSettings(concurrency=20),
        ) as consumer,
    ):
        await eventually(lambda: len(running) == 20)
        assert await cursors(shared_cluster, subject) == 20
        assert sum(owned.outstanding for owned in consumer.assignment) == 20, "a hand-over waits"
        gate.set()


async def test_handed_over_messages_are_handled_once_by_either_owner(shared_cluster: Cluster):
    """A graceful hand-over in the middle loses nothing and repeats nothing."""
    subject = "before-handover"
    await fill(shared_cluster, subject, 400, keys=50)
    seen: list[int] = []

    async def handle(message: Message) -> None:
        seen.append(int(message.value))
        await asyncio.sleep(0.002)

    def consumer() -> Consumer:
        return Consumer(
            shared_cluster.meta, subject=subject, group="g", ack="before", handler=handle
        )

    async with asyncio.timeout(60), consumer():
        await eventually(lambda: len(seen) > 50)
        async with consumer():
            await eventually(lambda: len(seen) > 200)
        await eventually(lambda: len(seen) >= 400)
    assert sorted(seen) == list(range(400))


async def test_killed_process_loses_at_most_what_was_in_its_handlers(shared_cluster: Cluster):
    """And the next one repeats nothing."""
    subject = "before-killed"
    await fill(shared_cluster, subject, 600, keys=100)
    first = ServerProcess(PROGRAM, [shared_cluster.meta, subject])
    with first.stdout as printed:
        before = {int(await asyncio.to_thread(printed.readline)) for _ in range(60)}
        first.kill()
        before |= {int(line) for line in await asyncio.to_thread(printed.readlines)}
    first.wait()
    seen: list[int] = []
    async with (
        asyncio.timeout(60),
        Consumer(
            shared_cluster.meta,
            subject=subject,
            group="g",
            ack="before",
            handler=lambda message: seen.append(int(message.value)),
        ),
    ):
        while await cursors(shared_cluster, subject) < 600:
            await asyncio.sleep(0.05)
        await eventually(lambda: len(seen) >= 600 - len(before) - 8)
    assert not before & set(seen)
    assert len(seen) == len(set(seen))
    assert len(before | set(seen)) >= 600 - 8


@pytest.mark.parametrize(
    "make",
    [
        lambda: Consumer("m:1", subject="s", group="g", ack="before"),
        lambda: ConsumerSettings(ack="before", on_failure="park"),
    ],
)
def test_acks_before_are_refused_where_they_cannot_work(make: Callable[[], object]):
    """A loop acks by itself, and a message that is acked is not parked."""
    with pytest.raises(ConfigError, match="before"):
        make()
