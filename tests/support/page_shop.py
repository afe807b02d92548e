"""What stand-ins of pages share: orders that arrive, and a group that handles or parks them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

from keylane import Admin, Consumer, Message, Producer

META = os.environ.get("KEYLANE_META", "")
ORDER = b'{"total": 12}'
CUSTOMERS = ("customer-7", "customer-8", "customer-7")


async def send_orders(subject: str = "orders", value: bytes = ORDER) -> None:
    """Send a message of each of `CUSTOMERS`."""
    async with Producer(META) as producer:
        for customer in CUSTOMERS:
            await producer.send(
                subject, value, key=customer, tags=["paid"], properties={"country": "DE"}
            )


async def handle_all(
    handler: Callable[[Message], Awaitable[None] | None],
    subject: str = "orders",
    group: str = "billing",
    **options: object,
) -> None:
    """Have the group handle what is there."""
    async with (
        Consumer(META, subject=subject, group=group, handler=handler, **options),
        Admin(META) as admin,
        asyncio.timeout(60),
    ):
        while await admin.lag(subject, group):
            await asyncio.sleep(0.05)


async def assert_handled(subject: str = "orders", group: str = "billing") -> None:
    """The group has handled all messages of the subject, and has set none aside."""
    async with Admin(META) as admin:
        described = await admin.describe_subject(subject)
        assert sum(partition.next_offset or 0 for partition in described.partitions)
        assert await admin.lag(subject, group) == 0
        assert not [key async for key in admin.parked(subject, group)]


async def park(key: str, error: Exception, *, to: str = "park") -> None:
    """Have the group `billing` set the next order of this key aside."""

    async def fail(message: Message) -> None:
        if message.key_text == key:
            raise error

    async with Producer(META) as producer:
        await producer.send("orders", ORDER, key=key)
    async with (
        Consumer(META, subject="orders", group="billing", handler=fail, on_failure=to, tries_max=1),
        Admin(META) as admin,
        asyncio.timeout(60),
    ):
        while await admin.lag("orders", "billing"):
            await asyncio.sleep(0.05)


async def handle_parked(key: str) -> None:
    """Have the group `billing` handle all parked orders of this key."""

    async def bill(message: Message) -> None:
        assert message.value

    async with (
        Consumer(META, subject="orders", group="billing", handler=bill),
        Admin(META) as admin,
        asyncio.timeout(60),
    ):
        await admin.redrive("orders", "billing", key=key)
        while [view async for view in admin.parked("orders", "billing", key=key)]:
            await asyncio.sleep(0.05)
