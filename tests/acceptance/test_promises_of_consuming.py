"""What docs/CONSUMING.md promises, each promise as a story of a shop whose orders are billed.

The cluster is the real one, in virtual time. What needs threads, signals or much time of the
processor has its story in tests/integration/:

* handlers in threads, and those that block the loop: consumers/test_taking_many.py and
  test_failing_handlers.py; a pool of processes, and what handlers set for later ones:
  consumers/test_handlers_that_block.py; no event loop: clients/test_sync_consumer.py and
  test_without_a_loop.py;
* signals of a real process: consumers/test_consumer_run.py;
* 10,000 ranges of acks: consumers/test_ack_range_limit.py and test_refused_acks.py;
* what operators see of a loop, and of an operation that waits for a handler:
  parking/test_hanging_handlers.py and test_named_troubles.py;
* starts at a time, and brokers that are away: groups/test_starts.py;
* switches of one client, and of the program: groups/test_switches.py and
  consumers/test_consumer_suspend.py;
* what is parked or dead: test_promises_of_parking.py beside this file.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise
from typing import Any

import pytest

from keylane import NACK, Consumer, ConsumerSettings, Message, Retry
from keylane.errors import (
    ConfigError,
    ConflictError,
    FencedError,
    InvalidRequestError,
    LeaseLostError,
    Reason,
    UsageError,
)
from keylane.testing import VirtualCluster
from support.billing_shop import BILLING, ORDERS, open_shop

pytestmark = pytest.mark.acceptance


def orders_of(customer: str, count: int, start: int = 1) -> list[str]:
    return [f"{customer}-{number}" for number in range(start, start + count)]


def texts_of(messages: list[Message]) -> list[str]:
    return [message.value.decode() for message in messages]


# ── a consumer and its group ──────────────────────────────────────────────────────────────────────
async def test_partition_belongs_to_one_member_at_a_time(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster, partitions=2) as shop:
        # given a group of two members
        first = shop.start_biller(settings={"name": "first"})
        shop.start_biller(settings={"name": "second"})
        # then each has one of two partitions
        await shop.until_owned("first", "second")
        # and when one leaves, the other has both
        await first.stop()
        await shop.until_owned("second")


async def test_orders_of_a_customer_are_handled_one_by_one_and_others_beside_them(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        # given orders of two customers, whose billing takes a second each
        anna, bob = orders_of("anna", 5), orders_of("bob", 5)
        shop.slow = dict.fromkeys(anna + bob, 1.0)
        await shop.place(*anna, *bob)
        # when one consumer bills them
        shop.start_biller()
        await shop.until_billed(*anna, *bob)
        # then each customer has their order, one at a time, and nobody has waited for the other
        assert (shop.billed_of("anna"), shop.billed_of("bob")) == (anna, bob)
        assert shop.busy_max == {"anna": 1, "bob": 1}
        assert shop.tries[-1].at_s - shop.tries[0].at_s < 6


async def test_stopped_member_hands_over_and_nothing_is_repeated(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        # given a biller in the middle of an order
        shop.slow = {"anna-2": 2.0}
        await shop.place("anna-1", "anna-2", "anna-3")
        first = shop.start_biller("first")
        await shop.until_tried("anna-2")
        # when it gets SIGTERM, and another one starts
        stopping = asyncio.ensure_future(first.stop())
        shop.start_biller("second")
        await shop.until_billed("anna-3")
        await stopping
        # then it has ended its order, and the other one goes on behind it
        assert shop.billed == ["anna-1", "anna-2", "anna-3"]
        assert [each.biller for each in shop.tries] == ["first", "first", "second"]


async def test_second_style_is_refused_when_the_consumer_has_one(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop, shop.consumer() as consumer:
        await shop.place("anna-1")
        await consumer.getmany(timeout_ms=5_000)
        with pytest.raises(UsageError) as refused:
            await anext(aiter(consumer))
        assert refused.value.reason is Reason.MIXED_USE


# ── the session of a partition ────────────────────────────────────────────────────────────────────
async def test_owner_that_slept_acks_nothing_when_another_one_has_its_partition(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        # given a biller that stands still within an order, for longer than its lease
        shop.slow = {"anna-1": 5.0}
        await shop.place("anna-1")
        first = shop.start_biller("first")
        await shop.until_tried("anna-1")
        first.pause()
        shop.slow = {"anna-1": 300.0}
        shop.start_biller("second")
        await shop.until_tried("anna-1", 2)
        # when it wakes
        first.resume()
        await asyncio.sleep(60)
        # then its ack moves no cursor: the order belongs to the second one
        assert await shop.lag() == 1
        assert shop.tries[-1].biller == "second"


async def test_partition_pulls_no_more_when_its_buffer_waits_for_one_order(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        # given room for ten orders, and a customer whose first order is broken
        shop.broken = {"anna-1"}
        shop.start_biller(settings={"buffer_messages": 10})
        await shop.place(*orders_of("anna", 60))
        await shop.until_tried("anna-1", 2)
        # when more orders wait, also those that the last pull has brought
        await shop.place("bob-1")
        await asyncio.sleep(120)
        # then nothing behind them is billed, until the broken one is mended
        assert shop.billed == []
        shop.broken.clear()
        await shop.until_billed("bob-1")
        assert shop.billed_of("anna") == orders_of("anna", 60)


async def test_handler_is_cancelled_when_the_hand_over_waits_too_long(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        shop.slow = {"anna-1": 3_000.0}
        await shop.place("anna-1")
        first = shop.start_biller("first", settings={"handover_ms": 2_000})
        await shop.until_tried("anna-1")
        # when it is to hand over
        began_s = keylane_cluster.now_s
        await first.stop()
        # then it has waited for two seconds, and the next owner gets the order
        assert 2 <= keylane_cluster.now_s - began_s < 4
        shop.slow.clear()
        shop.start_biller("second")
        await shop.until_billed("anna-1")
        assert shop.billed == ["anna-1"]


# ── what is promised ──────────────────────────────────────────────────────────────────────────────
async def test_acked_order_is_never_handed_out_again_when_everything_crashes(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        # given an order whose ack the broker has stored
        await shop.place("anna-1")
        first = shop.start_biller()
        await shop.until_acked()
        # when consumer and broker crash
        first.crash()
        keylane_cluster.brokers[0].crash()
        await asyncio.sleep(60)
        keylane_cluster.brokers[0].start()
        # then the next owner begins behind it
        shop.start_biller()
        await shop.place("anna-2")
        await shop.until_billed("anna-2")
        assert shop.billed == ["anna-1", "anna-2"]


async def test_order_in_hand_is_handed_out_again_when_its_owner_was_killed(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        shop.slow = {"anna-1": 10.0}
        await shop.place("anna-1", "anna-2")
        first = shop.start_biller("first")
        await shop.until_tried("anna-1")
        first.kill()
        shop.start_biller("second")
        await shop.until_billed("anna-1", "anna-2")
        assert shop.billed == ["anna-1", "anna-2"]
        assert [each.biller for each in shop.tries_of("anna-1")] == ["first", "second"]


async def test_tries_are_counted_on_when_owners_stop_and_crash(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        shop.broken = {"anna-1"}
        await shop.place("anna-1")
        first = shop.start_biller("first")
        await shop.until_tried("anna-1", 2)
        await first.stop()
        second = shop.start_biller("second")
        await shop.until_tried("anna-1", 4)
        await asyncio.sleep(0.2)
        second.crash()
        shop.start_biller("third")
        await keylane_cluster.until(lambda: shop.tries[-1].biller == "third")
        attempts = [each.attempt for each in shop.tries_of("anna-1")]
        assert attempts[:4] == [1, 2, 3, 4]
        assert shop.tries[-1].attempt == len(attempts)


async def test_failing_order_holds_only_its_customer_and_is_tried_after_growing_pauses(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        shop.broken = {"anna-1"}
        await shop.place("anna-1", "anna-2", "bob-1")
        shop.start_biller()
        await shop.until_tried("anna-1", 9)
        # then others go on, and the pauses grow
        assert shop.billed == ["bob-1"]
        times = [each.at_s for each in shop.tries_of("anna-1")]
        pauses = [later - earlier for earlier, later in pairwise(times)]
        assert pauses[0] < 0.3
        assert pauses[-1] > 4
        # and when it is mended, the customer's orders follow
        shop.broken.clear()
        await shop.until_billed("anna-2")
        assert shop.billed == ["bob-1", "anna-1", "anna-2"]


# ── handlers that fail ────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("policy", "strategy", "kind", "later_one_waits"),
    [
        ("block", "exclusive", "none", True),
        ("park", "exclusive", "key", True),
        ("dead", "exclusive", "dead", False),
        ("retry", "exclusive", "dead", False),
        ("block", "shared", "none", False),
        ("park", "shared", "dead", False),
        ("dead", "shared", "dead", False),
        ("retry", "shared", "dead", False),
    ],
)
async def test_order_that_fails_too_often_is_treated_by_its_policy(
    keylane_cluster: VirtualCluster, policy: str, strategy: str, kind: str, later_one_waits: bool
):
    """The table of the page."""
    subject = "best_tried" if (policy, strategy) == ("retry", "exclusive") else "strict"
    async with open_shop(keylane_cluster, strategy=subject) as shop:
        shop.broken = {"anna-1"}
        await shop.place("anna-1", "anna-2", "bob-1")
        options = {"on_failure": policy, "tries_max": 3}
        shop.start_biller(settings={"consume_strategy": strategy}, **options)
        await shop.until_tried("anna-1", 3)
        await asyncio.sleep(60)
        # then it is tried for ever, or three times
        assert (len(shop.tries_of("anna-1")) > 3) == (policy == "block")
        # and the later order of its customer waits with it, or does not
        assert shop.billed_of("anna") == ([] if later_one_waits else ["anna-2"])
        assert "bob-1" in shop.billed
        aside = [(view.key, view.is_dead, view.messages) for view in await shop.set_aside()]
        assert aside == {"none": [], "key": [(b"anna", False, 2)], "dead": [(None, True, 1)]}[kind]


async def test_stored_policy_overrides_the_code_of_a_running_consumer(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        shop.broken = {"anna-1"}
        await shop.place("anna-1", "anna-2")
        shop.start_biller(on_failure="block")
        await shop.until_tried("anna-1", 5)
        # when an operator stores another policy
        await shop.admin.set_group(ORDERS, BILLING, on_failure="park", tries_max=3)
        # then the customer that blocks is parked at its next failure
        parked = await shop.until_set_aside(2)
        assert parked.key == b"anna"


async def test_handler_chooses_its_pause_without_an_error_in_the_log(
    keylane_cluster: VirtualCluster, caplog: pytest.LogCaptureFixture
):
    times: list[float] = []

    async def bill(_message: Message) -> object:
        times.append(keylane_cluster.now_s)
        if len(times) == 1:
            raise Retry("the bank is closed", after_s=30)
        return NACK if len(times) == 2 else None

    async with open_shop(keylane_cluster) as shop:
        await shop.place("anna-1")
        with caplog.at_level(logging.WARNING, logger="keylane"):
            async with shop.consumer(handler=bill, on_failure="park", tries_max=1):
                await keylane_cluster.until(lambda: len(times) == 3, within_s=120)
        assert times[1] - times[0] > 29.9
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_order_that_a_loop_gives_back_too_often_is_set_aside(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        await shop.place("anna-1", "bob-1")
        async with shop.consumer(on_failure="dead", tries_max=3) as consumer:
            async for message in consumer:
                if message.key_text == "bob":
                    await message.ack()
                    continue
                attempt = message.attempt
                await message.nack()
                if attempt == 3:
                    break
            dead = await shop.until_set_aside()
        assert dead.is_dead
        assert dead.failure is not None
        assert dead.failure.attempts == 3


async def test_bad_order_of_a_batch_ends_up_alone_and_is_set_aside(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        # given a batch with one broken order
        customers = [f"customer{number}-1" for number in range(8)]
        shop.broken = {"customer5-1"}
        await shop.place(*customers)
        batches: list[list[str]] = []
        shop.start_batch_biller(batches, on_failure="dead", tries_max=3)
        dead = await shop.until_set_aside()
        # then it was tried whole, and in ever smaller parts, and the others are billed
        sizes = [len(batch) for batch in batches if "customer5-1" in batch]
        assert sizes[:2] == [8, 8]
        assert sizes[-1] == 1
        assert sizes == sorted(sizes, reverse=True)
        await shop.until_billed(*(set(customers) - shop.broken))
        assert (dead.is_dead, dead.messages) == (True, 1)


async def test_handler_that_hangs_is_named_and_cancelled(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        shop.slow = {"anna-1": 1_000_000.0}
        await shop.place("anna-1", "anna-2", "bob-1")
        shop.start_biller(settings={"handler_timeout_ms": 60_000}, on_failure="dead", tries_max=1)
        await shop.until_billed("bob-1")

        async def named() -> Any:
            (progress,) = await shop.progress()
            return progress.failing

        # then operators see it after ten seconds
        assert await named() is None
        hanging = await keylane_cluster.until(named, within_s=45)
        assert hanging.running_ms >= 10_000
        assert shop.billed == ["bob-1"]
        # and after a minute its try has failed
        dead = await shop.until_set_aside()
        assert dead.failure is not None
        assert dead.failure.kind == "HandlerTimeoutError"
        await shop.until_billed("anna-2")


# ── batches ───────────────────────────────────────────────────────────────────────────────────────
async def test_batches_have_one_partition_each_and_no_customer_in_common(
    keylane_cluster: VirtualCluster,
):
    running: list[set[str]] = []
    seen: list[tuple[int, list[int]]] = []

    async def bill(messages: list[Message]) -> None:
        customers = {message.key_text for message in messages}
        assert not any(customers & others for others in running)
        running.append(customers)
        (partition,) = {message.partition_id for message in messages}
        seen.append((partition, [message.offset for message in messages]))
        await asyncio.sleep(1)
        running.remove(customers)

    async with open_shop(keylane_cluster, partitions=2) as shop:
        names = [f"customer{number}" for number in range(10)]
        await shop.place(*(f"{name}-{number}" for number in range(6) for name in names))
        async with shop.consumer(batch_handler=bill, settings={"max_records": 5}) as consumer:
            await shop.until_acked()
            assert len(consumer.assignment) == 2
        assert len({partition for partition, _ in seen}) == 2
        assert all(offsets == sorted(offsets) and len(offsets) <= 5 for _, offsets in seen)


async def test_batch_that_asks_for_another_try_is_handed_out_whole(
    keylane_cluster: VirtualCluster,
):
    batches: list[list[str]] = []

    async def bill(messages: list[Message]) -> None:
        batches.append(texts_of(messages))
        if len(batches) < 5:
            raise Retry("the bank is closed", after_s=1)

    async with open_shop(keylane_cluster) as shop:
        customers = [f"customer{number}-1" for number in range(4)]
        await shop.place(*customers)
        async with shop.consumer(batch_handler=bill):
            await shop.until_acked()
        assert batches == [customers] * 5


# ── only some messages ────────────────────────────────────────────────────────────────────────────
async def test_unwanted_order_is_acked_without_a_handler(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        await shop.place("anna-1", tags=["paid"], properties={"country": "DE"})
        await shop.place("anna-2", tags=["open"], properties={"country": "DE"})
        await shop.place("anna-3", tags=["paid"], properties={"country": "FR"})
        wanted = {"tags": ["paid"], "filter": {"country": "DE"}}
        first = shop.start_biller(settings=wanted)
        await shop.until_acked()
        assert shop.billed == ["anna-1"]
        # and a member with another filter is refused
        with pytest.raises(ConflictError) as refused:
            async with shop.consumer(settings={"tags": ["open"]}):
                pass
        assert refused.value.reason is Reason.GROUP_FILTER
        await first.stop()


async def test_filter_that_raises_is_a_failed_try(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:

        def is_wanted(message: Message) -> bool:
            return message.properties["country"] == "DE"

        await shop.place("anna-1")
        await shop.place("bob-1", properties={"country": "DE"})
        shop.start_biller(settings={"filter": is_wanted}, on_failure="dead", tries_max=2)
        dead = await shop.until_set_aside()
        assert dead.failure is not None
        assert (dead.failure.kind, dead.failure.attempts) == ("FilterError", 2)
        await shop.until_billed("bob-1")


# ── when acks are stored ──────────────────────────────────────────────────────────────────────────
async def test_killed_consumer_repeats_one_order_of_a_customer_at_most_when_it_acks_each(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        # given many orders, whose billing takes less time than an ack
        shop.slow = dict.fromkeys(orders_of("anna", 200), 0.0001)
        await shop.place(*orders_of("anna", 200))
        first = shop.start_biller(ack="each")
        await keylane_cluster.until(lambda: "anna-20" in shop.billed, every_s=0.001)
        first.kill()
        shop.start_biller(ack="each")
        await shop.until_billed("anna-200")
        # then at most the last one is repeated
        assert len(shop.billed) <= 201
        assert list(dict.fromkeys(shop.billed)) == orders_of("anna", 200)


async def test_order_is_billed_at_most_once_when_it_is_acked_before(
    keylane_cluster: VirtualCluster, caplog: pytest.LogCaptureFixture
):
    async with open_shop(keylane_cluster) as shop:
        # given one order that fails, and one whose process is killed
        shop.broken, shop.fatal = {"anna-1"}, {"anna-2"}
        await shop.place("anna-1")
        first = shop.start_biller(ack="before")
        await shop.until_acked()
        await shop.place("anna-2")
        await shop.until_tried("anna-2")
        assert not first.running
        # then neither is tried again, and the failure is in the log
        shop.start_biller(ack="before")
        await shop.place("anna-3")
        await shop.until_billed("anna-3")
        assert [each.order for each in shop.tries] == ["anna-1", "anna-2", "anna-3"]
        assert any("lost" in record.getMessage() for record in caplog.records)
        # and a policy that would try again is refused
        with pytest.raises(ConfigError):
            shop.consumer(ack="before", on_failure="park")


# ── every message in every process ────────────────────────────────────────────────────────────────
async def test_broadcast_consumers_get_every_order_from_now_on_and_leave_no_trace(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster, partitions=2) as shop:
        await shop.place("anna-1")
        got: tuple[list[Message], list[Message]] = ([], [])
        everything = ConsumerSettings(broadcast=True)
        first, second = (
            Consumer(
                keylane_cluster.address, subject=ORDERS, handler=each.append, settings=everything
            )
            for each in got
        )
        async with first, second:
            await shop.place("anna-2", "bob-1", "anna-3")
            await keylane_cluster.until(lambda: all(len(each) == 3 for each in got))
        for messages in got:
            assert sorted(texts_of(messages)) == ["anna-2", "anna-3", "bob-1"]
            assert [text for text in texts_of(messages) if "anna" in text] == ["anna-2", "anna-3"]
            assert all(message.lease is None for message in messages)
        assert await shop.admin.list_groups(ORDERS) == []


# ── your own loop ─────────────────────────────────────────────────────────────────────────────────
async def test_loop_that_goes_on_without_an_ack_gets_other_customers(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        await shop.place("anna-1", "anna-2", "bob-1")
        async with shop.consumer() as consumer:
            loop = aiter(consumer)
            anna = await anext(loop)
            bob = await anext(loop)
            assert texts_of([anna, bob]) == ["anna-1", "bob-1"]
            # when no customer is left, the loop waits for an ack
            waiting = asyncio.ensure_future(anext(loop))
            await asyncio.sleep(5)
            assert not waiting.done()
            await anna.ack()
            assert (await waiting).value == b"anna-2"
        # then what was not acked is handed out again
        shop.start_biller()
        await shop.until_acked()
        assert sorted(shop.billed) == ["anna-2", "bob-1"]


async def test_order_that_is_given_back_comes_before_later_ones_of_its_customer(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        await shop.place("anna-1", "anna-2", "bob-1")
        taken = []
        async with shop.consumer() as consumer:
            async for message in consumer:
                taken.append((message.value.decode(), message.attempt))
                if message.attempt == 1 and message.value == b"anna-1":
                    await message.nack(after_s=5)
                    continue
                await message.ack()
                if message.value == b"anna-2":
                    break
        assert taken == [("anna-1", 1), ("bob-1", 1), ("anna-1", 2), ("anna-2", 1)]


async def test_later_order_of_a_best_tried_subject_waits_for_the_ack_and_not_for_a_nack(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster, strategy="best_tried") as shop:
        await shop.place("anna-1", "anna-2")
        async with shop.consumer() as consumer:
            first = await anext(consumer)
            waiting = asyncio.ensure_future(anext(consumer))
            await asyncio.sleep(5)
            assert (first.value, waiting.done()) == (b"anna-1", False)
            await first.nack()
            assert (await waiting).value == b"anna-2"


async def test_getmany_returns_orders_of_a_customer_together_and_later_ones_after_the_ack(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop, shop.consumer() as consumer:
        await shop.place(*orders_of("anna", 3))
        first = await consumer.getmany(max_records=2, timeout_ms=5_000)
        assert texts_of(first) == ["anna-1", "anna-2"]
        assert await consumer.getmany(timeout_ms=5_000) == []
        # when the first one is given back, the second one comes with it
        await consumer.nack([first[0]])
        again = await consumer.getmany(max_records=2, timeout_ms=5_000)
        assert texts_of(again) == ["anna-1", "anna-2"]
        await consumer.ack(again)
        assert texts_of(await consumer.getmany(timeout_ms=5_000)) == ["anna-3"]


async def test_arrow_batches_have_every_row_of_a_partition_in_order(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop, shop.consumer() as consumer:
        orders = [*orders_of("anna", 3), *orders_of("bob", 3)]
        await shop.place(*orders)
        rows, next_offset = [], 0
        async for batch in consumer.batches():
            assert batch.start_offset == next_offset
            next_offset = batch.next_offset
            rows += batch.record_batch.to_pylist()
            await batch.ack()
            if next_offset == len(orders):
                break
        assert [row["value"].decode() for row in rows] == orders
        assert set(rows[0]) == {"offset", "key", "value", "timestamp", "properties"}
        await shop.until_acked()


async def test_ack_is_refused_when_another_session_has_the_partition(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        await shop.place("anna-1")
        outcomes: list[type[BaseException]] = []

        async def loop_that_sleeps() -> None:
            async with shop.consumer() as consumer:
                message = await anext(aiter(consumer))
                await asyncio.sleep(10)
                try:
                    await message.ack()
                except LeaseLostError as error:
                    outcomes.append(type(error))

        sleeper = shop.start(loop_that_sleeps)
        await asyncio.sleep(5)
        sleeper.pause()
        shop.start_biller()
        await shop.until_acked()
        sleeper.resume()
        await sleeper.wait()
        assert outcomes == [LeaseLostError]


async def test_handler_acks_only_by_returning(keylane_cluster: VirtualCluster):
    refused: list[BaseException] = []

    async def bill(message: Message) -> None:
        try:
            await message.ack()
        except InvalidRequestError as error:
            refused.append(error)

    async with open_shop(keylane_cluster) as shop, shop.consumer(handler=bill):
        await shop.place("anna-1")
        await shop.until_acked()
    assert len(refused) == 1


# ── shared groups ─────────────────────────────────────────────────────────────────────────────────
SHARED = {"consume_strategy": "shared"}


async def test_members_of_a_shared_group_work_on_one_partition_together(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        orders = orders_of("anna", 12)
        shop.slow = dict.fromkeys(orders, 10.0)
        shop.start_biller("first", settings={**SHARED, "concurrency": 2})
        shop.start_biller("second", settings={**SHARED, "concurrency": 2})
        await asyncio.sleep(5)
        await shop.place(*orders)
        await shop.until_billed(*orders)
        assert {each.biller for each in shop.tries} == {"first", "second"}
        assert sorted(shop.billed) == sorted(orders)
        assert shop.busy_max["anna"] == 4


async def test_order_stays_with_its_handler_when_it_takes_longer_than_its_time_in_flight(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        shop.slow = {"anna-1": 100.0}
        await shop.place("anna-1")
        for name in ("first", "second"):
            shop.start_biller(name, settings={**SHARED, "in_flight_ms": 5_000})
        await shop.until_acked(within_s=300)
        assert shop.billed == ["anna-1"]
        assert len(shop.tries) == 1


async def test_order_that_a_loop_leaves_unacked_counts_as_failed(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        await shop.place("anna-1")
        settings = {**SHARED, "in_flight_ms": 5_000}
        async with shop.consumer(settings=settings, on_failure="dead", tries_max=2) as consumer:

            async def pass_over() -> None:
                async for _message in consumer:
                    pass

            loop = asyncio.ensure_future(pass_over())
            dead = await shop.until_set_aside()
            loop.cancel()
        assert dead.failure is not None
        assert "not acked" in f"{dead.failure.kind} {dead.failure.text}"


async def test_order_in_hand_goes_to_another_member_when_its_broker_starts_again(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        # given two members, of which one has the only order in hand
        shop.slow = {"anna-1": 60.0}
        (broker,) = keylane_cluster.brokers
        first = shop.start_biller("first", settings=SHARED)
        await shop.place("anna-1")
        await shop.until_tried("anna-1")
        shop.start_biller("second", settings=SHARED)
        await asyncio.sleep(5)
        # when the broker starts again, and the other member reaches it first
        keylane_cluster.cut(first, broker)
        broker.crash()
        broker.start()
        # then that one gets the order too, although it is still billed
        await shop.until_tried("anna-1", 2)
        keylane_cluster.heal()
        await asyncio.sleep(60)
        await shop.until_acked()
        assert [each.biller for each in shop.tries] == ["first", "second"]


# ── several subjects, instances, partitions, starts, switches ─────────────────────────────────────
async def test_consumer_of_several_subjects_calls_the_function_of_each(
    keylane_cluster: VirtualCluster,
):
    booked: list[str] = []
    billed: list[str] = []
    async with open_shop(keylane_cluster) as shop:
        await keylane_cluster.create_subject("payments")
        consumer = Consumer(keylane_cluster.address)

        @consumer.on(ORDERS, group=BILLING)
        async def bill(message: Message) -> None:
            billed.append(message.value.decode())

        @consumer.on("payments", group=BILLING, batch=True)
        async def book(messages: list[Message]) -> None:
            booked.extend(texts_of(messages))

        async with consumer:
            await shop.place("anna-1")
            await shop.place("bob-1", subject="payments")
            await keylane_cluster.until(lambda: billed and booked)
        assert (billed, booked) == (["anna-1"], ["bob-1"])


async def test_consumer_of_several_subjects_ends_when_one_of_its_functions_ends_it(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        await keylane_cluster.create_subject("payments")

        async def work() -> None:
            consumer = Consumer(keylane_cluster.address)

            @consumer.on(ORDERS, group=BILLING)
            async def bill(_message: Message) -> None:
                raise SystemExit(3)

            @consumer.on("payments", group=BILLING)
            async def book(_message: Message) -> None: ...

            await consumer.run()

        biller = shop.start(work)
        await shop.place("anna-1")
        with pytest.raises(SystemExit):
            await biller.wait()
        # then both have handed over: the group of the other one has no member
        assert (await shop.admin.describe_group("payments", BILLING)).sessions == 0


async def test_no_function_of_a_consumer_begins_once_one_has_ended_the_program(
    keylane_cluster: VirtualCluster,
):
    booked: list[str] = []
    ended = asyncio.Event()
    async with open_shop(keylane_cluster) as shop:
        await keylane_cluster.create_subject("payments")
        await shop.place("anna-1", "bob-1", "carl-1", subject="payments")

        async def work() -> None:
            consumer = Consumer(keylane_cluster.address, settings=ConsumerSettings(concurrency=1))

            @consumer.on(ORDERS, group=BILLING)
            async def bill(_message: Message) -> None:
                ended.set()
                raise SystemExit(3)

            @consumer.on("payments", group=BILLING)
            async def book(message: Message) -> None:
                booked.append(message.value.decode())
                await ended.wait()

            await consumer.run()

        biller = shop.start(work)
        await keylane_cluster.until(lambda: booked)
        await shop.place("anna-1")
        with pytest.raises(SystemExit):
            await biller.wait()
        assert len(booked) == 1


async def test_process_of_the_same_instance_takes_the_place_of_its_predecessor_at_once(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        named = {"instance": "billing-1", "ttl_ms": 60_000}
        first = shop.start_biller("first", settings=named)
        await shop.place("anna-1")
        await shop.until_billed("anna-1")
        # when a second process of that name starts
        began_s = keylane_cluster.now_s
        shop.start_biller("second", settings=named)
        # then the first one ends, and the second one need not wait for its ttl
        with pytest.raises(FencedError) as ended:
            await first.wait()
        assert ended.value.reason is Reason.INSTANCE_TAKEN
        await shop.place("anna-2")
        await shop.until_billed("anna-2")
        assert shop.tries[-1].biller == "second"
        assert keylane_cluster.now_s - began_s < 20


async def test_paused_partition_hands_out_nothing_until_it_is_resumed(
    keylane_cluster: VirtualCluster,
):
    handled: list[Message] = []
    async with open_shop(keylane_cluster) as shop:
        async with shop.consumer(handler=handled.append) as consumer:
            await shop.place("anna-1")
            await keylane_cluster.until(lambda: handled)
            (partition,) = consumer.position
            await consumer.pause(partition)
            await shop.place("anna-2")
            await asyncio.sleep(60)
            assert texts_of(handled) == ["anna-1"]
            await consumer.resume(partition)
            await keylane_cluster.until(lambda: len(handled) == 2)
            with pytest.raises(UsageError) as refused:
                await consumer.seek(partition, 0)
            assert refused.value.reason is Reason.SEEK_IN_GROUP


async def test_paused_partition_tries_a_failing_order_again_once_it_is_resumed(
    keylane_cluster: VirtualCluster,
):
    attempts: list[int] = []

    async def bill(message: Message) -> None:
        attempts.append(message.attempt)
        raise ValueError(f"cannot bill {message.value.decode()}")

    async with open_shop(keylane_cluster) as shop:
        # given an order that is tried again and again
        await shop.place("anna-1")
        async with shop.consumer(handler=bill) as consumer:
            await keylane_cluster.until(lambda: len(attempts) == 3)
            # when its partition is paused
            (partition,) = consumer.position
            await consumer.pause(partition)
            await asyncio.sleep(600)
            # then its next try waits as well
            assert attempts == [1, 2, 3]
            await consumer.resume(partition)
            await keylane_cluster.until(lambda: len(attempts) == 4)
            assert attempts[-1] == 4


async def test_callbacks_are_called_before_the_first_pull_and_before_the_hand_over(
    keylane_cluster: VirtualCluster,
):
    told: list[str] = []
    async with open_shop(keylane_cluster) as shop:
        await shop.place("anna-1")

        async def bill(_message: Message) -> None:
            told.append("billed")

        def note(text: str) -> Any:
            async def callback(partitions: list[int]) -> None:
                await asyncio.sleep(1)
                told.append(f"{text} {len(partitions)}")

            return callback

        settings = {"on_assigned": note("assigned"), "on_revoked": note("revoked")}
        async with shop.consumer(handler=bill, settings=settings):
            await shop.until_acked()
    assert told == ["assigned 1", "billed", "revoked 1"]


async def test_consumer_is_told_of_a_lost_lease_and_of_its_next_one_when_it_stood_still(
    keylane_cluster: VirtualCluster,
):
    told: list[tuple[str, list[int]]] = []

    def note(text: str) -> Any:
        return lambda partitions: told.append((text, partitions))

    async with open_shop(keylane_cluster) as shop:
        # given a biller that stands still for longer than its lease
        callbacks = {name: note(name) for name in ("on_assigned", "on_revoked", "on_lost")}
        biller = shop.start_biller(settings=callbacks)
        await shop.place("anna-1")
        await shop.until_acked()
        biller.pause()
        await asyncio.sleep(120)
        # when it goes on, it has lost the partition, and gets it again
        biller.resume()
        await shop.place("anna-2")
        await shop.until_billed("anna-2")
        assert told == [("on_assigned", [1]), ("on_lost", [1]), ("on_assigned", [1])]
        # then only a hand-over revokes it
        await biller.stop()
        assert told[3:] == [("on_revoked", [1])]


async def test_consumer_goes_on_when_its_callbacks_raise_or_are_late(
    keylane_cluster: VirtualCluster, caplog: pytest.LogCaptureFixture
):
    def fail(_partitions: list[int]) -> None:
        raise ValueError("no such file")

    async def never_return(_partitions: list[int]) -> None:
        await asyncio.Event().wait()

    async with open_shop(keylane_cluster) as shop:
        callbacks = {"on_assigned": fail, "on_lost": fail, "on_revoked": never_return}
        first = shop.start_biller("first", settings=callbacks)
        # when it gets its partition, loses it, and hands it over
        await shop.place("anna-1")
        await shop.until_billed("anna-1")
        first.pause()
        await asyncio.sleep(120)
        first.resume()
        await shop.place("anna-2")
        await shop.until_billed("anna-2")
        shop.start_biller("second")
        await first.stop()
        # then it has billed as usual, the next owner follows, and the log says what failed
        await shop.place("anna-3")
        await shop.until_billed("anna-3")
        assert shop.billed == ["anna-1", "anna-2", "anna-3"]
        logged = "\n".join(caplog.messages)
        assert logged.count("on_assigned for partitions [1] failed") == 2
        assert logged.count("on_lost for partitions [1] failed") == 1
        assert logged.count("on_revoked for partitions [1] took longer") == 1


async def test_start_of_a_group_is_fixed_by_its_first_consumer(keylane_cluster: VirtualCluster):
    async with open_shop(keylane_cluster) as shop:
        await shop.place("anna-1")
        first = shop.start_biller(start="latest")
        await keylane_cluster.until(shop.progress)
        await shop.place("anna-2")
        await shop.until_billed("anna-2")
        await first.stop()
        shop.start_biller(start="earliest")
        await shop.place("anna-3")
        await shop.until_billed("anna-3")
        assert shop.billed == ["anna-2", "anna-3"]
        # while another group begins at the first order
        taken: list[Message] = []
        async with shop.consumer(group="audit", handler=taken.append):
            await keylane_cluster.until(lambda: len(taken) == 3)


async def test_suspended_group_hands_over_and_waits_until_it_is_resumed(
    keylane_cluster: VirtualCluster,
):
    async with open_shop(keylane_cluster) as shop:
        shop.start_biller()
        await shop.place("anna-1")
        await shop.until_acked()
        await shop.admin.suspend_group(ORDERS, BILLING)
        await asyncio.sleep(30)
        assert await shop.owners() == {None}
        await shop.place("anna-2")
        await asyncio.sleep(60)
        assert shop.billed == ["anna-1"]
        await shop.admin.resume_group(ORDERS, BILLING)
        await shop.until_billed("anna-2")
