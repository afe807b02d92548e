"""`send_all` queues messages by chunks, and stores what a loop of `send` would."""

from __future__ import annotations

import pytest

from keylane.producer import ProducerSettings
from keylane.protocol.errors import PartlyQueuedError
from keylane.protocol.routing import OrderStrategy
from support.scripted_network import QUICK, ScriptedNetwork, producer_on, route_over


def four_partitions() -> ScriptedNetwork:
    network = ScriptedNetwork()
    ranges = {number + 1: (number * 256, number * 256 + 256) for number in range(4)}
    network.route = route_over(ranges, version=1, strategy=OrderStrategy.STRICT)
    return network


MESSAGES = [(b"key %d" % (number % 97), b"%d" % number) for number in range(5_000)]


@pytest.mark.parametrize("await_every", [1, 7, 1_000])
async def test_send_all_stores_the_messages_of_a_loop_of_send(await_every):
    network, other = four_partitions(), four_partitions()
    async with producer_on(network) as producer:
        assert await producer.send_all("s", MESSAGES, await_every=await_every) == len(MESSAGES)
        assert producer.stats.acked == len(MESSAGES)
    async with producer_on(other) as producer:
        for key, value in MESSAGES:
            producer.send("s", value, key=key)
    assert network.stored == other.stored
    assert len(network.stored) == 4


@pytest.mark.parametrize("batch_count", [2, 50])
async def test_no_batch_of_send_all_has_more_messages_than_the_setting(batch_count):
    network = four_partitions()
    settings = ProducerSettings(backoff=QUICK.backoff, batch_count=batch_count)
    async with producer_on(network, settings) as producer:
        await producer.send("s", b"first", key=b"key 1")
        counts: list[int] = []
        for executor in producer._senders["s"].executors:
            pack = executor._call

            def call(channel, batch, pack=pack):
                counts.append(len(batch))
                return pack(channel, batch)

            executor._call = call  # type: ignore[method-assign]
        await producer.send_all("s", MESSAGES)
    assert 0 < max(counts) <= batch_count
    assert sum(counts) == len(MESSAGES)


async def test_send_all_queues_what_came_before_when_its_messages_raise():
    """The messages that the iterable gave before its error are queued, also within a chunk."""

    def messages():
        yield from MESSAGES[:1_234]
        raise LookupError("no more")

    network = four_partitions()
    async with producer_on(network) as producer:
        await producer.send("s", b"first", key=b"key 1")
        with pytest.raises(PartlyQueuedError, match="no more") as told:
            await producer.send_all("s", messages())
        assert told.value.details["queued"] == 1_234
    assert sum(map(len, network.stored.values())) == 1_235


@pytest.mark.parametrize("bad", [(b"k", "text"), (b"k" * 2_000, b"v"), (b"k", 3), (b"k",), 7])
async def test_send_all_tells_how_many_are_queued_when_one_of_a_chunk_is_bad(bad):
    network = four_partitions()
    async with producer_on(network) as producer:
        await producer.send("s", b"first", key=b"key 1")
        with pytest.raises(PartlyQueuedError) as told:
            await producer.send_all("s", [*MESSAGES[:700], bad, *MESSAGES[700:]])
        assert told.value.details["queued"] == 700
    stored = {value for values in network.stored.values() for value in values}
    assert stored == {b"first", *(value for _, value in MESSAGES[:700])}


async def test_send_all_of_large_values_waits_for_room():
    """1,000 values of 100 KB are 100 MB, more than the queue holds: none is refused, and none is lost."""
    network = four_partitions()
    values = [b"%d " % number + bytes(100_000) for number in range(1_000)]
    async with producer_on(network) as producer:
        await producer.send_all("s", ((b"k", value) for value in values))
    assert [value for stored in network.stored.values() for value in stored] == values
