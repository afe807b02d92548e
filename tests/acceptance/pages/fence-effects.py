"""Payments arrive, and each is written to the database once."""

import sqlite3

from keylane import Admin
from support.page_shop import CUSTOMERS, META, send_orders


async def prepare(_text: str) -> None:
    async with Admin(META) as admin:
        await admin.create_subject("payments")
    await send_orders("payments", b"10")


def after_block(_text: str) -> None:
    with sqlite3.connect("billing.db") as database:
        (amount,) = database.execute("SELECT sum(amount) FROM payment").fetchone()
    assert amount == 10 * len(CUSTOMERS)
