"""A consumer process for tests whose handler fails for messages of the key `bad` until a file
exists.

Run as `python retrier.py META SUBJECT FILE MENDED DIES_FROM`; from try DIES_FROM on the process
ends. One line of FILE per message that the handler gets: KEY VALUE ATTEMPT.
"""

import asyncio
import os
import sys
from pathlib import Path

from keylane import Backoff, Consumer, ConsumerSettings, Message


async def main() -> None:
    meta, subject, path, mended, dies_from = sys.argv[1:]
    with open(path, "a", buffering=1) as out:

        async def handle(message: Message) -> None:
            out.write(f"{message.key.decode()} {message.value.decode()} {message.attempt}\n")
            if message.key == b"bad" and not Path(mended).exists():
                if message.attempt >= int(dies_from):
                    os._exit(9)  # as the kernel does when there is no memory left
                raise ValueError("not now")

        pauses = Backoff(first_ms=100, max_ms=400)
        settings = ConsumerSettings(ttl_ms=1_000, retry_backoff=pauses)
        await Consumer(meta, subject=subject, group="g", handler=handle, settings=settings).run()


asyncio.run(main())
