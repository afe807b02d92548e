"""Parked messages that their sender stored outside the range of their key, after a move or a growth
of the queue.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.protocol import endpoints
from keylane.protocol.backoff import Backoff
from keylane.protocol.routing import logical_partition
from keylane.rpc.connections import Connections
from keylane.testing import VirtualCluster, run

KEY = b"k1"
"""A key of the second half of the logical partitions."""
Handled = list[tuple[int, bytes]]


def handler_of(handled: Handled, poison: set[bytes]) -> Callable[[Message], None]:
    def handle(message: Message) -> None:
        if message.value in poison:
            raise ValueError(f"cannot take {message.value.decode()}")
        handled.append((message.queue, message.value))

    return handle


PARK = ConsumerSettings(on_failure="park", tries_max=1)
DEAD = ConsumerSettings(on_failure="dead", tries_max=1)
RETRY = ConsumerSettings(on_failure="retry", retry_backoff=Backoff(first_ms=30_000, max_ms=30_000))


async def consume(
    address: str, settings: ConsumerSettings, handled: Handled, poison: set[bytes]
) -> None:
    """The program of the only consumer."""
    handler = handler_of(handled, poison)
    await Consumer(address, subject="orders", group="g", settings=settings, handler=handler).run()


async def send(cluster: VirtualCluster, *values: bytes, queue: int = 0) -> None:
    async with Producer(cluster.address) as producer:
        for value in values:
            await producer.send("orders", value, key=KEY, queue=queue)


async def parked_count(cluster: VirtualCluster) -> int:
    return sum(view.messages for view in await cluster.parked("orders", "g"))


async def kept_count(admin: Admin) -> int:
    """The messages that sealed partitions keep for their children."""
    connections = Connections(None, timeout_ms=5_000)
    connections.open()
    count = 0
    try:
        for each in (await admin.describe_subject("orders")).partitions:
            if each.state == "sealed" and each.address is not None:
                broker = connections.broker_at(each.address)
                page = await broker.control(
                    endpoints.PARKED, query={"group": "g"}, id=each.partition_id
                )
                count += sum(key.messages for key in page.keys)
    finally:
        await connections.close()
    return count


async def change(admin: Admin, kind: str) -> None:
    """Seal the partition of queue 0 in one of two ways."""
    partitions = (await admin.describe_subject("orders")).partitions
    (first,) = [each for each in partitions if each.queue == 0 and each.state == "open"]
    other = ({"g0", "g1"} - {first.broker_group}).pop()
    await admin.wait(
        await admin.move([first.partition_id], to=other)
        if kind == "move"
        else await admin.grow_subject("orders", queues=[0])
    )


def story_of(
    body: Callable[[VirtualCluster, Admin, Handled, set[bytes]], object],
    settings: ConsumerSettings = PARK,
) -> None:
    """Run a story that begins with a consumer of a subject with two queues."""

    async def story(cluster: VirtualCluster) -> None:
        strategy = "best_tried" if settings is RETRY else "strict"
        await cluster.create_subject("orders", partitions=2, static=True, order_strategy=strategy)
        handled, poison = Handled(), {b"1"}
        cluster.start(consume, cluster.address, settings, handled, poison)
        async with Admin(cluster.address) as admin:
            await body(cluster, admin, handled, poison)

    run(story, brokers=2)


@pytest.mark.parametrize("changes", [["move"], ["grow"], ["grow", "move"], ["move", "grow"]])
def test_key_outside_its_queue_is_redriven_in_order_after_a_change_of_the_queue(changes):
    assert logical_partition(KEY) >= 512

    async def body(cluster, admin, handled, poison):
        await send(cluster, b"1", b"2")
        await cluster.until(lambda: has_parked(cluster, 2))
        for number, kind in enumerate(changes, 3):
            await change(admin, kind)
            await send(cluster, b"%d" % number)
            await cluster.until(lambda number=number: has_parked(cluster, number))
        assert handled == []
        assert await kept_count(admin) > 0
        (view,) = await cluster.parked("orders", "g")
        assert (view.key, view.messages) == (KEY, 2 + len(changes))

        poison.clear()
        await admin.redrive("orders", "g", key=KEY)
        last = 3 + len(changes)
        await send(cluster, b"%d" % last)
        await cluster.until(lambda: len(handled) == last)
        assert handled == [(0, b"%d" % number) for number in range(1, last + 1)]
        await cluster.until(lambda: has_parked(cluster, 0))
        await cluster.until(lambda: keeps_nothing(admin))

    story_of(body)


@pytest.mark.parametrize("kind", ["move", "grow"])
def test_operator_edits_and_skips_messages_of_a_key_outside_its_queue_after_a_change(kind):
    async def body(cluster, admin, handled, poison):
        await send(cluster, b"1", b"2")
        await cluster.until(lambda: has_parked(cluster, 2))
        await change(admin, kind)
        await send(cluster, b"3")
        await cluster.until(lambda: has_parked(cluster, 3))
        shown = await admin.parked_message("orders", "g", key=KEY)
        assert shown.message.value == b"1"
        assert await admin.skip("orders", "g", key=KEY, first=1) == 1
        await admin.edit_parked("orders", "g", key=KEY, value=b"2, mended")
        await admin.redrive("orders", "g", key=KEY)
        await cluster.until(lambda: len(handled) == 2)
        assert handled == [(0, b"2, mended"), (0, b"3")]

    story_of(body)


@pytest.mark.parametrize("kind", ["move", "grow"])
def test_key_keeps_its_order_in_each_queue_to_which_it_was_sent(kind):
    """The key is in the range of queue 1 and not in that of queue 0; both have parked it."""

    async def body(cluster, admin, handled, poison):
        await send(cluster, b"1", b"2")
        await send(cluster, b"1", b"2", queue=1)
        await cluster.until(lambda: has_parked(cluster, 4))
        await change(admin, kind)
        await send(cluster, b"3")
        await send(cluster, b"3", queue=1)
        await cluster.until(lambda: has_parked(cluster, 6))
        poison.clear()
        await admin.redrive("orders", "g", key=KEY)
        await cluster.until(lambda: len(handled) == 6)
        for queue in (0, 1):
            assert [value for at, value in handled if at == queue] == [b"1", b"2", b"3"]

    story_of(body)


@pytest.mark.parametrize("kind", ["move", "grow"])
def test_dead_letter_of_a_key_outside_its_queue_is_redriven_after_a_change(kind):
    async def body(cluster, admin, handled, poison):
        await send(cluster, b"1", b"2")
        await cluster.until(lambda: has_parked(cluster, 1))
        await change(admin, kind)
        await send(cluster, b"3")
        await cluster.until(lambda: handled == [(0, b"2"), (0, b"3")])
        poison.clear()
        await admin.redrive("orders", "g", key=KEY, dead=True)
        await cluster.until(lambda: handled == [(0, b"2"), (0, b"3"), (0, b"1")])

    story_of(body, DEAD)


@pytest.mark.parametrize("kind", ["move", "grow"])
def test_message_of_a_key_outside_its_queue_is_retried_after_a_change(kind):
    async def body(cluster, admin, handled, poison):
        await send(cluster, b"1", b"2")
        await cluster.until(lambda: handled == [(0, b"2")])
        await change(admin, kind)
        poison.clear()
        assert handled == [(0, b"2")]
        await cluster.until(lambda: handled == [(0, b"2"), (0, b"1")])
        await cluster.until(lambda: keeps_nothing(admin))

    story_of(body, RETRY)


async def keeps_nothing(admin: Admin) -> bool:
    return await kept_count(admin) == 0


async def has_parked(cluster: VirtualCluster, count: int) -> bool:
    return await parked_count(cluster) == count
