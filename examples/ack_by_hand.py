"""A consumer that iterates over messages, and acks each one when it is written to disk.

keylane dev --subject orders          (in another terminal)
seq 1 10 | keylane produce orders
python examples/ack_by_hand.py orders.txt
"""

import asyncio
import os
import sys
from typing import BinaryIO

from keylane import Consumer

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")
COUNT = 10


async def main(file: BinaryIO) -> None:
    written = 0
    async with Consumer(META, subject="orders", group="export") as consumer:
        async for message in consumer:
            file.write(message.value + b"\n")
            file.flush()
            os.fsync(file.fileno())
            # An acked message is not delivered again. If the program is killed before the ack, the
            # message is redelivered.
            await message.ack()
            written += 1
            if written == COUNT:
                break
    print(f"wrote {written} messages to {file.name}")


if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit("usage: python examples/ack_by_hand.py FILE")
with open(sys.argv[1], "ab") as target:
    asyncio.run(main(target))
