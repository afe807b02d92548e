"""Pass a trace from a producer through a handler to the messages that the handler sends, with
`traceparent` as a property of each message.

keylane dev --subject orders --subject bills      (in another terminal)
python examples/trace_sent_messages.py

To use OpenTelemetry instead of the two functions, see docs/do/trace-messages.md.
"""

import asyncio
import os
import secrets

from keylane import Consumer, Message, Producer

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")
COUNT = 3


def new_span(parent: str = "") -> str:
    """Return a W3C `traceparent` for a new span in the parent's trace, or in a new trace."""
    trace = parent.split("-")[1] if parent else secrets.token_hex(16)
    return f"00-{trace}-{secrets.token_hex(8)}-01"


def parent_of(message: Message) -> str:
    """Return the sender's `traceparent`, or "" if there is none."""
    given = message.properties.get("traceparent", "")
    return given if isinstance(given, str) else ""


async def main() -> None:
    mailed = 0
    everything = asyncio.Event()
    consumer = Consumer(META)

    async with Producer(META) as producer:

        @consumer.on("orders", group="billing")
        async def bill(message: Message) -> None:
            parent = parent_of(message)
            span = new_span(parent)
            print(f"{message.value.decode()} placed: {parent} billed: {span}")
            await producer.send(
                "bills", message.value, key=message.key, properties={"traceparent": span}
            )

        @consumer.on("bills", group="mail")
        async def mail(message: Message) -> None:
            nonlocal mailed
            print(f"{message.value.decode()} mailed: {new_span(parent_of(message))}")
            mailed += 1
            if mailed == COUNT:
                everything.set()

        for number in range(COUNT):
            await producer.send(
                "orders",
                b"order-%d" % number,
                key=b"customer-7",
                properties={"traceparent": new_span()},
            )
        async with consumer:
            await everything.wait()


asyncio.run(main())
