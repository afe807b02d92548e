"""The shop that all four versions serve: its tables, how an order is placed and how it is billed.

These lines are the user's own work, the same in every version, and are not counted.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, select
from sqlalchemy.dialects.postgresql import insert

BANK = Path(os.environ.get("BANK", tempfile.gettempdir()))
DATABASE_URL = os.environ.get("DATABASE_URL", "postgresql+asyncpg://localhost/shop")

metadata = MetaData()
customers = Table(
    "customers",
    metadata,
    Column("name", String, primary_key=True),
    Column("orders", Integer, nullable=False),
)
orders = Table(
    "orders",
    metadata,
    Column("customer", String, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("total", Integer, nullable=False),
    Column("currency", String, nullable=False),
)
rates = Table(
    "rates",
    metadata,
    Column("currency", String, primary_key=True),
    Column("cents", Integer, nullable=False),
)
# Nothing in this table keeps an order from being billed twice: that is the work of each version.
bills = Table(
    "bills",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("customer", String, nullable=False),
    Column("number", Integer, nullable=False),
    Column("cents", Integer, nullable=False),
)


@dataclass(frozen=True)
class Order:
    """An order, as its event has it. Numbers count the orders of a customer, from 1 on."""

    customer: str
    number: int
    total: int
    currency: str


def orders_to_place() -> Iterator[tuple[str, int, str]]:
    """Read customer, total and currency from each line of standard input."""
    for line in sys.stdin:
        yield tuple(json.loads(line))


def place(connection: Connection, customer: str, total: int, currency: str) -> Order:
    """Add an order. The customer's row stays locked until the commit, so that the orders of a
    customer are numbered in the order in which they are committed.
    """
    row = insert(customers).values(name=customer, orders=1)
    row = row.on_conflict_do_update(
        index_elements=["name"], set_={"orders": customers.c.orders + 1}
    )
    number = connection.execute(row.returning(customers.c.orders)).scalar_one()
    order = Order(customer=customer, number=number, total=total, currency=currency)
    connection.execute(orders.insert(), asdict(order))
    return order


def ask_bank(order: Order) -> None:
    """Stands for a call over the network: the first one fails for every tenth order.

    Raises:
        ConnectionError: the bank did not answer.
    """
    if order.number % 10 == 3:
        try:
            (BANK / f"{order.customer}-{order.number}").touch(exist_ok=False)
        except FileExistsError:
            return
        raise ConnectionError("the bank does not answer")


def bill(connection: Connection, order: Order) -> None:
    """Add the bill of an order.

    Raises:
        ConnectionError: the bank did not answer.
        LookupError: nobody has entered the rate of the order's currency.
    """
    ask_bank(order)
    rate = connection.execute(select(rates.c.cents).where(rates.c.currency == order.currency))
    cents = rate.scalar()
    if cents is None:
        raise LookupError(f"no rate of {order.currency}")
    values = {"customer": order.customer, "number": order.number, "cents": order.total * cents}
    connection.execute(bills.insert(), values)
