"""A consumer process for tests that ends when a handler gets a message of the key `bad`.

Run as `python crasher.py META SUBJECT FILE MANNER [on_failure]`.  MANNER: "one" or "batch".  One line of the file per message
that a handler gets: KEY VALUE ATTEMPT.
"""

import asyncio
import os
import sys

from keylane import Consumer, Message


async def main() -> None:
    meta, subject, path, manner, *policy = sys.argv[1:]
    with open(path, "a", buffering=1) as out:

        async def handle(message: Message) -> None:
            out.write(f"{message.key.decode()} {message.value.decode()} {message.attempt}\n")
            await asyncio.sleep(0.01)
            if message.key == b"bad":
                os._exit(9)  # as the kernel does when there is no memory left

        async def handle_all(messages: list[Message]) -> None:
            for message in messages:
                await handle(message)

        handlers = {"handler": handle} if manner == "one" else {"batch_handler": handle_all}
        await Consumer(
            meta,
            subject=subject,
            group="g",
            ttl_ms=1_000,
            on_failure=policy[0] if policy else "park",
            **handlers,
        ).run()


asyncio.run(main())
