"""A service that handles messages until it is stopped, and lets running handlers finish.

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
    # On SIGTERM or SIGINT, running handlers finish, their messages are acked, and other consumers
    # get the partitions at once.
    await Consumer(META, subject="readings", group="service", handler=handle).run()
    print("everything is handed over")


asyncio.run(main())
