"""A producer under watch, a process of its own: sends until SIGTERM, waits for every receipt, ends.

python producer.py META SUBJECT KEYS PER_SECOND SESSION RECORD
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from keylane import Producer
from keylane.checker.events import Sent, Settled
from keylane.producer.send_future import SendFuture
from keylane.producer.settings import ProducerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import Fate, KeylaneError
from proof.recording import Recorder

AT_ONCE = 10


async def main() -> None:
    meta, subject, keys, per_second, session, path = sys.argv[1:]
    record = Recorder(Path(path))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings = ProducerSettings(
        call_timeout_ms=1_000,
        close_timeout_ms=120_000,
        batch_count=100,
        backoff=Backoff(first_ms=10, max_ms=200),
    )
    waiting: set[asyncio.Task[None]] = set()

    async def settle(future: SendFuture, value: bytes) -> None:
        try:
            receipt = await future
        except KeylaneError as error:
            outcome = "not done" if error.fate is Fate.NOT_DONE else "unknown"
            record(Settled(value, outcome))
        else:
            place = (receipt.partition_id, receipt.offset)
            twice = receipt.duplicate == "possible"
            record(Settled(value, "stored", *place, receipt.reordered, twice))

    producer = Producer(meta.split(","), settings=settings)
    while True:
        try:
            await producer.__aenter__()
            break
        except KeylaneError:  # the metaserver is away just now
            await asyncio.sleep(0.2)
    print("ready", flush=True)
    number = 0
    while not stop.is_set():
        await producer.drain()
        for _ in range(AT_ONCE):
            key, value = (
                b"key-%d" % (number * 7_919 % int(keys)),
                f"{session}:{number}".encode(),
            )
            future = producer.send(subject, value, key=key)
            record(Sent(value, key, session, number, True))
            task = asyncio.create_task(settle(future, value))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
            number += 1
        await asyncio.sleep(AT_ONCE / float(per_second))
    await producer.flush()
    await asyncio.gather(*waiting)
    await producer.close()


if __name__ == "__main__":
    asyncio.run(main())
