"""What docs/PARKING.md promises, each promise as a story of a shop whose orders are billed.

The cluster is the real one, in virtual time. What needs real processes, broken files or many
messages has its story elsewhere:

* rows of Arrow data that end their process: tests/integration/parking/test_crashes.py;
* limits, and dead keys: tests/integration/parking/test_full_parking.py, a million messages in
  tests/unit/broker/partition/test_parked.py, and a thousand edits in
  tests/unit/broker/test_parking.py;
* commands: tests/integration/clients/test_parked.py;
* changes of a list that children have taken over, merges, and parts of a group that are reset:
  tests/integration/parking/test_parked_keys.py and test_resets_of_parked_keys.py;
* retention, and damage of records: tests/unit/broker/store/test_parking.py;
* messages that cannot be read: tests/unit/consumer/session/test_unreadable.py.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from keylane import Message, Retry
from keylane.admin import ParkState
from keylane.errors import (
    BusyError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    Reason,
    StaleRouteError,
)
from keylane.protocol.text import key_digest
from keylane.testing import ClientProgram, VirtualCluster
from support.billing_shop import BILLING, ORDERS, BillingShop, open_shop
from support.raising import raises

pytestmark = pytest.mark.acceptance
PARK: dict[str, Any] = {"on_failure": "park", "tries_max": 3}
DEAD: dict[str, Any] = {"on_failure": "dead", "tries_max": 3}


async def park_anna(shop: BillingShop, orders: int = 3) -> None:
    """Have the first orders of anna parked, behind a broken one."""
    shop.broken = {"anna-1"}
    await shop.place(*(f"anna-{number}" for number in range(1, orders + 1)))
    await shop.until_set_aside(orders)


async def redrive(shop: BillingShop, **selected: Any) -> None:
    """Have what is set aside handled again."""
    await shop.admin.redrive(ORDERS, BILLING, **selected)


def billers_of(shop: BillingShop, order: str) -> list[str]:
    return [each.biller for each in shop.tries_of(order)]


# ── parked and redriven ───────────────────────────────────────────────────────────────────────────
async def test_parked_customer_waits_alone_and_is_redriven_in_order(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        # given a customer whose first order is broken
        shop.start_biller(**PARK)
        await park_anna(shop, orders=2)
        # then later orders are parked too, and everything else continues
        await shop.place("anna-3", "bob-1")
        await shop.until_billed("bob-1")
        parked = await shop.until_set_aside(3)
        assert (parked.key, parked.state) == (b"anna", ParkState.PARKED)
        assert parked.failure is not None
        assert (parked.failure.text, parked.failure.attempts) == ("cannot bill anna-1", 3)
        assert shop.billed == ["bob-1"]
        # when the order is mended and redriven, while further ones arrive
        shop.broken.clear()
        await redrive(shop, key="anna")
        await shop.place("anna-4", "anna-5")
        # then all are billed in order, and the customer is like any other
        await shop.until_billed("anna-5")
        assert shop.billed_of("anna") == [f"anna-{number}" for number in range(1, 6)]
        await shop.until_nothing_is_aside()


async def test_redriven_customer_is_parked_again_when_it_fails_again(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        shop.start_biller(**PARK)
        await park_anna(shop)
        shop.broken = {"anna-2"}
        await redrive(shop, key="anna")
        parked = await shop.until_set_aside(2)
        assert (parked.key, parked.state) == (b"anna", ParkState.PARKED)
        assert shop.billed == ["anna-1"]
        assert len(shop.tries_of("anna-2")) == 3
        assert shop.tries_of("anna-3") == []


async def test_parked_customer_stays_parked_when_everything_crashes(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        first = shop.start_biller(**PARK)
        await park_anna(shop)
        # when consumer and broker crash, and another consumer follows
        first.crash()
        keylane_cluster.brokers[0].crash()
        await asyncio.sleep(60)
        keylane_cluster.brokers[0].start()
        shop.broken.clear()
        shop.start_biller("second", **PARK)
        await shop.place("anna-4", "bob-1")
        await shop.until_billed("bob-1")
        # then nothing of the customer is lost, or handled before its time
        await shop.until_set_aside(4)
        assert shop.billed == ["bob-1"]
        await redrive(shop, all=True)
        await shop.until_billed("anna-4")
        assert shop.billed_of("anna") == [f"anna-{number}" for number in range(1, 5)]


@pytest.mark.parametrize("act", ["redrive", "skip"])
async def test_change_of_an_operator_reaches_the_owner_when_the_broker_restarts_at_once(
    keylane_cluster: VirtualCluster, act: str
):
    """The broker has stored the change, and ends before it has told the owner."""
    async with open_shop(keylane_cluster) as shop:
        # given an owner that began when the customer was parked already
        first = shop.start_biller(**PARK)
        await park_anna(shop)
        await first.stop()
        shop.broken.clear()
        shop.start_biller("second", **PARK)
        await shop.place("bob-1")
        await shop.until_billed("bob-1")
        # when an operator acts, and the broker is killed
        if act == "redrive":
            await redrive(shop, key="anna")
        else:
            await shop.admin.skip(ORDERS, BILLING, key="anna")
        keylane_cluster.brokers[0].kill()
        keylane_cluster.brokers[0].start()
        # then the customer goes on
        await shop.place("anna-4")
        await shop.until_billed("anna-4")
        before = ["anna-1", "anna-2", "anna-3"] if act == "redrive" else []
        assert shop.billed == ["bob-1", *before, "anna-4"]


@pytest.mark.keylane(brokers=2)
@pytest.mark.parametrize("change", ["resize", "move"])
async def test_parked_customer_goes_with_its_partition(
    keylane_cluster: VirtualCluster, change: str
):
    async with open_shop(keylane_cluster) as shop:
        shop.start_biller(**PARK)
        await park_anna(shop)
        # when its partition gets children
        if change == "resize":
            operation = await shop.admin.resize(ORDERS, 2)
        else:
            (partition,) = await shop.progress()
            other = "g1" if partition.broker_group == "g0" else "g0"
            operation = await shop.admin.move([partition.partition_id], to=other)
        await shop.admin.wait(operation)
        # then a child has what was parked, and parks what follows
        await shop.place("anna-4", "bob-1")
        await shop.until_billed("bob-1")
        await shop.until_set_aside(4)
        shop.broken.clear()
        await redrive(shop, key="anna")
        await shop.until_billed("anna-4")
        assert shop.billed_of("anna") == [f"anna-{number}" for number in range(1, 5)]


@pytest.mark.keylane(brokers=2)
async def test_operator_is_refused_while_an_owner_takes_over_more_than_a_page(
    keylane_cluster: VirtualCluster,
):
    async def bill(message: Message) -> None:
        if message.key_text == "anna":
            raise ValueError("cannot bill anna")

    async with open_shop(keylane_cluster, partitions=1) as shop:

        def start_biller() -> ClientProgram:
            one_try = {"on_failure": "dead", "tries_max": 1}
            return shop.start(lambda: shop.consumer(handler=bill, **one_try).run())

        # given more dead orders, among others, than a page of a list has
        first = start_biller()
        for _ in range(5_001):
            shop.producer.send(ORDERS, b"broken", key="anna")
            shop.producer.send(ORDERS, b"good", key="bob")
        await shop.producer.flush()
        await shop.until_set_aside(5_001)
        await first.stop()
        # when their partition is moved, and its next owner stands still while it takes them over
        (parent,) = await shop.progress()
        other = "g1" if parent.broker_group == "g0" else "g0"
        await shop.admin.wait(await shop.admin.move([parent.partition_id], to=other))
        second = start_biller()

        async def has_a_page() -> bool:
            second.pause()
            if 5_000 in [view.messages for view in await shop.set_aside()]:
                return True
            second.resume()
            return False

        await keylane_cluster.until(has_a_page, every_s=0.001)

        async def edit() -> Reason | None:
            try:
                await shop.admin.edit_parked(ORDERS, BILLING, parent.partition_id, 0, value=b"good")
            except StaleRouteError as error:
                return error.reason
            return None

        # then operators change none of them, also when the broker has started again
        assert await edit() is Reason.PARK_MOVED
        broker = keylane_cluster.brokers[int(other.removeprefix("g"))]
        broker.crash()
        broker.start()
        await asyncio.sleep(1)
        assert await edit() is Reason.PARK_MOVED
        # until the owner has all of them
        second.resume()

        async def is_edited() -> bool:
            return await edit() is None

        await keylane_cluster.until(is_edited)


@pytest.mark.keylane(brokers=2)
async def test_operator_sees_a_customer_whose_next_owner_was_killed_before_it_had_a_page(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        first = shop.start_biller("first", **PARK)
        await park_anna(shop)
        await first.stop()
        # when its partition is moved, and the next owner is killed as soon as it has asked for it
        (parent,) = await shop.progress()
        other = "g1" if parent.broker_group == "g0" else "g0"
        await shop.admin.wait(await shop.admin.move([parent.partition_id], to=other))
        second = shop.start_biller("second", **PARK)

        async def is_asked_for() -> bool:
            second.pause()
            (view,) = await shop.set_aside()
            if view.being_adopted:
                return True
            second.resume()
            return False

        await keylane_cluster.until(is_asked_for, every_s=0.0005)
        second.kill()
        await asyncio.sleep(60)
        # then the customer is shown, and nothing of it is changed
        (view,) = await shop.set_aside()
        place = (parent.partition_id, 0)
        assert (view.partition_id, view.key, view.messages) == (place[0], b"anna", 3)
        assert view.being_adopted
        assert await shop.set_aside(partition_id=parent.partition_id) == [view]
        assert [
            each.message.value
            async for each in shop.admin.parked_messages(ORDERS, BILLING, "anna")
            if each.message is not None
        ] == [b"anna-1", b"anna-2", b"anna-3"]
        admin, shop_group = shop.admin, (ORDERS, BILLING)
        for change in (
            lambda: admin.edit_parked(*shop_group, key="anna", value=b"good"),
            lambda: admin.edit_parked(*shop_group, *place, value=b"good"),
            lambda: admin.skip(*shop_group, key="anna"),
            lambda: admin.redrive(*shop_group, key="anna"),
            lambda: admin.redrive(*shop_group, all=True),
        ):
            with raises(Reason.PARK_MOVED):
                await change()
        # until another owner has it
        shop.broken.clear()
        shop.start_biller("third", **PARK)

        async def is_skipped() -> bool:
            try:
                return await shop.admin.skip(ORDERS, BILLING, key="anna", first=1) == 1
            except StaleRouteError:
                return False

        await keylane_cluster.until(is_skipped)
        (view,) = await shop.set_aside()
        assert (view.messages, view.being_adopted) == (2, False)
        await redrive(shop, key="anna")
        await shop.until_billed("anna-3")
        assert shop.billed == ["anna-2", "anna-3"]


async def test_parked_order_is_no_lag_and_stays_where_it_was_stored(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        shop.start_biller(**PARK)
        await park_anna(shop)
        await shop.until_acked()
        (progress,) = await shop.progress()
        assert (progress.lag, progress.parked) == (0, 3)
        stored = await keylane_cluster.messages(ORDERS)
        assert [message.value for message in stored] == [b"anna-1", b"anna-2", b"anna-3"]


async def test_customer_is_free_when_an_operator_skips_its_last_order(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        shop.start_biller(**PARK)
        await park_anna(shop)
        # when one order is skipped, the others stay
        assert await shop.admin.skip(ORDERS, BILLING, key="anna", first=1) == 1
        await shop.until_set_aside(2)
        # and when all are, the customer is like any other
        assert await shop.admin.skip(ORDERS, BILLING, key="anna") == 2
        await shop.until_nothing_is_aside()
        await shop.place("anna-4")
        await shop.until_billed("anna-4")
        assert shop.billed == ["anna-4"]


async def test_reset_forgets_what_is_parked(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        shop.start_biller(**PARK)
        await park_anna(shop)
        shop.broken.clear()
        await shop.admin.reset_group(ORDERS, BILLING, "earliest", live=True)
        await shop.until_billed("anna-3")
        assert shop.billed == ["anna-1", "anna-2", "anna-3"]
        assert await shop.set_aside() == []


# ── tries and policies ────────────────────────────────────────────────────────────────────────────
async def test_tries_of_several_owners_count_together(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        shop.broken = {"anna-1"}
        await shop.place("anna-1")
        first = shop.start_biller("first", **PARK)
        await shop.until_tried("anna-1", 1)
        await asyncio.sleep(0.05)
        await first.stop()
        shop.start_biller("second", **PARK)
        parked = await shop.until_set_aside()
        assert parked.failure is not None
        assert parked.failure.attempts == 3
        assert billers_of(shop, "anna-1").count("first") >= 1
        assert len(shop.tries_of("anna-1")) == 3


@pytest.mark.parametrize(
    ("strategy", "attempts"),
    [("exclusive", [1, 2, 3, 3, 3, 5, 6]), ("shared", [1, 2, 3, 4, 5, 6, 7])],
)
async def test_try_that_ends_with_its_process_is_counted_where_the_broker_knows_it(
    keylane_cluster: VirtualCluster, strategy: str, attempts: list[int]
):
    """In an exclusive group once the order was billed alone, and then once for the ends before."""
    options = {"settings": {"consume_strategy": strategy}, "on_failure": "block"}
    async with open_shop(keylane_cluster) as shop:
        # given an order that has failed twice, and then ends each process
        shop.broken = {"anna-1"}
        await shop.place("anna-1")
        first = shop.start_biller("first", **options)
        await shop.until_tried("anna-1", 2)
        await asyncio.sleep(0.05)
        shop.fatal = {"anna-1"}
        await keylane_cluster.until(lambda: not first.running)
        for name in ("second", "third", "fourth", "fifth"):
            await bill_until_ended(shop, name, **options)
        assert [each.attempt for each in shop.tries_of("anna-1")] == attempts


async def test_tries_of_a_redriven_order_are_counted_from_one_by_each_owner(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        first = shop.start_biller("first", **PARK)
        await park_anna(shop)
        assert [each.attempt for each in shop.tries_of("anna-1")] == [1, 2, 3]
        await redrive(shop, key="anna")
        await shop.until_tried("anna-1", 5)
        await first.stop()
        shop.start_biller("second", **PARK)
        await shop.until_tried("anna-1", 8)
        redriven = shop.tries_of("anna-1")[3:]
        assert [each.attempt for each in redriven] == [1, 2, 1, 2, 3]


async def test_order_whose_handler_raises_system_exit_is_set_aside(
    keylane_cluster: VirtualCluster,
):
    attempts: list[int] = []

    async def bill(message: Message) -> None:
        if message.value == b"anna-1":
            attempts.append(message.attempt)
            raise SystemExit(3)

    async with open_shop(keylane_cluster) as shop:
        await shop.place("anna-1", "bob-1")
        for _ in range(3):
            biller = shop.start(lambda: shop.consumer(handler=bill, **PARK).run())
            with pytest.raises(SystemExit):
                await biller.wait()
        shop.start(lambda: shop.consumer(handler=bill, **PARK).run())
        parked = await shop.until_set_aside()
        assert (parked.key, attempts) == (b"anna", [1, 2, 3])
        await shop.until_acked()


async def test_batch_shrinks_to_a_sixteenth_and_a_256th_when_its_handler_ends_its_owners(
    keylane_cluster: VirtualCluster,
):
    batches: list[list[str]] = []

    async def bill(messages: list[Message]) -> None:
        batches.append([message.value.decode() for message in messages])
        if "anna-1" in batches[-1]:
            raise SystemExit(3)

    async with open_shop(keylane_cluster) as shop:
        # given a batch whose first order ends its owners
        await shop.place("anna-1", *(f"customer{number}-1" for number in range(1, 512)))
        options = {**PARK, "tries_max": 5, "settings": {"max_records": 512}}

        def start_biller() -> ClientProgram:
            return shop.start(lambda: shop.consumer(batch_handler=bill, **options).run())

        for _ in range(5):
            with pytest.raises(SystemExit):
                await start_biller().wait()
        # then it is whole twice, and ever smaller after that, until the order is alone
        assert [len(batch) for batch in batches if "anna-1" in batch] == [512, 512, 32, 2, 1]
        # and the next owner sets that one aside, and bills all others
        start_biller()
        assert (await shop.until_set_aside()).key == b"anna"
        await shop.until_acked()


async def test_order_that_asks_for_another_try_gets_it_beyond_the_last_one(
    keylane_cluster: VirtualCluster,
):
    attempts: list[int] = []

    async def bill(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt < 6:
            raise Retry("the bank is closed", after_s=1)

    async with open_shop(keylane_cluster) as shop:
        await shop.place("anna-1")
        shop.start(lambda: shop.consumer(handler=bill, **PARK).run())
        await shop.until_acked()
        assert attempts == [1, 2, 3, 4, 5, 6]
        assert await shop.set_aside() == []


async def test_forgotten_policy_leaves_the_one_of_the_code(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        # given a stored policy that blocks
        await shop.admin.create_group(ORDERS, BILLING)
        await shop.admin.set_group(ORDERS, BILLING, on_failure="block")
        shop.broken = {"anna-1"}
        shop.start_biller(**PARK)
        await shop.place("anna-1")
        await shop.until_tried("anna-1", 6)
        assert await shop.set_aside() == []
        # when it is forgotten, the code holds again
        await shop.admin.set_group(ORDERS, BILLING, forget=True)
        await shop.until_set_aside()


async def test_order_of_nobody_is_set_aside_alone_and_holds_nothing_back(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        shop.broken = {"-1"}
        shop.start_biller(**PARK)
        await shop.place("-1", "-2", "anna-1")
        dead = await shop.until_set_aside()
        await shop.until_billed("-2", "anna-1")
        assert (dead.is_loose, dead.messages) == (True, 1)


async def test_dead_order_is_retried_by_its_error_alone(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        shop.broken = {"anna-1", "bob-1"}
        shop.start_biller(**DEAD)
        await shop.place("anna-1", "bob-1", "anna-2")
        await shop.until_set_aside(2)
        await shop.until_billed("anna-2")
        # when those of one error are retried
        shop.broken.clear()
        await redrive(shop, dead=True, error="cannot bill anna-1")
        await shop.until_billed("anna-1")
        # then the other one stays
        await shop.until_set_aside(1)
        assert shop.billed == ["anna-2", "anna-1"]


async def test_arrow_batches_refuse_a_policy(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop, shop.consumer(**PARK) as consumer:
        with pytest.raises(Exception, match="on_failure"):
            await anext(aiter(consumer.batches()))


# ── edited ────────────────────────────────────────────────────────────────────────────────────────
async def test_edited_order_is_billed_in_its_place_and_its_original_stays(
    keylane_cluster: VirtualCluster,
):
    seen: list[tuple[str, bool]] = []

    async def bill(message: Message) -> None:
        if message.value == b"anna-1":
            raise ValueError("no such town")
        seen.append((message.value.decode(), "keylane.edited" in message.properties))

    async with open_shop(keylane_cluster) as shop:
        shop.start(lambda: shop.consumer(handler=bill, **PARK).run())
        await park_anna(shop, orders=2)
        await shop.admin.edit_parked(ORDERS, BILLING, key="anna", value=b"anna-1 of Ulm")
        await redrive(shop, key="anna")
        await shop.until_nothing_is_aside()
        assert seen == [("anna-1 of Ulm", True), ("anna-2", False)]
        assert (await keylane_cluster.messages(ORDERS))[0].value == b"anna-1"
        with pytest.raises(NotFoundError) as unknown:
            await shop.admin.edit_parked(ORDERS, BILLING, key="anna", value=b"late")
        assert unknown.value.reason is Reason.PARKED_KEY_UNKNOWN


async def test_edit_is_refused_while_a_customer_is_redriven(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        shop.start_biller(**PARK)
        await park_anna(shop)
        shop.broken.clear()
        shop.slow = {"anna-1": 60.0}
        await redrive(shop, key="anna")
        await shop.until_tried("anna-1", 4)
        with pytest.raises(BusyError) as refused:
            await shop.admin.edit_parked(ORDERS, BILLING, key="anna", value=b"other")
        assert refused.value.reason is Reason.PARKED_REDRIVEN


@pytest.mark.keylane(brokers=2)
async def test_edit_asks_for_the_partition_when_none_of_two_has_the_oldest_order_of_a_customer(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster, partitions=2, strategy="best_tried") as shop:
        shop.broken = {"anna-1", "anna-2"}
        shop.start_biller(on_failure="park", tries_max=3)
        # given a customer whose second order took a detour, because a broker was down
        first = await shop.producer.send(ORDERS, b"anna-1", key="anna")
        await shop.until_set_aside()
        described = await shop.admin.describe_subject(ORDERS)
        (group,) = (
            each.broker_group
            for each in described.partitions
            if each.partition_id == first.partition_id
        )
        broker = keylane_cluster.brokers[int(group.removeprefix("g"))]
        broker.crash()
        second = await shop.producer.send(ORDERS, b"anna-2", key="anna")
        broker.start()

        async def both_are_aside() -> bool:
            return [view.key for view in await shop.set_aside()] == [b"anna", b"anna"]

        await keylane_cluster.until(both_are_aside, within_s=300)
        # when an operator edits the oldest one, nothing is edited, for there are two
        with pytest.raises(ConflictError) as refused:
            await shop.admin.edit_parked(ORDERS, BILLING, key="anna", value=b"mended")
        assert refused.value.reason is Reason.PARKED_KEY_AMBIGUOUS
        # then one is, if the partition is given
        mended = await shop.admin.edit_parked(
            ORDERS, BILLING, second.partition_id, key="anna", value=b"mended"
        )
        assert (mended.partition_id, mended.offset) == (second.partition_id, second.offset)
        shown = [each async for each in shop.admin.parked_messages(ORDERS, BILLING, "anna")]
        assert sorted(each.edited for each in shown) == [False, True]


async def test_edit_is_refused_when_the_edits_of_the_group_are_too_large_together(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        shop.start_biller(**PARK)
        await park_anna(shop, orders=17)

        async def edit(offset: int) -> None:
            await shop.admin.edit_parked(ORDERS, BILLING, 1, offset, value=bytes(1_000_000))

        # given 16 orders of a megabyte each
        for offset in range(16):
            await edit(offset)
        # then the next one is refused, until one of them is away
        with pytest.raises(OverloadedError) as refused:
            await edit(16)
        assert refused.value.reason is Reason.EDITS_FULL
        assert await shop.admin.skip(ORDERS, BILLING, key="anna", first=1) == 1
        await edit(16)


# ── orders that end their process ─────────────────────────────────────────────────────────────────
async def bill_until_ended(shop: BillingShop, name: str, **options: Any) -> None:
    """Start a biller, and wait until an order has ended its process."""
    biller = shop.start_biller(name, **options)
    await shop.cluster.until(lambda: not biller.running, within_s=300)


async def test_order_that_ends_its_process_is_parked_after_three_ends(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        # given an order that ends each process, among others
        shop.fatal = {"bob-1"}
        await shop.place("anna-1", "bob-1", "bob-2", "carl-1")
        for name in ("first", "second", "third"):
            await bill_until_ended(shop, name, **PARK)
        # when the fourth one starts
        shop.start_biller("fourth", **PARK)
        parked = await shop.until_set_aside(2)
        # then the order is parked with its customer, as crashed, and all others are billed
        assert parked.failure is not None
        assert (parked.key, parked.failure.kind) == (b"bob", "crashed")
        assert billers_of(shop, "bob-1") == ["first", "second", "third"]
        await shop.until_billed("anna-1", "carl-1")
        await shop.until_acked()
        # and once it is mended it is redriven
        shop.fatal.clear()
        await redrive(shop, key="bob")
        await shop.until_billed("bob-2")
        assert shop.billed_of("bob") == ["bob-1", "bob-2"]


async def test_suspects_are_billed_alone_until_each_is_acked(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        orders = [f"customer{number}-1" for number in range(6)]
        shop.slow = dict.fromkeys(orders, 2.0)
        await shop.place(*orders)
        # given two owners that were killed with these orders in hand
        for name in ("first", "second"):
            biller = shop.start_biller(name, **PARK)
            await shop.until_tried(orders[-1], len(shop.tries_of(orders[-1])) + 1)
            biller.kill()
        # then the third one bills them one after another
        shop.start_biller("third", **PARK)
        await shop.until_billed(*orders)
        times = [each.at_s for each in shop.tries if each.biller == "third"]
        assert len(times) == 6
        assert all(later - earlier >= 2 for earlier, later in pairwise(times))
        # and the next ones at once
        later = [f"customer{number}-2" for number in range(6)]
        shop.slow = dict.fromkeys(later, 2.0)
        await shop.place(*later)
        await shop.until_billed(*later)
        assert await shop.set_aside() == []
        times = [each.at_s for each in shop.tries if each.order in later]
        assert times[-1] - times[0] < 2


@pytest.mark.parametrize("cleanly", ["killed once", "stopped between"])
async def test_orders_are_billed_at_once_when_no_two_owners_were_killed_in_a_row(
    keylane_cluster: VirtualCluster, cleanly: str
):
    async with open_shop(keylane_cluster) as shop:
        orders = [f"customer{number}-1" for number in range(6)]
        shop.slow = dict.fromkeys(orders, 20.0)
        await shop.place(*orders)

        async def kill_one(name: str) -> None:
            biller = shop.start_biller(name, **PARK)
            await shop.until_tried(orders[-1], len(shop.tries_of(orders[-1])) + 1)
            biller.kill()

        await kill_one("first")
        if cleanly == "stopped between":
            clean = shop.start_biller("clean", settings={"handover_ms": 100}, **PARK)
            await shop.until_tried(orders[-1], 2)
            await clean.stop()
            await kill_one("second")
        shop.start_biller("last", **PARK)
        await shop.until_billed(*orders)
        times = [each.at_s for each in shop.tries if each.biller == "last"]
        assert times[-1] - times[0] < 2


async def test_redriven_order_that_ends_its_process_stays_parked(
    keylane_cluster: VirtualCluster, caplog: pytest.LogCaptureFixture
):
    async with open_shop(keylane_cluster) as shop:
        first = shop.start_biller("first", **PARK)
        await park_anna(shop)
        # given a parked order that ends the processes that redrive it
        shop.broken.clear()
        shop.fatal = {"anna-1"}
        await redrive(shop, key="anna")
        await keylane_cluster.until(lambda: not first.running)
        await bill_until_ended(shop, "second", **PARK)
        # then the next owner leaves it parked, as crashed, and bills what else there is
        shop.start_biller("third", **PARK)
        await shop.place("bob-1")
        await shop.until_billed("bob-1")
        parked = await shop.until_set_aside(3)
        assert parked.failure is not None
        assert (parked.state, parked.failure.kind) == (ParkState.PARKED, "crashed")
        assert (parked.failure.attempts, parked.failure.text.split(", ")[-1]) == (2, "2 times")
        assert "third" not in billers_of(shop, "anna-1")
        # and the owner that parked it before it began has said so
        lines = [text for text in caplog.messages if "parked again before they are handled" in text]
        assert len(lines) == 1
        assert f"{ORDERS} partition 1 in group {BILLING}, {key_digest(b'anna')}: its" in lines[0]


async def test_order_of_a_shared_group_that_ends_its_process_is_dead_after_three_ends(
    keylane_cluster: VirtualCluster,
):
    shared = {"settings": {"consume_strategy": "shared"}, "on_failure": "dead", "tries_max": 99}
    async with open_shop(keylane_cluster) as shop:
        shop.fatal = {"bob-1"}
        await shop.place("anna-1", "bob-1", "carl-1")
        for name in ("first", "second", "third"):
            await bill_until_ended(shop, name, **shared)
        shop.start_biller("fourth", **shared)
        dead = await shop.until_set_aside()
        assert dead.is_dead
        assert dead.failure is not None
        assert dead.failure.kind == "crashed"
        await shop.until_billed("anna-1", "carl-1")
        assert billers_of(shop, "bob-1") == ["first", "second", "third"]


# ── retry ─────────────────────────────────────────────────────────────────────────────────────────
async def test_failing_order_of_a_best_tried_subject_waits_alone_and_is_dead_after_its_tries(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster, strategy="best_tried") as shop:
        shop.broken = {"anna-1"}
        await shop.place("anna-1", "anna-2")
        first = shop.start_biller("first", tries_max=4)
        # then the next order of its customer goes on, and operators see that one waits
        await shop.until_billed("anna-2")
        await shop.until_acked()
        (progress,) = await shop.progress()
        assert progress.retrying == 1
        # and its pauses grow from 2.5 s to 5 s on
        await shop.until_tried("anna-1", 2)
        times = [each.at_s for each in shop.tries_of("anna-1")]
        assert 2.5 <= times[1] - times[0] <= 5.5
        # and its tries count on when the owner is killed
        await asyncio.sleep(1)
        first.kill()
        shop.start_biller("second", tries_max=4)
        dead = await shop.until_set_aside()
        assert dead.is_dead
        assert [each.attempt for each in shop.tries_of("anna-1")] == [1, 2, 3, 4]


async def test_retry_is_refused_where_orders_must_wait(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        with pytest.raises(InvalidRequestError) as refused:
            async with shop.consumer(handler=lambda _message: None, on_failure="retry"):
                pass
        assert refused.value.reason is Reason.RETRY_POLICY


async def test_failing_order_of_a_shared_group_waits_at_its_consumer_between_its_tries(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        shop.broken = {"anna-1"}
        await shop.place("anna-1", "anna-2")
        settings = {"consume_strategy": "shared"}
        shop.start_biller(settings=settings, on_failure="retry", tries_max=3)
        await shop.until_tried("anna-1", 2)
        # then nothing waits for it, and it is not set aside between its tries
        assert shop.billed == ["anna-2"]
        assert await shop.set_aside(retrying=True) == []
        dead = await shop.until_set_aside()
        assert dead.is_dead
        assert len(shop.tries_of("anna-1")) == 3
