"""Processes beside the Spark job of `spark.py`: one fills subjects, one sends and handles live
messages.

Run as `python benchmarks/spark_side/spark_roles.py fill META SUBJECT COUNT` and `… live META
SUBJECT SECONDS`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import uvloop

from keylane import Consumer, Message, Producer

KEY_COUNT = 10_000
VALUE_BYTES = 100
FILL_ROWS = 100_000
LIVE_PER_SECOND = 5_000
TICKS_PER_SECOND = 100
WARM_S = 2.0


async def fill(meta: str, subject: str, count: int) -> dict[str, object]:
    """Store `count` messages of random bytes."""
    rng = np.random.default_rng(0)
    keys = np.array([b"key-%05d" % number for number in range(KEY_COUNT)])
    edges = pa.py_buffer(np.arange(0, (FILL_ROWS + 1) * VALUE_BYTES, VALUE_BYTES, dtype=np.int32))
    async with Producer(meta, order_strategy="strict") as producer:
        for first in range(0, count, FILL_ROWS):
            rows = min(FILL_ROWS, count - first)
            values = pa.Array.from_buffers(
                pa.binary(), rows, [None, edges, pa.py_buffer(rng.bytes(rows * VALUE_BYTES))]
            )
            chosen = pa.array(keys[rng.integers(0, KEY_COUNT, rows)], pa.binary())
            table = pa.table({"key": chosen, "value": values})
            receipt = await producer.send_arrow(subject, table, value="value", key="key")
            assert receipt.stored == rows
    return {"filled": count}


async def live(meta: str, subject: str, seconds: float) -> dict[str, object]:
    """Send LIVE_PER_SECOND messages a second, and measure each from `send` to its handler."""
    waits: list[float] = []
    warm_until = time.monotonic() + WARM_S

    async def handle(message: Message) -> None:
        now, sent = time.monotonic(), float(message.value)
        if sent >= warm_until:
            waits.append((now - sent) * 1000)

    async with (
        Consumer(meta, subject=subject, group="live", handler=handle),
        Producer(meta, order_strategy="strict") as producer,
    ):
        await producer.send(subject, b"0", key=b"key")
        warm_until = time.monotonic() + WARM_S
        ready, ends_at, number = False, warm_until + seconds, 0
        due = time.monotonic()
        while (now := time.monotonic()) < ends_at:
            if not ready and now >= warm_until:
                ready = True
                print(json.dumps({"ready": True}), flush=True)
            for _ in range(LIVE_PER_SECOND // TICKS_PER_SECOND):
                number += 1
                producer.send(subject, b"%r" % time.monotonic(), key=b"key-%d" % (number % 97))
            due = max(due + 1 / TICKS_PER_SECOND, now - 1)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await producer.flush()
        await asyncio.sleep(0.5)
    waits.sort()
    return {
        "count": len(waits),
        "p50_ms": waits[len(waits) // 2],
        "p99_ms": waits[len(waits) * 99 // 100],
    }


def main() -> None:
    """Run one role."""
    role, meta, subject, number = sys.argv[1:]
    work = (
        fill(meta, subject, int(number)) if role == "fill" else live(meta, subject, float(number))
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(work)), flush=True)


if __name__ == "__main__":
    assert Path(__file__).name == "spark_roles.py"
    main()
