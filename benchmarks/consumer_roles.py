"""The measured consumers of `make bench-clients`. Each prints a JSON line when it is ready, and
one at the end.

Run as `python benchmarks/consumer_roles.py ROLE META SUBJECT COUNT`; COUNT is what the subject has,
unless a role says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pyarrow.compute as pc
import uvloop
from bare_consume import Clock, Figures, make_handler, make_reader
from machine import peak_mb
from roles import KEYS, VALUE

from keylane import Consumer, ConsumerSettings, Message, Producer

POISON = b"poison"
"""Keys of messages that always fail begin with it; they are as long as the others, so that batches
are alike.
"""
POISON_KEYS = 1_000
STUCK = b"poison"
PACE_PER_SECOND = 5_000
PACE_MS = 5
"""Paced messages are sent in groups, one in this time."""
LANE_KEYS = 1_000


class Countdown:
    """Counts messages until `count` were handled, for handlers that do more than those of
    `bare_consume`.
    """

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock = clock
        self._remaining = self._count = count

    def count(self) -> None:
        """Count a handled message."""
        if self._remaining == self._count:
            self._clock.mark(0)
        self._remaining -= 1
        if self._remaining <= 0:
            self._clock.mark(0)


def ready() -> None:
    """Print that the consumer is ready for messages."""
    print(json.dumps({"ready": True}), flush=True)


async def handled(meta: str, subject: str, count: int) -> Figures:
    """Handle each message with an `async` handler."""
    clock = Clock()
    handle = make_handler(clock, count)
    async with Consumer(meta, subject=subject, group="handled", handler=handle):
        ready()
        await clock.done.wait()
    return clock.figures


async def batch_handled(meta: str, subject: str, count: int) -> Figures:
    """Handle up to 500 messages at once with an `async` handler."""
    clock = Clock()
    read = make_reader(clock, count)

    async def handle(messages: list[Message]) -> None:
        read(messages)

    async with Consumer(meta, subject=subject, group="batch-handled", batch_handler=handle):
        ready()
        await clock.done.wait()
    return clock.figures


async def getmany(meta: str, subject: str, count: int) -> Figures:
    """Read with `getmany` and `ack`, 1,000 messages at a time."""
    clock = Clock()
    read = make_reader(clock, count)
    async with Consumer(meta, subject=subject, group="getmany") as consumer:
        ready()
        while not clock.done.is_set():
            messages = await consumer.getmany(max_records=1_000)
            read(messages)
            await consumer.ack(messages)
    return clock.figures


async def iterated(meta: str, subject: str, count: int) -> Figures:
    """Read with `async for`, and ack each message."""
    clock = Clock()
    remaining, size_bytes, last_index = count, 0, count - 1
    async with Consumer(meta, subject=subject, group="iterated") as consumer:
        ready()
        async for message in consumer:
            size_bytes += len(message.key) + len(message.value)
            await message.ack()
            remaining -= 1
            if not 0 < remaining < last_index:
                clock.mark(size_bytes)
                if remaining <= 0:
                    break
    return clock.figures


async def arrow(meta: str, subject: str, count: int) -> Figures:
    """Arrow batches, each acked; keys and values are read by column."""
    clock = Clock()
    remaining, size_bytes = count, 0
    async with Consumer(meta, subject=subject, group="arrow") as consumer:
        ready()
        async for batch in consumer.batches():
            if remaining == count:
                clock.mark(0)
            for name in ("key", "value"):
                size_bytes += pc.sum(pc.binary_length(batch.record_batch.column(name))).as_py()
            remaining -= len(batch)
            await batch.ack()
            if remaining <= 0:
                clock.mark(size_bytes)
                break
    return clock.figures


async def lanes(meta: str, subject: str, count: int) -> Figures:
    """Send, then handle messages of 0 to 5 ms, with 1,000 keys and 100 handlers at once, in one
    partition.
    """
    async with Producer(meta) as producer:
        for index in range(count):
            producer.send(subject, VALUE, key=b"lane-%d" % (index % LANE_KEYS))
            await producer.drain()
    clock = Clock()
    countdown = Countdown(clock, count)

    async def handle(message: Message) -> None:
        await asyncio.sleep(message.offset * 7 % 51 / 10_000)
        countdown.count()

    async with Consumer(
        meta,
        subject=subject,
        group="lanes",
        handler=handle,
        settings=ConsumerSettings(concurrency=100),
    ):
        ready()
        await clock.done.wait()
    return clock.figures


async def healthy(meta: str, subject: str, count: int) -> Figures:
    """Handle `count` healthy messages among those of poison keys, which are parked after two
    attempts.
    """
    clock = Clock()
    countdown = Countdown(clock, count)

    async def handle(message: Message) -> None:
        if message.key.startswith(POISON):
            raise ValueError("poison")
        countdown.count()

    async with parking(meta, subject, handle):
        ready()
        await clock.done.wait()
    return clock.figures


async def poison(meta: str, subject: str, count: int) -> Figures:
    """Send `count` healthy messages, and ten messages of each of 1,000 poison keys among them."""
    messages_per_poison = max(1, count // (10 * POISON_KEYS))
    async with Producer(meta) as producer:
        for index in range(count):
            producer.send(subject, VALUE, key=KEYS[index % 10_000])
            if index % messages_per_poison == 0:
                producer.send(
                    subject,
                    VALUE,
                    key=b"%s%03d" % (POISON, index // messages_per_poison % POISON_KEYS),
                )
            if index % 500 == 0:
                await asyncio.sleep(0)
            await producer.drain()
    return {}


@contextlib.asynccontextmanager
async def parking(
    meta: str, subject: str, handle: Callable[[Message], object]
) -> AsyncIterator[Consumer]:
    """Open a consumer that parks keys that failed twice."""
    async with Consumer(
        meta, subject=subject, group="parking", handler=handle, on_failure="park", tries_max=2
    ) as consumer:
        yield consumer


async def paced(meta: str, subject: str, count: int, stuck: bool = False) -> Figures:
    """Send `count` messages at 5,000 per second, and measure the latency to their handler; every
    second message has the key STUCK, or none.
    """
    times: list[float] = []
    expected = count // 2 if stuck else count
    all_handled = asyncio.Event()

    async def handle(message: Message) -> None:
        if message.key == STUCK:
            raise ValueError("poison")
        times.append((time.monotonic_ns() - int.from_bytes(message.value[:8])) / 1e6)
        if len(times) == expected:
            all_handled.set()

    group = PACE_PER_SECOND * PACE_MS // 1000
    async with parking(meta, subject, handle), Producer(meta) as producer:
        ready()
        await producer.send(subject, bytes(8), key=STUCK if stuck else KEYS[0])
        times.clear()
        began = time.monotonic()
        for number in range(count // group):
            late_s = began + number * PACE_MS / 1000 - time.monotonic()
            await asyncio.sleep(max(0.0, late_s))
            for index in range(number * group, (number + 1) * group):
                key = STUCK if stuck and index % 2 else KEYS[index * 7 % 10_000]
                producer.send(subject, time.monotonic_ns().to_bytes(8) + VALUE[8:], key=key)
        await producer.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await all_handled.wait()
    times.sort()
    return {"p50_ms": times[len(times) // 2], "p99_ms": times[len(times) * 99 // 100]}


async def stuck(meta: str, subject: str, count: int) -> Figures:
    """Measure as `paced` does, but every second message has a key that always fails."""
    return await paced(meta, subject, count, stuck=True)


async def park_all(meta: str, subject: str, count: int) -> Figures:
    """Send `count` messages of one poison key, and park them all."""
    async with Producer(meta) as producer:
        for index in range(count):
            producer.send(subject, VALUE, key=STUCK)
            if index % 500 == 0:
                await asyncio.sleep(0)
                await producer.drain()

    async def handle(_message: Message) -> None:
        raise ValueError("poison")

    async with parking(meta, subject, handle) as consumer:
        ready()
        while True:
            acked = sum(position.cursor for position in consumer.position.values())
            if acked >= count:
                return {}
            await asyncio.sleep(0.1)


ROLES = {
    "handled": handled,
    "batch-handled": batch_handled,
    "getmany": getmany,
    "iterated": iterated,
    "arrow": arrow,
    "lanes": lanes,
    "poison": poison,
    "healthy": healthy,
    "paced": paced,
    "stuck": stuck,
    "park-all": park_all,
}


def main() -> None:
    """Run one role."""
    role, meta, subject, count = sys.argv[1:]
    logging.getLogger("keylane.consumer").setLevel(logging.CRITICAL)  # poison is meant to fail
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(ROLES[role](meta, subject, int(count)))
    print(json.dumps(result | {"peak_mb": peak_mb(os.getpid())}), flush=True)


if __name__ == "__main__":
    assert Path(__file__).name == "consumer_roles.py"
    main()
