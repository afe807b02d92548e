"""Messages that are not acked within their time-out, and the keys that they halt."""

from __future__ import annotations

import asyncio
import re

import pytest

from keylane import DeliveryTimeoutError, GivenUpError, KeyHaltedError
from keylane.producer import ProducerSettings
from keylane.protocol.errors import Fate, InvalidRequestError, MessageTooLargeError
from support.cluster import eventually
from support.scripted_network import QUICK, ScriptedNetwork, producer_on


async def test_error_has_the_message_when_it_times_out():
    """The error has the message and says that it is not stored; newer messages of its key fail,
    other keys continue.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.unreachable.add("broker-1")
        late = producer.send("s", b"1", key=b"k", properties={"a": "b"}, timeout_ms=50)
        newer = producer.send("s", b"2", key=b"k")
        other = producer.send("s", b"1", key=b"other")
        with pytest.raises(DeliveryTimeoutError) as told:
            await asyncio.wait_for(late, 30)
        assert told.value.fate is Fate.NOT_DONE
        message = {"subject": "s", "key": b"k", "value": b"1", "properties": {"a": "b"}}
        assert told.value.details == message
        text = (
            r"a message of 's', key digest ac52cb5ff985d463, was not acked in 0\.\d s: cannot "
            r"reach the server"
        )
        assert re.fullmatch(text, told.value.message)
        with pytest.raises(KeyHaltedError) as halted:
            await asyncio.wait_for(newer, 30)
        assert (halted.value.fate, halted.value.details["value"]) == (Fate.NOT_DONE, b"2")
        with pytest.raises(KeyHaltedError):
            producer.send("s", b"3", key=b"k")
        network.unreachable.clear()
        await asyncio.wait_for(other, 30)
        with pytest.raises(KeyHaltedError):
            producer.send("s", b"3", key=b"k")
        producer.resume(told.value)
        for value in (b"1", b"2", b"3"):
            await asyncio.wait_for(producer.send("s", value, key=b"k"), 30)

    assert network.stored == {1: [b"0", b"1", b"1", b"2", b"3"]}


async def test_message_in_flight_fails_as_unknown_when_it_times_out():
    """It cannot be taken out of its batch: its fate is unknown, the other messages are acked, and
    order holds.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.mute.add(1)
        late = producer.send("s", b"1", key=b"k", timeout_ms=50)
        same_batch = producer.send("s", b"1", key=b"other")
        await eventually(lambda: network.stored[1].count(b"1") == 2)
        behind = producer.send("s", b"2", key=b"k")
        with pytest.raises(DeliveryTimeoutError) as told:
            await asyncio.wait_for(late, 30)
        assert told.value.fate is Fate.UNKNOWN
        assert "the connection ended before the answer" in told.value.message
        assert not same_batch.done()
        with pytest.raises(KeyHaltedError):
            await asyncio.wait_for(behind, 30)
        producer.resume(told.value)
        again = producer.send("s", b"2", key=b"k")
        network.mute.clear()
        for future in (same_batch, again):
            await asyncio.wait_for(future, 30)
        await asyncio.wait_for(producer.flush(), 30)
        with pytest.raises(DeliveryTimeoutError) as again_told:
            late.result()
        assert again_told.value.fate is Fate.UNKNOWN, "an outcome is final"
        assert (producer.stats.acked, producer.stats.failed) == (3, 2)

    assert network.stored == {1: [b"0", b"1", b"1", b"2"]}


async def test_held_message_fails_when_it_times_out():
    """It fails while there is no route; a message without a key fails too, and halts no key."""
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        network.unreachable.add("meta:1")
        futures = [producer.send("s", b"1", key=key, timeout_ms=50) for key in (b"k", b"")]
        behind = producer.send("s", b"2")
        for future, whose in zip(futures, ("key digest", "no key"), strict=True):
            with pytest.raises(DeliveryTimeoutError, match=f"{whose}.*: cannot reach the server"):
                await asyncio.wait_for(future, 30)
        with pytest.raises(KeyHaltedError):
            producer.send("s", b"2", key=b"k")
        assert not behind.done()
        network.unreachable.clear()
        await asyncio.wait_for(behind, 30)

    assert network.stored == {1: [b"2"]}


async def test_flush_counts_unawaited_messages_when_they_time_out():
    """`delivery_timeout_ms` holds for messages sent without a time-out; `flush` counts those that
    are not awaited.
    """
    network = ScriptedNetwork()
    settings = ProducerSettings(backoff=QUICK.backoff, delivery_timeout_ms=50)
    async with producer_on(network, settings) as producer:
        await producer.send("s", b"0", key=b"k")
        network.unreachable.add("broker-1")
        futures = [producer.send("s", b"v", key=b"k%d" % number) for number in range(100)]
        longer = producer.send("s", b"v", key=b"k", timeout_ms=600_000)
        with pytest.raises(DeliveryTimeoutError):
            await asyncio.wait_for(futures[50], 30)
        while not all(future.done() for future in futures):
            await asyncio.sleep(0.005)
        network.unreachable.clear()
        with pytest.raises(GivenUpError) as told:
            await asyncio.wait_for(producer.flush(), 30)
        assert told.value.details == {"messages": 99, "unknown": 0}
        assert isinstance(told.value.__cause__, DeliveryTimeoutError)
        await asyncio.wait_for(longer, 30)


@pytest.mark.parametrize("timeout_ms", [0, -1, "5", 0.5, True, float("nan"), 10**13])
async def test_time_out_is_refused_when_it_is_not_a_duration(timeout_ms):
    """The message is not queued."""
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        with pytest.raises(InvalidRequestError, match="timeout_ms must be a whole number"):
            producer.send("s", b"v", timeout_ms=timeout_ms)
        assert producer.stats.sent == 0


async def test_newer_message_in_flight_is_not_stored_alone_when_the_partition_is_sealed():
    """The message that timed out goes to the next partition with the newer one, which was in flight
    behind it.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.sealed.add(1)
        network.late = asyncio.Event()
        late = producer.send("s", b"1", key=b"k", timeout_ms=50)
        newer = producer.send("s", b"2", key=b"k")
        keyless = producer.send("s", b"no order", timeout_ms=50)
        with pytest.raises(DeliveryTimeoutError) as told:
            await asyncio.wait_for(late, 30)
        assert told.value.fate is Fate.UNKNOWN
        with pytest.raises(DeliveryTimeoutError):
            await asyncio.wait_for(keyless, 30)
        producer.resume(told.value)
        again = producer.send("s", b"1", key=b"k")
        network.route = network.route_to(2, version=2)
        network.late.set()
        for future in (newer, again):
            await asyncio.wait_for(future, 30)
        assert (producer.stats.acked, producer.stats.failed, producer.stats.sent) == (3, 2, 5)

    assert network.stored == {1: [b"0"], 2: [b"1", b"2", b"1"]}


async def test_newer_message_in_flight_is_not_stored_alone_when_a_message_is_too_large():
    """The batch is divided; the message that timed out in it stays before the newer one of its
    key.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.limits[1] = 100
        network.narrow = network.busy = True  # refused, and sent again
        late = producer.send("s", b"1", key=b"k", timeout_ms=50)
        large = producer.send("s", bytes(101), key=b"other")
        newer = producer.send("s", b"2", key=b"k")
        with pytest.raises(DeliveryTimeoutError):
            await asyncio.wait_for(late, 30)
        network.narrow = False
        with pytest.raises(MessageTooLargeError):
            await asyncio.wait_for(large, 30)
        await asyncio.wait_for(newer, 30)
        await asyncio.wait_for(producer.flush(), 30)

    assert network.stored == {1: [b"0", b"1", b"2"]}


async def test_newer_message_fails_when_its_batch_comes_back_unsent_and_its_key_is_halted_again():
    """Both leave the queue; nothing of the key is stored until it is resumed."""
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"0", key=b"k")
        network.sealed.add(1)
        network.late = asyncio.Event()
        late = producer.send("s", b"1", key=b"k", timeout_ms=50)
        newer = producer.send("s", b"2", key=b"k")
        with pytest.raises(DeliveryTimeoutError) as told:
            await asyncio.wait_for(late, 30)
        network.late.set()
        network.late = None
        other = producer.send("s", b"1", key=b"other", timeout_ms=50)
        with pytest.raises(DeliveryTimeoutError):
            await asyncio.wait_for(other, 30)
        with pytest.raises(KeyHaltedError):
            await asyncio.wait_for(newer, 30)
        producer.resume(told.value)
        again = [producer.send("s", value, key=b"k") for value in (b"1", b"2")]
        network.route = network.route_to(2, version=2)
        for future in again:
            await asyncio.wait_for(future, 30)
        await asyncio.wait_for(producer.flush(), 30)
        assert producer.waiting().messages == 0

    assert network.stored == {1: [b"0"], 2: [b"1", b"2"]}
