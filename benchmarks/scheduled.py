"""Measures scheduled sends beside plain ones; prints JSON.

    plain_p50_ms, scheduled_p50_ms         one send at a time, from the call to its ack
    plain_per_s, scheduled_per_s           acked sends a second, `AT_ONCE` under way
    both_plain_per_s, both_scheduled_per_s the same of both kinds together

The messages have no key and 200 bytes, one broker has the subject, and nothing becomes due.
The kinds are measured in turns; each figure is the median of `ROUNDS`. `--quick`: fewer sends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import uvloop
from machine import machine
from main_path import BenchCluster

from keylane import Producer

VALUE = b"x" * 200
AT_ONCE = 256
ROUNDS = 5
SUBJECT = "scheduled"
Send = Callable[[], Awaitable[object]]


async def measure_latency(send: Send, count: int) -> float:
    """Return the median time of a send, in milliseconds."""
    times_ms = []
    for _ in range(count):
        began = time.perf_counter()
        await send()
        times_ms.append(1_000 * (time.perf_counter() - began))
    return statistics.median(times_ms)


async def measure_rate(send: Send, count: int) -> float:
    """Return the number of acked sends a second."""
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            await send()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return count / (time.perf_counter() - began)


async def measure(meta: str, *, quick: bool) -> dict[str, float]:
    """Measure everything, in turns."""
    alone, many = (50, 2_000) if quick else (400, 10_000)
    figures: dict[str, list[float]] = {}
    async with Producer(meta) as producer:
        at_ms = int(time.time() * 1_000) + 200 * 86_400_000

        def plain() -> Awaitable[object]:
            return producer.send(SUBJECT, VALUE)

        def scheduled() -> Awaitable[object]:
            return producer.send(SUBJECT, VALUE, deliver_at=at_ms)

        for _ in range(ROUNDS):
            for name, send in (("plain", plain), ("scheduled", scheduled)):
                figures.setdefault(f"{name}_p50_ms", []).append(await measure_latency(send, alone))
                figures.setdefault(f"{name}_per_s", []).append(await measure_rate(send, many))
            both = await asyncio.gather(measure_rate(plain, many), measure_rate(scheduled, many))
            for name, rate in zip(("plain", "scheduled"), both, strict=True):
                figures.setdefault(f"both_{name}_per_s", []).append(rate)
    return {name: round(statistics.median(values), 3) for name, values in figures.items()}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = BenchCluster(Path(folder), stack)
        cluster.create(SUBJECT, 1)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures = runner.run(measure(cluster.meta, quick=arguments.quick))
    print(json.dumps({"machine": machine(), **figures}))


if __name__ == "__main__":
    main()
