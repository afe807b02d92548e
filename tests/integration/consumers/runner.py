"""A consumer process for tests that runs until it is told to stop, and writes what it handled to a
file.

Run as `python runner.py HOW META SUBJECT GROUP TTL_MS FILE SLEEP_S`. HOW: "alone", "opened" or
"iterating". One line of a file per handled message: PARTITION OFFSET BOOT_MS, written when its
handling ends.
"""

import asyncio
import signal
import sys
import time

from keylane import Consumer, ConsumerSettings, Message


def boot_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


async def iterate(consumer: Consumer, handle) -> None:
    async with consumer:
        running = asyncio.create_task(consumer.run())
        print("ready", flush=True)
        async for message in consumer:
            await handle(message)
            await message.ack()
        await running


async def main() -> None:
    how, meta, subject, group, ttl_ms, path, sleep_s = sys.argv[1:]
    with open(path, "a", buffering=1) as out:

        async def handle(message: Message) -> None:
            await asyncio.sleep(float(sleep_s))
            out.write(f"{message.partition_id} {message.offset} {boot_ms()}\n")

        consumer = Consumer(
            meta,
            subject=subject,
            group=group,
            settings=ConsumerSettings(ttl_ms=int(ttl_ms)),
            handler=None if how == "iterating" else handle,
        )
        if how == "iterating":
            await iterate(consumer, handle)
        elif how == "opened":
            async with consumer:
                print("ready", flush=True)
                await consumer.run()
        else:
            print("ready", flush=True)
            await consumer.run()
    print("done", flush=True)


signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
asyncio.run(main())
