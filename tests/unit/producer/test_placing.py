"""Messages whose sender chooses their place: a logic queue, or what a partitioner returns."""

from __future__ import annotations

import asyncio
import enum

import pytest

from keylane import LogicQueue, ProducerSettings
from keylane.producer.placing import choose_destination
from keylane.protocol.errors import (
    ConfigError,
    InvalidRequestError,
    Reason,
)
from keylane.protocol.routing import OrderStrategy, logical_partition
from support.cluster import eventually
from support.raising import raises
from support.scripted_network import ScriptedNetwork, producer_on, route_over

STRICT = OrderStrategy.STRICT
HALVES = {1: (0, 512), 2: (512, 1024)}


def key_in(start: int, end: int) -> bytes:
    keys = (b"k%d" % number for number in range(10_000))
    return next(key for key in keys if start <= logical_partition(key) < end)


CLOSED, RIGHT = key_in(0, 512), key_in(512, 1024)


def static_network(**more) -> ScriptedNetwork:
    """Two logic queues, each of a broker of its own."""
    network = ScriptedNetwork()
    network.route = route_over(HALVES, version=1, strategy=STRICT, static=True, **more)
    return network


async def test_message_goes_to_its_queue_when_its_key_says_another():
    """Also with the first message, which is sent before the route is known, and without a key."""
    network = static_network()
    async with producer_on(network) as producer:
        futures = [producer.send("s", b"0", key=CLOSED, queue=1)]
        await futures[0]
        futures.append(producer.send("s", b"1", key=RIGHT, queue=0))
        futures += [producer.send("s", b"%d" % number, queue=1) for number in range(2, 8)]
        receipts = [await future for future in futures]

    assert network.stored == {1: [b"1"], 2: [b"0", b"2", b"3", b"4", b"5", b"6", b"7"]}
    assert [receipt.queue for receipt in receipts] == [1, 0] + [1] * 6


async def test_receipts_have_the_logic_offset_when_the_subject_is_static():
    """It counts on from the start of the partition; other subjects have neither queue nor logic
    offset.
    """
    network = static_network()
    async with producer_on(network) as producer:
        futures = [producer.send("s", b"%d" % number, key=CLOSED) for number in range(3)]
        receipts = [await future for future in futures]
    assert [(receipt.queue, receipt.logic_offset) for receipt in receipts] == [
        (0, 0),
        (0, 1),
        (0, 2),
    ]

    network.route = route_over(HALVES, version=1, strategy=STRICT)
    async with producer_on(network) as producer:
        receipt = await producer.send("s", b"3", key=CLOSED)
    assert (receipt.offset, receipt.queue, receipt.logic_offset) == (3, None, None)


@pytest.mark.parametrize("queue", [2, -1, 1 << 70])
async def test_queue_is_refused_when_it_does_not_exist(queue):
    """At once if the route is known; else the future raises it, and other messages are stored."""
    network = static_network()
    async with producer_on(network) as producer:
        early, beside = producer.send("s", b"0", queue=queue), producer.send("s", b"1", queue=0)
        with raises(Reason.QUEUE_UNKNOWN, match=f"no logic queue {queue}") as told:
            await early
        assert (told.value.subject, told.value.queue) == ("s", queue)
        await beside
        with raises(Reason.QUEUE_UNKNOWN):
            producer.send("s", b"2", key=CLOSED, queue=queue)
        assert producer.stats.sent == 2
    assert network.stored == {1: [b"1"]}


async def test_queue_is_refused_when_the_subject_is_not_static():
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        with raises(Reason.SUBJECT_NOT_STATIC):
            await producer.send("s", b"0", queue=0)
        with raises(Reason.SUBJECT_NOT_STATIC):
            producer.send("s", b"1", queue=0)
    assert network.stored == {}


@pytest.mark.parametrize("queue", ["1", 1.0, True, b""])
async def test_queue_is_refused_when_it_is_no_number(queue):
    async with producer_on(static_network()) as producer:
        with pytest.raises(InvalidRequestError, match="queue is the number"):
            producer.send("s", b"0", queue=queue)
        assert producer.stats.sent == 0


async def test_messages_without_a_key_stay_in_their_queue_when_it_does_not_answer():
    """In the order in which they were sent; messages without key and queue pass over it."""
    network = static_network()
    async with producer_on(network) as producer:
        await asyncio.gather(*(producer.send("s", b"0", queue=queue) for queue in (0, 1)))
        network.unreachable.add("broker-1")
        futures = [producer.send("s", b"%d" % number, queue=0) for number in (1, 2)]
        free = [producer.send("s", b"free") for _ in range(10)]
        await asyncio.wait_for(asyncio.gather(*free), 30)
        await eventually(lambda: producer.stats.retries > 3)
        futures.append(producer.send("s", b"3", queue=0))
        assert not any(future.done() for future in futures)
        network.unreachable.clear()
        for future in futures:
            await asyncio.wait_for(future, 30)

    assert network.stored == {1: [b"0", b"1", b"2", b"3"], 2: [b"0"] + [b"free"] * 10}


async def test_message_keeps_its_queue_when_the_queue_moves():
    """Messages that a sealed partition refused go to the partition that continues the queue, and
    newer ones behind.
    """
    network = static_network()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=RIGHT, queue=0)
        network.sealed.add(1)
        futures = [producer.send("s", b"1", key=RIGHT, queue=0)]
        await eventually(lambda: network.asked)
        futures.append(producer.send("s", b"2", queue=0))
        network.route = route_over(
            {3: (0, 512), 2: (512, 1024)}, version=2, strategy=STRICT, static=True
        )
        receipts = [await asyncio.wait_for(future, 30) for future in futures]

    assert network.stored == {1: [b"0"], 3: [b"1", b"2"]}
    assert [receipt.queue for receipt in receipts] == [0, 0]


async def test_partitioner_places_messages_when_they_name_no_queue():
    """It is asked once for each message, also for those without a key."""
    network = static_network()
    asked = []

    def destination(key: bytes) -> int | LogicQueue:
        asked.append(key)
        return LogicQueue(1) if key == CLOSED else 3

    async with producer_on(network, partitioner=destination) as producer:
        for key in (CLOSED, RIGHT, b""):
            await producer.send("s", key, key=key)
        await producer.send("s", b"named", key=CLOSED, queue=0)
        with pytest.raises(ConfigError, match="partitioner"):
            await producer.send_arrow("s", None, value="v")

    assert asked == [CLOSED, RIGHT, b""]
    assert network.stored == {2: [CLOSED], 1: [RIGHT, b"", b"named"]}


@pytest.mark.parametrize("destination", [-1, 1024, None, "3", 1.5, True])
async def test_place_is_refused_when_it_is_no_logical_partition(destination):
    async with producer_on(static_network(), partitioner=lambda _key: destination) as producer:
        with pytest.raises(InvalidRequestError, match="a partitioner returns"):
            producer.send("s", b"0", key=CLOSED)
        assert producer.stats.sent == 0


async def test_send_is_refused_when_the_partitioner_fails():
    """The cause is kept, and the next message is taken."""

    def destination(key: bytes) -> int:
        return {CLOSED: 0}[key]

    network = static_network()
    async with producer_on(network, partitioner=destination) as producer:
        with pytest.raises(InvalidRequestError, match="partitioner failed") as told:
            producer.send("s", b"0", key=RIGHT)
        assert isinstance(told.value.__cause__, KeyError)
        await producer.send("s", b"1", key=CLOSED)
    assert network.stored == {1: [b"1"]}


async def test_unknown_queue_is_refused_when_it_is_the_number_of_the_time_out():
    """`send` asks whether a message is plain by the identity of its `queue`."""
    number = 60_000
    settings = ProducerSettings(delivery_timeout_ms=number)
    async with producer_on(static_network(), settings=settings) as producer:
        await producer.send("s", b"0", key=CLOSED)
        with raises(Reason.QUEUE_UNKNOWN):
            producer.send("s", b"1", key=CLOSED, queue=number)


async def test_placed_message_waits_in_its_turn_when_the_queue_is_full():
    """`await send` beyond the limit keeps the place too."""
    network = static_network()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", queue=1)
        producer._budget.full = True
        receipt = await producer.send("s", b"1", key=CLOSED, queue=1)
    assert (receipt.queue, network.stored) == (1, {2: [b"0", b"1"]})


def test_partitioner_is_refused_when_it_cannot_be_called():
    with pytest.raises(ConfigError, match="partitioner"):
        producer_on(ScriptedNetwork(), partitioner=5)


class Road(enum.IntEnum):
    """Queues with names."""

    FAST = 3


class Indexed:
    """A whole number of another library, as of numpy."""

    def __index__(self) -> int:
        return 5


class Numbers:
    """As an array: it has the method, and is no number."""

    def __index__(self) -> int:
        raise TypeError("only integer scalar arrays can be converted to a scalar index")


def test_queue_is_a_whole_number_of_any_type_and_no_bool():
    chosen = [choose_destination(queue, None, b"").number for queue in (Road.FAST, Indexed())]
    assert chosen == [3, 5]
    assert [type(number) for number in chosen] == [int, int]
    for refused in (True, 3.0, "3", Numbers()):
        with pytest.raises(InvalidRequestError):
            choose_destination(refused, None, b"")


@pytest.mark.parametrize("number", [True, "1", 1.0, None, [], b"1"])
def test_logic_queue_is_a_whole_number(number: object):
    """`LogicQueue(True)` was queue 1, and a list failed where the route was looked at."""
    with pytest.raises(InvalidRequestError, match="queue is the number of a logic queue, not"):
        LogicQueue(number)  # type: ignore[arg-type]  # that is the test
