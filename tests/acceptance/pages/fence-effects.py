"""Orders arrive, and each is billed once."""

import sqlite3

from support.page_shop import CUSTOMERS, send_orders


async def prepare(_text: str) -> None:
    await send_orders("orders", b"10")


def after_block(_text: str) -> None:
    with sqlite3.connect("billing.db") as database:
        (amount,) = database.execute("SELECT sum(amount) FROM bills").fetchone()
    assert amount == 10 * len(CUSTOMERS)
