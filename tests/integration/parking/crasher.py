"""A consumer process for tests that ends when a handler gets a message of the key `bad`.

Run as `python crasher.py META SUBJECT FILE MANNER`. MANNER: "one", "slow", "dead", "batch",
"iterated", "arrow" or "shared". One line of the file per message that a handler gets: KEY VALUE
ATTEMPT.
"""

import asyncio
import os
import sys

from keylane import Consumer, ConsumerSettings, Message


async def main() -> None:
    meta, subject, path, manner = sys.argv[1:]
    if manner == "arrow":
        from keylane.arrow import columns
    with open(path, "a", buffering=1) as out:

        async def handle(message: Message) -> None:
            out.write(f"{message.key.decode()} {message.value.decode()} {message.attempt}\n")
            await asyncio.sleep(0.2 if message.key.startswith(b"slow") else 0.01)
            if message.key.startswith(b"stands"):
                await asyncio.Event().wait()
            if message.key == b"bad":
                os._exit(9)  # as the kernel does when there is no memory left

        async def handle_all(messages: list[Message]) -> None:
            for message in messages:
                await handle(message)

        handlers = {
            "one": {"handler": handle},
            "slow": {"handler": handle},
            "dead": {"handler": handle},
            "shared": {"handler": handle},
            "batch": {"batch_handler": handle_all},
        }
        settings = {
            "arrow": ConsumerSettings(ttl_ms=10_000, instance="crasher"),
            "shared": ConsumerSettings(ttl_ms=1_000, consume_strategy="shared"),
        }
        consumer = Consumer(
            meta,
            subject=subject,
            group="g",
            settings=settings.get(manner, ConsumerSettings(ttl_ms=1_000)),
            on_failure={"arrow": "block", "dead": "dead"}.get(manner, "park"),
            **handlers.get(manner, {}),
        )
        if manner not in {"iterated", "arrow"}:
            await consumer.run()
            return
        async with consumer:
            if manner == "arrow":
                async for batch in consumer.batches():
                    columns = batch.record_batch.to_pydict()
                    for key, value in zip(columns["key"], columns["value"], strict=True):
                        await handle(Message(subject, key, value, 0, 1, 0))
                    await batch.ack()
            async for message in consumer:
                await handle(message)
                await message.ack()


asyncio.run(main())
