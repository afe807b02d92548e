"""Send the parcels of three customers, with the customer as order key, and handle them
concurrently, but in order for each customer.

keylane dev --subject parcels          (in another terminal)
python examples/send_and_handle.py
"""

import asyncio
import os

from keylane import Consumer, Message, Producer

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")
CUSTOMERS = ["ada", "bob", "cyd"]
STEPS = ["placed", "paid", "packed", "shipped"]


async def send() -> None:
    async with Producer(META) as producer:
        futures = [
            producer.send("parcels", step.encode(), key=customer)
            for step in STEPS
            for customer in CUSTOMERS
        ]
        for future in futures:
            # The message is now stored on disk. The error of a future that is not awaited is
            # raised by flush or close.
            receipt = await future
        print(f"sent {len(futures)}, the last to offset {receipt.offset}: {receipt.durable}")


async def main() -> None:
    seen: dict[str, list[str]] = {customer: [] for customer in CUSTOMERS}
    everything = asyncio.Event()

    async def handle(message: Message) -> None:
        # Handles one message of a key at a time, and other keys concurrently. The message is acked
        # when this returns.
        await asyncio.sleep(0.01)
        seen[message.key_text].append(message.value.decode())
        if sum(map(len, seen.values())) == len(CUSTOMERS) * len(STEPS):
            everything.set()

    await send()
    async with Consumer(META, subject="parcels", group="shipping", handler=handle):
        await everything.wait()
    for customer, steps in seen.items():
        print(customer, *steps)


asyncio.run(main())
