"""What a service needs beside Kafka or Celery: an outbox, effects that happen once, and parked
customers. The three versions without keylane share it.

python by_hand.py tables
python by_hand.py place < orders.jsonl
python by_hand.py parked customer-7
python by_hand.py redrive customer-7

All functions but the commands work in the transaction of their caller.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    create_engine,
    delete,
    select,
)
from sqlalchemy.dialects.postgresql import insert

import shop
from shop import Order

TRIES = 5

metadata = MetaData()
outbox = Table(
    "outbox",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("customer", String, nullable=False),
    Column("event", String, nullable=False),
)
progress = Table(
    "progress",
    metadata,
    Column("customer", String, primary_key=True),
    Column("number", Integer, nullable=False),
)
parked = Table(
    "parked",
    metadata,
    Column("customer", String, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("event", String, nullable=False),
    Column("failure", String, nullable=False),
)

Effect = Callable[[Connection, Order], None]


class TooEarlyError(Exception):
    """An earlier order of the customer has not been handled yet."""


def add_to_outbox(connection: Connection, order: Order) -> None:
    """Add the event of an order; it is sent once the transaction is committed."""
    values = {"customer": order.customer, "event": json.dumps(asdict(order))}
    connection.execute(outbox.insert(), values)


def oldest_events(connection: Connection) -> Sequence[Row[Any]]:
    """Return the events to send. Their locks make any other relay wait until these are deleted."""
    oldest = select(outbox).order_by(outbox.c.id).limit(100).with_for_update()
    return connection.execute(oldest).all()


def delete_events(connection: Connection, sent: Sequence[Row[Any]]) -> None:
    """Delete events that the broker has stored."""
    if sent:
        connection.execute(delete(outbox).where(outbox.c.id.in_([row.id for row in sent])))


def handle_once(connection: Connection, order: Order, effect: Effect) -> None:
    """Run the effect of an order, unless it is done; queue the order if its customer is parked.

    Raises:
        TooEarlyError: an earlier order of the customer is not done.
    """
    done = _lock(connection, order.customer)
    if order.number <= done:
        return
    if list_parked(connection, order.customer):
        _add_parked(connection, order, "")
    else:
        _run(connection, order, done, effect)


def park(connection: Connection, order: Order, failure: str) -> None:
    """Set an order aside, unless it is done, and with it all later ones of its customer."""
    if order.number > _lock(connection, order.customer):
        _add_parked(connection, order, failure)


def list_parked(connection: Connection, customer: str) -> Sequence[Row[Any]]:
    """Return the orders of a customer that are set aside, in order."""
    rows = select(parked).where(parked.c.customer == customer).order_by(parked.c.number)
    return connection.execute(rows).all()


def redrive_next(connection: Connection, customer: str, effect: Effect) -> bool:
    """Run the effect of the oldest order of a customer that is set aside, if one is."""
    done = _lock(connection, customer)
    rows = list_parked(connection, customer)
    if rows:
        order = Order(**json.loads(rows[0].event))
        _run(connection, order, done, effect)
        oldest = (parked.c.customer == customer) & (parked.c.number == order.number)
        connection.execute(delete(parked).where(oldest))
    return bool(rows)


def _lock(connection: Connection, customer: str) -> int:
    """Lock a customer until the transaction ends, and return the number of his last order that is
    done.
    """
    row = insert(progress).values(customer=customer, number=0)
    connection.execute(row.on_conflict_do_nothing())
    locked = select(progress.c.number).where(progress.c.customer == customer).with_for_update()
    return connection.execute(locked).scalar_one()


def _run(connection: Connection, order: Order, done: int, effect: Effect) -> None:
    if order.number > done + 1:
        raise TooEarlyError(f"order {done + 1} of {order.customer} comes first")
    effect(connection, order)
    row = progress.update().where(progress.c.customer == order.customer)
    connection.execute(row, {"number": order.number})


def _add_parked(connection: Connection, order: Order, failure: str) -> None:
    values = {
        "customer": order.customer,
        "number": order.number,
        "event": json.dumps(asdict(order)),
        "failure": failure,
    }
    connection.execute(insert(parked).on_conflict_do_nothing(), values)


def redrive(engine: Engine, customer: str) -> None:
    """Handle all orders of a customer that are set aside, in order."""
    failures = 0
    while True:
        try:
            with engine.begin() as connection:
                if not redrive_next(connection, customer, shop.bill):
                    return
            failures = 0
        except Exception:
            failures += 1
            if failures == TRIES:
                raise
            time.sleep(0.1 * 2**failures)


def main(command: str, *customer: str) -> None:
    engine = create_engine(shop.DATABASE_URL)
    if command == "place":
        for each in shop.orders_to_place():
            with engine.begin() as connection:
                add_to_outbox(connection, shop.place(connection, *each))
    elif command == "redrive":
        redrive(engine, *customer)
    else:
        with engine.begin() as connection:
            if command == "tables":
                shop.metadata.create_all(connection)
                metadata.create_all(connection)
            elif command == "parked":
                for row in list_parked(connection, *customer):
                    print(row.number, row.event, row.failure)


if __name__ == "__main__":
    main(*sys.argv[1:])
