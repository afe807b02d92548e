"""A program that ends without closing its consumer: one line says so, and nothing else is printed."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from keylane import Consumer, Message, Producer
from support.cluster import Cluster

PROGRAM = """
import asyncio, sys
from keylane import Consumer

META, GROUP, END = sys.argv[1:]

async def main():
    consumer = Consumer(META, subject="unclosed", group=GROUP)
    await consumer.__aenter__()
    while messages := await consumer.getmany(timeout_ms=500):
        await consumer.ack(messages)

async def begin():
    global task
    task = asyncio.create_task(main())
    await asyncio.sleep(1.5)

if END == "run":
    asyncio.run(main())
elif END == "run in a task":
    asyncio.run(begin())
else:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
"""


@pytest.mark.parametrize("end", ["run", "run in a task", "closed loop"])
def test_program_prints_one_line_when_it_never_closes_its_consumer(
    shared_cluster: Cluster, end: str
):
    """Its pulls wait at the brokers when its event loop ends, and none begins again."""
    asyncio.run(send(shared_cluster))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, shared_cluster.meta, end.replace(" ", "-"), end],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (line,) = (ended.stdout + ended.stderr).splitlines()
    assert line.endswith("was never closed: use `async with`, or await its close()")


def test_consumer_closes_when_its_task_ends_with_the_event_loop(shared_cluster: Cluster):
    """The messages that its block acked while the event loop ended are not delivered again."""
    asyncio.run(send(shared_cluster))

    async def consume() -> None:
        consumer = Consumer(shared_cluster.meta, subject="unclosed", group="ending")
        async with consumer:
            messages = await consumer.getmany(timeout_ms=30_000)
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.2)
                await consumer.ack(messages)
                acked.extend(map(place, messages))

    async def begin() -> None:
        tasks.append(asyncio.create_task(consume()))
        await asyncio.sleep(2)

    async def rest() -> list[tuple[int, int]]:
        async with Consumer(shared_cluster.meta, subject="unclosed", group="ending") as consumer:
            return list(map(place, await consumer.getmany(timeout_ms=5_000)))

    acked: list[tuple[int, int]] = []
    tasks: list[asyncio.Task[None]] = []
    asyncio.run(begin())
    assert acked
    assert not set(acked) & set(asyncio.run(rest()))


async def send(cluster: Cluster) -> None:
    await cluster.create("unclosed", partitions=2)
    async with Producer(cluster.meta) as producer:
        for number in range(200):
            producer.send("unclosed", b"%d" % number, key=b"%d" % (number % 20))
        await producer.flush()


def place(message: Message) -> tuple[int, int]:
    return message.partition_id, message.offset
