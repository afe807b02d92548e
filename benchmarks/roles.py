"""The measured processes: send, consume, send messages one at a time, drain an outbox. Each prints
one JSON line.

Run as `python benchmarks/roles.py ROLE META SUBJECT COUNT`.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from machine import peak_mb

from keylane import Consumer, Message, Producer

KEYS = [b"key-%05d" % index for index in range(10_000)]
VALUE = bytes(range(100))
SENDS_PER_TURN = 500


async def send(meta: str, subject: str, count: int) -> dict[str, object]:
    """Send `count` messages as fast as the producer's queue takes them; the clock stops at the last
    ack.
    """
    async with Producer(meta, order_strategy="strict") as producer:
        await producer.send(subject, VALUE, key=KEYS[0])
        started = time.monotonic()
        queue = producer.send
        for base in range(0, count, SENDS_PER_TURN):
            for index in range(base, base + SENDS_PER_TURN):
                queue(subject, VALUE, key=KEYS[index % 10_000])
            await asyncio.sleep(0)
            await producer.drain()
        await producer.flush()
        ended = time.monotonic()
        assert producer.stats.acked == count + 1
    return {"started": started, "ended": ended, "seconds": ended - started}


async def consume(meta: str, subject: str, count: int) -> dict[str, object]:
    """Handle `count` messages, an `async` call each; the clock runs from the first message to the
    last.
    """
    handled = 0
    started = ended = 0.0
    done = asyncio.Event()

    async def handle(_message: Message) -> None:
        nonlocal handled, started, ended
        handled += 1
        if handled == 1:
            started = time.monotonic()
        elif handled == count:
            ended = time.monotonic()
            done.set()

    async with Consumer(meta, subject=subject, group="bench", handler=handle):
        print(json.dumps({"ready": True}), flush=True)
        await done.wait()
    return {"started": started, "ended": ended, "seconds": ended - started}


async def single(meta: str, subject: str, count: int) -> dict[str, object]:
    """Send messages one at a time, each after the ack before it; measures the disk's own fdatasync
    as well.
    """
    sends: list[float] = []
    flushes: list[float] = []
    with tempfile.NamedTemporaryFile() as probe:
        async with Producer(meta, order_strategy="strict") as producer:
            await producer.send(subject, VALUE, key=KEYS[0])
            for index in range(count):
                began = time.perf_counter()
                await producer.send(subject, VALUE, key=KEYS[index])
                sends.append((time.perf_counter() - began) * 1000)
                if index % 2:
                    os.write(probe.fileno(), bytes(350))
                    began = time.perf_counter()
                    os.fdatasync(probe.fileno())
                    flushes.append((time.perf_counter() - began) * 1000)
    ordered = sorted(sends)
    return {
        "p50_ms": statistics.median(ordered),
        "p99_ms": ordered[len(ordered) * 99 // 100],
        "fdatasync_p50_ms": statistics.median(flushes),
    }


async def drain_outbox(meta: str, subject: str, count: int) -> dict[str, object]:
    """Send `count` rows of an outbox on SQLite; the clock runs until all are sent and deleted."""
    # Here, so that SQLAlchemy's memory is in no figure of the other roles.
    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import create_async_engine

    from keylane.outbox import Outbox, create_tables

    with tempfile.TemporaryDirectory() as folder:
        engine = create_async_engine(f"sqlite+aiosqlite:///{folder}/user.db")
        await create_tables(engine)
        outbox = Outbox(meta, engine)
        async with engine.connect() as connection:
            await connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            for index in range(count):
                await outbox.add(connection, subject, VALUE, key=KEYS[index % len(KEYS)])
                if index % 5_000 == 4_999:
                    await connection.commit()
            await connection.commit()
            started = time.monotonic()
            async with outbox:
                remaining_query = sa.text("SELECT 1 FROM keylane_outbox LIMIT 1")
                while (await connection.execute(remaining_query)).first() is not None:
                    await connection.rollback()
                    await asyncio.sleep(0.02)
                seconds = time.monotonic() - started
        await engine.dispose()
    return {"seconds": seconds}


def main() -> None:
    """Run one role."""
    role, meta, subject, count = sys.argv[1:]
    body = {"send": send, "consume": consume, "single": single, "outbox": drain_outbox}[role]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(body(meta, subject, int(count)))
    print(json.dumps(result | {"peak_mb": peak_mb(os.getpid())}), flush=True)


if __name__ == "__main__":
    assert Path(__file__).name == "roles.py"
    main()
