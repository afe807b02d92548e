"""Held messages: they keep their order, and are declared reordered if they go to another
partition.
"""

from __future__ import annotations

import asyncio
import logging

from keylane.producer import ProducerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.routing import OrderStrategy, logical_partition
from support.cluster import eventually
from support.scripted_network import QUICK, ScriptedNetwork, producer_on, route_over

BEST_TRIED = OrderStrategy.BEST_TRIED


def _key_in(start: int, end: int) -> bytes:
    """An order key whose logical partition is in `[start, end)`."""
    keys = (b"k%d" % number for number in range(10_000))
    return next(key for key in keys if start <= logical_partition(key) < end)


async def test_held_messages_are_declared_reordered_when_they_go_elsewhere():
    """BEST_TRIED: a held message that goes to another partition than its own is reordered."""
    left, right, other = _key_in(0, 341), _key_in(341, 682), _key_in(682, 1024)
    network = ScriptedNetwork()
    network.route = route_over(
        {1: (0, 341), 2: (341, 682), 4: (682, 1024)}, version=1, strategy=BEST_TRIED
    )
    settings = ProducerSettings(backoff=QUICK.backoff, leave_after_ms=20)
    async with producer_on(network, settings) as producer:
        for key in (left, right, other):
            await producer.send("s", b"0", key=key)
        sender = producer._senders["s"]
        network.late = asyncio.Event()
        network.sealed |= {1, 2}
        futures = [producer.send("s", b"1", key=left)]  # under way to 1, which refuses it late
        await eventually(lambda: network.asked)
        network.unreachable.add("broker-3")  # 1 and 2 are merged into 3, whose broker is silent
        network.route = route_over({3: (0, 682), 4: (682, 1024)}, version=2, strategy=BEST_TRIED)
        await eventually(
            lambda: 3 in [executor.partition.partition_id for executor in sender.executors]
        )
        futures.append(producer.send("s", b"1", key=right))  # finds out that 3 does not answer
        await eventually(lambda: sender.careful)
        futures.append(producer.send("s", b"2", key=left))  # held behind the first
        at_home = producer.send("s", b"1", key=other)
        network.late.set()
        for future in futures:
            receipt = await asyncio.wait_for(future, 30)
            assert (receipt.partition_id, receipt.reordered) == (4, True)
        receipt = await at_home
        assert (receipt.partition_id, receipt.reordered) == (4, False)


async def test_newer_messages_wait_when_an_unknown_partition_refused_older_ones():
    """STRICT: a broker briefly does not know its partition while the metaserver is silent; the
    order is kept.
    """
    network = ScriptedNetwork()
    settings = ProducerSettings(backoff=Backoff(first_ms=20, max_ms=600_000, factor=50.0))
    async with producer_on(network, settings) as producer:
        await producer.send("s", b"0", key=b"k")
        sender = producer._senders["s"]
        (executor,) = sender.executors
        asks = network.route_asks
        network.unreachable.add(
            "meta:1"
        )  # it pauses ever longer before it asks again for the route
        sender._refresh_requested.set()
        await eventually(lambda: network.route_asks >= asks + 2)
        network.unknown.add(1)
        older = producer.send("s", b"1", key=b"k")
        await eventually(lambda: executor.state.refuses)
        held = producer.send("s", b"2", key=b"k")
        network.unknown.clear()
        await eventually(lambda: sender.table[0] is executor)
        newer = producer.send("s", b"3", key=b"k")
        for future in (older, held, newer):
            await asyncio.wait_for(future, 30)

    assert network.stored == {1: [b"0", b"1", b"2", b"3"]}


async def test_newer_messages_wait_when_two_partitions_refused_older_ones():
    """STRICT: newer messages do not overtake those that a partition refused when a second partition
    refuses as well.
    """
    left, right = _key_in(0, 512), _key_in(512, 1024)
    network = ScriptedNetwork()
    network.route = route_over(
        {1: (0, 512), 2: (512, 1024)}, version=1, strategy=OrderStrategy.STRICT
    )
    settings = ProducerSettings(backoff=Backoff(first_ms=300, max_ms=300))
    async with producer_on(network, settings) as producer:
        futures = [producer.send("s", b"0", key=left), producer.send("s", b"0", key=right)]
        await asyncio.gather(*futures)
        first, second = producer._senders["s"].executors
        network.unreachable.add("meta:1")
        producer._senders["s"]._refresh_requested.set()
        network.unknown |= {1, 2}
        futures = [producer.send("s", b"1", key=left)]
        await eventually(lambda: first.state.refuses)
        futures.append(producer.send("s", b"1", key=right))
        await eventually(lambda: second.state.refuses)
        futures += [producer.send("s", b"2", key=key) for key in (left, right)]
        network.unknown.clear()
        for future in futures:
            await asyncio.wait_for(future, 30)

    assert network.stored == {1: [b"0", b"1", b"2"], 2: [b"0", b"1", b"2"]}


async def test_sender_tells_once_of_a_metaserver_that_does_not_answer(caplog):
    """It asks again and again."""
    caplog.set_level(logging.INFO, "keylane.producer")
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.unreachable.add("meta:1")
        network.sealed.add(1)
        producer.send("s", b"1", key=b"k")
        asks = network.route_asks
        await eventually(lambda: network.route_asks > asks + 5)
        network.unreachable.clear()
        network.sealed.clear()
        network.route = network.route_to(2, version=2)
        await producer.flush()
    first, last = (line for line in caplog.messages if "route of s" in line)
    assert first == "route of s: cannot reach the server"
    assert last.startswith("route of s is updated again, after ")
