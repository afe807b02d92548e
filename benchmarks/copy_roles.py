"""The measured producers of `make bench-copies`. Each prints one JSON line at the end.

Run as `python benchmarks/copy_roles.py ROLE META SUBJECT COUNT`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from client_roles import VALUE_1K
from client_roles import send as send_many
from roles import KEYS

from keylane import Producer

SINGLE_VALUE = bytes(range(200)) * 2
WARM_SENDS = 50


async def timed_send(producer: Producer, subject: str, index: int) -> tuple[float, float]:
    """Send one message; return when the call began, by the monotonic clock in seconds, and how long
    its ack took, in milliseconds.
    """
    began = time.monotonic()
    await producer.send(subject, SINGLE_VALUE, key=KEYS[index % len(KEYS)])
    return began, (time.monotonic() - began) * 1_000


async def single(meta: str, subject: str, count: int) -> dict[str, Any]:
    """Send `count` messages of 400 bytes, each after the ack before it."""
    async with Producer(meta) as producer:
        for index in range(WARM_SENDS):
            await timed_send(producer, subject, index)
        times_ms = [(await timed_send(producer, subject, index))[1] for index in range(count)]
    return {"p50_ms": statistics.median(times_ms)}


async def steady(meta: str, subject: str, _count: int) -> dict[str, Any]:
    """Send as `single` does, from the line that says so until standard input ends; the figures are
    those of each send.
    """
    sends: list[tuple[float, float]] = []
    async with Producer(meta) as producer:
        for index in range(WARM_SENDS):
            await timed_send(producer, subject, index)
        print(json.dumps({"ready": True}), flush=True)
        end = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        while not end.done():
            sends.append(await timed_send(producer, subject, len(sends)))
        await end
    return {"sends": sends}


async def send_1k(meta: str, subject: str, count: int) -> dict[str, float]:
    """Send `count` messages of 1 KiB, as fast as the producer's queue takes them."""
    return await send_many(meta, subject, count, VALUE_1K)


ROLES = {"single": single, "steady": steady, "send": send_many, "send-1k": send_1k}


def main() -> None:
    """Run one role."""
    role, meta, subject, count = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(ROLES[role](meta, subject, int(count)))), flush=True)


if __name__ == "__main__":
    assert Path(__file__).name == "copy_roles.py"
    main()
