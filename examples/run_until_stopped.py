"""A service: handles messages until it is told to stop, and lets running handlers end.

keylane dev --subject readings        (in another terminal)
seq 1 10 | keylane produce readings
python examples/run_until_stopped.py  (Ctrl-C, or a deploy's SIGTERM, ends it)
"""

import asyncio
import os

from keylane import Consumer, Message

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")


async def handle(message: Message) -> None:
    await asyncio.sleep(0.1)
    print("handled", message.value.decode(), flush=True)


async def main() -> None:
    # At SIGTERM or SIGINT: running handlers end, their messages are acked, the partitions go to
    # other consumers at once.
    await Consumer(META, subject="readings", group="service", handler=handle).run()
    print("everything is handed over")


asyncio.run(main())
