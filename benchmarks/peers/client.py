"""A measured client: `client.py JOB`, a JSON object. Prints a line {"ready": true} once connected,
then its figures.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import resource
import statistics
import struct
import sys
import time
from typing import Any

from peers.measure import peak_mb
from peers.systems.base import KEYS, Client, Handling, StampedHandling

VALUE = bytes(range(100))
WARMING = 100
"""Single sends that are not measured."""
UNMEASURED_S = 2.0
"""Of the beginning of a steady take."""
PAUSE_S = 0.001
RETRY_S = 0.01


def print_line(**line: Any) -> None:
    """Print a JSON line."""
    print(json.dumps(line), flush=True)


def cpu_seconds() -> float:
    """Processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def percentile(ordered: list[float], share: float) -> float:
    """Return the value below which this share of the sorted values lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def send(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    """Everything as fast as there is room."""
    await client.open_producer()
    value = VALUE if job["size"] == len(VALUE) else os.urandom(job["size"])
    print_line(ready=True)
    if job.get("gated"):
        await asyncio.to_thread(sys.stdin.readline)
    started_at, cpu_s = time.monotonic(), cpu_seconds()
    await client.send_all(value, job["count"])
    figures = {"began": started_at, "ended": time.monotonic(), "cpu": cpu_seconds() - cpu_s}
    await client.close_producer()
    return figures


async def single(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    """Send each message after the ack of the previous one."""
    await client.open_producer()
    for key in KEYS[:WARMING]:
        await client.send(key, VALUE)
    print_line(ready=True)
    latencies_ms = []
    for number in range(job["count"]):
        started_at = time.perf_counter()
        await client.send(KEYS[number % 10_000], VALUE)
        latencies_ms.append((time.perf_counter() - started_at) * 1000)
    await client.close_producer()
    latencies_ms.sort()
    return {"p50_ms": statistics.median(latencies_ms), "p99_ms": percentile(latencies_ms, 0.99)}


async def watch(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    """Send each message after the ack of the previous one, and again after an error."""
    await client.open_producer()
    for key in KEYS[:WARMING]:
        await client.send(key, VALUE)
    print_line(ready=True)
    acked_at = time.monotonic()
    ends_at, gap_s, errors, sent = acked_at + job["seconds"], 0.0, 0, 0
    while time.monotonic() < ends_at:
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + job["seconds"]):
                await client.send(KEYS[sent % 10_000], VALUE)
        except Exception:  # noqa: BLE001 - libraries have errors of their own for what passes
            errors += 1
            await asyncio.sleep(RETRY_S)
            continue
        before, acked_at = acked_at, time.monotonic()
        gap_s, sent = max(gap_s, acked_at - before), sent + 1
    gap_s = max(gap_s, time.monotonic() - acked_at)
    return {"gap_ms": gap_s * 1000, "errors": errors, "sent": sent}


async def steady(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    """`rate` messages a second, each with the time of its send in its value."""
    await client.open_producer()
    print_line(ready=True)
    rate, count, remainder = job["rate"], job["count"], VALUE[8:]
    cpu_s, started_at, sent = cpu_seconds(), time.monotonic(), 0
    while sent < count:
        due_count = min(count, int((time.monotonic() - started_at) * rate))
        while sent < due_count:
            sent_at = struct.pack("<Q", time.monotonic_ns())
            await client.post(KEYS[sent % 10_000], sent_at + remainder)
            sent += 1
        await client.pause(PAUSE_S)
    late_s = time.monotonic() - started_at - count / rate
    await client.drain()
    figures = {"cpu": cpu_seconds() - cpu_s, "late_s": late_s}
    await client.close_producer()
    return figures


async def consume(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    """Handle `count` messages."""
    rate = job.get("rate", 0)
    handling = (StampedHandling if rate else Handling)(job["count"], job["size"])
    started_at = cpu_s = 0.0

    def ready() -> None:
        nonlocal started_at, cpu_s
        started_at, cpu_s = time.monotonic(), cpu_seconds()
        print_line(ready=True)

    await client.consume(handling, ready)
    figures = {
        "first": handling.first_at,
        "last": handling.last_at,
        "began": started_at,
        "ended": time.monotonic(),
        "cpu": cpu_seconds() - cpu_s,
    }
    if isinstance(handling, StampedHandling):
        latencies_ms = sorted(handling.took_ms[int(UNMEASURED_S * rate) :])
        figures |= {
            "p50_ms": statistics.median(latencies_ms),
            "p99_ms": percentile(latencies_ms, 0.99),
        }
    return figures


async def start(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    """Load the library, then open a consumer on each of several topics, one after the other."""
    began = time.monotonic()
    client.load()
    load_s = time.monotonic() - began
    print_line(ready=True)
    used, began = cpu_seconds(), time.monotonic()
    closings = [await client.open_consumer(topic) for topic in job["topics"]]
    figures = {"load": load_s, "seconds": time.monotonic() - began, "cpu": cpu_seconds() - used}
    for close in closings:
        closed = close()
        if inspect.isawaitable(closed):
            await closed
    return figures


ROLES = {
    "send": send,
    "single": single,
    "watch": watch,
    "steady": steady,
    "consume": consume,
    "start": start,
}


def main() -> None:
    """Run a role."""
    job = json.loads(sys.argv[1])
    sys.path.append(job["clients"])  # behind the locked libraries, which keylane's own client uses
    module, _, name = job["client"].partition(":")
    client = getattr(importlib.import_module(module), name)(job)
    factory = None
    if job["loop"] == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        figures = runner.run(ROLES[job["role"]](client, job))
    print_line(**figures, peak_mb=peak_mb([os.getpid()]))


if __name__ == "__main__":
    main()
