"""What `send` does with its arguments before a message is in a batch."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from typing import Any

import pytest

from keylane.producer import Producer, ProducerSettings
from keylane.protocol.batch import BYTES_PER_MESSAGE
from keylane.protocol.routing import OrderStrategy
from support.scripted_network import ScriptedNetwork, producer_on, route_over


async def test_send_refuses_a_third_argument_without_a_name():
    """A program that swaps key and value, as other clients order them, is told so; nothing is
    queued.
    """
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        for _ in range(2):
            with pytest.raises(TypeError, match="key="):
                producer.send("s", b"key", b"value")
        await producer.send("s", b"0", key=b"k")
        with pytest.raises(TypeError, match="key="):
            producer.send("s", b"key", b"value")
    assert network.stored == {1: [b"0"]}


def test_send_shows_its_options_as_named_only():
    parameters = inspect.signature(Producer.send).parameters
    named = [name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY]
    assert list(parameters)[:3] == ["self", "subject", "value"]
    assert named == ["key", "deliver_at", "properties", "tags", "queue", "timeout_ms"]


LINGERS = ProducerSettings(linger_ms=10_000)


async def test_messages_have_the_time_of_their_turn():
    """The clock is read once in a turn of the event loop, also for messages with options, and again
    for a new batch.
    """
    async with producer_on(ScriptedNetwork(), settings=LINGERS) as producer:
        await _stored(producer)
        producer._now_ns = itertools.count(100).__next__
        for _ in range(2):
            sent = producer.send("s", b"", key=b"k")
            producer.send("s", b"", key=b"k", tags=["t"])
            await asyncio.sleep(0)
        assert [at_ns for _, _, at_ns in sent._batch.iter_unsettled()] == [100, 100, 101, 101]
        producer._senders["s"].queue_open_batches()
        later = producer.send("s", b"", key=b"k")
        assert later._batch.first_sent_at_ns == 102
        producer._senders["s"].queue_open_batches()


async def test_new_batch_has_a_later_time_in_the_same_turn():
    """A program that fills batches without an `await` gives each batch a time of its own."""
    settings = ProducerSettings(linger_ms=10_000, batch_count=2)
    async with producer_on(ScriptedNetwork(), settings=settings) as producer:
        await _stored(producer)
        producer._now_ns = itertools.count(100).__next__
        sent = [producer.send("s", b"", key=b"k") for _ in range(4)]
        assert [future._batch.first_sent_at_ns for future in sent] == [100, 100, 101, 101]
        producer._senders["s"].queue_open_batches()


async def test_full_batch_is_sent_when_send_fills_it():
    """The broker has it while the program goes on without an `await`."""
    network = ScriptedNetwork()
    async with producer_on(network, settings=ProducerSettings(batch_count=3)) as producer:
        await _stored(producer)
        sent = [producer.send("s", b"%d" % number, key=b"k") for number in range(7)]
        assert [future._batch.send_count for future in sent] == [1, 1, 1, 1, 1, 1, 0]
    assert network.stored[1][1:] == [b"%d" % number for number in range(7)]


class SameBytes:
    """A codec that changes nothing."""

    name = "plain"

    @staticmethod
    def encode(value: bytes) -> bytes:
        return value

    @staticmethod
    def decode(data: bytes) -> bytes:
        return data


BY_DEFAULT = {"delivery_timeout_ms": 60_000}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "tags": ({"tags": ("t",)}, {}, {}),
    "properties": ({"properties": {"a": "b"}}, {}, {}),
    "time-out": ({"timeout_ms": 60_000}, {}, {}),
    "time-out of all": ({}, {}, BY_DEFAULT),
    "codec": ({}, {"codec": SameBytes()}, {}),
    "partitioner": ({}, {"partitioner": lambda _key: 3}, {}),
}
"""Options of a send, of its producer, and of the producer's settings."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("every", [1, 2], ids=["all", "every second"])
async def test_batch_of_one_message_holds_no_other(way, every):
    """Whichever way a message takes into it, and whichever the next one takes."""
    options, more, set_to = WAYS[way]
    settings = ProducerSettings(batch_count=1, **set_to)
    network = ScriptedNetwork()
    async with producer_on(network, settings=settings, **more) as producer:
        await _stored(producer)
        sent = [
            producer.send("s", b"%d" % number, key=b"k", **({} if number % every else options))
            for number in range(4)
        ]
        assert [len(future._batch) for future in sent] == [1] * 4
        assert len({id(future._batch) for future in sent}) == 4
        await asyncio.gather(*sent)
    assert network.stored[1][1:] == [b"%d" % number for number in range(4)]


async def test_batch_of_one_message_holds_no_other_when_messages_choose_their_queue():
    """Nor one that is sent in the next moment without a queue."""
    network = ScriptedNetwork()
    network.route = route_over(
        {1: (0, 1024)}, version=1, strategy=OrderStrategy.STRICT, static=True
    )
    async with producer_on(network, settings=ProducerSettings(batch_count=1)) as producer:
        await _stored(producer)
        queues = [{"queue": 0}, {}, {"queue": 0}, {"queue": 0}, {}]
        sent = [producer.send("s", b"v", key=b"k", **queue) for queue in queues]
        assert [len(future._batch) for future in sent] == [1] * 5
        await asyncio.gather(*sent)


async def test_full_batch_of_messages_with_tags_is_sent_when_send_fills_it():
    """As one of plain messages: also the first message may fill it, by its size."""
    settings = ProducerSettings(batch_bytes=1_000, linger_ms=10_000)
    async with producer_on(ScriptedNetwork(), settings=settings) as producer:
        await _stored(producer)
        sent = [producer.send("s", bytes(2_000), key=b"k", tags=("t",)) for _ in range(3)]
        assert [future._batch.send_count for future in sent] == [1, 1, 1]


@pytest.mark.parametrize("tags", [(), ("t",)])
@pytest.mark.parametrize("turns", [1, 3])
async def test_batch_keeps_its_limits_when_plain_messages_and_others_mix(tags, turns):
    """The size counts each message once, and no batch grows on behind `batch_bytes` or
    `batch_count`.
    """
    settings = ProducerSettings(batch_bytes=2_000, batch_count=40, linger_ms=10_000)
    async with producer_on(ScriptedNetwork(), settings=settings) as producer:
        await _stored(producer)
        sent = []
        for number in range(300):
            value = bytes(number % 90)
            sent.append(producer.send("s", value, key=b"k", tags=tags if number % 7 == 0 else ()))
            if number % (300 // turns) == 0:
                await asyncio.sleep(0)
        batches = list({id(future._batch): future._batch for future in sent}.values())
        for batch in batches:
            sizes = [batch.size_of(index) + BYTES_PER_MESSAGE for index in range(len(batch))]
            assert batch.size == sum(sizes)
            assert sum(sizes[:-1]) < 2_000
            assert len(batch) <= 40
        assert all(batch.size >= 2_000 or len(batch) == 40 for batch in batches[:-1])
        assert sum(map(len, batches)) == 300
        producer._senders["s"].queue_open_batches()


async def _stored(producer: Producer) -> None:
    """Have a message stored, so that the route is known."""
    sent = producer.send("s", b"", key=b"k")
    await producer._senders["s"].wait_for_route()
    producer._senders["s"].queue_open_batches()
    await sent
