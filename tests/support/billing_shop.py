"""A shop whose orders are billed, in virtual time: what stories about consumers share.

An order is a text such as "anna-2", the second order of the customer `anna`, who is its key.
Consumers of the group `billing` handle the orders of the subject `orders`, each in a program of its
own, a biller.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.admin import ParkedKeyView, ParkState, PartitionProgress
from keylane.errors import GroupUnknownError
from keylane.testing import ClientProgram, VirtualCluster

ORDERS, BILLING = "orders", "billing"


def customer_of(order: str) -> str:
    """Return the customer of an order; "" if it has none."""
    return order.rpartition("-")[0]


class BillingTry(NamedTuple):
    """A call of a handler for an order."""

    order: str
    attempt: int
    at_s: float
    biller: str


class BillingShop:
    """
    The shop.

    Attributes:
        billed: the orders, when their billing has ended.
        tries: the calls of handlers.
        broken: orders whose billing raises.
        fatal: orders whose billing ends its process, as SIGKILL.
        slow: how many seconds the billing of an order takes.
        busy_max: the largest number of orders that were billed at the same time, by customer.
    """

    def __init__(self, cluster: VirtualCluster, producer: Producer, admin: Admin) -> None:
        self.cluster = cluster
        self.producer = producer
        self.admin = admin
        self.billed: list[str] = []
        self.tries: list[BillingTry] = []
        self.broken: set[str] = set()
        self.fatal: set[str] = set()
        self.slow: dict[str, float] = {}
        self.busy_max: Counter[str] = Counter()
        self._busy: Counter[str] = Counter()

    # ── given and when ────────────────────────────────────────────────────────────────────────────
    async def place(self, *orders: str, subject: str = ORDERS, **options: Any) -> None:
        """Send orders, one after another."""
        for order in orders:
            key = {"key": customer} if (customer := customer_of(order)) else {}
            await self.producer.send(subject, order.encode(), **key, **options)

    def consumer(self, **options: Any) -> Consumer:
        """A consumer of the group; without a handler, for a loop."""
        settings = options.pop("settings", {})
        given = {"subject": ORDERS, "group": BILLING, "settings": ConsumerSettings(**settings)}
        return Consumer(self.cluster.address, **given | options)

    def start_biller(self, name: str = "biller", **options: Any) -> ClientProgram:
        """Start a process that bills orders one by one."""

        async def bill(message: Message) -> None:
            await self.bill(message, name, program)

        program = self.start(lambda: self.consumer(handler=bill, **options).run())
        return program

    def start_batch_biller(self, batches: list[list[str]], **options: Any) -> ClientProgram:
        """Start a process that bills orders in batches, and notes these."""

        async def bill(messages: list[Message]) -> None:
            batches.append([message.value.decode() for message in messages])
            await asyncio.sleep(0.01)
            for order in batches[-1]:
                if order in self.broken:
                    raise ValueError(f"cannot bill {order}")
            self.billed += batches[-1]

        return self.start(lambda: self.consumer(batch_handler=bill, **options).run())

    def start(self, function: Callable[[], Awaitable[Any]]) -> ClientProgram:
        """Start a process."""

        async def biller() -> None:
            await function()

        return self.cluster.start(biller)

    async def bill(self, message: Message, name: str, program: ClientProgram) -> None:
        """Bill an order: what handlers do."""
        order, customer = message.value.decode(), message.key_text
        self.tries.append(BillingTry(order, message.attempt, self.cluster.now_s, name))
        self._busy[customer] += 1
        self.busy_max[customer] = max(self.busy_max[customer], self._busy[customer])
        try:
            if order in self.fatal:
                program.kill()
            await asyncio.sleep(self.slow.get(order, 0))
            if order in self.broken:
                raise ValueError(f"cannot bill {order}")
            self.billed.append(order)
        finally:
            self._busy[customer] -= 1

    # ── then ──────────────────────────────────────────────────────────────────────────────────────
    async def until_billed(self, *orders: str, within_s: float = 120) -> None:
        """Wait until each order was billed at least once."""
        await self.cluster.until(lambda: set(orders) <= set(self.billed), within_s=within_s)

    async def until_tried(self, order: str, times: int = 1, within_s: float = 120) -> None:
        """Wait until the billing of an order has begun so often."""
        await self.cluster.until(lambda: len(self.tries_of(order)) >= times, within_s=within_s)

    def tries_of(self, order: str) -> list[BillingTry]:
        """Return the tries of an order."""
        return [each for each in self.tries if each.order == order]

    def billed_of(self, customer: str) -> list[str]:
        """Return the billed orders of a customer, in their order."""
        return [order for order in self.billed if customer_of(order) == customer]

    async def lag(self) -> int:
        """Return how many orders are not acked."""
        return await self.cluster.lag(ORDERS, BILLING)

    async def until_acked(self, within_s: float = 120) -> None:
        """Wait until all orders are acked, or set aside."""

        async def is_acked() -> bool:
            return bool(await self.progress()) and await self.lag() == 0

        await self.cluster.until(is_acked, within_s=within_s)

    async def set_aside(self, **options: Any) -> list[ParkedKeyView]:
        """Return what was set aside: keys, dead orders, and, if asked for, what waits for retry."""
        try:
            return [each async for each in self.admin.parked(ORDERS, BILLING, **options)]
        except GroupUnknownError:
            return []

    async def until_set_aside(self, messages: int = 1, within_s: float = 300) -> ParkedKeyView:
        """Wait until so many orders are set aside under one key, which waits, and return it."""

        async def found() -> ParkedKeyView | None:
            views = await self.set_aside()
            if [view.messages for view in views] != [messages]:
                return None
            return None if views[0].state is ParkState.REDRIVING else views[0]

        view: ParkedKeyView = await self.cluster.until(found, within_s=within_s)
        return view

    async def until_nothing_is_aside(self) -> None:
        """Wait until no order is parked or dead."""

        async def is_empty() -> bool:
            return not await self.set_aside()

        await self.cluster.until(is_empty)

    async def progress(self) -> list[PartitionProgress]:
        """Return owner and cursor of each partition; none before the group's first consumer."""
        try:
            return list((await self.admin.describe_group(ORDERS, BILLING)).partitions)
        except GroupUnknownError:
            return []

    async def owners(self) -> set[str | None]:
        """Return the owners of the partitions."""
        return {each.owner for each in await self.progress()}

    async def until_owned(self, *names: str) -> None:
        """Wait until these consumers have all partitions."""

        async def is_owned() -> bool:
            return await self.owners() == set(names)

        await self.cluster.until(is_owned)


@asynccontextmanager
async def open_shop(
    cluster: VirtualCluster, *, partitions: int = 1, strategy: str = "strict"
) -> AsyncIterator[BillingShop]:
    """Open a shop without orders, and without a biller."""
    await cluster.create_subject(ORDERS, partitions=partitions, order_strategy=strategy)
    async with Producer(cluster.address) as producer, Admin(cluster.address) as admin:
        yield BillingShop(cluster, producer, admin)
