"""Bills each order once, those of a customer in order: python billing.py"""

import asyncio
import logging

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from keylane import Consumer, ConsumerSettings, Message
from keylane.sink import FencedSession
from shop import CODEC, DATABASE_URL, META, Bill, OrderPlaced


def make_consumer(meta: str, engine: Engine) -> Consumer[OrderPlaced]:
    def handle(message: Message[OrderPlaced]) -> None:
        order = message.decode()
        with Session(engine) as session, FencedSession(session, message) as todo:
            if todo:
                session.add(bill(order))

    return Consumer(
        meta,
        subject="orders",
        group="billing",
        handler=handle,
        codec=CODEC,
        on_failure="park",
        tries_max=3,
        settings=ConsumerSettings(threads=8),
    )


def bill(order: OrderPlaced) -> Bill:
    if not order.cents:
        raise ValueError(f"order {order.order_id} has no price")
    return Bill(order_id=order.order_id, customer=order.customer, cents=order.cents)


async def main(meta: str, engine: Engine) -> None:
    await make_consumer(meta, engine).run()  # until SIGTERM; then running handlers finish


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main(META, create_engine(DATABASE_URL)))
