"""The measured producers of `make bench-clients`. Each prints one JSON line.

Run as `python benchmarks/client_roles.py ROLE META SUBJECT COUNT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import pyarrow as pa
import uvloop
from machine import peak_mb
from roles import KEYS, SENDS_PER_TURN, VALUE

from keylane import GivenUpError, Producer, ProducerSettings, QueueFullError

VALUE_1K = bytes(range(256)) * 4
DISTURBING_BYTES = 4 << 20


async def send(meta: str, subject: str, count: int, value: bytes = VALUE) -> dict[str, float]:
    """Send `count` messages by `Producer.send`; the clock stops at the last ack."""
    async with Producer(meta) as producer:
        await producer.send(subject, value, key=KEYS[0])
        started, cpu = time.monotonic(), time.process_time()
        queue = producer.send
        for base in range(0, count, SENDS_PER_TURN):
            for index in range(base, base + SENDS_PER_TURN):
                try:
                    queue(subject, value, key=KEYS[index % 10_000])
                except QueueFullError:
                    await producer.drain()
                    queue(subject, value, key=KEYS[index % 10_000])
            await asyncio.sleep(0)
        await producer.flush()
        return {
            "started": started,
            "seconds": time.monotonic() - started,
            "cpu_seconds": time.process_time() - cpu,
        }


async def send_1k(meta: str, subject: str, count: int) -> dict[str, float]:
    """Send messages of 1 KiB, beside what the disk takes in one file, with an fdatasync for each
    MiB.
    """
    sent = await send(meta, subject, count, VALUE_1K)
    block = bytes(1 << 20)
    with tempfile.NamedTemporaryFile(dir=".") as probe:
        started = time.monotonic()
        for _ in range(count >> 10):
            os.write(probe.fileno(), block)
            os.fdatasync(probe.fileno())
        sent["disk_seconds"] = time.monotonic() - started
    return sent


async def send_arrow(meta: str, subject: str, count: int) -> dict[str, float]:
    """Send a table of the same messages by `Producer.send_arrow`."""
    keys = pa.array(KEYS, pa.binary()).take(pa.array([n % 10_000 for n in range(count)]))
    table = pa.table({"key": keys, "value": pa.array([VALUE] * count, pa.binary())})
    async with Producer(meta) as producer:
        await producer.send(subject, VALUE, key=KEYS[0])
        started, cpu = time.monotonic(), time.process_time()
        receipt = await producer.send_arrow(subject, table, key="key", value="value")
        assert receipt.stored == count
        return {
            "seconds": time.monotonic() - started,
            "cpu_seconds": time.process_time() - cpu,
        }


async def single(meta: str, subject: str, count: int) -> dict[str, float]:
    """Send messages one at a time while a thread writes to the same disk."""
    stop = threading.Event()

    def disturb() -> None:
        with tempfile.NamedTemporaryFile(dir=".") as file:
            while not stop.is_set():
                os.pwrite(file.fileno(), bytes(DISTURBING_BYTES), 0)
                os.fdatasync(file.fileno())

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        times: list[float] = []
        async with Producer(meta) as producer:
            await producer.send(subject, VALUE, key=KEYS[0])
            for index in range(count):
                started_at = time.perf_counter()
                await producer.send(subject, VALUE, key=KEYS[index % 10_000])
                times.append((time.perf_counter() - started_at) * 1000)
    finally:
        stop.set()
        thread.join()
    times.sort()
    return {"p50_ms": statistics.median(times), "p99_ms": times[len(times) * 99 // 100]}


async def dead(meta: str, subject: str, count: int) -> dict[str, float]:
    """Send to a broker that is stopped meanwhile, until the queue is full and longer."""
    settings = ProducerSettings(close_timeout_ms=0)
    sent = 0
    with contextlib.suppress(GivenUpError):
        async with Producer(meta, settings=settings) as producer:
            await producer.send(subject, VALUE_1K, key=KEYS[0])
            idle_mb = peak_mb(os.getpid())
            print(json.dumps({"ready": True}), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    for index in range(count):
                        await producer.drain()
                        value = VALUE_1K[8:] + index.to_bytes(8)  # an object for each message
                        producer.send(subject, value, key=KEYS[index % 10_000])
                        sent += 1
    return {"queued": sent, "idle_mb": idle_mb, "limit_mb": settings.queue_bytes / 2**20}


ROLES = {"send": send, "send-1k": send_1k, "arrow": send_arrow, "single": single, "dead": dead}


def main() -> None:
    """Run one role."""
    role, meta, subject, count = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(ROLES[role](meta, subject, int(count)))
    print(json.dumps(result | {"peak_mb": peak_mb(os.getpid())}), flush=True)


if __name__ == "__main__":
    assert Path(__file__).name == "client_roles.py"
    main()
