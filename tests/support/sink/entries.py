"""A user's table of entries, and a program that writes an entry for each message, fenced.

Run as `python entries.py META SUBJECT GROUP TTL_MS DATABASE_URL FILE SLEEP_S`: it appends a line to
FILE in the middle of each transaction, then stands still for SLEEP_S seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from keylane import Consumer, ConsumerSettings, Message
from keylane.sink import FencedSession

ENTRIES = sa.Table(
    "entries",
    sa.MetaData(),
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=True),
    sa.Column("order_key", sa.LargeBinary(100), nullable=False),
    sa.Column("value", sa.LargeBinary(100), nullable=False),
    sa.Column("token", sa.BigInteger, nullable=False),
)
"""Without a constraint: an effect that is done twice is there twice."""


def entry(message: Message) -> dict[str, object]:
    """The row of a message."""
    return {
        "order_key": message.key,
        "value": message.value,
        "token": message.fencing_token,
    }


async def entries_by_key(engine) -> dict[bytes, list[bytes]]:
    """The values of each key, in the order in which they were inserted."""
    by_key: dict[bytes, list[bytes]] = {}
    ask = sa.select(ENTRIES.c.order_key, ENTRIES.c.value).order_by(ENTRIES.c.id)
    async with engine.connect() as connection:
        for key, value in await connection.execute(ask):
            by_key.setdefault(bytes(key), []).append(bytes(value))
    return by_key


async def consume(
    meta: str, subject: str, group: str, ttl_ms: str, url: str, path: str, sleep_s: str
) -> None:
    """Write entries until the end."""
    engine = create_async_engine(url, pool_size=10)
    with open(path, "a", buffering=1) as out:

        async def handle(message: Message) -> None:
            async with AsyncSession(engine) as session:
                async with FencedSession(session, message) as todo:
                    if todo:
                        await session.execute(sa.insert(ENTRIES).values(entry(message)))
                    out.write(f"{message.partition_id} {message.offset}\n")
                    if float(sleep_s):
                        await asyncio.sleep(float(sleep_s) / 2)
                        time.sleep(float(sleep_s) / 2)

        async with Consumer(
            meta,
            subject=subject,
            group=group,
            handler=handle,
            settings=ConsumerSettings(ttl_ms=int(ttl_ms), concurrency=4),
        ) as consumer:
            await consumer.run()


if __name__ == "__main__":
    asyncio.run(consume(*sys.argv[1:]))
