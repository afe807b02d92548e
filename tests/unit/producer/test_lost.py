"""Messages whose partition the route does not list any more, and whose broker does not have it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from keylane import Producer
from keylane.producer.send_future import SendFuture
from keylane.protocol.errors import Fate, PartitionUnknownError, Reason
from keylane.protocol.routing import OrderStrategy
from support.cluster import eventually
from support.raising import raises
from support.scripted_network import ScriptedNetwork, producer_on, route_over


@asynccontextmanager
async def doubtful_at(
    network: ScriptedNetwork, strategy: OrderStrategy = OrderStrategy.STRICT
) -> AsyncIterator[tuple[Producer, SendFuture]]:
    """A producer with a message that is stored in partition 1, and that it has no answer for."""
    network.route = route_over({1: (0, 1024)}, version=1, strategy=strategy)
    network.past = list(network.route.partitions)
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.mute.add(1)
        future = producer.send("s", b"1", key=b"k")
        await eventually(lambda: len(network.stored[1]) == 2)
        yield producer, future


def replace_route(network: ScriptedNetwork) -> None:
    """The route leads to partition 2 of another broker group, and no more to partition 1."""
    strategy = network.route.order_strategy
    network.route = route_over({2: (0, 1024)}, version=2, strategy=strategy)


@pytest.mark.parametrize("strategy", OrderStrategy)
async def test_message_is_told_as_lost_when_the_new_broker_answers_before_the_metaserver(
    strategy,
):
    """The broker that replaced the lost one is empty; the history says why."""
    network = ScriptedNetwork()
    async with doubtful_at(network, strategy) as (producer, older):
        network.history_late = asyncio.Event()
        network.accepted_losses.add(1)
        network.unknown.add(1)
        replace_route(network)
        newer = producer.send("s", b"2", key=b"k")
        await eventually(lambda: network.history_asks > 0)
        await asyncio.sleep(0.05)
        assert not older.done()
        network.history_late.set()
        with raises(Reason.ACCEPTED_AS_LOST) as told:
            await asyncio.wait_for(older, 30)
        assert told.value.fate is Fate.UNKNOWN
        await asyncio.wait_for(newer, 30)

    assert network.stored == {1: [b"0", b"1"], 2: [b"2"]}


async def test_doubtful_message_fails_as_unknown_when_its_partition_is_gone():
    """No broker knows any more whether it was stored: its future raises that, and newer messages
    are sent.
    """
    network = ScriptedNetwork()
    async with doubtful_at(network) as (producer, older):
        network.unknown.add(1)
        newer = producer.send("s", b"2", key=b"k")
        await eventually(lambda: network.asked > 2)
        assert not older.done()  # the route still lists the partition
        replace_route(network)
        with pytest.raises(PartitionUnknownError) as told:
            await asyncio.wait_for(older, 30)
        assert told.value.fate is Fate.UNKNOWN
        await asyncio.wait_for(newer, 30)

    assert network.stored == {1: [b"0", b"1"], 2: [b"2"]}


async def test_message_waits_for_the_history_when_the_metaserver_is_silent():
    """The metaserver is asked repeatedly; the message of a partition that only expired then fails
    as unknown.
    """
    network = ScriptedNetwork()
    async with doubtful_at(network) as (producer, older):
        network.history_silent = True
        network.unknown.add(1)
        replace_route(network)
        newer = producer.send("s", b"2", key=b"k")
        await eventually(lambda: network.history_asks > 5)
        assert not older.done()
        network.history_silent = False
        with pytest.raises(PartitionUnknownError) as told:
            await asyncio.wait_for(older, 30)
        assert told.value.fate is Fate.UNKNOWN
        await asyncio.wait_for(newer, 30)

    assert network.stored == {1: [b"0", b"1"], 2: [b"2"]}


async def test_message_is_sent_to_the_moved_broker_when_another_has_its_address():
    """The refusal of a broker of another group decides nothing: the broker that has the partition
    stored the message.
    """
    network = ScriptedNetwork()
    async with doubtful_at(network) as (producer, older):
        network.history_late = asyncio.Event()
        network.strangers.add("broker-1")
        network.sealed.add(1)
        network.mute.clear()
        (left,) = network.past
        network.past = [msgspec.structs.replace(left, address="elsewhere")]
        replace_route(network)
        newer = producer.send("s", b"2", key=b"k")
        await eventually(lambda: network.history_asks > 0)
        await asyncio.sleep(0.05)
        network.history_late.set()
        receipts = [await asyncio.wait_for(future, 30) for future in (older, newer)]

    assert [(receipt.partition_id, receipt.duplicate) for receipt in receipts] == [
        (1, True),
        (2, False),
    ]
    assert network.stored == {1: [b"0", b"1"], 2: [b"2"]}


async def test_message_waits_for_a_silent_broker_when_another_has_its_address():
    """The history has no address of the broker that stored the message, until that broker is back
    at a new address.
    """
    network = ScriptedNetwork()
    async with doubtful_at(network) as (producer, older):
        network.strangers.add("broker-1")
        network.sealed.add(1)
        network.mute.clear()
        (left,) = network.past
        network.past = [msgspec.structs.replace(left, address=None)]
        replace_route(network)
        newer = producer.send("s", b"2", key=b"k")
        await eventually(lambda: network.history_asks > 2)
        assert not older.done()
        network.past = [msgspec.structs.replace(left, address="elsewhere")]
        receipts = [await asyncio.wait_for(future, 30) for future in (older, newer)]

    assert [(receipt.partition_id, receipt.duplicate) for receipt in receipts] == [
        (1, True),
        (2, False),
    ]


async def test_close_ends_when_the_metaserver_never_answers():
    """Closing cancels the call for the history."""
    network = ScriptedNetwork()
    async with doubtful_at(network) as (producer, older):
        network.history_late = asyncio.Event()
        network.unknown.add(1)
        replace_route(network)
        await eventually(lambda: network.history_asks > 0)
        await asyncio.sleep(0.05)
        assert not older.done()
        await asyncio.wait_for(producer.close(flush=False), 30)
        assert older.done()
