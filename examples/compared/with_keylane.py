"""The service with keylane.

python with_keylane.py tables
python with_keylane.py place < orders.jsonl
python with_keylane.py work

The operator lists and redrives with `keylane parked list orders billing` and
`keylane parked redrive orders billing --key customer-7`.
"""

import asyncio
import os
import sys

from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from keylane import Consumer, ConsumerSettings, JsonCodec, Message
from keylane.outbox import Outbox
from keylane.outbox import create_tables as create_outbox
from keylane.sink import create_tables as create_sink
from keylane.sink import fenced
from shop import DATABASE_URL, Order, bill, metadata, orders_to_place, place

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")
CODEC = JsonCodec(Order)


async def tables(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await create_outbox(engine)
    await create_sink(engine)


async def place_orders(engine: AsyncEngine) -> None:
    outbox = Outbox(META, engine, codec=CODEC)
    for customer, total, currency in orders_to_place():
        async with engine.begin() as connection:
            order = await connection.run_sync(place, customer, total, currency)
            await outbox.add(connection, "orders", order, key=customer.encode())


async def work(engine: AsyncEngine) -> None:
    async def handle(message: Message[Order]) -> None:
        async with engine.begin() as connection, fenced(connection, message) as todo:
            if todo:
                await connection.run_sync(bill, message.decode())

    consumer = Consumer(
        META,
        subject="orders",
        group="billing",
        handler=handle,
        codec=CODEC,
        on_failure="park",
        tries_max=5,
        settings=ConsumerSettings(ttl_ms=10_000),
    )
    async with Outbox(META, engine):
        await consumer.run()


async def main(command: str) -> None:
    engine = create_async_engine(DATABASE_URL)
    await {"tables": tables, "place": place_orders, "work": work}[command](engine)
    await engine.dispose()


asyncio.run(main(sys.argv[1]))
