"""`ack="each"`: the ack of a message is durable before the next one of its key starts."""

from __future__ import annotations

import asyncio

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.protocol.errors import ConfigError
from support.cluster import Cluster, eventually
from support.server_process import ServerProcess

KEYS = 4
PROGRAM = """
import asyncio, sys
from keylane import Consumer, ConsumerSettings

async def handle(message):
    print(message.key.decode(), message.value.decode(), flush=True)

asyncio.run(Consumer(
    sys.argv[1], subject=sys.argv[2], group="g", handler=handle, ack=sys.argv[3],
    settings=ConsumerSettings(concurrency=KEYS, ttl_ms=1_000)
).run())
""".replace("KEYS", str(KEYS))


async def fill(cluster: Cluster, subject: str, count: int) -> None:
    await cluster.create(subject, partitions=1)
    async with Producer(cluster.meta) as producer:
        for number in range(count):
            producer.send(subject, b"%d" % number, key=b"key-%d" % (number % KEYS))


def lines_of_killed(cluster: Cluster, subject: str, mode: str, count: int) -> list[str]:
    """What a consumer's process printed before it was killed; at least `count` lines."""
    process = ServerProcess(PROGRAM, [cluster.meta, subject, mode])
    with process.stdout as printed:
        lines = [printed.readline() for _ in range(count)]
        process.kill()
        rest = printed.read()
    process.wait()
    return [line.strip() for line in [*lines, *rest.splitlines()] if len(line.split()) == 2]


async def test_killed_consumer_had_each_message_acked_before_the_next_of_its_key(
    shared_cluster: Cluster,
):
    """At most: that whose ack was not durable. The others are never handled twice."""
    await fill(shared_cluster, "each-killed", 400)
    before = await asyncio.to_thread(lines_of_killed, shared_cluster, "each-killed", "each", 120)
    seen: list[tuple[str, str]] = [tuple(line.split()) for line in before]  # type: ignore[misc]
    again: list[tuple[str, str]] = []

    async def handle(message: Message) -> None:
        again.append((message.key.decode(), message.value.decode()))

    async with Consumer(
        shared_cluster.meta,
        subject="each-killed",
        group="g",
        handler=handle,
        settings=ConsumerSettings(ttl_ms=1_000),
    ):
        await eventually(lambda: len({*seen, *again}) == 400)
    assert len(before) < 400
    for key in {key for key, _ in seen}:
        last = max(int(value) for each, value in seen if each == key)
        first = min(int(value) for each, value in again if each == key)
        assert first >= last, "the one before was acked"


async def test_ack_of_an_iteration_is_durable_when_it_returns(shared_cluster: Cluster):
    """The broker's cursor has moved by then."""
    await fill(shared_cluster, "each-iterated", 5)
    async with (
        Consumer(shared_cluster.meta, subject="each-iterated", group="g", ack="each") as consumer,
        Admin(shared_cluster.meta) as admin,
    ):
        for lag in (4, 3, 2, 1, 0):
            await (await anext(consumer)).ack()
            assert await admin.lag("each-iterated", "g") == lag


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
async def test_messages_are_handled_in_order_when_each_is_acked(
    shared_cluster: Cluster, strategy: str
):
    """Also those that are tried again; a hand-over waits for no ack."""
    subject = f"each-{strategy}"
    await fill(shared_cluster, subject, 200)
    handled: list[tuple[bytes, int]] = []

    async def handle(message: Message) -> None:
        if message.offset % 50 == 0 and message.attempt == 1:
            raise ValueError("once")
        handled.append((message.key, message.offset))

    consumer = Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        handler=handle,
        ack="each",
        settings=ConsumerSettings(consume_strategy=strategy),
    )
    async with consumer, Admin(shared_cluster.meta) as admin:
        await eventually(lambda: len(handled) == 200)
        async with asyncio.timeout(20):
            while await admin.lag(subject, "g"):
                await asyncio.sleep(0.05)
    if strategy == "exclusive":
        for key in {key for key, _ in handled}:
            offsets = [offset for each, offset in handled if each == key]
            assert offsets == sorted(offsets)


def test_mode_is_refused_when_there_is_no_such_one():
    """The text names those that there are."""
    with pytest.raises(ConfigError, match="ack must be one of lingering, each, before, not 'all'"):
        Consumer("127.0.0.1:7000", subject="s", group="g", ack="all")
