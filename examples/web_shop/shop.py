"""The shop's tables, and how an order is placed."""

import asyncio
import os
from dataclasses import dataclass

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from keylane import JsonCodec
from keylane import outbox as keylane_outbox
from keylane import sink as keylane_sink
from keylane.outbox import Outbox

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")
DATABASE_URL = os.environ.get("DATABASE_URL", "postgresql+psycopg://localhost/shop")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    cents: Mapped[int]


class Bill(Base):
    __tablename__ = "bills"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]
    customer: Mapped[str]
    cents: Mapped[int]


@dataclass(frozen=True)
class OrderPlaced:
    """The event, as it is sent."""

    order_id: int
    customer: str
    cents: int


CODEC = JsonCodec(OrderPlaced)


def place_order(session: Session, outbox: Outbox[OrderPlaced], customer: str, cents: int) -> int:
    """Add an order and its event, which is sent if the transaction commits. Return the id."""
    order = Order(customer=customer, cents=cents)
    session.add(order)
    session.flush()
    event = OrderPlaced(order.id, customer, cents)
    outbox.add_sync(session, "orders", event, key=customer.encode())
    return order.id


async def create_tables(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    await keylane_outbox.create_tables(engine)
    await keylane_sink.create_tables(engine)


if __name__ == "__main__":
    asyncio.run(create_tables(create_engine(DATABASE_URL)))
