"""The shop's own functions and its database; orders arrive before each block of Python."""

import asyncio
import os
import signal
import sqlite3
from pathlib import Path

import pyarrow.parquet

from keylane import Admin, Message, Producer
from support.page_shop import META, assert_handled, send_orders

shop = sqlite3.connect("shop.db", isolation_level=None, check_same_thread=False)
shop.execute("CREATE TABLE stored (key BLOB, value BLOB)")
shop.execute("CREATE TABLE charged (value BLOB)")


class Database:
    async def insert(self, rows: list[tuple[bytes, bytes]]) -> None:
        shop.executemany("INSERT INTO stored VALUES (?, ?)", rows)


class Bank:
    async def charge(self, value: bytes) -> None:
        shop.execute("INSERT INTO charged VALUES (?)", (value,))


database, bank = Database(), Bank()
noted: list[bytes] = []


async def note(message: Message) -> None:
    noted.append(message.value)


async def bill_all(messages: list[Message]) -> None:
    for message in messages:
        await bank.charge(message.value)


def write(rows: pyarrow.RecordBatch, name: str) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_batches([rows]), f"{name}.parquet")


async def send_orders_until_one_is_remembered() -> None:
    """Then press Ctrl-C: a broadcast consumer has no group that shows what it has handled."""
    while not globals().get("latest"):
        await send_orders()
        await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)


async def prepare(_text: str) -> None:
    async with Admin(META) as admin:
        await admin.create_subject("payments")


async def before_block(text: str) -> None:
    async with Producer(META) as producer:
        await producer.send("payments", b"12", key="customer-7")
    await send_orders()
    if "latest: dict" in text:
        globals()["sending"] = asyncio.create_task(send_orders_until_one_is_remembered())


async def after_block(text: str) -> None:
    for group in ("billing", "warehouse", "lake"):
        if f'group="{group}"' in text and "bank.charge" not in text:
            await assert_handled(group=group)
    if "batch_handler=store" in text:
        assert shop.execute("SELECT count(*) FROM stored").fetchone()[0] >= 3
    if "bookmark" in text:
        assert len(noted) >= 3
        assert Path("orders.json").exists()
    if "consumer.batches()" in text:
        assert list(Path.cwd().glob("*.parquet"))
    if "bill_all(messages)" in text:
        assert shop.execute("SELECT count(*) FROM charged").fetchone()[0] >= 6
