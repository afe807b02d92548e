"""A consumer process for tests that notes in a file when each handler starts and ends.

Run as `python zombie.py META SUBJECT GROUP TTL_MS FILE SLEEP_S [shared IN_FLIGHT_MS | instance
NAME]`. One JSON line per event: {"event": "start" | "end" | "cancelled", "partition", "offset",
"token", "key", "boot_ms", "deadline_ms"}
"""

import asyncio
import json
import sys
import time
from dataclasses import replace

from keylane import Consumer, Message
from keylane.consumer import ConsumerSettings


def boot_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


async def main() -> None:
    meta, subject, group, ttl_ms, path, sleep_s, *more = sys.argv[1:]
    settings = ConsumerSettings()
    if more[:1] == ["shared"]:
        settings = ConsumerSettings(
            consume_strategy="shared", in_flight_ms=int(more[1]), in_flight_messages=20
        )
    elif more:
        settings = ConsumerSettings(instance=more[1])
    with open(path, "a", buffering=1) as out:

        def say(event: str, message: Message) -> None:
            line = {
                "event": event,
                "partition": message.partition_id,
                "offset": message.offset,
                "token": message.fencing_token,
                "key": message.key.decode(),
                "boot_ms": boot_ms(),
                "deadline_ms": message.delivery.shell.state.tenure.until_ms,
            }
            out.write(json.dumps(line) + "\n")

        async def handle(message: Message) -> None:
            say("start", message)
            try:
                if float(sleep_s):
                    await asyncio.sleep(float(sleep_s))
            except asyncio.CancelledError:
                say("cancelled", message)
                raise
            say("end", message)

        async with Consumer(
            meta,
            subject=subject,
            group=group,
            handler=handle,
            settings=replace(settings, ttl_ms=int(ttl_ms), concurrency=4),
        ) as consumer:
            print("ready", flush=True)
            await consumer.run()


asyncio.run(main())
