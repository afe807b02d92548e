"""Messages over the limit of their subject: refused at once where it is known, given up alone where
it is not.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane.producer import ProducerSettings
from keylane.protocol.errors import Fate, KeylaneError, MessageTooLargeError
from keylane.protocol.message import Receipt
from keylane.protocol.routing import OrderStrategy, Route
from support.cluster import eventually
from support.scripted_network import QUICK, ScriptedNetwork, producer_on, route_over

LIMIT = 2_048
LARGE = bytes(LIMIT)
"""With its key it is over the limit."""


def route_to(partition_id: int, *, version: int, limit: int = LIMIT) -> Route:
    whole = {partition_id: (0, 1024)}
    return route_over(
        whole, version=version, strategy=OrderStrategy.STRICT, message_bytes_max=limit
    )


def network_of(limit: int) -> ScriptedNetwork:
    network = ScriptedNetwork()
    network.route = route_to(1, version=1, limit=limit)
    network.limits[1] = limit
    return network


async def outcomes(futures: list) -> list[str]:
    """`stored`, or the name of the error, of each message."""
    told: list[Receipt | KeylaneError] = []
    for future in futures:
        try:
            told.append(await asyncio.wait_for(future, 30))
        except KeylaneError as error:
            told.append(error)
    assert all(each.fate is Fate.NOT_DONE for each in told if isinstance(each, KeylaneError))
    return ["stored" if isinstance(each, Receipt) else type(each).__name__ for each in told]


async def test_send_refuses_a_message_over_the_limit_of_the_route():
    network = network_of(LIMIT)
    async with producer_on(network) as producer:
        await producer.send("s", b"first", key=b"k")
        with pytest.raises(MessageTooLargeError, match="2049 bytes") as raised:
            producer.send("s", LARGE, key=b"k")
        assert (raised.value.size_bytes, raised.value.limit_bytes) == (2_049, LIMIT)
        await producer.send("s", LARGE[1:], key=b"k")
        with pytest.raises(MessageTooLargeError):
            producer.send("s", LARGE, key=b"k", properties={"a": "b"}, timeout_ms=1_000)
    assert network.stored == {1: [b"first", LARGE[1:]]}


async def test_message_is_given_up_alone_when_it_was_sent_before_the_first_route():
    network = network_of(LIMIT)
    async with producer_on(network) as producer:
        values = [b"1", LARGE, b"2", LARGE, b"3"]
        futures = [producer.send("s", value, key=b"k") for value in values]
        large = "MessageTooLargeError"
        assert await outcomes(futures) == ["stored", large, "stored", large, "stored"]
        assert producer.stats.failed == 2
    assert network.stored == {1: [b"1", b"2", b"3"]}


@pytest.mark.parametrize("in_flight_max", [1, 4])
async def test_lower_limit_gives_up_what_the_old_partition_did_not_store(in_flight_max):
    """A message that was stored before the switch stays; of the others only those over the limit
    are given up.
    """
    network = network_of(1 << 20)
    settings = ProducerSettings(backoff=QUICK.backoff, in_flight_max=in_flight_max, batch_count=2)
    async with producer_on(network, settings) as producer:
        await producer.send("s", LARGE, key=b"k")
        network.sealed.add(1)
        values = [b"1", LARGE, b"2", b"3", LARGE, LARGE, b"4"]
        futures = [producer.send("s", value, key=b"k") for value in values]
        await eventually(lambda: network.asked)
        network.limits[2] = LIMIT
        network.route = route_to(2, version=2)
        large = "MessageTooLargeError"
        expected = ["stored", large, "stored", "stored", large, large, "stored"]
        assert await outcomes(futures) == expected
        with pytest.raises(MessageTooLargeError):
            producer.send("s", LARGE, key=b"k")
    assert network.stored == {1: [LARGE], 2: [b"1", b"2", b"3", b"4"]}


@pytest.mark.parametrize("in_flight_max", [1, 4])
async def test_refusal_of_a_broker_gives_up_only_what_is_over_its_limit(in_flight_max):
    """As where a message without a key passed over from the partition before the switch."""
    network = network_of(1 << 20)
    network.limits[1] = LIMIT
    settings = ProducerSettings(backoff=QUICK.backoff, in_flight_max=in_flight_max, batch_count=3)
    async with producer_on(network, settings) as producer:
        values = [b"1", LARGE, b"2", b"3", b"4", b"5", LARGE, LARGE, LARGE, b"6"]
        futures = [producer.send("s", value, key=b"k") for value in values]
        told = await outcomes(futures)
        large = "MessageTooLargeError"
        assert [each == large for each in told] == [value == LARGE for value in values]
        await producer.send("s", b"7", key=b"k")
    assert network.stored == {1: [b"%d" % number for number in range(1, 8)]}


async def test_raised_limit_is_followed_with_the_route():
    network = network_of(LIMIT)
    async with producer_on(network) as producer:
        await producer.send("s", b"1", key=b"k")
        network.sealed.add(1)
        network.route = route_to(2, version=2, limit=1 << 20)
        sender = producer._senders["s"]
        await eventually(lambda: sender.message_bytes_max == 1 << 20)
        await producer.send("s", LARGE, key=b"k")
    assert network.stored == {1: [b"1"], 2: [LARGE]}
