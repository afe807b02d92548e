"""A consumer process with a filter, for tests that kill it.

Run as `python filterer.py META SUBJECT FILE MANNER`. MANNER: "tags", "property" or "batch". One
line of the file per message that a handler gets: PARTITION OFFSET VALUE.
"""

import asyncio
import sys

from keylane import Consumer, ConsumerSettings, Message
from support.consumer_options import consumer_options


async def main() -> None:
    meta, subject, path, manner = sys.argv[1:]
    with open(path, "a", buffering=1) as out:

        async def handle(message: Message) -> None:
            out.write(f"{message.partition_id} {message.offset} {message.value.decode()}\n")
            await asyncio.sleep(0.002)

        async def handle_all(messages: list[Message]) -> None:
            for message in messages:
                await handle(message)

        calls = {"batch_handler": handle_all} if manner == "batch" else {"handler": handle}
        wanted = {"filter": {"country": "DE"}} if manner == "property" else {"tags": ["paid"]}
        await Consumer(
            meta,
            **consumer_options(
                subject=subject,
                group="g",
                settings=ConsumerSettings(ttl_ms=3_000, concurrency=8, max_records=16),
                **calls,
                **wanted,
            ),
        ).run()


asyncio.run(main())
