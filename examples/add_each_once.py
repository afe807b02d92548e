"""A consumer that adds each payment to an account in SQLite exactly once, however often it is
killed and restarted.

keylane dev --subject payments        (in another terminal)
seq 1 10 | keylane produce payments
python examples/add_each_once.py bank.db
"""

import asyncio
import os
import sys

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from keylane import Consumer, ConsumerSettings, Message
from keylane.sink import FencedSession, create_tables

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")
COUNT = int(os.environ.get("COUNT", "10"))


async def add_payment(connection: AsyncConnection, amount: int) -> int:
    await connection.execute(
        sa.text("UPDATE account SET balance = balance + :amount"), {"amount": amount}
    )
    return (await connection.execute(sa.text("SELECT balance FROM account"))).scalar_one()


async def main(path: str) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    await create_tables(engine)
    async with engine.begin() as connection:
        await connection.execute(
            sa.text("CREATE TABLE IF NOT EXISTS account (balance INTEGER NOT NULL)")
        )
        if (await connection.execute(sa.text("SELECT count(*) FROM account"))).scalar_one() == 0:
            await connection.execute(sa.text("INSERT INTO account VALUES (0)"))
    handled = 0
    ended = asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal handled
        # The payment and the offset of its message are committed together, or not at all.
        async with engine.connect() as connection, FencedSession(connection, message) as todo:
            if todo:
                balance = await add_payment(connection, int(message.value))
                print(f"payment of {int(message.value)}: balance {balance}")
        handled += 1
        if handled == COUNT:
            ended.set()

    async with Consumer(
        META,
        subject="payments",
        group="ledger",
        handler=handle,
        settings=ConsumerSettings(concurrency=1),
    ):
        await ended.wait()
    await engine.dispose()


if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit("usage: python examples/add_each_once.py DATABASE_FILE")
asyncio.run(main(sys.argv[1]))
