"""Draws `docs/pictures/life.svg` from a run in virtual time: the picture that `keylane subject
lineage` draws. A subject is resized, moved, evacuated and resized again while messages flow; one
consumer group keeps up, and another one does not.

    .venv/bin/python docs/pictures/life.py
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.console.lineage import draw_lineage, fetch_lineage
from keylane.testing import VirtualCluster, run

SUBJECT = "orders"
CUSTOMERS = 500
MINUTE_S = 60
MOVED = 6
"""The id of a partition that the resize opens on another broker group."""
SEARCH_S = 2.0
"""How long a handler of the slower group takes."""


async def run_story(cluster: VirtualCluster) -> str:
    """Run the life of a subject, and return its picture."""
    async with Admin(cluster.address) as admin, Producer(cluster.address) as producer:
        await admin.create_subject(SUBJECT, partitions=4)
        running = [
            asyncio.create_task(_consume(cluster, "billing", 0.01)),
            asyncio.create_task(_consume(cluster, "search", SEARCH_S)),
            asyncio.create_task(_produce(producer)),
        ]
        await asyncio.sleep(3 * MINUTE_S)
        await admin.wait(await admin.resize(SUBJECT, 6))
        await asyncio.sleep(10 * MINUTE_S)
        await admin.wait(await admin.move([MOVED], to="g0"))
        await asyncio.sleep(2 * MINUTE_S)
        for operation in (await admin.evacuate("g1")).operations:
            await admin.wait(operation)
        await asyncio.sleep(4 * MINUTE_S)
        await admin.wait(await admin.resize(SUBJECT, 3))
        await asyncio.sleep(5 * MINUTE_S)
        picture = draw_lineage(await fetch_lineage(admin, SUBJECT))
        for task in running:
            task.cancel()
    return picture


async def _produce(producer: Producer) -> None:
    number = 0
    while True:
        number += 1
        key = f"customer-{number * 7 % CUSTOMERS}"
        await producer.send(SUBJECT, b"%d" % number, key=key)
        await asyncio.sleep(1)


async def _consume(cluster: VirtualCluster, group: str, handling_s: float) -> None:
    async def handle(_message: Message) -> None:
        await asyncio.sleep(handling_s)

    settings = ConsumerSettings(concurrency=1)
    consumer = Consumer(
        cluster.address, subject=SUBJECT, group=group, handler=handle, settings=settings
    )
    await consumer.run()


def main() -> None:
    """Run the story and write the picture."""
    picture = run(run_story, brokers=3)
    Path(__file__).with_name("life.svg").write_text(picture)
    sys.stderr.write(f"life.svg: {len(picture)} characters\n")


if __name__ == "__main__":
    main()
