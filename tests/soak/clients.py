"""A producer or a consumer of a soak, a process of its own that writes down what it does.

python -m soak.clients produce META NAME PER_SECOND RECORD
python -m soak.clients consume META GROUP RECORD HEALING

A line of a producer's record is the key and the number of an acked message; one of a consumer's is
the boot time in nanoseconds, the key and the number. SIGTERM ends both in good order.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable
from pathlib import Path

from keylane import Consumer, KeylaneError, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol.backoff import Backoff

SUBJECT = "orders"
GROUPS = {"audit": None, "billing": "park"}
"""What each consumer group does with a message that keeps failing."""
KEYS = 100
BODY_BYTES = 400
POISON_EVERY = 300
"""One in so many messages fails in the group that parks, until the healing file is there."""
WAIT_S = 300
"""How long a client waits for a metaserver when it begins: the machine has other work."""
POISONED = "ValueError: cannot take"
"""How a failure of such a message begins in a log."""
CONSUMER = ConsumerSettings(
    ttl_ms=10_000, concurrency=8, handler_backoff=Backoff(first_ms=10, max_ms=50)
)


class LineFile:
    """A file of lines, each written at once, so that a kill loses none."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def body_of(number: int) -> bytes:
    """A value with its number that does not compress away."""
    return b"%d " % number + random.Random(number).randbytes(BODY_BYTES // 2).hex().encode()


async def produce(
    meta: str, name: str, per_second: float, record: LineFile, ended: asyncio.Event
) -> None:
    numbers = itertools.count()
    sending: set[asyncio.Task[None]] = set()

    async def settle(future: Awaitable[object], key: str, number: int) -> None:
        try:
            await future
        except KeylaneError as error:
            print(f"{key} {number} was not acked: {error!r}", file=sys.stderr)
        else:
            record.write(key, number)

    async with Producer(meta, wait_s=WAIT_S) as producer:
        while not ended.is_set():
            number = next(numbers)
            await producer.drain()
            key = f"{name}-{number % KEYS}"
            future = producer.send(SUBJECT, body_of(number), key=key)
            task = asyncio.create_task(settle(future, key, number))
            sending.add(task)
            task.add_done_callback(sending.discard)
            await asyncio.sleep(1 / per_second)
        await asyncio.gather(*sending)


async def consume(
    meta: str, group: str, record: LineFile, healing: Path, ended: asyncio.Event
) -> None:
    async def handle(message: Message) -> None:
        number = int(message.value.split(b" ", 1)[0])
        is_poison = GROUPS[group] == "park" and number % POISON_EVERY == 7
        if is_poison and not healing.exists():
            raise ValueError(f"cannot take {number}")
        record.write(
            time.clock_gettime_ns(time.CLOCK_BOOTTIME), (message.key or b"").decode(), number
        )

    policy = {} if GROUPS[group] is None else {"on_failure": GROUPS[group], "tries_max": 2}
    async with Consumer(
        meta,
        subject=SUBJECT,
        group=group,
        handler=handle,
        settings=CONSUMER,
        wait_s=WAIT_S,
        **policy,
    ):
        await ended.wait()


async def main() -> None:
    act, meta, name, *rest = sys.argv[1:]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    if act == "produce":
        await produce(meta, name, float(rest[0]), LineFile(rest[1]), ended)
    else:
        await consume(meta, name, LineFile(rest[0]), Path(rest[1]), ended)


if __name__ == "__main__":
    asyncio.run(main())
