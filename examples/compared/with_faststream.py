"""The service with Kafka and FastStream, and by_hand.py.

python by_hand.py tables
python by_hand.py place < orders.jsonl
python with_faststream.py relay
python with_faststream.py work
"""

import asyncio
import itertools
import json
import os
import sys

from faststream import AckPolicy, FastStream
from faststream.kafka import KafkaBroker
from sqlalchemy.ext.asyncio import create_async_engine

import by_hand
from shop import DATABASE_URL, Order, bill

KAFKA = os.environ.get("KAFKA", "127.0.0.1:9092")

engine = create_async_engine(DATABASE_URL)
broker = KafkaBroker(KAFKA, acks="all", enable_idempotence=True)


async def relay() -> None:
    """Send what is in the outbox. Events are sent again if the relay dies before its commit."""
    async with broker:
        while True:
            async with engine.begin() as connection:
                events = await connection.run_sync(by_hand.oldest_events)
                for row in events:
                    order = json.loads(row.event)
                    await broker.publish(order, "orders", key=row.customer.encode())
                await connection.run_sync(by_hand.delete_events, events)
            if not events:
                await asyncio.sleep(0.1)


async def handle(order: Order) -> None:
    failure = ""
    for attempt in itertools.count():
        try:
            async with engine.begin() as connection:
                if attempt < by_hand.TRIES:
                    await connection.run_sync(by_hand.handle_once, order, bill)
                else:
                    await connection.run_sync(by_hand.park, order, failure)
            return
        except Exception as error:  # noqa: BLE001  any failure is a try
            failure = repr(error)
            await asyncio.sleep(min(0.1 * 2**attempt, 10))


async def work() -> None:
    # Each of the two workers of a process takes one message at a time. All keys of a partition
    # wait while one of them is tried again.
    broker.subscriber(
        "orders",
        group_id="billing",
        auto_offset_reset="earliest",
        ack_policy=AckPolicy.NACK_ON_ERROR,
        max_workers=2,
        session_timeout_ms=10_000,
    )(handle)
    await FastStream(broker).run()


asyncio.run({"relay": relay, "work": work}[sys.argv[1]]())
